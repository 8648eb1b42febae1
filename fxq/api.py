"""Public functions: `quantize`, its steps `prepare`, `calibrate` and `convert`, and `compare`, `load`, `run_passes`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx, nn

from fxq.common.collector import new_objects_collected
from fxq.common.isolation import untouched
from fxq.common.ranks import AUTO
from fxq.dispatch import (
    calibrate_model,
    check_needs_no_training,
    compare_models,
    convert_model,
    load_path,
    prepare_model,
    prepare_training,
    quantize_model,
    reading_weights,
)
from fxq.ledger.comparison import Comparison
from fxq.model import QuantizedModel
from fxq.quant.resumed_grids import resuming_grids
from fxq.recipe.recipe import as_recipe
from fxq.tuning.effort import Effort, best, check_effort, quick
from fxq.tuning.trials import Metric, check_metric, metric_value
from fxq.workflow.calibrate import EVERY, merge_calibrations
from fxq.workflow.entry import compared_model, float_model, trainable_model
from fxq.workflow.observed_model import ObservedModel
from fxq.workflow.steps import manager_for, observed_with, phases, prepared
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
    weights: str | os.PathLike[str] | None = None,
    effort: Effort = "default",
) -> QuantizedModel:
    """Quantize a float model: trace, calibrate on `data`, convert, lower, verify. The float model is not changed.

    *Large models.* Weights in safetensors files are mapped into memory: the pages of a layer are read when it is used,
    and dropped afterwards, so that the float model is never in memory as a whole. The result is the one that the model
    with its weights in memory has. `estimate_memory` computes the memory beforehand. Weights in 16 bits are converted
    to float32 in a temporary file.

    Args:
        model: a float `nn.Module` in eval mode, an `ExportedProgram` of one (`torch.export.export`), or the path of an
            ONNX file, see `read_onnx`. Wrappers of data parallelism and `torch.compile` are removed. A model on the
            meta device needs `weights`. The path of a folder of a float model of transformers stands for that model.
        recipe: a `Recipe`, the name of a preset ("static", "dynamic", "weight_only"; "stored" for a model that is
            quantized already, such as a quantized ONNX file), a dict, or a path to a .toml file.
        data: calibration batches. Each is a tensor, a tuple or list of positional inputs, or a dict of keyword inputs.
            Of `(input, target)` pairs, the target is dropped if the model takes one input. Recipes without calibrated
            ranges need no data, but use the first batches if there are any.
        example_inputs: one batch to infer shapes from. Default: the first batch of `data` that is not empty.
        progress: whether to show a progress bar. Default: only if stderr is a terminal.
        checkpoint: file from which an interrupted calibration resumes, see `calibrate`. Without data: folder for the
            scales of weights, from which an interrupted run resumes. Scales of other weights, recipes or versions in it
            are not used.
        group: processes that calibrate together, each with its share of the data, and convert together, see `calibrate`
            and `convert`. Each process returns a model. With optimize="speed", each process times the layers itself, so
            that the processes may keep different layers in float.
        weights: weights of a model on the meta device: a safetensors file, or a folder with `model.safetensors`, or
            with `model.safetensors.index.json` and the files that it names.
        effort: how much time to spend. "fast": no op is timed, so that every op that can runs on integers, and passes
            fit and verify on fewer samples; backend="fastest" still times its backends. "best": equalization, other
            observers, and passes that choose the rounding of weights are tried, and the most accurate are used, with
            the fastest of all installed backends unless the recipe names one. This takes many times as long, and keeps
            the data in memory.

    Returns:
        A `QuantizedModel` for the recipe's backend. Its `output_sqnr` compares it with the float model on recorded
        calibration samples. If that is below the recipe's `min_sqnr`, a warning names the layers with the largest
        error. If the model cannot be traced as a whole, its largest submodules that can be are quantized in their
        places: the result is a `PartsModel` of the float model's class, and a warning says what stays in Python.

    Raises:
        FxqError: an argument cannot be used; the message says what, where, why and what to do.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
        >>> qmodel = quantize(model, data=[torch.rand(1, 3, 16, 16)])
        >>> qmodel(torch.rand(1, 3, 16, 16)).shape
        torch.Size([1, 4, 12, 12])
    """
    check_effort(effort)
    chosen = as_recipe(recipe)
    check_needs_no_training(chosen)
    resuming = resuming_grids(checkpoint if data is None else None)
    with new_objects_collected(), reading_weights(model, weights) as readable, resuming:
        if effort == "fast":
            chosen = quick(chosen)
        elif effort == "best":
            data = list(data) if data is not None else None
            chosen = best(float_model(readable), chosen, data, group, progress)
        return quantize_model(readable, chosen, data, example_inputs, progress, checkpoint, group)


def prepare(
    model: nn.Module, recipe: Any = "static", *, example_inputs: Any = None, observe_all: bool = False
) -> ObservedModel | TrainingModel:
    """Prepare a float model for calibration: trace it, fuse ops, insert observers.

    Call the result on calibration data, or use `calibrate`; then `convert` it.

    With a recipe for quantization-aware training, insert fake quantizers instead: train the result, then `convert` it.
    It has copies of the model's parameters under the same names, is in train mode, and is on the model's device. The
    float model may be in train mode.

    Args:
        model: a float `nn.Module` in eval mode.
        recipe: as for `quantize`.
        example_inputs: one batch to infer shapes from. Required.
        observe_all: whether to observe every value, with histograms besides the recipe's observers, so that `convert`
            accepts other recipes. Calibration takes longer.

    Returns:
        An `ObservedModel`; with a recipe for training, a `TrainingModel`. If the model cannot be traced as a whole, an
        `ObservedParts`, with observers in its largest submodules that can be, see `quantize`.

    Raises:
        FxqError: an argument cannot be used; the message says what, where, why and what to do.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
        >>> observed = prepare(model, "static", example_inputs=torch.rand(1, 4))
        >>> _ = observed(torch.rand(8, 4))
        >>> convert(observed)(torch.rand(1, 4)).shape
        torch.Size([1, 2])
        >>> trained = prepare(model, fxq.Recipe.qat(), example_inputs=torch.rand(8, 4))
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
        return prepare_training(trainable_model(model), chosen, example_inputs)
    with new_objects_collected():
        observed: ObservedModel = prepare_model(float_model(model), chosen, example_inputs, observe_all)
        return observed


