"""The public API: quantize, and the same in steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, takewhile, zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

import fxq.passes
import fxq.patterns  # registers the fusion patterns
from fxq.backends.by_name import FASTEST, get_backend
from fxq.common.data import Batch, as_batch, batches, check_batch, device_of, naming_batch
from fxq.common.isolation import untouched, without_autocast
from fxq.common.names import check_names, is_writable
from fxq.common.progress import progress_bar
from fxq.common.train_mode import first_in_train_mode
from fxq.errors import InputError, RecipeError, warn
from fxq.fastest import convert_all, prepare_all
from fxq.ledger.build import ledger_of
from fxq.ledger.comparison import Baseline, Comparison, compare_with, quantized_reference
from fxq.ledger.float_record import checksums
from fxq.ledger.narrowing import narrowed
from fxq.ledger.output_check import check_output, output_sqnr
from fxq.ledger.side_by_side import Program
from fxq.model import ObservedModel, QuantizedModel
from fxq.pipeline.context import Context
from fxq.pipeline.manager import PassManager
from fxq.pipeline.samples import has_enough
from fxq.recipe.pass_base import Pass, Stage
from fxq.recipe.recipe import Recipe, as_recipe
from fxq.report.report import write_comparison
from fxq.tracing.exported_program import Exported
from fxq.tracing.wrappers import unwrapped


def quantize(
    model: nn.Module,
    recipe: Any = "static",
    *,
    data: Iterable[Any] | None = None,
    example_inputs: Any = None,
    progress: bool | None = None,
) -> QuantizedModel:
    """Quantize a float model: trace, calibrate on `data`, convert, lower, verify. The model itself is not changed.

    Args:
        model: a float `nn.Module` in eval mode (where that makes a difference), or an `ExportedProgram` of one
            (`torch.export.export`); data parallel and `torch.compile` wrappers are taken off.
        recipe: a `Recipe`, a preset's name ("static", "dynamic", "weight_only"), a dict, or a path to a .toml file.
        data: calibration batches: an iterable of tensors, tuples or lists of positional inputs, or dicts of keyword
            inputs; `(input, target)` pairs are taken as the input alone when the model takes one. A recipe that
            calibrates no ranges needs none, and looks at the first few if there are any.
        example_inputs: one batch to find shapes with; default: the first of `data`.
        progress: show a progress bar; default: when stderr is a terminal.

    Returns:
        A `QuantizedModel` for the recipe's backend, with `history`, `ledger` and `qparams()`. Its `output_sqnr` says
        how far it is from the float model on recorded calibration samples; below the recipe's `min_sqnr`, a warning
        names the layers that are to blame.

    Raises:
        FxqError: bad input; every message says what, where, why and what to do.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
        >>> qmodel = quantize(model, data=[torch.rand(1, 3, 16, 16)])
        >>> qmodel(torch.rand(1, 3, 16, 16)).shape
        torch.Size([1, 4, 12, 12])
    """
    chosen, model = as_recipe(recipe), unwrapped(model)
    _check_model(model)
    stream = batches(data, model) if data is not None else iter(())
    first = list(islice(stream, 1))
    if example_inputs is None and not first:
        raise InputError(
            f"the recipe {chosen.preset!r} needs data to calibrate with: fxq.quantize(model, recipe, data=loader)."
            if chosen.config.is_calibrated
            else "give one batch of inputs to find shapes with: fxq.quantize(model, recipe, example_inputs=x)."
        )
    example = as_batch(example_inputs, model, "example_inputs") if example_inputs is not None else first[0]
    observed = prepare(model, chosen, example)
    observed.manager.context.progress = progress
    if data is None and observed.calibrated:
        raise InputError(
            f"the recipe {chosen.preset!r} needs data to calibrate with, for {observed.calibrated}: "
            "fxq.quantize(model, recipe, data=loader)."
        )
    if data is not None:
        shown, context = chain(first, stream), observed.manager.context
        few = takewhile(lambda _: not has_enough(context), shown)
        _calibrate(observed, shown if observed.calibrated else few, _length(data), progress)
    return convert(observed)


def prepare(model: nn.Module, recipe: Any = "static", example_inputs: Any = None) -> ObservedModel:
    """The first half of `quantize`: trace, fuse, insert observers. Call the result on calibration data, then `convert`.

    Args:
        model: a float `nn.Module` in eval mode.
        recipe: as for `quantize`.
        example_inputs: one batch, to find shapes with.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
        >>> observed = prepare(model, "static", torch.rand(1, 4))
        >>> _ = observed(torch.rand(8, 4))
        >>> convert(observed)(torch.rand(1, 4)).shape
        torch.Size([1, 2])
    """
    chosen = as_recipe(recipe)
    if chosen.backend == FASTEST:
        return prepare_all(chosen, device_of(unwrapped(model)), lambda one: prepare(model, one, example_inputs))
    manager = _manager(model, chosen, example_inputs)
    before, _, _ = _phases(manager.context.recipe)
    manager.run(before)
    if manager.stage < Stage.OBSERVED:
        left = manager.context.recipe.pipeline[len(before) :]
        later = any(step.needs < Stage.OBSERVED <= step.gives for step in left)
        why = f"{left[0].name} needs observers and stands before it" if later else "insert-observers was removed"
        raise RecipeError(f"the pipeline has no pass that inserts observers: {why}.")
    manager.check_float()
    return ObservedModel.from_manager(manager)


def calibrate(observed: ObservedModel, data: Iterable[Any], progress: bool | None = None) -> ObservedModel:
    """Show `data` to the observers of a prepared model, with a progress bar; the same model.

    Raises:
        InputError: `data` is empty or no iterable, or the model rejects a batch.
        CalibrationError: NaN or Inf in a batch or in an activation; the message names the batch and the layer.
    """
    _check_observed(observed)
    _calibrate(observed, batches(data, observed.manager.context.model), _length(data), progress)
    return observed


def convert(observed: ObservedModel) -> QuantizedModel:
    """The second half of `quantize`: observers become scales and zero points, units become kernels.

    Raises:
        CalibrationError: an observer has seen no data.
    """
    _check_observed(observed)
    if observed.others is not None:
        return convert_all(observed, convert)
    _, to_qdq, to_kernels = _phases(observed.manager.context.recipe)
    priced = next((i for i, step in enumerate(to_qdq) if isinstance(step, fxq.passes.Fallback)), len(to_qdq))
    observed.manager, gave_way = narrowed(observed.manager, to_qdq[:priced])
    manager = observed.manager
    manager.run(to_qdq[priced:])
    manager.run(to_kernels)
    context = manager.context
    ledger, record = ledger_of(manager.history, manager.gm, context)
    found = output_sqnr(manager.gm, context, sum(e.macs for e in ledger))
    ledger = replace(ledger, output_sqnr=found, narrowed=gave_way if ledger.count("int8") else None)
    if ledger and not ledger.count("int8") and not ledger.count("weight-only"):
        warn(f"nothing runs on integers; {ledger.main_reason()}. print(qmodel.ledger)")
    check_output(ledger, context)
    return QuantizedModel.from_manager(manager, ledger, record)


def compare(a: Any, b: QuantizedModel, data: Iterable[Any], *, progress: bool | None = None) -> Comparison:
    """How far a quantized model is from the float model, or from another quantized one, layer by layer.

    Both run on every batch, side by side; of the values only sums are kept, so any amount of data will do.

    Args:
        a: the float model that `b` was made from, as it was given to `quantize`; or another quantized model of it.
        b: a quantized model.
        data: batches, as for `quantize`.
        progress: show a progress bar; default: when stderr is a terminal.

    Returns:
        A table with a row per layer: SQNR, cosine and largest error of its output; against a float model also what the
        layer does wrong alone.

    Raises:
        InputError: `a` is not the model that `b` was made from; `data` is empty, or the models do not run on a batch
            (the message says on which).

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
        >>> qmodel = quantize(model, data=[torch.rand(1, 3, 16, 16)])
        >>> found = compare(model, qmodel, [torch.rand(1, 3, 16, 16) for _ in range(4)])
        >>> [row.name for row in found], found.output_sqnr > 20, found.batches
        (['_1', '_2'], True, 4)
    """
    a = unwrapped(a)
    _check_compared(a, b)
    stream = batches(data, a)
    first = next(stream)
    quantized = isinstance(a, QuantizedModel)
    reference = quantized_reference(a, b) if quantized else _float_reference(a, b, first)
    with untouched(a), untouched(b), progress_bar("comparing", _length(data), progress) as advance:
        return compare_with(reference, b, chain([first], stream), advance, write_comparison)


def _check_compared(a: Any, b: Any) -> None:
    if not isinstance(b, QuantizedModel):
        hint = " (a is: fxq.compare(float_model, quantized_model, data))" if isinstance(a, QuantizedModel) else ""
        raise InputError(f"b is a {type(b).__name__}, not a quantized model{hint}.")
    if not isinstance(a, QuantizedModel):
        _check_model(a)
    if device_of(a) != device_of(b):
        raise InputError(f"a is on {device_of(a)}, b on {device_of(b)}; move one of them with .to(...).")


def _float_reference(model: nn.Module, b: QuantizedModel, first: Batch) -> Baseline:
    """The float model's canonical graph, made as when `b` was."""
    manager = _manager(model, b.recipe, first)
    line = manager.context.recipe.pipeline
    fused = next((i for i, step in enumerate(line) if step.gives >= Stage.FUSED), len(line))
    manager.run(line[:fused])
    original = manager.context.original
    if original is None:
        raise InputError("the recipe of b has no canonicalize, so that the layers of a float model have other names.")
    ours = [f"{op.op} {op.name!r} of {op.path!r}" for op in original.ops]
    theirs = [f"{e.op} {e.name!r} of {e.path!r}" for e in b.ledger]
    for i, (mine, its) in enumerate(zip_longest(ours, theirs, fillvalue="nothing")):
        if mine != its:
            raise InputError(
                f"a is not the model that b was made from, or traces to other ops on inputs of this size: op {i} is "
                f"{mine}, where the ledger of b has {its}."
            )
    now, then = checksums(manager.context.model), b.record.weights
    changed = [name for name in now if now[name] != then.get(name)]
    if changed:
        warn(
            f"a has other weights than the model that b was made from, {changed[0]!r} for one ({len(changed)} of "
            f"{len(now)} parameters): what is compared is not only what quantization did."
        )
    return Baseline(Program(original.gm, original.graph), original.nodes)


