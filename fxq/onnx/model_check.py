"""Comparison of an ONNX model with its qdq graph, value by value, each computed from the graph's own integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxq.common.data import Batch
from fxq.common.isolation import copied
from fxq.common.metrics import tensors
from fxq.graph.analysis.varying_axes import inputs_of
from fxq.graph.info import info
from fxq.graph.query import is_op
from fxq.graph.run import Runner
from fxq.onnx.onnx_objects import onnx_type
from fxq.onnx.whole_model import OnnxModel
from fxq.quant.dynamic_grid import MIN_SCALE


@dataclass(frozen=True)
class Difference:
    """Difference between a value of an ONNX model and the value of the qdq graph.

    Attributes:
        name: name of the graph's node, or "output" and its number.
        layer: path of the node's module.
        steps: largest difference, in steps of the grid. Float outputs and dynamic scales count in steps of 1/255 of
            their range.
        mean: mean difference in steps. For values of fewer than 100 entries the sum is divided by 100, since one entry
            may be near a tie.
    """

    name: str
    layer: str
    steps: float
    mean: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding alone explains the difference."""
        return self.steps <= MAX_ROUNDING_STEPS and self.mean <= MAX_MEAN_STEPS

    def __str__(self) -> str:
        return f"{self.name}{f' (layer {self.layer!r})' if self.layer else ''} differs by {self.steps:.3g} steps"


MAX_ROUNDING_STEPS, MAX_MEAN_STEPS = 1.05, 0.05
"""Largest and mean difference, in steps, that rounding explains: a sum in another order may fall on the other side of a
tie, and a bias is rounded to a step of the accumulator."""


Runtime = Callable[[bytes, Mapping[str, Tensor], list[str]], Mapping[str, Tensor]]
"""Function that runs a serialized ONNX model on inputs by name, and returns the outputs of the given names."""


class ModelCheck:
    """Comparison of a model with its qdq graph: of each quantized value, and each output.

    The runtime computes each value from the graph's integers and dynamic grids, so that differences do not accumulate:
    a network may amplify rounding until the outputs of two correct models differ.
    """

    def __init__(self, written: OnnxModel, gm: fx.GraphModule, batch: Batch) -> None:
        """Run the graph and record its values.

        Args:
            written: the model.
            gm: the qdq graph.
            batch: inputs of the graph.
        """
        self._values: dict[str, Tensor] = {}
        self._nodes: dict[str, fx.Node] = {}
        runner = Runner(gm, copied(batch))
        self._inputs = dict(inputs_of({n: runner.values[n] for n in gm.graph.find_nodes(op="placeholder")}))
        outputs = {name for node in written.model.graph.node for name in node.output}
        result: Any = None
        with torch.no_grad():
            for node in gm.graph.nodes:
                result = runner.step(node)
                name = written.quantized_names.get(node)
                if name in outputs and name not in self._values:
                    assert name is not None
                    self._values[name], self._nodes[name] = result, node
        self._outputs = dict(zip((output.name for output in written.model.graph.output), tensors(result), strict=True))
        self._model = _cut(written.model, self._values).SerializeToString()

    def differences(self, optimized: bool = False, entries: Mapping[str, str] | None = None) -> list[Difference]:
        """Differences of ONNX Runtime, in graph order.

        Args:
            optimized: whether to optimize as a default session does, except across quantized values, which are inputs
                and outputs here. Otherwise the nodes run as they are written.
            entries: entries of the session's configuration.
        """
        differences = self.differences_in(partial(_run, optimized=optimized, entries=entries or {}))
        if optimized and not self._values:  # no value is quantized, so that each element counts
            return [replace(end, mean=end.steps) for end in differences]
        return differences

    def differences_in(self, run: Runtime) -> list[Difference]:
        """Differences of a runtime, in graph order.

        Args:
            run: function that runs the model, see `Runtime`.
        """
        inputs = {**self._inputs, **{f"{name}/given": value for name, value in self._values.items()}}
        wanted = {**self._values, **self._outputs}
        got = run(self._model, inputs, list(wanted))
        differences = [self._of_integers(name, value, got[name]) for name, value in self._values.items()]
        pairs = ((f"output {i}", value, got[name]) for i, (name, value) in enumerate(self._outputs.items()))
        return [*differences, *(_difference(name, "", value, result, on_grid=False) for name, value, result in pairs)]

    def _of_integers(self, name: str, wanted: Tensor, got: Tensor) -> Difference:
        node, path = self._nodes[name], info(self._nodes[name]).path
        if not is_op(node, "choose_scale"):
            return _difference(node.name, path, wanted, got, on_grid=True)
        if (
            wanted.shape == got.shape
        ):  # relative to each scale; for a range of zeros only, runtimes may choose any scale
            wanted, got = torch.ones_like(wanted), torch.where(wanted <= MIN_SCALE, 1.0, got / wanted)
        return _difference(node.name, path, wanted, got, on_grid=False)


def _cut(model: Any, values: Mapping[str, Tensor]) -> Any:
    """Copy of a model that returns these values and takes them as inputs for the nodes that read them."""
    import onnx

    copy = type(model)()
    copy.CopyFrom(model)
    outputs = {output.name for output in copy.graph.output}
    for name, value in values.items():
        type_number = onnx_type(value.dtype)
        copy.graph.input.append(onnx.helper.make_tensor_value_info(f"{name}/given", type_number, list(value.shape)))
        if name not in outputs:
            copy.graph.output.append(onnx.helper.make_tensor_value_info(name, type_number, None))
    for node in copy.graph.node:
        for i, name in enumerate(node.input):
            if name in values:
                node.input[i] = f"{name}/given"
    return copy


def _run(
    model: bytes, inputs: Mapping[str, Tensor], outputs: list[str], optimized: bool, entries: Mapping[str, str]
) -> dict[str, Tensor]:
    """Run a serialized model with ONNX Runtime and return its outputs by name."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 4
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    arrays = {name: value.detach().cpu().contiguous().numpy() for name, value in inputs.items()}
    results = session.run(outputs, {port.name: arrays[port.name] for port in session.get_inputs()})
    return {name: torch.from_numpy(value) for name, value in zip(outputs, results, strict=True)}


def _difference(name: str, layer: str, wanted: Tensor, got: Tensor, on_grid: bool) -> Difference:
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        kinds = " instead of ".join(f"{y.dtype} {list(y.shape)}" for y in (got, wanted))
        return Difference(f"{name}, which is {kinds},", layer, 255.0, 255.0)
    if not wanted.numel():
        return Difference(name, layer, 0.0, 0.0)
    if not wanted.dtype.is_floating_point and not on_grid:  # indices and bools: either side of a tie is right
        share = float((wanted != got).double().mean())
        return Difference(name, layer, 100 * share, share)
    same = (wanted == got) | (wanted.isnan() & got.isnan())
    apart = torch.where(same, 0.0, (wanted.double() - got.double()).abs())
    if not on_grid:
        finite = wanted[wanted.isfinite()].double()
        size = float(finite.amax() - finite.amin()) if finite.numel() else 0.0
        apart = apart * 255 / max(size, float(finite.abs().amax()) if finite.numel() else 0.0, 1e-30)
    apart = apart.nan_to_num(nan=255.0, posinf=255.0)
    return Difference(name, layer, float(apart.max()), float(apart.sum()) / max(apart.numel(), 100))
