"""backend="fastest": convert a model with every backend that is available, time the results, and keep the fastest."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fxq.backends.by_name import FASTEST, fastest_order, unavailable
from fxq.common.cpus import is_contended, usable_cpus
from fxq.common.data import Batch, device_of, samples_in
from fxq.common.isolation import copied, without_autocast
from fxq.common.ranks import Ranks
from fxq.common.timed_calls import MIN_ROUNDS, clock, interleaved, rounds, threads_set_to, times_in_turns, turn_seconds
from fxq.errors import BackendError, FxqError, InputError, RecipeError, warn, words_of
from fxq.graph.info import precision_of
from fxq.graph.text.text_writer import write_graph
from fxq.ledger.attempts import Attempt, Attempts
from fxq.model import QuantizedModel
from fxq.quant.observer_base import Observer
from fxq.quant.observers import MinMax
from fxq.recipe.recipe import Recipe
from fxq.runtime.binding import bind
from fxq.workflow.observed_model import ObservedModel
from fxq.workflow.steps import QdqCache, SharedGraphs, Trial, all_on_integers, converted, prepared, warn_again
from fxq.workflow.time_estimate import Estimate

log = logging.getLogger("fxq")

Lower = Callable[[ObservedModel], Trial | None]
"""Function that lowers an observed model to time it; its result is None if the conversion is as quick."""


def prepared_for_recipe(
    model: nn.Module, recipe: Recipe, example_inputs: Any, observe_all: bool = False
) -> ObservedModel:
    """Prepare a model for calibration, see `fxq.prepare`, for the recipe's backend or for all available backends."""
    if recipe.backend != FASTEST:
        return prepared(model, recipe, example_inputs, observe_all)
    return prepare_all(
        recipe, device_of(model), lambda own, shared: prepared(model, own, example_inputs, observe_all, shared)
    )


def converted_for_recipe(
    calibrated: ObservedModel, recipe: Recipe | None = None, ranks: Ranks | None = None
) -> QuantizedModel:
    """Convert a calibrated model, see `fxq.convert`, for the recipe's backend or for the fastest backend.

    Args:
        calibrated: the model.
        recipe: the recipe; None: the one that the model was prepared with.
        ranks: processes that convert the model together, see `converted`; None: this one alone. For the fastest
            backend, each works alone, since it may choose another one.

    Raises:
        RecipeError: the model was prepared for all backends, and the recipe is for one.
    """
    try:
        if calibrated.others is None:
            return converted(calibrated, recipe, ranks=ranks)
        if recipe is not None and recipe.backend != FASTEST:
            raise RecipeError(
                f"the model was prepared for all backends, and the recipe asks for {recipe.backend!r}: pass a recipe "
                f"with backend={FASTEST!r}, or prepare the float model with this recipe."
            )
        qdq_cache: QdqCache = []
        return convert_all(
            calibrated,
            lambda model: converted(model, _for_backend_of(model, recipe), qdq_cache),
            _lower_for(recipe),
        )
    finally:
        calibrated.forget_float_values()


def _lower_for(recipe: Recipe | None) -> Lower:
    """Function that lowers observed models for trials, with the recipe; None: with their own recipes."""
    trial_cache: QdqCache = []
    return lambda model: all_on_integers(model, _for_backend_of(model, recipe), trial_cache)


def _for_backend_of(observed: ObservedModel, recipe: Recipe | None) -> Recipe | None:
    return recipe.with_backend(observed.manager.context.recipe.backend) if recipe is not None else None