def _phases(recipe: Recipe) -> tuple[Sequence[Pass], Sequence[Pass], Sequence[Pass]]:
    """The passes before calibration, from there to the qdq graph, and from there to kernels."""
    line = recipe.pipeline
    calibrated = next((i for i, step in enumerate(line) if step.needs >= Stage.OBSERVED), len(line))
    lowered = next((i for i, step in enumerate(line) if step.gives >= Stage.LOWERED), len(line))
    lowered = max(calibrated, lowered)
    return line[:calibrated], line[calibrated:lowered], line[lowered:]


def run_passes(model: nn.Module, recipe: Any = "static", example_inputs: Any = None, *, until: str) -> fx.GraphModule:
    """The graph as it stands after the pass `until`, for `explain`, `diff` and tests of passes and patterns.

    Args:
        model: a float `nn.Module` in eval mode.
        recipe: as for `quantize`.
        example_inputs: one batch, to find shapes with.
        until: name of a pass before calibration.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
        >>> print(run_passes(model, "static", torch.rand(1, 4), until="fuse").code.count("fxq_units"))
        1
    """
    manager = _manager(model, recipe, example_inputs)
    line = manager.context.recipe.pipeline
    return manager.run(line[: line.position(until) + 1])


def _manager(model: nn.Module, recipe: Any, example_inputs: Any) -> PassManager:
    chosen, model = as_recipe(recipe), unwrapped(model)
    _check_model(model)
    if example_inputs is None:
        raise InputError("example_inputs is missing: one batch of inputs, to find shapes with.")
    example = as_batch(example_inputs, model, "example_inputs")
    check_batch(example, model, "example_inputs")
    types: Any = model.types if isinstance(model, Exported) else {}
    return PassManager(Context(chosen, get_backend(chosen.backend, device_of(model)), model, example, types))


