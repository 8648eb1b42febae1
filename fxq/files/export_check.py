"""Checks of an exported file in the runtime that will read it, at more than one batch size."""

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
from fxq.graph.info import info
from fxq.graph.run import Runner, inputs_for
from fxq.graph.varying_axes import FIXED, Axes, inputs_of
from fxq.onnx.model_check import Difference, ModelCheck
from fxq.onnx.whole_model import WrittenModel
from fxq.pipeline.float_form import FloatForm


def checked_batches(gm: fx.GraphModule, batch: Batch, axes: Axes) -> Iterator[Batch]:
    """The batches that a file is checked with: the example, and one of another batch size where that varies.

    The second is left out where the graph itself does not run on it.

    Args:
        gm: the qdq graph.
        batch: the example.
        axes: the axes that vary, by the name of their input. The first axis of an input is its batch.
    """
    yield batch
    named = inputs_of(inputs_for(gm.graph, batch))
    batched = {id(x) for name, x in named if 0 in axes.get(name, {})}
    if not batched:
        return

    def resized(leaf: Any) -> Any:
        if id(leaf) not in batched:
            return leaf
        return torch.cat([leaf, leaf]) if len(leaf) == 1 else leaf[:1]

    args, kwargs = mapped((batch.args, dict(batch.kwargs)), resized)
    resized_batch = Batch(args, kwargs)
    try:
        run_graph(gm, resized_batch)
    except Exception:  # whatever a model raises for a size that it does not take
        return
    yield resized_batch


def warn_of_fixed_sizes(path: Path, batch: Batch, why: str) -> None:
    """Warn that a file takes no other sizes than those of the example, and say why."""
    warn(
        f"{path} takes inputs of the example's sizes alone, {batch}: {why.removesuffix(FIXED).rstrip(' .')}. "
        "dynamic=False says that this is meant. For other sizes, change the model there, or export it for each."
    )


@torch.no_grad()
def run_graph(gm: nn.Module, batch: Batch) -> Any:
    """What a graph returns for a copy of a batch."""
    args, kwargs = copied((batch.args, dict(batch.kwargs)))
    return gm(*args, **kwargs)


def check_in_openvino(
    path: Path, model: Any, written: WrittenModel, gm: fx.GraphModule, batches: Sequence[Batch]
) -> None:
    """Raise `ExportError` where OpenVINO computes something else than the qdq graph, by more than rounding explains.

    Its kernels depend on sizes, so that each batch counts. Where float32 instead of the default precision of this CPU
    helps, that is a warning.

    Args:
        path: the file, for messages.
        model: `openvino.Model`, as it will be in the file.
        written: the ONNX model that it was read from.
        gm: the qdq graph.
        batches: inputs.
    """
    reason = Openvino().available()
    if reason is not None:
        warn(f"{path} is written, and was not checked in OpenVINO: {reason}")
        return
    run, precise = _Compiled(model, {}), {"INFERENCE_PRECISION_HINT": "f32"}
    wrong = [(batch, problem) for batch in batches if (problem := _wrong(run, written, gm, batch))]
    if not wrong:
        return
    run = _Compiled(model, precise)
    still = [(batch, problem) for batch, _ in wrong if (problem := _wrong(run, written, gm, batch))]
    if not still:
        warn(
            f"{path}: OpenVINO with its default precision on this CPU does not compute what the quantized model does: "
            f'{wrong[0][1]}. Compile it with {{"INFERENCE_PRECISION_HINT": "f32"}}: with that it does, up to rounding.'
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
        f"{problem}, inputs {batch}.{where} Its kernel for it may be wrong: {remedy}, or export ONNX for "
        "ONNX Runtime. check=False writes the file all the same."
    )


class _Compiled:
    """An `openvino.Model`, compiled once for all sizes."""

    def __init__(self, model: Any, config: Mapping[str, Any]) -> None:
        import openvino

        self.config = config
        threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self._compiled = openvino.Core().compile_model(model, "CPU", {**threads, **config})

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        names = [name for port in self._compiled.inputs for name in port.names if name in inputs]
        results = self._compiled({name: inputs[name].detach().cpu().contiguous().numpy() for name in names})
        return {name: torch.from_numpy(results[self._compiled.output(name)].copy()) for name in outputs}


def _wrong(run: Callable[..., Mapping[str, Tensor]], written: WrittenModel, gm: fx.GraphModule, batch: Batch) -> str:
    """What is wrong of what a runtime makes of a batch; empty: nothing."""
    inputs = dict(inputs_of(inputs_for(gm.graph, batch)))
    names = [output.name for output in written.model.graph.output]
    try:
        results = run(inputs, names)
    except Exception as error:  # whatever an engine raises
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
    return f"{far!r} of {list(wanted[far].shape)} is at {db:.1f} dB of what it should be"


class _Unrounded(FloatForm):
    """Runs a qdq graph with no activation rounded, and the weights as they are stored."""

    def compute(self, node: fx.Node) -> Any:
        return Runner.compute(self, node) if info(node).stands_for else super().compute(node)


NEAR = 1e-3
"""Power of a difference, as a share of the signal's, that is never looked into: 30 dB."""
ROUNDING = 4.0
"""How many times the power of the model's own rounding error a difference may have. Where sums in another order bring
one value to the other side of a tie, those computed of it are rounded anew: two roundings that are independent differ
by twice the power of one; of small outputs, the estimate varies."""


def _near(got: Tensor, wanted: Tensor, real: Tensor | None) -> bool:
    """Whether an output differs by rounding alone; `real` is what it is where no activation is rounded."""
    if got.shape != wanted.shape:
        return False
    return _apart(got, wanted) <= max(NEAR, 0.0 if real is None else ROUNDING * _apart(real, wanted))


def _apart(got: Tensor, wanted: Tensor) -> float:
    """The power of the difference as a share of the signal's; of integers and truths, the share of entries."""
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


def _first_wrong_layer(written: WrittenModel, gm: fx.GraphModule, batch: Batch) -> Difference | None:
    """The first value on integers that OpenVINO makes wrong of the integers before it; None: it is not found so."""

    def run(model: bytes, inputs: Mapping[str, Tensor], outputs: list[str]) -> dict[str, Tensor]:
        import openvino

        return _Compiled(openvino.Core().read_model(model), {"INFERENCE_PRECISION_HINT": "f32"})(inputs, outputs)

    try:
        differences = ModelCheck(written, gm, batch).differences_in(run)
    except Exception:  # it is not compiled in parts
        return None
    return next((difference for difference in differences if not difference.is_rounding), None)
