"""Checks of exported models in the runtime that reads them, at two batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxq.backends.engines.openvino import Openvino
from fxq.common.data import Batch
from fxq.common.isolation import copied
from fxq.common.metrics import tensors
from fxq.common.trees import mapped
from fxq.errors import ExportError, warn, words_of
from fxq.graph.analysis.varying_axes import FIXED_SIZE_REMEDY, Axes, example_sizes, inputs_of, terms_of
from fxq.graph.info import info
from fxq.graph.run import Runner, inputs_for
from fxq.onnx.model_check import Difference, ModelCheck
from fxq.onnx.whole_model import OnnxModel
from fxq.pipeline.float_form import FloatForm


def checked_batches(gm: fx.GraphModule, batch: Batch, axes: Axes) -> Iterator[Batch]:
    """Batches to check an exported model with: the example, and one of other sizes if some sizes are dynamic.

    The second batch has two samples if the example has one, else one sample. Its other dynamic sizes are larger by one.
    It is skipped if the graph itself rejects it.

    Args:
        gm: qdq graph.
        batch: the example.
        axes: dynamic axes by input name. Axis 0 is the batch.
    """
    yield batch
    named = dict(inputs_of(inputs_for(gm.graph, batch)))
    batch_sizes = {label for of_axes in axes.values() for axis, label in of_axes.items() if axis == 0}
    sizes = {
        label: size + 1 if label not in batch_sizes else 2 if size == 1 else 1
        for label, size in example_sizes(named, axes).items()
    }
    if not sizes:
        return

    resized_batch = resized(batch, named, axes, sizes)
    try:
        run_graph(gm, resized_batch)
    except Exception:  # the model rejects this size; any type of error
        return
    yield resized_batch


def resized(batch: Batch, named: Mapping[str, Tensor], axes: Axes, sizes: Mapping[str, int]) -> Batch:
    """Batch whose dynamic axes have other sizes: tensors are cut, or repeated, or zeros if they had no entries.

    Args:
        batch: the inputs.
        named: its tensors by input name.
        axes: dynamic axes by input name.
        sizes: the sizes by name, without sums.
    """
    labels = {id(x): axes[name] for name, x in named.items() if name in axes}

    def of_sizes(leaf: Any) -> Any:
        for axis, label in labels.get(id(leaf), {}).items():
            index = torch.arange(sum(sizes[term] for term in terms_of(label)), device=leaf.device)
            size = leaf.shape[axis]
            empty = [len(index) if i == axis else n for i, n in enumerate(leaf.shape)]
            leaf = leaf.index_select(axis, index % size) if size else leaf.new_zeros(empty)
        return leaf

    args, kwargs = mapped((batch.args, dict(batch.kwargs)), of_sizes)
    return Batch(args, kwargs)


def warn_of_fixed_sizes(path: Path, batch: Batch, why: str) -> None:
    """Warn that an exported model has the example's sizes only, with the reason."""
    warn(
        f"{path} takes inputs of the example's sizes only, {batch}: "
        f"{why.removesuffix(FIXED_SIZE_REMEDY).rstrip(' .')}. "
        "Pass dynamic=False if this is intended. For other sizes, change that part of the model or export each one."
    )


@torch.no_grad()
def run_graph(gm: nn.Module, batch: Batch) -> Any:
    """Run a graph on a copy of a batch. Models that draw random numbers draw the same ones in each run."""
    args, kwargs = copied((batch.args, dict(batch.kwargs)))
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return gm(*args, **kwargs)


def check_in_openvino(path: Path, model: Any, written: OnnxModel, gm: fx.GraphModule, batches: Sequence[Batch]) -> None:
    """Compare OpenVINO with the qdq graph on each batch, since its kernels depend on sizes.

    Warns if they agree only with `INFERENCE_PRECISION_HINT` set to float32.

    Args:
        path: the file, for messages.
        model: `openvino.Model` to be written.
        written: the ONNX model that it was converted from.
        gm: qdq graph.
        batches: inputs to compare on.

    Raises:
        ExportError: outputs differ by more than rounding errors in float32, too.
    """
    reason = Openvino().available()
    if reason is not None:
        warn(f"{path} is written, but was not checked in OpenVINO: {reason}")
        return
    run, precise = _Compiled(model, {}), {"INFERENCE_PRECISION_HINT": "f32"}
    wrong = [(batch, problem) for batch in batches if (problem := _wrong(run, written, gm, batch))]
    if not wrong:
        return
    run = _Compiled(model, precise)
    still = [(batch, problem) for batch, _ in wrong if (problem := _wrong(run, written, gm, batch))]
    if not still:
        warn(
            f"{path}: with its default precision on this CPU, OpenVINO differs from the quantized model: "
            f'{wrong[0][1]}. Compile it with {{"INFERENCE_PRECISION_HINT": "f32"}}, with which they agree.'
        )
        return
    batch, problem = still[0]
    layer = _first_wrong_layer(written, gm, batch)
    where, remedy = "", "quantize with another recipe"
    if layer is not None:
        where = f" The first value that differs is {layer}."
        remedy = f'leave the layer in float, recipe.override("{layer.layer}", fxq.FLOAT)' if layer.layer else remedy
    raise ExportError(
        f"{path}: OpenVINO on this CPU computes something else than the quantized model, and nothing was written: "
        f"{problem}, inputs {batch}.{where} OpenVINO's kernel may be wrong: {remedy}, or export ONNX for "
        "ONNX Runtime. check=False skips this check and writes the file."
    )


