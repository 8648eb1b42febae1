"""backend="fastest": a model is lowered with every backend that this machine has, and the quickest one stays."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fxq.backends.by_name import fastest_order, unavailable
from fxq.common.cpus import is_contended, usable_cpus
from fxq.common.isolation import copied, without_autocast
from fxq.common.timed_calls import interleaved, threads_set_to
from fxq.errors import BackendError, FxqError, InputError, words_of
from fxq.graph.text.text_writer import write_graph
from fxq.ledger.attempts import Attempt, Attempts
from fxq.model import QuantizedModel
from fxq.recipe.recipe import Recipe
from fxq.workflow.observed_model import ObservedModel


def prepare_all(
    recipe: Recipe, device: str, prepare: Callable[[Recipe, ObservedModel | None], ObservedModel]
) -> ObservedModel:
    """The model with observers, for every backend that this machine has: calibrated as one, converted one by one.

    Args:
        recipe: with `backend="fastest"`.
        device: type of the device that the model is on.
        prepare: what prepares the model with a recipe of one backend; it is given what it made for another one.

    Raises:
        FxqError: no backend prepares the model, or there is none; the first one's error.
    """
    absent: dict[str, str] = {}
    made: list[ObservedModel] = []
    failed: FxqError | None = None
    for name in fastest_order():
        why = unavailable(name, device)
        try:
            made += [prepare(recipe.with_backend(name), made[0] if made else None)] if why is None else []
        except FxqError as error:
            failed, why = failed or error, words_of(error)
        if why is not None:
            absent[name] = why
    if not made:
        raise failed or BackendError("no backend runs here: " + " ".join(absent.values()))
    graphs: dict[Any, int] = {}
    for i, one in enumerate(made):
        same = graphs.setdefault(_text_of(one), i)
        one.same_as = same if same != i else None
    first, *others = made
    first.others, first.absent = tuple(others), absent
    return first


def _text_of(observed: ObservedModel) -> Any:
    """What two models have in common that have the same graph and observers."""
    try:
        return write_graph(observed, facts=False)
    except InputError:  # it calls what no text can name
        return observed


def convert_all(observed: ObservedModel, convert: Callable[[ObservedModel], QuantizedModel]) -> QuantizedModel:
    """The quickest of the models that the backends make; `attempts` of it has all of them.

    One whose output is further from the float model's than the recipe's `min_sqnr` loses against any that is not.

    Raises:
        Exception: no backend makes a model that runs on the example; the first one's error.
    """
    tries: list[Attempt] = []
    models: dict[int, tuple[QuantizedModel, list[warnings.WarningMessage]]] = {}
    failed: Exception | None = None
    everyone = observed, *(observed.others or ())
    for candidate in everyone:
        if candidate.same_as is not None:
            candidate.take_calibration(everyone[candidate.same_as])
    for candidate in everyone:
        name = candidate.manager.context.recipe.backend
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                model, batch = convert(candidate), copied(candidate.manager.context.example)
                model(*batch.args, **batch.kwargs)
            except Exception as error:  # whatever an engine raises
                failed = failed or error
                tries.append(Attempt(name, why=words_of(error)))
                continue
        models[len(tries)] = model, list(heard)
        tries.append(Attempt(name, int8=model.ledger.count("int8"), sqnr=model.output_sqnr))
    if not models:
        assert failed is not None  # one was tried at least
        raise failed
    example, least = observed.manager.context.example, observed.manager.context.recipe.min_sqnr
    with torch.no_grad(), without_autocast():
        calls: dict[str, Callable[[], object]] = {}
        for i, (model, _) in models.items():
            batch = copied(example)
            calls[str(i)] = partial(model, *batch.args, **batch.kwargs)
        threads = _threads()
        with threads_set_to(threads):
            times = interleaved(calls, lambda: None, shortest=True)
    best = min(models, key=lambda i: (_is_far(tries[i].sqnr, least), times[str(i)]))
    # the earliest backend wins a tie, so that noise does not decide
    best = next(
        i
        for i in models
        if _is_far(tries[i].sqnr, least) == _is_far(tries[best].sqnr, least)
        and times[str(i)] <= MAX_TIE_RATIO * times[str(best)]
    )
    for i in models:
        tries[i] = replace(tries[i], us=times[str(i)], chosen=i == best)
    tries += [Attempt(name, why=why) for name, why in observed.absent.items()]
    chosen, heard = models[best]
    for warning in heard:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    chosen.attempts = Attempts(tuple(tries), threads)
    return chosen


MAX_TIE_RATIO = 1.1
"""Time relative to the fastest backend up to which an earlier backend is preferred."""


def _threads() -> int:
    """Number of threads for timing: PyTorch's, or one if they would not get a CPU each.

    With several threads, other programs delay the whole model; the CPU time of one thread is not affected.
    """
    threads = torch.get_num_threads()
    return 1 if threads > usable_cpus() or is_contended() else threads


def _is_far(sqnr: float | None, least: float | None) -> bool:
    """Whether an output is too far from the float model's."""
    return sqnr is not None and least is not None and not sqnr >= least  # NaN is far
