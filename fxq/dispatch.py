"""Dispatch of the public functions by the kind of model: one graph, parts, programs, a generator, a training run."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from fxq.checkpoints.open_checkpoint import is_checkpoint
from fxq.common.code_state import CodeState
from fxq.common.data import Batch, batches, length_of, samples_in
from fxq.common.files import as_path
from fxq.common.isolation import untouched
from fxq.common.progress import progress_bar
from fxq.common.ranks import Ranks
from fxq.errors import FxqError, FxqWarning, InputError, RecipeError, TraceError, warn, words_of
from fxq.integrations import float_shell, load_folder, load_stored, mapped_model, quantizer_for
from fxq.integrations.adapters import with_float_adapters
from fxq.ledger.comparison import Comparison, compare_with, quantized_reference
from fxq.model import QuantizedModel
from fxq.parts.choose import untraced_modules, why_in_parts, why_not
from fxq.parts.compare_parts import compare_parts
from fxq.parts.observed_parts import ObservedParts
from fxq.parts.parts_model import PartsModel, load_parts
from fxq.parts.quantize_parts import PartsRun
from fxq.programs.quantized_programs import QuantizedPrograms, load_model
from fxq.recipe.recipe import Recipe, as_recipe
from fxq.report.report import write_comparison
from fxq.tracing.failure import StatefulForwardError
from fxq.tracing.wrappers import unwrapped
from fxq.workflow.calibrate import EVERY, Calibration, as_observed, first_of_all
from fxq.workflow.compare_programs import compare_programs
from fxq.workflow.entry import compared_model, float_model, trainable_model
from fxq.workflow.fastest import converted_for_recipe, prepared_for_recipe, without_slow
from fxq.workflow.observed_model import ObservedModel
from fxq.workflow.programs import (
    check_no_checkpoint,
    example_of_one_graph,
    examples_of,
    needs_programs,
    quantize_programs,
)
from fxq.workflow.steps import float_reference
from fxq.workflow.train import converted_from_training, prepared_for_training
from fxq.workflow.training_model import TrainingModel


def check_needs_no_training(recipe: Recipe) -> None:
    """Raise `RecipeError` if the recipe needs training."""
    if recipe.trains:
        raise RecipeError(
            f"the recipe {recipe.preset!r} needs training, which fxq.quantize does not do: call trained = "
            "fxq.prepare(model, recipe, example_inputs=x), run your training loop, then call fxq.convert(trained)."
        )


def quantize_model(
    model: nn.Module,
    recipe: Recipe,
    data: Iterable[Any] | None,
    example_inputs: Any,
    progress: bool | None,
    checkpoint: str | os.PathLike[str] | None,
    group: Any,
) -> QuantizedModel:
    """Quantize a model as one graph, in parts, as several programs, or as a generator, see `fxq.quantize`."""
    model = float_model(model)
    examples_by_name = {} if example_inputs is None else examples_of(example_inputs, model)
    recipe = with_float_adapters(model, recipe)
    check = partial(check_no_checkpoint, checkpoint, data)
    ranks = Ranks.of(group if data is not None else None)
    quantize_own: Any = quantizer_for(model, recipe, data, examples_by_name, progress=progress, ranks=ranks)
    _check_equal_calls(ranks, recipe, [*examples_by_name, "" if quantize_own is None else type(model).__name__])
    if quantize_own is not None:
        check()
        own_class: QuantizedModel = quantize_own()  # typed as the usual case
        return own_class
    programs = _as_programs(model, recipe, examples_by_name, data, progress, check, ranks)
    if programs is not None:
        return programs
    stream = batches(data, model, may_be_empty=ranks.size > 1) if data is not None else iter(())
    first = ranks.together(lambda: list(_opening(stream)))
    examples = list(examples_by_name.values()) or first_of_all(first, ranks, model)
    if not examples:
        raise _no_data(recipe)
    first_example = {} if examples_by_name else {"program_0": examples[-1]}
    programs = _as_programs(model, recipe, first_example, chain(first, stream), progress, check, ranks)
    if programs is not None:
        return programs
    run = _prepared(model, recipe, examples[-1], False) if ranks.size == 1 else None
    if isinstance(run, ObservedParts):
        if data is None and run.calibrated:
            raise _no_data(recipe, run.calibrated)
        run.calibrate(chain(first, stream), length_of(data), progress, checkpoint)
        return convert_model(run, None)
    observed = run or ranks.together(lambda: prepared_for_recipe(model, recipe, examples[-1]))
    if data is not None:
        if ranks.size == 1 and checkpoint is None:  # which must calibrate the same models in each process and run
            observed = without_slow(observed)
        calibration = Calibration(observed, ranks, checkpoint, EVERY, progress, few=not observed.calibrated)
        calibration.run(chain(first, stream), length_of(data) if observed.calibrated else None)
    elif observed.calibrated:
        raise _no_data(recipe, observed.calibrated)
    observed.manager.context.progress = progress
    return ranks.together(lambda: converted_for_recipe(observed, ranks=ranks))


def _check_equal_calls(ranks: Ranks, recipe: Recipe, names: Sequence[str]) -> None:
    """Raise `InputError` on all ranks if they quantize in different ways.

    Args:
        ranks: processes that quantize together.
        recipe: the recipe of this process.
        names: names of its examples, and of the class of its model if that is quantized in a way of its own.
    """
    ways = f"{recipe.preset} recipe, optimize={recipe.optimize!r}, backend={recipe.backend!r}, examples {names}"
    for _ in ranks.exchanged(lambda: None, about=ways):
        pass


@contextlib.contextmanager
def reading_weights(model: Any, weights: Any) -> Iterator[Any]:
    """Context with a model to quantize, whose weights are read when they are used if they are in files.

    Args:
        model: a model; or the folder of a float model of transformers, which has its weights.
        weights: path of safetensors files with the weights of the model; None: the model has them.

    Raises:
        FileError: the files are damaged, or do not fit the model.
        InputError: the model has values already, or writes to its parameters.
    """
    is_folder = isinstance(model, (str, os.PathLike)) and os.path.isdir(model)
    if weights is None and not is_folder:
        yield model
        return
    path = as_path(model if weights is None else weights)
    if not is_folder and not any(p.is_meta for p in trainable_model(model).parameters()):
        raise InputError(
            f"weights={str(path)!r} is for a model on the meta device, and {type(model).__name__} has values: leave it "
            'out, or create the model inside of: with torch.device("meta").'
        )
    shell = float_shell(None if is_folder else unwrapped(model), Path(model) if is_folder else path)
    whole, mapped = mapped_model(shell, path)
    with mapped.bounded(whole):
        yield whole


def _as_programs(
    model: nn.Module,
    recipe: Recipe,
    examples: Mapping[str, Batch],
    data: Iterable[Any] | None,
    progress: bool | None,
    check: Callable[[], None],
    ranks: Ranks,
) -> Any:
    """Model quantized as programs. None: one graph is enough, or it cannot be traced as a whole but has parts.

    `check` is called first, and raises an error for options that programs do not have.
    The float code around parts changes the arguments of a call itself.
    """
    traces_later = recipe.new_kinds == "trace"
    if not examples or not (traces_later or needs_programs(model, recipe, list(examples.values()))):
        return None
    check()
    try:
        return quantize_programs(model, recipe, examples, data, progress=progress, ranks=ranks)
    except TraceError as error:
        if not traces_later and len(examples) == 1:
            with contextlib.suppress(TraceError, InputError):
                if isinstance(_prepared(model, recipe, next(iter(examples.values())), False), ObservedParts):
                    return None
        raise error


def prepare_model(model: nn.Module, recipe: Recipe, example_inputs: Any, observe_all: bool = False) -> Any:
    """Prepare a model as one graph or in parts, see `fxq.prepare`."""
    if example_inputs is None:
        return prepared_for_recipe(model, recipe, None, observe_all)  # raises the error for a missing example
    example, refusal = example_of_one_graph(example_inputs, model)
    try:
        with warnings.catch_warnings():
            if refusal is not None:  # which says more than the warnings about the graph
                warnings.simplefilter("ignore", FxqWarning)
            run = _prepared(model, recipe, example, observe_all)
    except (TraceError, InputError) as error:
        raise refusal or error from error.__cause__
    if refusal is not None and not isinstance(run, ObservedParts):
        raise refusal
    return run


def prepare_training(model: nn.Module, recipe: Recipe, example_inputs: Any) -> TrainingModel:
    """Prepare a model for training, see `fxq.prepare`."""
    if example_inputs is None:
        return prepared_for_training(model, recipe, None)  # raises the error for a missing example
    example, refusal = example_of_one_graph(example_inputs, model)
    if refusal is not None:
        raise refusal
    return prepared_for_training(model, recipe, example)


def _prepared(model: nn.Module, recipe: Recipe, example: Batch, observe_all: bool) -> Any:
    """Prepare a model as one graph; or in parts, if the recipe says so or the model cannot be traced as a whole."""

    def prepare(part: nn.Module, own: Recipe, inputs: Any) -> ObservedModel:
        return prepared_for_recipe(part, own, inputs, observe_all)

    run = PartsRun(model, recipe, example, prepare)
    if recipe.part_modules:
        return ObservedParts(run.begin("the recipe names the parts."))
    observed: ObservedModel | None = None
    error: FxqError | None = None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            observed = prepare(model, recipe, run.example)
            why = why_in_parts(observed)
        except (TraceError, InputError) as failure:
            # an error without a cause is a refusal that parts cannot avoid: shared state, or values that are not finite
            error, why = failure, why_not(model, failure) if failure.__cause__ is not None else ""
            run.keeps_state = isinstance(failure.__cause__, StatefulForwardError)
    parts, refused = _in_parts(run, why, observed, error) if why and not recipe.strict_trace else (None, "")
    if parts is not None:
        return parts
    if error is not None:
        raise (type(error)(f"{error} {refused}") if refused else error) from error.__cause__
    if refused:
        warn(f"{type(model).__name__} is quantized as one graph, though {why} {refused}")
    for warning in heard:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    assert observed is not None
    return observed


def _in_parts(
    run: PartsRun, why: str, observed: ObservedModel | None, error: FxqError | None
) -> tuple[ObservedParts | None, str]:
    """Return the model in parts, None if one graph serves as well or there are no parts; and what prevented them.

    Args:
        run: the run with parts.
        why: why the model is quantized in parts.
        observed: the model as one graph, if there is one.
        error: why there is no such graph; None if there is one. A failure of the parts with the same cause is not
            repeated.
    """
    try:
        run.begin(why)
    except TraceError:
        return None, ""  # there are no parts: the error of the whole model says more
    except InputError as failure:
        causes = [None if e is None or e.__cause__ is None else words_of(e.__cause__) for e in (failure, error)]
        if causes[0] is not None and causes[0] == causes[1]:
            return None, ""
        return None, f"It cannot be quantized in parts either: {words_of(failure)}"
    is_better = observed is None or run.has_parts_in(untraced_modules(observed))
    return ObservedParts(run) if is_better else None, ""


def _opening(stream: Iterable[Batch]) -> Iterator[Batch]:
    """First batches of a stream, up to the first one that is not empty."""
    for batch in stream:
        yield batch
        if samples_in(batch) != 0:
            return


def _no_data(recipe: Recipe, calibrated: str = "") -> InputError:
    """Error for missing calibration data, or for a missing batch to infer shapes from.

    Args:
        recipe: the recipe.
        calibrated: name of a value whose range needs data; empty if no such value is known.
    """
    if not calibrated and (recipe.preset == "stored" or not recipe.config.is_calibrated):
        return InputError(
            "give one batch of inputs to infer shapes from: fxq.quantize(model, recipe, example_inputs=x)."
        )
    value = f", for {calibrated}" if calibrated else ""
    return InputError(
        f"the recipe {recipe.preset!r} needs data to calibrate with{value}: fxq.quantize(model, recipe, data=loader)."
    )


def convert_model(observed: Any, recipe: Any, group: Any = None) -> QuantizedModel:
    """Convert a calibrated or a trained model, see `fxq.convert`."""
    trained, ranks = unwrapped(observed), Ranks.of(group)
    if ranks.size > 1 and isinstance(trained, (TrainingModel, ObservedParts)):
        raise InputError(
            "group is for a calibrated model of one graph: processes do not divide the work of converting a trained "
            "model, or a model in parts. Leave it out."
        )
    if isinstance(trained, TrainingModel):
        if recipe is not None:
            raise RecipeError(
                "a trained model is converted with the recipe that it was prepared with: call fxq.convert(trained) "
                "without a recipe."
            )
        return converted_from_training(trained)
    chosen = as_recipe(recipe) if recipe is not None else None
    if isinstance(trained, ObservedParts):
        parts: QuantizedModel = trained.run.convert(chosen)  # typed as the usual case
        return parts
    calibrated = as_observed(observed)
    return ranks.together(lambda: converted_for_recipe(calibrated, chosen, ranks))


def calibrate_model(
    observed: Any,
    data: Iterable[Any],
    progress: bool | None,
    checkpoint: str | os.PathLike[str] | None,
    every: float,
    group: Any,
) -> Any:
    """Calibrate a prepared model, as one graph or in parts, see `fxq.calibrate`."""
    ranks = Ranks.of(group)
    if isinstance(observed, ObservedParts):
        return observed.calibrate(
            batches(data, observed.run.model), length_of(data), progress, checkpoint, every, ranks
        )
    calibrated = as_observed(observed)
    stream = batches(data, calibrated.manager.context.model, may_be_empty=ranks.size > 1)
    Calibration(calibrated, ranks, checkpoint, every, progress).run(stream, length_of(data))
    return calibrated


def compare_models(a: Any, b: QuantizedModel, data: Iterable[Any], progress: bool | None) -> Comparison:
    """Compare a quantized model, as one graph, in parts or programs, with its float model, see `fxq.compare`."""
    quantized: Any = b
    if isinstance(quantized, PartsModel):
        a = float_model(a)
        with untouched(a, CodeState.of(a).bindings), progress_bar("comparing", length_of(data), progress) as advance:
            return compare_parts(a, quantized, batches(data, a), advance)
    if isinstance(quantized, QuantizedPrograms):
        a = float_model(a)
        with untouched(a, CodeState.of(a).bindings), progress_bar("comparing", length_of(data), progress) as advance:
            return compare_programs(a, quantized, batches(data, a), advance)
    a = compared_model(a, b)
    stream = batches(data, a)
    first = next(stream)
    reference = quantized_reference(a, b) if isinstance(a, QuantizedModel) else float_reference(a, b, first)
    with untouched(a), untouched(b), progress_bar("comparing", length_of(data), progress) as advance:
        return compare_with(reference, b, chain([first], stream), advance, write_comparison)


def load_path(
    path: str | os.PathLike[str], leaves: Mapping[str, nn.Module] | None, into: nn.Module | None
) -> QuantizedModel:
    """Load a model from a file, or from a folder of `save_pretrained`, see `fxq.load`."""
    if isinstance(path, (str, os.PathLike)) and is_checkpoint(Path(path)):
        stored: QuantizedModel = load_stored(Path(path), into)  # typed as the usual case
        return stored
    if into is not None:
        parts: QuantizedModel = load_parts(path, unwrapped(into))
        return parts
    if isinstance(path, (str, os.PathLike)) and os.path.isdir(path):
        folder: QuantizedModel = load_folder(Path(path))  # typed as the usual case
        return folder
    model: QuantizedModel = load_model(path, leaves)
    return model
