"""backend="fastest": convert a model with every backend that is available, time the results, and keep the fastest."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fxq.backends.by_name import FASTEST, fastest_order, unavailable
from fxq.common.cpus import is_contended, usable_cpus
from fxq.common.data import device_of
from fxq.common.isolation import copied, without_autocast
from fxq.common.timed_calls import interleaved, threads_set_to
from fxq.errors import BackendError, FxqError, InputError, RecipeError, words_of
from fxq.graph.text.text_writer import write_graph
from fxq.ledger.attempts import Attempt, Attempts
from fxq.model import QuantizedModel
from fxq.recipe.recipe import Recipe
from fxq.workflow.observed_model import ObservedModel
from fxq.workflow.steps import QdqCache, converted, prepared


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
        return convert_all(calibrated, lambda model: converted(model, _for_backend_of(model, recipe), qdq_cache))
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
        The model of the first backend, which holds the others.

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
    graphs: dict[Any, int] = {}
    for i, model in enumerate(observed):
        index = graphs.setdefault(_graph_key(model), i)
        model.same_as = index if index != i else None
    first, *others = observed
    first.others, first.absent = tuple(others), absent
    return first


def _graph_key(observed: ObservedModel) -> Any:
    """Key that is equal for models with the same graph and observers."""
    try:
        return write_graph(observed, facts=False)
    except InputError:  # a call has no text form
        return observed


def convert_all(observed: ObservedModel, convert: Callable[[ObservedModel], QuantizedModel]) -> QuantizedModel:
    """Convert a model with every backend, and return the fastest result. Its `attempts` lists all backends.

    Models whose output SQNR is below the recipe's `min_sqnr` are only chosen if all are.

    Args:
        observed: result of `prepare_all`, calibrated.
        convert: function that converts the observed model of one backend.

    Raises:
        Exception: no backend's model runs on the example; the first backend's error.
    """
    tries: list[Attempt] = []
    models: dict[int, tuple[QuantizedModel, list[warnings.WarningMessage]]] = {}
    first_error: Exception | None = None
    candidates = observed, *(observed.others or ())
    for candidate in candidates:
        if candidate.same_as is not None:
            candidate.take_calibration(candidates[candidate.same_as])
    for candidate in candidates:
        name = candidate.manager.context.recipe.backend
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                model, batch = convert(candidate), copied(candidate.manager.context.example)
                model(*batch.args, **batch.kwargs)
            except Exception as error:  # engines may raise anything
                first_error = first_error or error
                tries.append(Attempt(name, why=words_of(error)))
                continue
        models[len(tries)] = model, list(heard)
        tries.append(Attempt(name, int8=model.ledger.count("int8"), sqnr=model.output_sqnr))
    if not models:
        assert first_error is not None  # at least one backend was tried
        raise first_error
    example, min_sqnr = observed.manager.context.example, observed.manager.context.recipe.min_sqnr
    with torch.no_grad(), without_autocast():
        calls: dict[str, Callable[[], object]] = {}
        for i, (model, _) in models.items():
            batch = copied(example)
            calls[str(i)] = partial(model, *batch.args, **batch.kwargs)
        threads = _threads()
        with threads_set_to(threads):
            times = interleaved(calls, lambda: None, shortest=True)
    best = min(models, key=lambda i: (_is_inaccurate(tries[i].sqnr, min_sqnr), times[str(i)]))
    # the earliest backend wins a tie, so that noise does not decide
    best = next(
        i
        for i in models
        if _is_inaccurate(tries[i].sqnr, min_sqnr) == _is_inaccurate(tries[best].sqnr, min_sqnr)
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


def _is_inaccurate(sqnr: float | None, min_sqnr: float | None) -> bool:
    """Whether the SQNR of an output, in dB, is below the recipe's minimum, or NaN."""
    return sqnr is not None and min_sqnr is not None and not sqnr >= min_sqnr
