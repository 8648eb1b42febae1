"""The public API: quantize, and the same in steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import fx, nn

from fxq.backends.by_name import FASTEST
from fxq.calibration.ranks import AUTO, Ranks
from fxq.common.data import Batch, as_batch, batches, device_of, samples_in
from fxq.common.isolation import untouched
from fxq.common.progress import progress_bar
from fxq.errors import InputError, RecipeError
from fxq.ledger.comparison import Comparison, compare_with, quantized_reference
from fxq.model import QuantizedModel, remade
from fxq.recipe.recipe import Recipe, as_recipe
from fxq.report.report import write_comparison
from fxq.saved.model_file import load_model
from fxq.tracing.wrappers import unwrapped
from fxq.workflow.calibrate import EVERY, Calibration, as_observed, first_of_all, merge_calibrations
from fxq.workflow.fastest import convert_all, prepare_all
from fxq.workflow.observed_model import ObservedModel
from fxq.workflow.steps import (
    ModelCache,
    check_compared,
    check_model,
    converted,
    float_reference,
    manager_for,
    prepared,
)
from fxq.workflow.train import converted_from_training, prepared_for_training
from fxq.workflow.training_model import TrainingModel


def quantize(
    model: nn.Module,
    recipe: Any = "static",
    *,
    data: Iterable[Any] | None = None,
    example_inputs: Any = None,
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    group: Any = AUTO,
) -> QuantizedModel:
    """Quantize a float model: trace, calibrate on `data`, convert, lower, verify. The model itself is not changed.

    Args:
        model: a float `nn.Module` in eval mode (where that makes a difference), or an `ExportedProgram` of one
            (`torch.export.export`); data parallel and `torch.compile` wrappers are taken off.
        recipe: a `Recipe`, a preset's name ("static", "dynamic", "weight_only"), a dict, or a path to a .toml file.
        data: calibration batches: an iterable of tensors, tuples or lists of positional inputs, or dicts of keyword
            inputs; `(input, target)` pairs are taken as the input alone when the model takes one. A recipe that
            calibrates no ranges needs none, and looks at the first few if there are any.
        example_inputs: one batch to find shapes with; default: the first of `data` that is not empty.
        progress: show a progress bar; default: when stderr is a terminal.
        checkpoint: a file to go on from when calibration was killed, see `calibrate`.
        group: the processes that have a share of the data each, see `calibrate`. Each of them returns a model. Which of
            its layers are quicker in float each measures by itself, unless the recipe says optimize="coverage".

    Returns:
        A `QuantizedModel` for the recipe's backend. Its `output_sqnr` says how far it is from the float model on
        recorded calibration samples; below the recipe's `min_sqnr`, a warning names the layers that are to blame.

    Raises:
        FxqError: bad input; every message says what, where, why and what to do.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
        >>> qmodel = quantize(model, data=[torch.rand(1, 3, 16, 16)])
        >>> qmodel(torch.rand(1, 3, 16, 16)).shape
        torch.Size([1, 4, 12, 12])
    """
    chosen, model = as_recipe(recipe), unwrapped(model)
    if chosen.trains:
        raise RecipeError(
            f"the recipe {chosen.preset!r} is for training, which is yours to do: trained = fxq.prepare(model, recipe, "
            "example_inputs=x), your training loop, fxq.convert(trained)."
        )
    check_model(model)
    ranks = Ranks.of(group if data is not None else None)
    stream = batches(data, model, may_be_empty=ranks.size > 1) if data is not None else iter(())
    first = ranks.together(lambda: list(_opening(stream)))
    examples_given = [] if example_inputs is None else [as_batch(example_inputs, model, "example_inputs")]
    examples = examples_given or first_of_all(first, ranks, model)
    if not examples:
        raise _no_data(chosen)
    observed = ranks.together(lambda: _observed(model, chosen, examples[-1]))
    observed.manager.context.progress = progress
    if data is not None:
        calibration = Calibration(observed, ranks, checkpoint, EVERY, progress, few=not observed.calibrated)
        calibration.run(chain(first, stream), _length(data) if observed.calibrated else None)
    elif observed.calibrated:
        raise _no_data(chosen, observed.calibrated)
    return convert(observed)


def _opening(stream: Iterable[Batch]) -> Iterator[Batch]:
    """The first batches, up to one that holds samples."""
    for batch in stream:
        yield batch
        if samples_in(batch) != 0:
            return


def _no_data(recipe: Recipe, calibrated: str = "") -> InputError:
    """What to say where data is missing: to find the range of a value with, or the shapes alone."""
    if not calibrated and not recipe.config.is_calibrated:
        return InputError(
            "give one batch of inputs to find shapes with: fxq.quantize(model, recipe, example_inputs=x)."
        )
    what = f", for {calibrated}" if calibrated else ""
    return InputError(
        f"the recipe {recipe.preset!r} needs data to calibrate with{what}: fxq.quantize(model, recipe, data=loader)."
    )


def prepare(
    model: nn.Module, recipe: Any = "static", *, example_inputs: Any = None, observe_all: bool = False
) -> ObservedModel | TrainingModel:
    """The first half of `quantize`: trace, fuse, insert observers. Call the result on calibration data, then `convert`.

    With a recipe for training, a model with fake quantizers: train it, then `convert`. It has a copy of the model's
    parameters, by the same names, and is in train mode, on the model's device. The float model may be in train mode.

    Args:
        model: a float `nn.Module` in eval mode.
        recipe: as for `quantize`.
        example_inputs: one batch, to find shapes with.
        observe_all: observe every value, with histograms besides the recipe's observers, so that `convert` accepts
            other recipes. Calibration takes longer.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
        >>> observed = prepare(model, "static", example_inputs=torch.rand(1, 4))
        >>> _ = observed(torch.rand(8, 4))
        >>> convert(observed)(torch.rand(1, 4)).shape
        torch.Size([1, 2])
        >>> trained = prepare(model, Recipe.qat(), example_inputs=torch.rand(8, 4))
        >>> optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     trained(torch.rand(8, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> convert(trained)(torch.rand(1, 4)).shape
        torch.Size([1, 2])
    """
    chosen = as_recipe(recipe)
    if chosen.trains:
        return prepared_for_training(model, chosen, example_inputs)
    return _observed(model, chosen, example_inputs, observe_all)


def _observed(model: nn.Module, recipe: Recipe, example_inputs: Any, observe_all: bool = False) -> ObservedModel:
    if recipe.backend != FASTEST:
        return prepared(model, recipe, example_inputs, observe_all)
    device = device_of(unwrapped(model))
    return prepare_all(recipe, device, lambda one, known: prepared(model, one, example_inputs, observe_all, known))


def calibrate(
    observed: ObservedModel | TrainingModel,
    data: Iterable[Any],
    *,
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: float = EVERY,
    group: Any = AUTO,
) -> ObservedModel:
    """Show `data` to the observers of a prepared model, with a progress bar; the same model.

    *On several machines, or in several processes*, under `torchrun` or wherever `torch.distributed` is initialized:
    each rank gives its share of the data, and at the end every rank has seen what all have. (A `DistributedSampler`
    repeats samples to make shares equal; `torch.utils.data.Subset(dataset, range(rank, len(dataset), ranks))` deals out
    each of them once.) The result is, bit for bit, that of one process which is shown the shares in turns: the first
    batch of each rank, then the second of each. Shares may have any number of batches, also none. A moving average is
    the mean of those of the ranks, weighted by their numbers of batches. It takes CPUs of one kind and as many threads
    for each (torchrun gives every process one). Where ranks give the same data, ranges stay as they are, to rounding.

    All ranks have to make the call. What fails on one raises on all. Where one is to work alone: `group=None`.

    *With a checkpoint*, what was seen is written to a file from time to time, and at the end. If there is such a file,
    the calibration goes on from it: batches that were seen are taken from `data` and passed over, and the result is the
    same as without the break, bit for bit. `data` must give the same batches in the same order again, which is checked.
    The file of a calibration that has ended is loaded, and no more is done. Each rank has a file of its own,
    `c.rank0.safetensors` for `c.safetensors`. For machines that do not know of one another: `merge_calibrations`.

    Args:
        observed: what `prepare` returned. With a checkpoint, or on several ranks, it must have seen no data.
        data: batches, as for `quantize`.
        progress: show a progress bar; default: when stderr is a terminal.
        checkpoint: the file, safetensors.
        every: seconds between two writes of it.
        group: a `torch.distributed.ProcessGroup`, None for this process alone, or "auto": the default group, if there
            is one.

    Raises:
        InputError: `data` is empty or no iterable, or the model rejects a batch; the checkpoint is damaged, or of
            another model, recipe or data; the ranks have different models or recipes.
        CalibrationError: NaN or Inf in a batch or in an activation; the message names the batch and the layer, and the
            rank where there are several.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
        >>> observed = prepare(model, "static", example_inputs=torch.rand(1, 4))
        >>> calibrate(observed, [torch.rand(8, 4) for _ in range(3)]).batches_seen
        3
    """
    calibrated = as_observed(observed)
    ranks = Ranks.of(group)
    stream = batches(data, calibrated.manager.context.model, may_be_empty=ranks.size > 1)
    Calibration(calibrated, ranks, checkpoint, every, progress).run(stream, _length(data))
    return calibrated


def convert(observed: ObservedModel | TrainingModel, recipe: Any = None) -> QuantizedModel:
    """The second half of `quantize`: observers become scales and zero points, units become kernels.

    The observed model stays as it is: it can be converted again, with other recipes, and calibrated further.

    Args:
        observed: a calibrated model, or one that was trained (on several ranks with sharded parameters, all of them
            have to make the call). Of that, what is returned is on the CPU, and computes in eval mode what it does.
        recipe: another one than it was prepared with, as for `quantize`: the result is what `quantize` would make with
            it and the same data, bit for bit, without another calibration. It may set layers to float and back, give
            weights other bits, and activations other observers where what was seen is enough for them (a histogram is
            for min-max, percentiles and the like), ask for another backend, and for other passes behind calibration.
            Values that become integers must have been observed: `prepare(..., observe_all=True)` observes all.

    Raises:
        CalibrationError: an observer has seen no data; or no forward in train mode has.
        RecipeError: the recipe needs another calibration: it traces the model in another way, folds other batch norms,
            has other passes before calibration or one behind it that reads more samples than are kept, or makes
            integers of values that were not looked at.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
        >>> batch = torch.rand(1, 3, 16, 16)
        >>> observed = calibrate(prepare(model, "static", example_inputs=batch), [batch])
        >>> trial = convert(observed, Recipe.static().override("2", fxq.FLOAT))
        >>> convert(observed).ledger.count("int8"), trial.ledger.where(path="2")[0].precision
        (3, 'float')
    """
    trained = unwrapped(observed)
    if isinstance(trained, TrainingModel):
        if recipe is not None:
            raise RecipeError("a trained model is converted with the recipe that it was prepared with: leave it out.")
        return converted_from_training(trained)
    calibrated = as_observed(observed)
    chosen = as_recipe(recipe) if recipe is not None else None
    try:
        return _converted(calibrated, chosen)
    finally:
        calibrated.forget_float_values()


def _converted(calibrated: ObservedModel, chosen: Recipe | None) -> QuantizedModel:
    """The quantized model of a calibrated one, for one backend or the fastest."""
    if calibrated.others is None:
        return converted(calibrated, chosen)
    if chosen is not None and chosen.backend != FASTEST:
        raise RecipeError(
            f"the model was prepared for all backends, and the recipe asks for {chosen.backend!r}: give one with "
            f"backend={FASTEST!r}, or prepare the float model with this one."
        )
    known: ModelCache = []
    return convert_all(calibrated, lambda one: converted(one, _for_backend_of(one, chosen), known))


def _for_backend_of(observed: ObservedModel, recipe: Recipe | None) -> Recipe | None:
    return recipe.with_backend(observed.manager.context.recipe.backend) if recipe is not None else None


def compare(a: Any, b: QuantizedModel, data: Iterable[Any], *, progress: bool | None = None) -> Comparison:
    """How far a quantized model is from the float model, or from another quantized one, layer by layer.

    Both run on every batch, side by side; of the values only sums are kept, so any amount of data will do. To find what
    pads texts in a batch, all values of up to eight samples are kept for a while.

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
    check_compared(a, b)
    stream = batches(data, a)
    first = next(stream)
    quantized = isinstance(a, QuantizedModel)
    reference = quantized_reference(a, b) if quantized else float_reference(a, b, first)
    with untouched(a), untouched(b), progress_bar("comparing", _length(data), progress) as advance:
        return compare_with(reference, b, chain([first], stream), advance, write_comparison)


def load(path: str | os.PathLike[str], leaves: Mapping[str, nn.Module] | None = None) -> QuantizedModel:
    """The quantized model that `QuantizedModel.save` wrote, with the same numbers, bit for bit.

    Nothing of the file is run, and nothing that it names is imported: ops and kernels of your own are to be imported
    before. The content is validated, so that a damaged file is an error. The model is on the CPU. On another kind of
    CPU than the one it was quantized on, its kernels are verified again; those that are wrong there run in q/dq form,
    with a warning.

    Files up to 256 MiB are read into memory. Larger files are memory-mapped, so that processes share memory, and must
    not be modified while the model is in use: replace such a file by renaming a new one over it, as `save` does.

    Args:
        path: the file.
        leaves: by path, the modules that the model calls as they are, which are not in the file: with the weights that
            they had. They are copied.

    Raises:
        FileError: there is no such file, it holds no model or is damaged, a newer fxq has written it, or it needs a
            module, an op or a kernel that is not available; the message says what to do. Calls of a memory-mapped
            model raise it if its file was changed in place.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
        >>> x = torch.rand(1, 3, 16, 16)
        >>> qmodel = quantize(model, "static", data=[x])
        >>> import tempfile
        >>> path = qmodel.save(tempfile.gettempdir() + "/model.fxq")
        >>> torch.equal(load(path)(x), qmodel(x))
        True
        >>> path.unlink()
    """
    gm, parts, made_on = load_model(path, leaves)
    return remade(gm, gm.graph, parts, made_on)


def run_passes(model: nn.Module, recipe: Any = "static", *, example_inputs: Any = None, until: str) -> fx.GraphModule:
    """The graph as it stands after the pass `until`, for `explain`, `diff` and tests of passes and patterns.

    Args:
        model: a float `nn.Module` in eval mode.
        recipe: as for `quantize`.
        example_inputs: one batch, to find shapes with.
        until: name of a pass before calibration.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
        >>> print(run_passes(model, "static", example_inputs=torch.rand(1, 4), until="fuse").code.count("fxq_units"))
        1
    """
    manager = manager_for(model, recipe, example_inputs)
    line = manager.context.recipe.pipeline
    return manager.run(line[: line.position(until) + 1])


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


__all__ = ["calibrate", "compare", "convert", "load", "merge_calibrations", "prepare", "quantize", "run_passes"]
