"""Quantization parameters of every layer: integer weights, scales, zero points and int32 biases."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fxq.backends.kernel import Kernel
from fxq.errors import InputError, unknown
from fxq.graph.grid import grid_of
from fxq.graph.info import info
from fxq.graph.query import constant, is_op, options_of, submodule
from fxq.graph.region import Weight, integer_weight, out_grids, read_region
from fxq.graph.unit import OpCall
from fxq.quant.qparams import QParams

Reads = Literal["integers", "dynamic", "float"]


@dataclass(frozen=True, repr=False)
class LayerQParams:
    """Quantization parameters and integers of one layer, on the CPU. Real values are (q - zero_point) * scale.

    Attributes:
        weights: weights by the name of the op's argument: "weight", except in recurrent layers. Each has `values`, int8
            in the weight's shape (values of few bits take a byte each, too) or float16, and `qparams`.
        gates: for a recurrent layer, rows of each gate in its weights and biases, by name, as in
            `biases["bias_hh"][gates["f"]]`.
        biases: biases by the name of the op's argument: "bias", except in recurrent layers. Each is int32, (C,):
            round(bias / bias_scale), zero point 0; or float32, see `float_bias_reason`.
        bias_scale: float32, (C,) or (): scale of the accumulator, input_scale * weight_scale; None if the bias is
            float.
        float_bias_reason: why the bias is float; otherwise empty.
        reads: "integers" on a static grid; "dynamic": integers on a grid that is computed at run time; or "float", as
            with integer weights only, and inside units such as squeeze-and-excitation.
        input_scale, input_zero_point: grid of the integers that it reads; None if not known before the call.
        output_scale, output_zero_point: grid of its output, after fused ops; None if the output is float. For a unit
            with several outputs, that of the first.
        node: name of the node that runs it, as in the ledger's `into`.
        input_factors: float32, (C,): factors per channel that its input is multiplied by before rounding, from
            `passes.Smooth` or `SmoothDepthwise`; its weight is divided by them. None if there are none.
        input_rotation: number of values of its input that `passes.Smooth` rotates together by an orthonormal Hadamard
            matrix, after the factors; its weight is rotated along its input channels, too. None if it is not rotated.
    """

    weights: Mapping[str, Weight]
    gates: Mapping[str, slice]
    biases: Mapping[str, Tensor]
    bias_scale: Tensor | None
    float_bias_reason: str
    reads: Reads
    input_scale: float | None
    input_zero_point: int | None
    output_scale: float | None
    output_zero_point: int | None
    node: str
    input_factors: Tensor | None = None
    input_rotation: int | None = None

    @property
    def weight(self) -> Tensor:
        """Integer values of its weight; of the first one if there are several, here and in the properties below."""
        return self._first.values

    @property
    def bias(self) -> Tensor | None:
        """Bias, int32 or float32; the first one if there are several, None if there is none."""
        return next(iter(self.biases.values()), None)

    @property
    def weight_scale(self) -> Tensor:
        """Scale of its weight, float32: () per tensor, (C,) per channel; for blocks, the shape but for `axis`."""
        return self._first.qparams.scale

    @property
    def weight_zero_point(self) -> Tensor:
        """Zero point of its weight, int32, in the shape of the scale; 0 for symmetric weights."""
        return self._first.qparams.zero_point

    @property
    def axis(self) -> int | None:
        """Output-channel axis of the weight, or the axis that is divided into blocks; None per tensor."""
        return self._first.qparams.axis

    @property
    def block(self) -> int | None:
        """Number of values of the weight along `axis` that share a scale; None per tensor and per channel."""
        return self._first.qparams.block

    @property
    def _first(self) -> Weight:
        return next(iter(self.weights.values()))

    def gate(self, name: str, weight: str = "weight_ih") -> Weight:
        """Return the rows of one gate in a weight of a recurrent layer.

        Args:
            name: "i", "f", "g" or "o" for an LSTM, "r", "z" or "n" for a GRU.
            weight: "weight_ih" for the input, "weight_hh" for the hidden state.

        Raises:
            InputError: the layer has no such gate, or no such weight with gates.
        """
        if name not in self.gates:
            raise InputError(unknown("gate", name, self.gates))
        rows = {key: w for key, w in self.weights.items() if len(w.values) == max(s.stop for s in self.gates.values())}
        if weight not in rows:
            raise InputError(unknown("weight with gates", weight, rows))
        part, grid = self.gates[name], rows[weight].qparams
        if grid.scale.dim() and (grid.axis == 0 or grid.block is not None):
            grid = replace(grid, scale=grid.scale[part], zero_point=grid.zero_point[part])
        return Weight(rows[weight].values[part], grid)

    def __repr__(self) -> str:
        weights = ", ".join(f"{name} {tuple(weight.values.shape)}" for name, weight in self.weights.items())
        return f"<LayerQParams of {self.node}: {weights}, reads {self.reads}>"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data and tensors.

        The keys are the names of the weights, each also with the suffixes `_scale`, `_zero_point`, `_axis`, `_block`
        and `_bits`; the names of the biases; "gates" with the first and last row of each gate; and the other
        attributes.
        """
        weights: dict[str, Any] = {}
        for name, weight in self.weights.items():
            grid = weight.qparams
            about = {"scale": grid.scale, "zero_point": grid.zero_point, "axis": grid.axis, "block": grid.block}
            weights[name] = weight.values
            weights |= {f"{name}_{key}": value for key, value in {**about, "bits": grid.bits}.items()}
        rest = {key: value for key, value in vars(self).items() if key not in ("weights", "biases")}
        return {
            **weights,
            **(self.biases or {"bias": None}),
            **rest,
            "gates": {name: [rows.start, rows.stop - 1] for name, rows in self.gates.items()},
        }


