"""backend="fastest": convert a model with every backend that is available, time the results, and keep the fastest."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fxq.backends.by_name import FASTEST, fastest_order, unavailable
from fxq.common.cpus import is_contended, usable_cpus
from fxq.common.data import Batch, device_of
from fxq.common.isolation import copied, without_autocast
from fxq.common.timed_calls import MIN_ROUNDS, clock, interleaved, rounds, threads_set_to, times_in_turns
from fxq.errors import BackendError, FxqError, InputError, RecipeError, words_of
from fxq.graph.info import precision_of
from fxq.graph.text.text_writer import write_graph
from fxq.ledger.attempts import Attempt, Attempts
from fxq.model import QuantizedModel
from fxq.recipe.recipe import Recipe
from fxq.runtime.binding import bind
from fxq.workflow.observed_model import ObservedModel
from fxq.workflow.steps import QdqCache, Trial, all_on_integers, converted, prepared, warn_again

log = logging.getLogger("fxq")


def prepared_for_recipe(
    model: nn.Module, recipe: Recipe, example_inputs: Any, observe_all: bool = False
) -> ObservedModel:
    """Prepare a model for calibration, see `fxq.prepare`, for the recipe's backend or for all available backends."""
    if recipe.backend != FASTEST:
        return prepared(model, recipe, example_inputs, observe_all)
    return prepare_all(
        recipe, device_of(model), lambda own, sibling: prepared(model, own, example_inputs, observe_all, sibling)
    )


def converted_for_recipe(calibrated: ObservedModel, recipe: Recipe | None = None) -> QuantizedModel:
    """Convert a calibrated model, see `fxq.convert`, for the recipe's backend or for the fastest backend.

    Raises:
        RecipeError: the model was prepared for all backends, and the recipe is for one.
    """
    try:
        if calibrated.others is None:
            return converted(calibrated, recipe)
        if recipe is not None and recipe.backend != FASTEST:
            raise RecipeError(
                f"the model was prepared for all backends, and the recipe asks for {recipe.backend!r}: pass a recipe "
                f"with backend={FASTEST!r}, or prepare the float model with this recipe."
            )
        qdq_cache: QdqCache = []
        trial_cache: QdqCache = []
        return convert_all(
            calibrated,
            lambda model: converted(model, _for_backend_of(model, recipe), qdq_cache),
            lambda model: all_on_integers(model, _for_backend_of(model, recipe), trial_cache),
        )
    finally:
        calibrated.forget_float_values()


def _for_backend_of(observed: ObservedModel, recipe: Recipe | None) -> Recipe | None:
    return recipe.with_backend(observed.manager.context.recipe.backend) if recipe is not None else None


def prepare_all(
    recipe: Recipe, device: str, prepare: Callable[[Recipe, ObservedModel | None], ObservedModel]
) -> ObservedModel:
    """Prepare a model for every backend that is available. The models are calibrated together and converted separately.

    Args:
        recipe: a recipe with `backend="fastest"`.
        device: type of the device that the model is on.
        prepare: function that prepares the model with a recipe for one backend; its second argument is the model
            prepared for the first backend, or None.

    Returns:
        The model of the first backend, which holds the others. If the recipe is weight-only, which is for size, those
        that keep weights in float are left out.

    Raises:
        FxqError: no backend is available, or none can prepare the model; then it is the first backend's error.
    """
    absent: dict[str, str] = {}
    observed: list[ObservedModel] = []
    first_error: FxqError | None = None
    for name in fastest_order():
        why = unavailable(name, device)
        try:
            sibling = observed[0] if observed else None
            observed += [prepare(recipe.with_backend(name), sibling)] if why is None else []
        except FxqError as error:
            first_error, why = first_error or error, words_of(error)
        if why is not None:
            absent[name] = why
    if not observed:
        raise first_error or BackendError("no backend runs on this machine: " + " ".join(absent.values()))
    if recipe.config.activation is None:
        observed = _smallest(observed, absent)
    graphs: dict[Any, int] = {}
    for i, model in enumerate(observed):
        index = graphs.setdefault(_graph_key(model), i)
        model.same_as = index if index != i else None
    first, *others = observed
    first.others, first.absent = tuple(others), absent
    return first