def prepare_all(recipe: Recipe, device: str, prepare: Callable[[Recipe, SharedGraphs], ObservedModel]) -> ObservedModel:
    """Prepare a model for every backend that is available. The models are calibrated together and converted separately.

    Args:
        recipe: a recipe with `backend="fastest"`.
        device: type of the device that the model is on.
        prepare: function that prepares the model with a recipe for one backend; its second argument holds the graphs
            that the backends share.

    Returns:
        The model of the first backend, which holds the others. If the recipe is weight-only, which is for size, those
        that keep weights in float are left out.

    Raises:
        FxqError: no backend is available, or none can prepare the model; then it is the first backend's error.
    """
    absent: dict[str, str] = {}
    observed: list[ObservedModel] = []
    first_error: FxqError | None = None
    shared = SharedGraphs()
    for name in fastest_order():
        why = unavailable(name, device)
        try:
            observed += [prepare(recipe.with_backend(name), shared)] if why is None else []
        except FxqError as error:
            first_error, why = first_error or error, words_of(error)
        if why is not None:
            absent[name] = why
    if not observed:
        raise first_error or BackendError("no backend runs on this machine: " + " ".join(absent.values()))
    if recipe.config.activation is None:
        observed = _smallest(observed, absent)
    first, *others = observed
    first.others, first.absent = tuple(others), absent
    _share_calibration(first)
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


def _share_calibration(observed: ObservedModel) -> None:
    """Let one model of each graph run on the calibration data, the first one. See `ObservedModel.same_as`."""
    graphs: dict[Any, int] = {}
    for i, model in enumerate(_models_of(observed)):
        index = graphs.setdefault(_graph_key(model), i)
        model.same_as = index if index != i else None


def _share_statistics(observed: ObservedModel) -> None:
    """Copy the statistics of calibrated models to those with the same graph."""
    models = _models_of(observed)
    for model in models:
        if model.same_as is not None:
            model.take_calibration(models[model.same_as])


def _models_of(observed: ObservedModel) -> list[ObservedModel]:
    """Models of all backends that a model was prepared for."""
    return [observed, *(observed.others or ()), *observed.left_out]


def _graph_key(observed: ObservedModel) -> Any:
    """Key that is equal for models with the same graph and observers."""
    try:
        return write_graph(observed, facts=False)
    except InputError:  # a call has no text form
        return observed


def without_slow(observed: ObservedModel) -> ObservedModel:
    """Leave backends that cannot become the fastest out of the calibration, by their times on the example.

    Args:
        observed: result of `prepared_for_recipe`, which has seen no data.

    Returns:
        The model of the first backend that is left, which holds those of all others.
    """
    if not observed.others or observed.manager.context.recipe.optimize != "speed":
        return observed
    candidates = _in_order(observed)
    try:
        with _on_example(observed):
            _add_estimates(candidates, _lower_for(None), _threads())
    except Exception as error:  # values of the example that no grid holds, for instance; the data may have none
        log.debug("no backend is timed before the calibration: %s", error)
        return observed
    times_us = [candidate.time_estimate.us for candidate in candidates if candidate.time_estimate is not None]
    limit_us = MAX_TIE_RATIO * min(times_us, default=math.inf)
    slow = [c for c in candidates if c.time_estimate is not None and c.time_estimate.cannot_be_below(limit_us)]
    for candidate in slow:
        assert candidate.time_estimate is not None  # as for all slow ones
        candidate.time_estimate.drop_model()
    first, *others = (candidate for candidate in candidates if candidate not in slow)
    absent, observed.others, observed.absent = observed.absent, None, {}
    first.others, first.left_out, first.absent = tuple(others), tuple(slow), absent
    _share_calibration(first)
    return first