def layers_of(gm: fx.GraphModule) -> dict[str, LayerQParams]:
    """Return the parameters of every layer with an integer weight in a qdq or lowered graph, by module path.

    A functional call outside any module has its node's name as key; further calls of a layer have `@2`, `@3`, ...
    appended, and so have the factors of its low-rank correction.
    """
    layers: dict[str, LayerQParams] = {}
    calls: defaultdict[str, int] = defaultdict(lambda: 1)
    for node in gm.graph.nodes:
        kernel = submodule(gm, node)
        if isinstance(kernel, Kernel) and kernel.form is not None:
            form = kernel.form.module(kernel)
            inputs = form.graph.find_nodes(op="placeholder")
            outside = {inner: (gm, read) for inner, read in zip(inputs, node.args, strict=False)}
            node_layers = [pair for inside in form.graph.nodes for pair in _layers(form, inside, outside)]
        else:
            node_layers = list(_layers(gm, node, {}))
        for path, layer in node_layers:
            key = path
            while key in layers:
                calls[path] += 1
                key = f"{path}@{calls[path]}"
            layers[key] = replace(layer, node=node.name)
    return layers


Outside = Mapping[fx.Node, tuple[fx.GraphModule, Any]]
"""For each input of a graph inside a kernel, the graph that calls the kernel, and the argument there."""


def _layers(gm: fx.GraphModule, node: fx.Node, outside: Outside) -> Iterator[tuple[str, LayerQParams]]:
    """Layers that a node runs, each with its module path: the first op of a unit, and further ops with weights."""
    region, node_info = read_region(gm, node), info(node)
    if region is None:
        return
    for i, call in enumerate(region.calls):
        layer = _layer(gm, node, call, out_grids(gm, region)[0] if i == 0 else None, outside)
        if layer is not None:
            inside = node_info.fused.paths[i] if i and node_info.fused.paths else node_info.path
            yield inside or node_info.path or node.name, layer