def _smallest(observed: Sequence[ObservedModel], absent: dict[str, str]) -> list[ObservedModel]:
    """Models with the most weight-only layers; `absent` gets the reason for each of the others."""
    counts = [sum(precision_of(node) == "weight-only" for node in model.manager.gm.graph.nodes) for model in observed]
    most = max(counts)
    for model, count in zip(observed, counts, strict=True):
        if count < most:
            absent[model.manager.context.recipe.backend] = (
                f"left out: the recipe is for size, and it stores the weights of {count} layers as integers, where "
                f"other backends store those of {most}"
            )
    return [model for model, count in zip(observed, counts, strict=True) if count == most]


def _graph_key(observed: ObservedModel) -> Any:
    """Key that is equal for models with the same graph and observers."""
    try:
        return write_graph(observed, facts=False)
    except InputError:  # a call has no text form
        return observed


def convert_all(
    observed: ObservedModel,
    convert: Callable[[ObservedModel], QuantizedModel],
    lower: Callable[[ObservedModel], Trial | None] = lambda model: None,
) -> QuantizedModel:
    """Convert a model with every backend, and return the fastest result. Its `attempts` lists all backends.

    Models whose output SQNR is below the recipe's `min_sqnr` are only chosen if all are.

    Args:
        observed: result of `prepare_all`, calibrated.
        convert: function that converts the observed model of one backend.
        lower: function that lowers the observed model of one backend without measuring prices, to time it before it is
            converted: backends that cannot become the fastest are not converted. It returns None if conversion is as
            quick.

    Raises:
        Exception: no backend's model runs on the example; the first backend's error.
    """
    candidates = observed, *(observed.others or ())
    for candidate in candidates:
        if candidate.same_as is not None:
            candidate.take_calibration(candidates[candidate.same_as])
    example, min_sqnr = observed.manager.context.example, observed.manager.context.recipe.min_sqnr
    threads = _threads()
    tries = {i: Attempt(candidate.manager.context.recipe.backend) for i, candidate in enumerate(candidates)}
    models: dict[int, tuple[QuantizedModel, list[warnings.WarningMessage]]] = {}
    errors: dict[int, Exception] = {}
    trials, times = _trials(candidates, lower, example, threads)
    leader: tuple[int, float] | None = None  # index and microseconds of the fastest accurate model so far
    for i in sorted(tries, key=lambda i: times.get(i, math.inf)):
        if leader is not None and i in trials:
            # of models that are as fast, the earliest is kept
            limit_us = leader[1] * (MAX_TIE_RATIO if i < leader[0] else 1 / MAX_TIE_RATIO)
            if _cannot_win(trials[i], times[i], limit_us):
                tries[i] = replace(tries[i], why=_slower(times[i], tries[leader[0]].backend, leader[1]))
                continue
        trials.pop(i, None)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                model, batch = convert(candidates[i]), copied(candidates[i].manager.context.example)
                model(*batch.args, **batch.kwargs)
            except Exception as error:  # engines may raise anything
                errors[i] = error
                tries[i] = replace(tries[i], why=words_of(error))
                continue
        models[i] = model, list(heard)
        tries[i] = replace(tries[i], int8=model.ledger.count("int8"), sqnr=model.output_sqnr)
        if trials and not _is_inaccurate(model.output_sqnr, min_sqnr):
            us = _times({i: partial(model, *batch.args, **batch.kwargs)}, threads)[i]
            leader = (i, us) if leader is None or us < leader[1] else leader
    if not models:
        raise errors[min(errors)]
    trials.clear()
    best, times = _fastest({i: models[i][0] for i in sorted(models)}, tries, example, threads, min_sqnr)
    for i in models:
        tries[i] = replace(tries[i], us=times[i], chosen=i == best)
    absent = (Attempt(name, why=why) for name, why in observed.absent.items())
    chosen, heard = models[best]
    warn_again(heard)
    chosen.attempts = Attempts((*tries.values(), *absent), threads)
    return chosen


