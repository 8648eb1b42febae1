"""Candidates: recipes for one calibrated model, and how near the model that each makes is to the float model."""

from __future__ import annotations

import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fxq.backends.by_name import get_backend
from fxq.common.data import batches, naming_batch
from fxq.common.isolation import copied, seeded, untouched, without_autocast
from fxq.common.metrics import Agreement, tensors
from fxq.errors import InputError, words_of
from fxq.ledger.output_check import add_output, rank
from fxq.passes.observe_all import Watch
from fxq.pipeline.manager import PassManager
from fxq.recipe.pass_base import Stage
from fxq.recipe.recipe import Recipe
from fxq.tracing.fidelity import run_model
from fxq.workflow.steps import observed_with, prepared, to_qdq

Metric = Callable[[nn.Module], float]
"""A function of a model: how good it is, larger is better."""
PARTS = 16
"""Into how many parts candidates are split for an executor: each of its workers gets the calibrated model with each."""


class Trials:
    """One calibrated model, on which recipes are tried.

    A candidate is the graph in exact integer arithmetic, before anything is priced or lowered: with all on integers
    that can run on them with this recipe, whatever is faster. It computes what kernels compute, up to their rounding.
    Pickled, it takes the float model along, the data, and what the observers have seen.

    Args:
        model: the float model.
        recipe: the recipe to start from; its backend is one, and not "fastest".
        data: batches: the observers are shown them, and candidates are judged on them.
        metric: says how good a model is; None: SQNR of its output.

    Attributes:
        batches: the data.
        recipe: the recipe, where `reduce_range` is decided.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, data: Iterable[Any], metric: Metric | None = None) -> None:
        self.model, self.recipe, self.metric = model, recipe, metric
        self.batches = list(batches(data, model))
        self.threads = torch.get_num_threads()
        self.observed = prepared(model, recipe, self.batches[0], observe_all=True)
        self.wants: list[list[torch.Tensor]] = []
        self._lock = threading.Lock()

    def calibrate(self, advance: Callable[[], None] = lambda: None) -> None:
        """Show the data to the float model and the observers, and decide what of the recipe is to be decided once.

        Args:
            advance: is called behind every batch.

        Raises:
            InputError: the model returns no float tensor, so that nothing can be compared.
        """
        fixed = self.recipe.concrete_args
        with torch.no_grad(), without_autocast():
            for i, batch in enumerate(self.batches):
                with naming_batch(i, batch), untouched(self.model):
                    nn.Module.__call__(self.observed, *batch.args, **batch.kwargs)
                self.wants.append([t.detach() for t in tensors(run_model(self.model, batch, fixed))])
                advance()
        if not any(t.is_floating_point() for t in self.wants[0]):
            raise InputError("the model returns no float tensor: there is no output whose error could be measured.")
        _, gave_way, _ = to_qdq(observed_with(self.observed, self.recipe))
        if gave_way is not None:
            self.recipe = replace(self.recipe, reduce_range=gave_way.role)

    def candidate(self, recipe: Recipe) -> PassManager:
        """The manager of the qdq graph that a recipe makes."""
        with self._lock, warnings.catch_warnings():  # one at a time: catching warnings is for all threads
            warnings.simplefilter("ignore")
            manager, _, left = to_qdq(observed_with(self.observed, recipe))
            exact = get_backend("reference", "cpu")
            settled = manager.fork(backend=exact, recipe=recipe.with_optimize("coverage"), progress=False)
            lowered = next((i for i, step in enumerate(left) if step.gives >= Stage.LOWERED), len(left))
            settled.run(left[:lowered])
        return settled

    def score(self, recipe: Recipe) -> float:
        """What the metric says of the model that a recipe makes; without one, dB: see `sqnr`.

        To a thousandth of a dB: the order of sums may differ from one process to another.
        """
        gm = self.candidate(recipe).gm
        return round(self.sqnr(gm), 3) if self.metric is None else self.metric_of(gm.eval())

    def metric_of(self, model: nn.Module) -> float:
        """What the metric says of a model, which it may put into another mode. Raises `InputError` for no number."""
        assert self.metric is not None  # there is nobody to ask otherwise
        with untouched(self.model):
            found = self.metric(model)
        try:
            return float(found)
        except (TypeError, ValueError) as error:
            raise InputError(f"the metric returned {found!r}; it returns a number, larger is better.") from error

    def sqnr(self, gm: nn.Module) -> float:
        """dB of a model's output against the float model's over all data; of several outputs, that of the worst."""
        found: dict[int, Agreement] = {}
        with torch.no_grad(), without_autocast():
            for batch, wants in zip(self.batches, self.wants, strict=True):
                given = copied(batch)
                with seeded():
                    gots = tensors(gm(*given.args, **given.kwargs))
                for place, (want, got) in enumerate(zip(wants, gots, strict=True)):
                    if want.is_floating_point():
                        add_output(found, place, want, got)
        return min((output.sqnr for output in found.values()), key=rank)

    def scores(
        self, recipes: Sequence[Recipe], executor: Executor | None = None, advance: Callable[[], None] = lambda: None
    ) -> list[float]:
        """The scores of several recipes, in order.

        Args:
            recipes: the candidates.
            executor: where they are judged; None: here, one after the other.
            advance: is called for every candidate that is judged.

        Raises:
            InputError: what other processes need cannot be pickled.
        """
        found: list[float] = []
        if executor is None or isinstance(executor, ThreadPoolExecutor):
            for score in map(self.score, recipes) if executor is None else executor.map(self.score, recipes):
                found.append(score)
                advance()
            return found
        payload = self._pickled()
        size = max(-(-len(recipes) // PARTS), 1)
        parts = [recipes[i : i + size] for i in range(0, len(recipes), size)]
        for future in [executor.submit(_scores, payload, part) for part in parts]:
            for score in future.result():
                found.append(score)
                advance()
        return found

    def _pickled(self) -> bytes:
        try:
            return pickle.dumps(self)
        except Exception as error:  # whatever the user's objects raise
            raise InputError(
                f"the model, the metric or the data cannot be sent to other processes: {words_of(error)}. What is "
                "pickled is to be defined in a module, not in a function; or use a ThreadPoolExecutor, or no executor."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in vars(self).items() if key not in ("observed", "_lock")}
        seen = {name: module for name, module in self.observed.named_modules() if isinstance(module, Watch)}
        return {**kept, "seen": seen, "samples": self.observed.manager.context.samples}

    def __setstate__(self, state: dict[str, Any]) -> None:
        seen, samples = state.pop("seen"), state.pop("samples")
        vars(self).update(state)
        self._lock = threading.Lock()
        self.observed = prepared(self.model, self.recipe, self.batches[0], observe_all=True)
        self.observed.manager.context.samples[:] = samples
        for name, watch in seen.items():
            self.observed.set_submodule(name, watch)


@lru_cache(maxsize=1)
def _opened(payload: bytes) -> Trials:
    """The trials that another process has pickled: traced once by each worker."""
    made: Trials = pickle.loads(payload)
    return made


_HERE = os.getpid()


def _scores(payload: bytes, recipes: Sequence[Recipe]) -> list[float]:
    """What a worker does: with as many threads as here, for sums in another order are other sums.

    A forked process has one: OpenMP waits there for threads that were not forked.
    """
    if os.getpid() != _HERE:
        torch.set_num_threads(1)
    trials = _opened(payload)
    if os.getpid() == _HERE and torch.get_num_threads() != trials.threads:
        torch.set_num_threads(trials.threads)
    return [trials.score(recipe) for recipe in recipes]
