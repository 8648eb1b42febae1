"""Evaluation of candidate recipes on one calibrated model, by SQNR or a metric."""

from __future__ import annotations

import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from fxq.ledger.ledger import Ledger
from fxq.ledger.output_check import add_output, rank
from fxq.passes.observe_all import ObserverSet
from fxq.pipeline.manager import PassManager
from fxq.recipe.pass_base import Stage
from fxq.recipe.recipe import Recipe
from fxq.tracing.fidelity import run_model
from fxq.tuning.tunable_layer import TunableLayer, layers_of
from fxq.workflow.observed_model import ObservedModel
from fxq.workflow.steps import converted, observed_with, prepared, to_qdq

Metric = Callable[[nn.Module], float]
"""Function of a model that returns its quality, larger is better."""
MAX_TASKS = 16
"""Number of tasks that candidates are split into for an executor. Each task sends the calibrated model to a worker."""


class Trials:
    """Calibrated model on which candidate recipes are evaluated.

    A candidate runs as a graph in exact integer arithmetic, before pricing and lowering, with every op on integers that
    can be. It computes what kernels compute, up to their rounding. A pickle has the float model, the data, and the
    statistics of the observers.

    Args:
        model: the float model.
        recipe: the recipe to start from, for one backend, not "fastest".
        data: batches, for calibration and evaluation.
        metric: function that returns the quality of a model; None: SQNR of its output.

    Attributes:
        batches: the data.
        recipe: the recipe, with `reduce_range` decided after calibration.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, data: Iterable[Any], metric: Metric | None = None) -> None:
        self.model, self.recipe, self.metric = model, recipe, metric
        self.batches = list(batches(data, model))
        self.threads = torch.get_num_threads()
        self.wants: list[list[torch.Tensor]] = []
        self._lock = threading.Lock()
        self.prepare()

    def prepare(self) -> None:
        """Prepare the model for calibration, with observers on all values."""
        self.observed = prepared(self.model, self.recipe, self.batches[0], observe_all=True)

    def calibrate(self, advance: Callable[[], None] = lambda: None) -> None:
        """Run the float model and the observers on the data, and decide `reduce_range` for all candidates.

        Args:
            advance: called after each batch.

        Raises:
            InputError: the model returns no float tensor to compare.
        """
        fixed = self.recipe.concrete_args
        with torch.no_grad(), without_autocast():
            for i, batch in enumerate(self.batches):
                with naming_batch(i, batch), untouched(self.model):
                    nn.Module.__call__(self.observed, *batch.args, **batch.kwargs)
                self.wants.append([t.detach() for t in tensors(run_model(self.model, batch, fixed))])
                advance()
        self.check_wants()
        _, reduced, _ = to_qdq(observed_with(self.observed, self.recipe))
        if reduced is not None:
            self.recipe = replace(self.recipe, reduce_range=reduced.role)

    def check_wants(self) -> None:
        """Raise `InputError` if the model returns no float tensor to compare."""
        if not any(t.is_floating_point() for t in self.wants[0]):
            raise InputError("the model returns no float tensor: there is no output whose error could be measured.")

    @property
    def types(self) -> Mapping[str, type[nn.Module]]:
        """Module type by module path."""
        return self.observed.manager.context.types

    def ledger(self) -> Ledger:
        """Return the ledger of the recipe's model, with the prices of ops."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a low SQNR is expected here
            return converted(self.observed, self.recipe).ledger

    def layers(self, recipe: Recipe, ledger: Ledger) -> list[TunableLayer]:
        """Return the layers that run on integers with a recipe; see `layers_of` for `ledger`."""
        return layers_of(self.candidate(recipe), ledger)

    def candidate(self, recipe: Recipe) -> PassManager:
        """Return the manager of the qdq graph of a recipe."""
        with self._lock, warnings.catch_warnings():  # the lock is needed since catch_warnings affects all threads
            warnings.simplefilter("ignore")
            return settled(self.observed, recipe)

    def managers(self, recipe: Recipe) -> list[PassManager]:
        """Return the managers of all qdq graphs of a recipe."""
        return [self.candidate(recipe)]

    def candidate_model(self, recipe: Recipe) -> nn.Module:
        """Return the model of a recipe, in exact integer arithmetic."""
        return self.candidate(recipe).gm.eval()

    def score(self, recipe: Recipe) -> float:
        """Return the metric of a recipe's model; without a metric, its SQNR in dB.

        The SQNR is rounded to 0.001 dB, since the order of sums may differ between processes.
        """
        model = self.candidate_model(recipe)
        return round(self.sqnr(model), 3) if self.metric is None else self.metric_of(model)

    def metric_of(self, model: nn.Module) -> float:
        """Return the metric of a model. Raises `InputError` if the metric does not return a number."""
        assert self.metric is not None
        with untouched(self.model):  # a metric may change the mode of the model
            return metric_value(self.metric, model)

    def sqnr(self, gm: nn.Module) -> float:
        """Return dB of a model's output against the float model's over all data, the minimum over its outputs."""
        outputs: dict[int, Agreement] = {}
        with torch.no_grad(), without_autocast():
            for batch, wants in zip(self.batches, self.wants, strict=True):
                inputs = copied(batch)
                with seeded():
                    gots = tensors(gm(*inputs.args, **inputs.kwargs))
                for place, (want, got) in enumerate(zip(wants, gots, strict=True)):
                    if want.is_floating_point():
                        add_output(outputs, place, want, got)
        return min((output.sqnr for output in outputs.values()), key=rank)

    def scores(
        self, recipes: Sequence[Recipe], executor: Executor | None = None, advance: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Return the scores of candidates, in order.

        Args:
            recipes: the candidates.
            executor: executor that evaluates them; None: this thread, one after another.
            advance: called after each candidate.

        Raises:
            InputError: the model, metric or data cannot be pickled for other processes.
        """
        scores: list[float] = []
        if executor is None or isinstance(executor, ThreadPoolExecutor):
            for score in map(self.score, recipes) if executor is None else executor.map(self.score, recipes):
                scores.append(score)
                advance()
            return scores
        payload = self._pickled()
        size = max(-(-len(recipes) // MAX_TASKS), 1)
        chunks = [recipes[i : i + size] for i in range(0, len(recipes), size)]
        for future in [executor.submit(_scores, payload, chunk) for chunk in chunks]:
            for score in future.result():
                scores.append(score)
                advance()
        return scores

    def _pickled(self) -> bytes:
        try:
            return pickle.dumps(self)
        except Exception as error:  # the user's objects may raise anything
            raise InputError(
                f"the model, the metric or the data cannot be sent to other processes: {words_of(error)}. Define their "
                "classes and functions at module level, or use a ThreadPoolExecutor or no executor."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        attributes = {key: value for key, value in vars(self).items() if key not in ("observed", "_lock")}
        observers = {name: module for name, module in self.observed.named_modules() if isinstance(module, ObserverSet)}
        return {**attributes, "observers": observers, "samples": self.observed.manager.context.samples}

    def __setstate__(self, state: dict[str, Any]) -> None:
        observers, samples = state.pop("observers"), state.pop("samples")
        vars(self).update(state)
        self._lock = threading.Lock()
        self.prepare()
        self.observed.manager.context.samples[:] = samples
        for name, observer in observers.items():
            self.observed.set_submodule(name, observer)


def check_metric(metric: Any) -> None:
    """Raise `InputError` unless this is None or a function."""
    if metric is not None and not callable(metric):
        raise InputError(f"metric is {metric!r}; give a function of a model that returns a number, larger is better.")


def metric_value(metric: Metric, model: nn.Module) -> float:
    """Return the metric of a model. Raises `InputError` if it is no number."""
    score = metric(model)
    try:
        return float(score)
    except (TypeError, ValueError) as error:
        raise InputError(f"the metric returned {score!r}; it must return a number, larger is better.") from error


def settled(observed: ObservedModel, recipe: Recipe) -> PassManager:
    """Return the manager of the qdq graph of a calibrated model, with every op on integers that can be."""
    manager, _, left = to_qdq(observed_with(observed, recipe))
    exact = get_backend("reference", "cpu")
    fork = manager.fork(backend=exact, recipe=recipe.with_optimize("coverage"), progress=False)
    lowered = next((i for i, step in enumerate(left) if step.gives >= Stage.LOWERED), len(left))
    fork.run(left[:lowered])
    return fork


@lru_cache(maxsize=1)
def _opened(payload: bytes) -> Trials:
    """Unpickle the trials of another process; cached, so that each worker traces the model once."""
    trials: Trials = pickle.loads(payload)
    return trials


_IMPORT_PID = os.getpid()
"""Process that imported this module; another one after a fork."""


def _scores(payload: bytes, recipes: Sequence[Recipe]) -> list[float]:
    """Evaluate candidates in a worker process, with as many threads as the caller, so that sums have the same order.

    A forked process uses one thread: OpenMP would wait for threads that were not forked.
    """
    if os.getpid() != _IMPORT_PID:
        torch.set_num_threads(1)
    trials = _opened(payload)
    if os.getpid() == _IMPORT_PID and torch.get_num_threads() != trials.threads:
        torch.set_num_threads(trials.threads)
    return [trials.score(recipe) for recipe in recipes]