def _trials(
    candidates: Sequence[ObservedModel],
    lower: Callable[[ObservedModel], Trial | None],
    example: Batch,
    threads: int,
) -> tuple[dict[int, Trial], dict[int, float]]:
    """Trials of the candidates and their microseconds for a call on the example. Those that fail are left out."""
    trials: dict[int, Trial] = {}
    calls: dict[int, Callable[[], object]] = {}
    untouched = candidates[0].manager.context.untouched()  # leaves may keep state
    with untouched, torch.no_grad(), without_autocast(), threads_set_to(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, candidate in enumerate(candidates):
            try:
                trial, batch = lower(candidate), copied(example)
                if trial is not None:
                    _, bound = bind(trial.lowered, batch.args, batch.kwargs)
                    bound.run(*batch.args, **batch.kwargs)
                    trials[i], calls[i] = trial, partial(bound.run, *batch.args, **batch.kwargs)
            except Exception as error:  # engines may raise anything; the conversion reports it
                log.debug("%s: no trial: %s", candidate.manager.context.recipe.backend, error)
        return trials, _times(calls, threads)


def _times(calls: Mapping[int, Callable[[], object]], threads: int) -> dict[int, float]:
    """Least microseconds of each call in a few rounds."""
    with torch.no_grad(), without_autocast(), threads_set_to(threads):
        names = {str(i): call for i, call in calls.items()}
        times = times_in_turns(names, rounds(MIN_ROUNDS), clock(every_thread=True))
    return {int(i): 1e6 * min(seconds) for i, seconds in times.items()}


def _cannot_win(trial: Trial, us: float, limit_us: float) -> bool:
    """Whether a backend, by estimate, takes more than `limit_us` even with ops in float where that is faster."""
    if us <= limit_us or us > MAX_TRIAL_RATIO * limit_us:
        return us > limit_us
    try:
        with torch.no_grad(), without_autocast(), threads_set_to(1), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return us * trial.least_share() > limit_us
    except Exception as error:  # engines may raise anything; the conversion reports it
        log.debug("no prices of a trial: %s", error)
        return False


def _slower(us: float, leader: str, leader_us: float) -> str:
    """Reason why a backend is not converted."""
    times = f"{us / 1e3:.2f} ms, and {leader} {leader_us / 1e3:.2f} ms"
    kept = f"; {leader} is kept unless another is {MAX_TIE_RATIO:g} times as fast" if us < leader_us else ""
    return f"not converted: with all possible ops on integers it takes {times}{kept}"


def _fastest(
    models: Mapping[int, QuantizedModel],
    tries: Mapping[int, Attempt],
    example: Batch,
    threads: int,
    min_sqnr: float | None,
) -> tuple[int, dict[int, float]]:
    """Index of the fastest model, and the microseconds of each. Of models that are as fast, it is the earliest."""
    calls: dict[str, Callable[[], object]] = {}
    with torch.no_grad(), without_autocast(), threads_set_to(threads):
        for i, model in models.items():
            batch = copied(example)
            calls[str(i)] = partial(model, *batch.args, **batch.kwargs)
        times = {int(i): us for i, us in interleaved(calls, lambda: None, shortest=True).items()}
    is_inaccurate = {i: _is_inaccurate(tries[i].sqnr, min_sqnr) for i in models}
    best = min(models, key=lambda i: (is_inaccurate[i], times[i]))
    # noise does not decide
    alike = (i for i in models if is_inaccurate[i] == is_inaccurate[best] and times[i] <= MAX_TIE_RATIO * times[best])
    return next(alike), times


MAX_TIE_RATIO = 1.1
"""Time relative to the fastest backend up to which an earlier backend is preferred."""
MAX_TRIAL_RATIO = 2.0
"""Ratio of a trial's time to the longest time that could win, above which the backend is not converted: ops in float,
chosen by price, hardly halve the time. Below it, the backend's prices decide."""


def _threads() -> int:
    """Number of threads for timing: PyTorch's, or one if they would not get a CPU each.

    With several threads, other programs delay the whole model; the CPU time of one thread is not affected.
    """
    threads = torch.get_num_threads()
    return 1 if threads > usable_cpus() or is_contended() else threads


def _is_inaccurate(sqnr: float | None, min_sqnr: float | None) -> bool:
    """Whether the SQNR of an output, in dB, is below the recipe's minimum, or NaN."""
    return sqnr is not None and min_sqnr is not None and not sqnr >= min_sqnr