class _Compiled:
    """`openvino.Model` compiled with dynamic sizes."""

    def __init__(self, model: Any, config: Mapping[str, Any]) -> None:
        import openvino

        self.config = config
        threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self._compiled = openvino.Core().compile_model(model, "CPU", {**threads, **config})

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        names = [name for port in self._compiled.inputs for name in port.names if name in inputs]
        results = self._compiled({name: inputs[name].detach().cpu().contiguous().numpy() for name in names})
        return {name: torch.from_numpy(results[self._compiled.output(name)].copy()) for name in outputs}


def _wrong(run: Callable[..., Mapping[str, Tensor]], written: OnnxModel, gm: fx.GraphModule, batch: Batch) -> str:
    """Describe how a runtime's outputs for a batch are wrong; empty if they are right."""
    inputs = dict(inputs_of(inputs_for(gm.graph, batch)))
    names = [output.name for output in written.model.graph.output]
    try:
        results = run(inputs, names)
    except Exception as error:  # engines may raise anything
        return f"it fails: {words_of(error)}"
    wanted = dict(zip(names, tensors(run_graph(gm, batch)), strict=True))
    if all(_near(results[name], y, None) for name, y in wanted.items()):
        return ""
    with torch.no_grad():
        real = dict(zip(names, tensors(_Unrounded(gm, copied(batch)).run()), strict=True))
    far = next((name for name, y in wanted.items() if not _near(results[name], y, real[name])), None)
    if far is None:
        return ""
    db = -10 * torch.log10(torch.tensor(max(_apart(results[far], wanted[far]), 1e-30))).item()
    return f"output {far!r} {list(wanted[far].shape)} has {db:.1f} dB SQNR against the quantized model"


class _Unrounded(FloatForm):
    """Runs a qdq graph with its quantized weights, but without rounding activations."""

    def compute(self, node: fx.Node) -> Any:
        return Runner.compute(self, node) if info(node).stands_for or info(node).corrects else super().compute(node)


MAX_ERROR_POWER = 1e-3
"""Tolerated power of a difference relative to the signal: 30 dB SQNR."""
MAX_ROUNDING_RATIO = 4.0
"""Tolerated power of a difference relative to the model's own rounding error. A sum in another order may round a value
differently, and everything computed from it: two independent roundings differ by twice the power of one, and the
estimate is noisy for small outputs."""


def _near(got: Tensor, wanted: Tensor, real: Tensor | None) -> bool:
    """Whether an output differs by rounding only; `real` is the output without rounded activations."""
    if got.shape != wanted.shape:
        return False
    return _apart(got, wanted) <= max(
        MAX_ERROR_POWER, 0.0 if real is None else MAX_ROUNDING_RATIO * _apart(real, wanted)
    )


def _apart(got: Tensor, wanted: Tensor) -> float:
    """Power of the difference relative to the signal; for integer and bool outputs, the fraction that differs."""
    if not wanted.numel():
        return 0.0
    if not wanted.dtype.is_floating_point:
        return float((got.to(wanted.dtype) != wanted).double().mean())
    a, b = got.double(), wanted.double()
    odd = ~(a.isfinite() & b.isfinite())
    if bool((odd & (a != b) & ~(a.isnan() & b.isnan())).any()):
        return float("inf")
    a, b = (value.masked_fill(odd, 0.0) for value in (a, b))
    signal, power = float(b.square().sum()), float((a - b).square().sum())
    return power / signal if signal else float(power > 0)


def _first_wrong_layer(written: OnnxModel, gm: fx.GraphModule, batch: Batch) -> Difference | None:
    """First quantized value that OpenVINO computes wrong from correct inputs; None if there is none."""

    def run(model: bytes, inputs: Mapping[str, Tensor], outputs: list[str]) -> dict[str, Tensor]:
        import openvino

        return _Compiled(openvino.Core().read_model(model), {"INFERENCE_PRECISION_HINT": "f32"})(inputs, outputs)

    try:
        differences = ModelCheck(written, gm, batch).differences_in(run)
    except Exception:  # OpenVINO does not compile the parts
        return None
    return next((difference for difference in differences if not difference.is_rounding), None)