def convert_all(
    observed: ObservedModel,
    convert: Callable[[ObservedModel], QuantizedModel],
    lower: Lower = lambda model: None,
) -> QuantizedModel:
    """Convert a model with every backend, and return the fastest result. Its `attempts` lists all backends.

    Models whose output SQNR is below the recipe's `min_sqnr` are only chosen if all are.

    Args:
        observed: result of `prepare_all` or `without_slow`, calibrated.
        convert: function that converts the observed model of one backend.
        lower: function that lowers the observed model of one backend without measuring prices, to time it before it is
            converted: backends that cannot become the fastest are not converted. It returns None if conversion is as
            quick.

    Raises:
        Exception: no backend's model runs on the example; the first backend's error.
    """
    candidates = _in_order(observed)
    _share_statistics(observed)
    example, min_sqnr = observed.manager.context.example, observed.manager.context.recipe.min_sqnr
    threads = _threads()
    _add_estimates(candidates, lower, threads)
    tries = {i: Attempt(candidate.manager.context.recipe.backend) for i, candidate in enumerate(candidates)}
    models: dict[int, tuple[QuantizedModel, list[warnings.WarningMessage]]] = {}
    errors: dict[int, Exception] = {}
    leader: tuple[int, float] | None = None  # index and microseconds of the fastest accurate model so far
    for i in sorted(tries, key=lambda i: _estimated_us(candidates[i])):
        candidate, estimate = candidates[i], candidates[i].time_estimate
        if leader is not None and estimate is not None:
            # of models that are as fast, the earliest is kept
            limit_us = leader[1] * (MAX_TIE_RATIO if i < leader[0] else 1 / MAX_TIE_RATIO)
            if estimate.cannot_be_below(limit_us / MIN_LATE_SPEEDUP if candidate in observed.left_out else limit_us):
                tries[i] = replace(tries[i], why=_slower(estimate.us, tries[leader[0]].backend, leader[1]))
                continue
        candidate.time_estimate = None  # whose trial holds a lowered model
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                _calibrate_late(candidate, observed)
                model, batch = convert(candidate), copied(candidate.manager.context.example)
                model(*batch.args, **batch.kwargs)
            except Exception as error:  # engines may raise anything
                errors[i] = error
                tries[i] = replace(tries[i], why=words_of(error))
                continue
        models[i] = model, list(heard)
        tries[i] = replace(tries[i], int8=model.ledger.count("int8"), sqnr=model.output_sqnr)
        if estimate is not None and not _is_inaccurate(model.output_sqnr, min_sqnr):
            us = _least_times({i: partial(model, *batch.args, **batch.kwargs)}, threads)[i]
            leader = (i, us) if leader is None or us < leader[1] else leader
    if not models:
        raise errors[min(errors)]
    best, times = _fastest({i: models[i][0] for i in sorted(models)}, tries, example, threads, min_sqnr)
    for i in models:
        tries[i] = replace(tries[i], us=times[i], chosen=i == best)
    absent = (Attempt(name, why=why) for name, why in observed.absent.items())
    chosen, heard = models[best]
    warn_again(heard)
    chosen.attempts = Attempts((*tries.values(), *absent), threads)
    return chosen


@contextmanager
def _on_example(observed: ObservedModel) -> Iterator[None]:
    """Context in which all models are calibrated on the example, by quick observers; they forget it at its end."""
    models = _models_of(observed)
    before = [dict(_observers(model)) for model in models]
    example = copied(observed.manager.context.example)
    try:
        for model, observers in zip(models, before, strict=True):
            for name, observer in observers.items():
                model.set_submodule(name, _quick(observer))
        with observed.manager.context.untouched(), torch.no_grad(), without_autocast():
            nn.Module.__call__(observed, *example.args, **example.kwargs)
        _share_statistics(observed)
        yield
    finally:
        for model, observers in zip(models, before, strict=True):
            model.batches_seen = 0
            model.manager.context.samples.clear()
            for name, observer in observers.items():
                model.set_submodule(name, observer)


def _quick(observer: Observer) -> Observer:
    """Observer of the smallest and the largest value for the tensor of another; of a weight the observer itself."""
    return observer if observer.paused else MinMax(observer.spec, observer.axis, observer.name, observer.constants)


def _observers(model: nn.Module) -> Iterator[tuple[str, Observer]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Observer))