def calibrate(
    observed: ObservedModel | TrainingModel,
    data: Iterable[Any],
    *,
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: float = EVERY,
    group: Any = AUTO,
) -> ObservedModel:
    """Run a prepared model on `data`, so that its observers collect the ranges of values. Returns `observed` itself.

    *Several ranks.* If `torch.distributed` is initialized, as by `torchrun`, each rank passes its share of the data,
    and afterwards the observers of every rank hold the statistics of all shares. The result equals, bit for bit, that
    of one process that gets the first batch of each rank, then the second of each, and so on. This requires the same
    kind of CPU and the same number of threads on every rank (torchrun sets one thread). Shares may differ in length and
    may be empty. Moving averages are averaged over ranks, weighted by the numbers of batches. If every rank gets all
    the data instead of a share, ranges differ only by rounding from those of one process.

    Every rank must make the call, and an error on one rank raises on all. To calibrate one process alone, pass
    `group=None`. To split a dataset, use `torch.utils.data.Subset(dataset, range(rank, len(dataset), ranks))`; a
    `DistributedSampler` repeats samples to make shares equal.

    *Checkpoints.* With `checkpoint`, the statistics are written to a file periodically and at the end. If the file
    exists, calibration resumes from it: batches that it covers are read from `data` and skipped, and the result equals
    an uninterrupted calibration, bit for bit. `data` must give the same batches in the same order, which is checked.
    The file of a finished calibration is loaded without running the model. Each rank writes its own file:
    `c.rank0.safetensors` for `c.safetensors`. To combine checkpoints of machines that are not connected, use
    `merge_calibrations`.

    Args:
        observed: result of `prepare`. With a checkpoint or several ranks, it must not have seen data before.
        data: batches, as for `quantize`.
        progress: whether to show a progress bar. Default: only if stderr is a terminal.
        checkpoint: path of the checkpoint, a safetensors file.
        every: seconds between two writes of the checkpoint.
        group: a `torch.distributed.ProcessGroup`; None: this process alone; "auto": the default group, if there is one.

    Raises:
        InputError: `data` is empty or not iterable; the model does not run on a batch; the checkpoint is damaged, or
            belongs to another model, recipe or data; ranks have different models or recipes.
        CalibrationError: a batch or an activation has NaN or Inf; the message names the batch, the layer and the rank.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
        >>> observed = prepare(model, "static", example_inputs=torch.rand(1, 4))
        >>> calibrate(observed, [torch.rand(8, 4) for _ in range(3)]).batches_seen
        3
    """
    calibrated: ObservedModel = calibrate_model(observed, data, progress, checkpoint, every, group)
    return calibrated


