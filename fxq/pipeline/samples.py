"""Which calibration inputs are kept, for passes that run the graph: to correct, to price, to verify."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from fxq.common.data import Batch, first_of, samples_in
from fxq.common.isolation import untouched
from fxq.errors import InputError
from fxq.pipeline.context import Context
from fxq.recipe.recipe import Recipe

T = TypeVar("T")

SAMPLES, BATCHES = 32, 8
"""How many samples are kept where no pass asks for more, and of how many batches, if there are so many."""


def wanted(recipe: Recipe) -> int:
    """How many samples are to be kept for the passes of a recipe."""
    return max([SAMPLES, *(step.samples_read for step in recipe.pipeline)])


def record(context: Context, batch: Batch) -> None:
    """Keep some samples of a calibration batch, as many of it as of those before, while they are too few.

    Of a graph that is made for the size of its batches, these are kept whole. From so many batches on that samples need
    be of, it is as many of each: so what is kept of some of the data holds what is kept of all of it (`in_turns`).
    """
    kept = context.samples
    most = wanted(context.recipe)
    if _holds(context, most):
        return
    each = max(most // min(len(kept) + 1, BATCHES), 1) if context.divisible else sys.maxsize
    for i, known in enumerate(kept):
        if (samples_in(known) or 0) > each:
            kept[i] = first_of(known, each)
    kept.append(first_of(batch, each))


def has_enough(context: Context) -> bool:
    """Whether no pass would look at more samples than are kept."""
    return _holds(context, max((step.samples_read for step in context.recipe.pipeline), default=0))


def _holds(context: Context, most: int) -> bool:
    sizes = map(samples_in, context.samples)
    together = sum(most if size is None else size for size in sizes)
    return len(context.samples) >= BATCHES and (together >= most or not context.divisible)


def on_samples(context: Context, most: int, run: Callable[[Sequence[Batch]], T]) -> T:
    """What `run` makes of about `most` of the samples; of the example where the graph does not run on a few samples.

    It does not where the first axis of an input does not count samples.
    """
    with untouched(context.model):  # leaves may keep something from call to call
        try:
            return run(context.some_samples(most))
        except (InputError, RuntimeError, IndexError, ValueError):
            return run([context.example])