def _add_estimates(candidates: Sequence[ObservedModel], lower: Lower, threads: int) -> None:
    """Lower calibrated models, time them on the example, and set their `time_estimate`. Those that fail get none.

    Nothing is done if there are estimates already.
    """
    if any(candidate.time_estimate is not None for candidate in candidates):
        return
    trials: dict[int, Trial] = {}
    calls: dict[int, Callable[[], object]] = {}
    seconds: dict[int, float] = {}
    context, now = candidates[0].manager.context, clock(every_thread=True)
    untouched = context.untouched()  # leaves may keep state
    with untouched, torch.no_grad(), without_autocast(), threads_set_to(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, candidate in enumerate(candidates):
            try:
                trial, batch = lower(candidate), copied(context.example)
                if trial is not None:
                    _, bound = bind(trial.lowered, batch.args, batch.kwargs)
                    call = partial(bound.run, *batch.args, **batch.kwargs)
                    start = now()
                    call()
                    trials[i], calls[i], seconds[i] = trial, call, now() - start
            except Exception as error:  # engines may raise anything; the conversion reports it
                log.debug("%s: no trial: %s", candidate.manager.context.recipe.backend, error)
        limit = max(MAX_FIRST_RATIO * min(seconds.values(), default=0.0), MIN_FIRST_SECONDS)
        close = {i: call for i, call in calls.items() if seconds[i] <= limit}
        times_us = {i: 1e6 * first for i, first in seconds.items()} | _least_times(close, threads)
        for i, us in times_us.items():
            candidates[i].time_estimate = Estimate(us, trials[i].least_share, trials[i].share_bound)


def _least_times(calls: Mapping[int, Callable[[], object]], threads: int) -> dict[int, float]:
    """Least microseconds of each call in a few rounds, in which short calls are repeated.

    Otherwise the first call after those of other models would count, which finds no code or data in the caches.
    """
    with torch.no_grad(), without_autocast(), threads_set_to(threads):
        names = {str(i): call for i, call in calls.items()}
        times = times_in_turns(
            names, rounds(MIN_ROUNDS), clock(every_thread=True), lambda: None, turn_seconds(len(calls))
        )
    return {int(i): 1e6 * min(seconds) for i, seconds in times.items()}


def _in_order(observed: ObservedModel) -> list[ObservedModel]:
    """Models of all backends that a model was prepared for, in the order of preference."""
    order = fastest_order()
    return sorted(_models_of(observed), key=lambda model: order.index(model.manager.context.recipe.backend))


def _estimated_us(candidate: ObservedModel) -> float:
    return math.inf if candidate.time_estimate is None else candidate.time_estimate.us


def _calibrate_late(candidate: ObservedModel, observed: ObservedModel) -> None:
    """Calibrate a model on the samples that were recorded, if it was left out of the calibration.

    Args:
        candidate: the model.
        observed: the model that was calibrated.
    """
    if candidate not in observed.left_out or candidate.batches_seen:  # it has the graph of a model that was calibrated
        return
    samples = observed.manager.context.samples
    with candidate.manager.context.untouched(), torch.no_grad(), without_autocast():
        for batch in samples:
            own = copied(batch)
            nn.Module.__call__(candidate, *own.args, **own.kwargs)
    if not candidate.calibrated:
        return
    warn(
        f"backend={FASTEST!r}: {candidate.manager.context.recipe.backend} was taken for slow, and is calibrated on "
        f"{sum(samples_in(batch) or 1 for batch in samples)} samples alone. To calibrate it on all data, name it: "
        f"recipe.with_backend({candidate.manager.context.recipe.backend!r})."
    )


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
MAX_FIRST_RATIO, MIN_FIRST_SECONDS = 4.0, 0.1
"""Time of a first call, relative to the shortest and in seconds, above which a model is not timed again."""
MIN_LATE_SPEEDUP = 1.25
"""Speedup over the fastest model that a backend must promise to be converted after it was left out of the calibration:
times of one model vary by less, and it only has the recorded samples to calibrate with."""


def _threads() -> int:
    """Number of threads for timing: PyTorch's, or one if they would not get a CPU each.

    With several threads, other programs delay the whole model; the CPU time of one thread is not affected.
    """
    threads = torch.get_num_threads()
    return 1 if threads > usable_cpus() or is_contended() else threads


def _is_inaccurate(sqnr: float | None, min_sqnr: float | None) -> bool:
    """Whether the SQNR of an output, in dB, is below the recipe's minimum, or NaN."""
    return sqnr is not None and min_sqnr is not None and not sqnr >= min_sqnr