def convert(observed: ObservedModel | TrainingModel, recipe: Any = None, *, group: Any = None) -> QuantizedModel:
    """Convert a calibrated or trained model to a quantized one: compute scales and zero points, then create kernels.

    The observed model is not changed: it can be calibrated further, and converted again with other recipes.

    *Several ranks.* Each rank converts alone, unless they pass a `group`. Then passes that choose the integers of
    weights, such as `gptq`, divide their work: each rank runs a share of the recorded samples and rounds a share of
    each weight's rows. The integers are the same on all ranks. They differ from those of one process as they would with
    another order of the batches: sums of inputs differ in their last bits, which decide some roundings, and the layers
    after these compensate others. Every rank must make the call, and an error on one rank raises on all.

    Args:
        observed: a calibrated model, or a trained one. A trained model becomes a quantized model on the CPU, which
            computes what the trained model computes in eval mode. If parameters are sharded over ranks, every rank must
            make the call.
        recipe: a recipe other than the one that `prepare` got, as for `quantize`. The result equals, bit for bit, what
            `quantize` returns with that recipe and the same data, without a second calibration. The recipe may change
            which layers are in float, the bits of weights, the backend, the passes after calibration, and the observers
            of activations if the collected statistics suffice (a histogram serves min-max, percentiles and others).
            It can quantize only values that were observed: all of them after `prepare(..., observe_all=True)`.
        group: processes that convert the model together, after they calibrated it together: as for `calibrate`, "auto"
            is the default group; None: this process alone.

    Returns:
        A `QuantizedModel`, as for `quantize`.

    Raises:
        InputError: there is a `group`, and the model is a trained one or in parts, or ranks have different layers or
            samples.
        CalibrationError: an observer has seen no data, or a model prepared for training was never called in train
            mode.
        RecipeError: the recipe needs a new calibration, because it traces the model differently, folds other batch
            norms, has other passes before calibration, has a pass that reads more samples than were recorded, or
            quantizes values that were not observed.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
        >>> batch = torch.rand(1, 3, 16, 16)
        >>> observed = calibrate(prepare(model, "static", example_inputs=batch), [batch])
        >>> trial = convert(observed, fxq.Recipe.static().override("2", fxq.FLOAT))
        >>> convert(observed).ledger.count("int8"), trial.ledger.where(path="2")[0].precision
        (3, 'float')
    """
    with new_objects_collected():
        return convert_model(observed, recipe, group)


def compare(
    a: Any, b: QuantizedModel, data: Iterable[Any], metric: Metric | None = None, *, progress: bool | None = None
) -> Comparison:
    """Compare a quantized model with its float model, or with another quantized model of it, layer by layer.

    Both models run on every batch. Only sums are stored, so memory does not grow with the amount of data. Padding
    tokens are left out; to find them, all values of up to eight samples are stored temporarily.

    Args:
        a: the float model that was passed to `quantize`, or another quantized model of it.
        b: a quantized model.
        data: batches, as for `quantize`.
        metric: function of a model that returns its quality as a number, larger is better, as for `search`;
            `fxq.task_metrics` has some. Both models are judged by it.
        progress: whether to show a progress bar. Default: only if stderr is a terminal.

    Returns:
        A table with a row per layer: SQNR, cosine and largest error of its output. Against a float model, also the SQNR
        of the layer alone, run on the float model's values. With a metric, its value for both models.

    Raises:
        InputError: `b` was not made from `a`; `data` is empty; the metric is no function, or returns no number; or a
            model does not run on a batch (the message says on which).

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
        >>> qmodel = quantize(model, data=[torch.rand(1, 3, 16, 16)])
        >>> table = compare(model, qmodel, [torch.rand(1, 3, 16, 16) for _ in range(4)])
        >>> [row.name for row in table], table.output_sqnr > 20, table.batches
        (['_1', '_2'], True, 4)
        >>> metric = fxq.task_metrics.cosine(model, [torch.rand(8, 3, 16, 16)])
        >>> in_float, in_int8 = compare(model, qmodel, [torch.rand(1, 3, 16, 16)], metric).metric
        >>> 0.99 < in_int8 <= in_float
        True
    """
    check_metric(metric)
    comparison = compare_models(a, b, data, progress)
    if metric is None:
        return comparison
    inside = compared_model(a, b) if isinstance(b, QuantizedModel) else float_model(a)
    with untouched(inside), untouched(b):
        return replace(comparison, metric=(metric_value(metric, inside), metric_value(metric, b)))


