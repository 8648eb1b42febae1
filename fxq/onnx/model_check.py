"""Whether an ONNX model computes what its qdq graph does: each value on integers, of the integers before it."""

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
from fxq.onnx.whole_model import WrittenModel
from fxq.quant.dynamic_grid import MIN_SCALE


@dataclass(frozen=True)
class Difference:
    """How far a value of an ONNX model is from that of the qdq graph.

    Attributes:
        name: the node of the graph, or "output" and its number.
        layer: the path of its module.
        steps: the largest difference in steps of the grid; of an output in float, and of scales that are measured, in
            steps of 255 for its range.
        mean: the mean one, of a hundred entries at least: of few, one may be near a tie.
    """

    name: str
    layer: str
    steps: float
    mean: float

    @property
    def is_rounding(self) -> bool:
        """Whether nothing but rounding can have made it."""
        return self.steps <= MOST and self.mean <= MEAN

    def __str__(self) -> str:
        return f"{self.name}{f' (layer {self.layer!r})' if self.layer else ''} differs by {self.steps:.3g} steps"


MOST, MEAN = 1.05, 0.05
"""Steps that rounding explains, and on average: sums in another order may be on the other side of a tie, and a bias is
rounded to a step of the accumulator."""


Runtime = Callable[[bytes, Mapping[str, Tensor], list[str]], Mapping[str, Tensor]]
"""Function that runs a serialized ONNX model on inputs by name, and returns the outputs of the given names."""


class ModelCheck:
    """A model beside its qdq graph: each value that the graph puts on a grid, and each output.

    ONNX Runtime is given the integers of the graph for all that was computed before, with the grids that were measured,
    so that differences do not add up: where a network amplifies them, an equal model would give other outputs.
    """

    def __init__(self, written: WrittenModel, gm: fx.GraphModule, batch: Batch) -> None:
        """Run the graph.

        Args:
            written: the model.
            gm: the qdq graph.
            batch: inputs.
        """
        self._values: dict[str, Tensor] = {}
        self._nodes: dict[str, fx.Node] = {}
        runner = Runner(gm, copied(batch))
        self._inputs = dict(inputs_of({n: runner.values[n] for n in gm.graph.find_nodes(op="placeholder")}))
        made_by = {name for node in written.model.graph.node for name in node.output}
        result: Any = None
        with torch.no_grad():
            for node in gm.graph.nodes:
                result = runner.step(node)
                name = written.integers.get(node)
                if name in made_by and name not in self._values:
                    assert name is not None
                    self._values[name], self._nodes[name] = result, node
        self._outputs = dict(zip((output.name for output in written.model.graph.output), tensors(result), strict=True))
        self._model = _cut(written.model, self._values).SerializeToString()

    def differences(self, optimized: bool = False, entries: Mapping[str, str] | None = None) -> list[Difference]:
        """What ONNX Runtime makes of the model, in order.

        Args:
            optimized: with its optimizations, as in a default session, but for those across values on integers, which
                are inputs and outputs here. Else node by node, as the model is written.
            entries: of the session's configuration.
        """
        differences = self.differences_in(partial(_run, optimized=optimized, entries=entries or {}))
        if optimized and not self._values:  # no value is quantized, so that each element counts
            return [replace(end, mean=end.steps) for end in differences]
        return differences

    def differences_in(self, run: Runtime) -> list[Difference]:
        """Differences between a runtime and this model, in graph order.

        Args:
            run: the runtime.
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
        if wanted.shape == got.shape:  # each counts by itself; of zeros alone, runtimes may choose any
            wanted, got = torch.ones_like(wanted), torch.where(wanted <= MIN_SCALE, 1.0, got / wanted)
        return _difference(node.name, path, wanted, got, on_grid=False)


def _cut(model: Any, values: Mapping[str, Tensor]) -> Any:
    """A copy of a model that returns these values, and takes others in their place for what is computed of them."""
    import onnx

    made = type(model)()
    made.CopyFrom(model)
    outputs = {output.name for output in made.graph.output}
    for name, value in values.items():
        kind = onnx_type(value.dtype)
        made.graph.input.append(onnx.helper.make_tensor_value_info(f"{name}/given", kind, list(value.shape)))
        if name not in outputs:
            made.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    for node in made.graph.node:
        for i, name in enumerate(node.input):
            if name in values:
                node.input[i] = f"{name}/given"
    return made


def _run(
    model: bytes, inputs: Mapping[str, Tensor], outputs: list[str], optimized: bool, entries: Mapping[str, str]
) -> dict[str, Tensor]:
    """What ONNX Runtime makes of a model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 4
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    given = {name: value.detach().cpu().contiguous().numpy() for name, value in inputs.items()}
    made = session.run(outputs, {one.name: given[one.name] for one in session.get_inputs()})
    return {name: torch.from_numpy(value) for name, value in zip(outputs, made, strict=True)}


def _difference(name: str, layer: str, wanted: Tensor, got: Tensor, on_grid: bool) -> Difference:
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        kinds = " instead of ".join(f"{y.dtype} {list(y.shape)}" for y in (got, wanted))
        return Difference(f"{name}, which is {kinds},", layer, 255.0, 255.0)
    if not wanted.numel():
        return Difference(name, layer, 0.0, 0.0)
    if not wanted.dtype.is_floating_point and not on_grid:  # places and truths: a tie may go either way
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