def _calibrate(observed: ObservedModel, stream: Iterator[Batch], total: int | None, progress: bool | None) -> None:
    own = observed.manager.context.model
    bar = progress_bar("calibrating", total, progress)
    with untouched(own), torch.no_grad(), without_autocast(), bar as advance:
        for i, batch in enumerate(stream):
            with naming_batch(i, batch):
                nn.Module.__call__(observed, *batch.args, **batch.kwargs)  # its own __call__ prints what goes wrong
            advance()


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


_QUANTIZED = (
    "torch.ao.nn.quantized",
    "torch.ao.nn.intrinsic.quantized",
    "torch.ao.nn.qat",
    "torch.ao.nn.intrinsic.qat",
    "torch.ao.quantization.fake_quantize",
    "torch.ao.quantization.observer",
    "fxq.backends",
)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, not an nn.Module. (A function? Wrap it in a module.)")
    if isinstance(model, (QuantizedModel, ObservedModel)):
        raise InputError(f"the model is a {type(model).__name__} already; quantize the float model it came from.")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("the model is a TorchScript module, which has no Python code to trace; give the original.")
    for path, module in model.named_modules():
        if isinstance(module, (QuantizedModel, ObservedModel)) or type(module).__module__.startswith(_QUANTIZED):
            raise InputError(
                f"the model is quantized already: {path or 'the model'} is a {type(module).__name__}. "
                "Give the float model."
            )
    if type(model).__mro__[1].__name__ in ("_StatefulGraphModule", "_UnliftedModule"):
        raise InputError("the model is the module of an exported program; give the program that it came from.")
    training = first_in_train_mode(model)
    if training is not None:
        where = f"its module {training!r} is" if training else "it is"
        raise InputError(f"the model cannot be quantized while {where} in train mode: call model.eval() first.")
    for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers()):
        if not is_writable(name):
            raise InputError(f"{name!r}: torch.fx writes names into code, and cannot write this one; rename it.")
    check_names(model, ObservedModel)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InputError(f"{name} has no values and no shape yet: run the float model once on a batch first.")
        if tensor.is_meta:
            raise InputError(f"{name} is on the meta device, so it has no values; load the model's weights first.")


def _check_observed(observed: Any) -> None:
    if not isinstance(observed, ObservedModel):
        raise InputError(f"this takes the model that fxq.prepare returned, not a {type(observed).__name__}.")
    if observed.manager.stage > Stage.OBSERVED:
        raise InputError("this observed model was converted already; prepare the float model again.")


__all__ = ["Recipe", "calibrate", "compare", "convert", "prepare", "quantize", "run_passes"]