def load(
    path: str | os.PathLike[str], leaves: Mapping[str, nn.Module] | None = None, *, into: nn.Module | None = None
) -> QuantizedModel:
    """Load a quantized model that `QuantizedModel.save` wrote. It computes what the saved model computed, bit for bit.

    Loading runs no code from the file and imports nothing that it names: import modules with your own ops and kernels
    first. The content is validated, so a damaged file raises. The model is on the CPU. On another kind of CPU than the
    one it was quantized on, its kernels are verified again, and wrong kernels are replaced by their q/dq form, with a
    warning.

    Files up to 256 MiB are read into memory. Larger files are memory-mapped, so that processes share memory, and must
    not be modified while the model is in use: replace such a file by renaming a new one over it, as `save` does.

    Args:
        path: the file; or a folder that `save_pretrained` of a quantized model of transformers wrote; or a checkpoint
            of another tool with a model of transformers: a folder of GPTQ, AWQ or compressed-tensors, or a GGUF file
            (Q4_0, Q4_1, Q8_0, Q4_K, Q6_K), which needs `into`. Its integers, scales and zero points stay as they are.
        leaves: modules that the model calls unchanged (`Recipe.leaf`), by path, with the weights that they had. They
            are not in the file. They are copied.
        into: the float model, for the file of a model that is quantized in parts. Its code and its weights around the
            parts are copied. It need not have the weights of the parts. For a checkpoint, a model of the class and
            configuration that it has weights for, such as one on the meta device.

    Returns:
        The quantized model; a `QuantizedPrograms` if it was saved with several programs or containers; from a folder, a
        model of the float model's class; with `into`, a model of the class of the float model.

    Raises:
        FileError: the file is missing, damaged, no fxq model, or written by a newer fxq; or it needs a module, op or
            kernel that is not available. The message says what to do. Calls of a memory-mapped model raise it,
            too, once its file was changed in place.

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
    return load_path(path, leaves, into)


def run_passes(
    model: nn.Module,
    recipe: Any = "static",
    *,
    example_inputs: Any = None,
    data: Iterable[Any] | None = None,
    until: str,
) -> fx.GraphModule:
    """Run the passes of a recipe up to and including `until`, for `explain`, `diff` and tests of passes and patterns.

    Args:
        model: a float `nn.Module` in eval mode.
        recipe: as for `quantize`.
        example_inputs: one batch to infer shapes from. Required.
        data: calibration batches, as for `quantize`; only used if `until` is a pass after calibration.
        until: name of a pass. Without data, one before calibration.

    Returns:
        The graph module after that pass.

    Raises:
        FxqError: an argument cannot be used, or a pass fails.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
        >>> print(run_passes(model, "static", example_inputs=torch.rand(1, 4), until="fuse").code.count("fxq_units"))
        1
    """
    model, chosen = float_model(model), as_recipe(recipe)
    line, before_calibration = chosen.pipeline, len(phases(chosen)[0])
    end = line.position(until) + 1
    if data is None or end <= before_calibration:
        return manager_for(model, chosen, example_inputs).run(line[:end])
    calibrated = calibrate(prepared(model, chosen, example_inputs, observe_all=False), data, progress=False)
    return observed_with(calibrated, None).run(line[before_calibration:end])


__all__ = ["calibrate", "compare", "convert", "load", "merge_calibrations", "prepare", "quantize", "run_passes"]