def _layer(
    gm: fx.GraphModule, node: fx.Node, call: OpCall, out: QParams | None, outside: Outside
) -> LayerQParams | None:
    traits = call.op.traits
    read = {
        name: integer_weight(gm, call.tensors.get(name)) for name in call.op.tensors if traits.role(name) == "weight"
    }
    weights = {name: _on_cpu(weight) for name, weight in read.items() if weight is not None}
    if not weights:
        return None
    first = next(iter(weights.values()))
    value: Any = call.tensors.get(traits.inputs[0])
    reads, input_scale, zero_point = _input_grid(gm, value)
    reason = _float_accumulator(traits.axis, weights, reads, input_scale is not None)
    scale = first.qparams.scale * input_scale if input_scale is not None and not reason else None
    values = {name: constant(gm, call.tensors.get(name)) for name in call.op.tensors if traits.role(name) == "bias"}
    biases = {name: bias.detach().cpu() for name, bias in values.items() if bias is not None}
    if scale is not None and biases:
        if scale.dim():  # a transposed convolution's groups share the scales of their channels
            scale = scale.repeat(next(iter(biases.values())).numel() // scale.numel())
        if all(bool(((bias.double() / scale.double()).abs() < 2**31).all()) for bias in biases.values()):
            biases = {name: int32_bias(bias, scale) for name, bias in biases.items()}
        else:  # for instance if weights are tiny
            scale, reason = None, "its integers, on steps of input_scale * weight_scale, exceed int32"
    gates = traits.recurrence.gates if traits.recurrence is not None else ()
    size = len(first.values) // max(len(gates), 1)
    outer, integers = outside.get(value.args[0], (gm, value.args[0])) if reads != "float" else (gm, None)
    quantized = _quantized_value(integers)
    return LayerQParams(
        weights=weights,
        gates={name: slice(i * size, (i + 1) * size) for i, name in enumerate(gates)},
        biases=biases,
        bias_scale=scale,
        float_bias_reason=reason if biases else "",
        reads=reads,
        input_scale=input_scale,
        input_zero_point=zero_point,
        output_scale=out.s if out is not None else None,
        output_zero_point=out.z if out is not None else None,
        node=node.name,
        input_factors=_factors(outer, quantized),
        input_rotation=options_of(quantized)["size"] if is_op(quantized, "rotate_rows") else None,
    )


def _quantized_value(integers: Any) -> Any:
    """Value that a quantize node reads; None if it is not known. A kernel of dynamic ranges has several results."""
    node = integers.args[0] if isinstance(integers, fx.Node) and integers.target is operator.getitem else integers
    return node.args[0] if isinstance(node, fx.Node) and node.args else None


def _factors(gm: fx.GraphModule, quantized: Any) -> Tensor | None:
    """Factors that a pass inserted before the quantize node of a value, on the CPU; None if there are none."""
    product: Any = quantized.args[0] if is_op(quantized, "rotate_rows") else quantized
    factors = constant(gm, product.args[1]) if is_op(product, "mul") and info(product).origins == () else None
    return factors.cpu().flatten() if factors is not None else None


def _on_cpu(weight: Weight) -> Weight:
    grid = weight.qparams
    return Weight(weight.values.cpu(), replace(grid, scale=grid.scale.cpu(), zero_point=grid.zero_point.cpu()))


def _input_grid(gm: fx.GraphModule, value: Any) -> tuple[Reads, float | None, int | None]:
    """`reads`, `input_scale` and `input_zero_point` of `LayerQParams` for the input `value` of a layer."""
    if not is_op(value, "dequantize"):
        return "float", None, None
    grid, zero_point = grid_of(gm, value), options_of(value)["zero_point"]
    if grid is None:
        return "dynamic", None, zero_point if isinstance(zero_point, int) else None
    return ("integers", grid.s, grid.z) if grid.axis is None else ("integers", None, None)


def _float_accumulator(axis: int | None, weights: Mapping[str, Weight], reads: Reads, one_scale: bool) -> str:
    """Reason why a layer's accumulator has no static scale, so that its bias stays float; empty if it has one.

    Args:
        axis: output-channel axis of the layer's weight.
        weights: its weights by name.
        reads: form of its input.
        one_scale: whether the input has one static scale for the whole tensor.
    """
    if reads == "float":
        return "its input is float"
    if reads == "dynamic":
        return "the scale of its input is computed at run time"
    if not one_scale:
        return "its input has several scales"
    if len(weights) > 1:
        return "the products of its weights have different scales"
    grid = next(iter(weights.values())).qparams
    if grid.block is not None or grid.axis not in (None, axis):
        return "the weights of one output channel have several scales"
    return ""


def int32_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """Quantize a bias to int32: round(bias / scale), zero point 0.

    Args:
        bias: float32, (C,).
        scale: float32, (C,) or (): input_scale * weight_scale.

    Source: Jacob et al. 2018, section 2.4.
    """
    limit = 2**31 - 1
    return torch.round(bias.detach().cpu().double() / scale.cpu().double()).clamp(-limit - 1, limit).to(torch.int32)
