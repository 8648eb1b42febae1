"""Recording of calibration inputs, for passes that run the graph: to correct, to price, to verify."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from fxq.common.data import Batch, first_of, samples_in
from fxq.errors import InputError
from fxq.pipeline.context import Context
from fxq.recipe.recipe import Recipe

T = TypeVar("T")

SAMPLES, BATCHES = 32, 8
"""Number of recorded samples if no pass reads any, and number of batches that they are from, if there are so many."""


def wanted(recipe: Recipe) -> int:
    """Number of samples to record: as many as the passes of a recipe read."""
    return _read(recipe) or SAMPLES


def record(context: Context, batch: Batch) -> None:
    """Record samples of a calibration batch, while there are too few.

    All batches give the same number of samples, at most. From `BATCHES` batches on, this number is constant, so that
    the samples of several processes can be merged to those of one (`in_turns`). Batches of a graph that is not
    divisible are recorded whole.
    """
    recorded = context.samples
    most = wanted(context.recipe)
    if _holds(context, most):
        return
    per_batch = max(most // min(len(recorded) + 1, BATCHES), 1) if context.divisible else sys.maxsize
    for i, earlier in enumerate(recorded):
        if (samples_in(earlier) or 0) > per_batch:
            recorded[i] = first_of(earlier, per_batch)
    recorded.append(first_of(batch, per_batch))


def has_enough(context: Context) -> bool:
    """Whether no pass reads more samples than are recorded."""
    return _holds(context, _read(context.recipe))


def _read(recipe: Recipe) -> int:
    """Largest number of samples that a pass of the recipe reads."""
    configs = [recipe.config, *(config for _, config in recipe.overrides)]
    return max((step.samples_read for step in recipe.pipeline if step.applies(configs)), default=0)


def _holds(context: Context, most: int) -> bool:
    """Whether enough batches, and `most` samples, are recorded."""
    sizes = map(samples_in, context.samples)
    together = sum(most if size is None else size for size in sizes)
    return len(context.samples) >= BATCHES and (together >= most or not context.divisible)


def on_samples(context: Context, most: int, run: Callable[[Sequence[Batch]], T]) -> T:
    """Return the result of `run` on about `most` samples, or on the example if the graph does not run on those.

    That is so if the first axis of an input does not count samples.
    """
    with context.untouched():  # leaves may have state
        try:
            return run(context.some_samples(most))
        except (InputError, RuntimeError, IndexError, ValueError):
            return run([context.example])
