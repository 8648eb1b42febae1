"""The integers of every layer: weights, scales, zero points and int32 biases, read off the graph and its kernels."""

from __future__ import annotations

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
from fxq.graph.query import constant, is_op, submodule
from fxq.graph.region import Weight, integer_input, integer_weight, out_grids, read_region
from fxq.graph.unit import OpCall
from fxq.quant.qparams import QParams

Reads = Literal["integers", "dynamic", "float"]


@dataclass(frozen=True, repr=False)
class LayerQParams:
    """The integers of one layer, on the CPU. The real value of an integer q is (q - zero_point) * scale.

    Attributes:
        weights: by the name of the op's argument, which is "weight" but in recurrent layers: its `values`, int8 and of
            the weight's own shape (a 4-bit value has a byte, too), or float16, and their `qparams`.
        gates: of a recurrent layer, the rows of each gate in its weights and biases, by name, as in
            `biases["bias_hh"][gates["f"]]`.
        biases: by the name of the op's argument, "bias" but in recurrent layers: int32, (C,), round(bias / bias_scale),
            zero point 0; or float32, see `float_bias_reason`.
        bias_scale: float32, (C,) or (), of the accumulator: input_scale * weight_scale; None where the bias is float.
        float_bias_reason: why the bias is float; else empty.
        reads: "integers" on a grid known beforehand, integers on a grid that is "dynamic" at run time, or "float", as
            with weights alone in integers, and inside of a unit (of squeeze-and-excitation).
        input_scale, input_zero_point: of the integers that it reads; None where not known beforehand.
        output_scale, output_zero_point: of what it makes, fused ops included; None when it emits float. Of a unit of
            several outputs, of the first.
        node: the node of the graph that runs it, as the ledger's `into` names it.
        input_factors: float32, (C,): what its input is multiplied by, channel by channel, before it is rounded, as
            `passes.Smooth` asks for; its weight is divided by them. None where it is rounded as it is.
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

    @property
    def weight(self) -> Tensor:
        """The integers of its weight; of several, the first. The next four are of the same weight."""
        return self._first.values

    @property
    def bias(self) -> Tensor | None:
        """Its bias, int32 or float32; of several, the first; None without one."""
        return next(iter(self.biases.values()), None)

    @property
    def weight_scale(self) -> Tensor:
        """float32: () per tensor, (C,) per channel, or for blocks the weight's shape, but for `axis`."""
        return self._first.qparams.scale

    @property
    def weight_zero_point(self) -> Tensor:
        """int32, same shape; 0 for symmetric weights."""
        return self._first.qparams.zero_point

    @property
    def axis(self) -> int | None:
        """The output-channel axis of the weight, or the one that is cut into blocks; None per tensor."""
        return self._first.qparams.axis

    @property
    def block(self) -> int | None:
        """How many values of the weight along `axis` share a scale; None per tensor and per channel."""
        return self._first.qparams.block

    @property
    def _first(self) -> Weight:
        return next(iter(self.weights.values()))

    def gate(self, name: str, weight: str = "weight_ih") -> Weight:
        """The rows of one gate of a recurrent layer, in one of its weights.

        Args:
            name: "i", "f", "g" or "o" of an LSTM, "r", "z" or "n" of a GRU.
            weight: "weight_ih", which the input is multiplied by, or "weight_hh", for the hidden state.

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
        """Plain data and tensors.

        Each weight by its name, and behind this name `_scale`, `_zero_point`, `_axis`, `_block` and `_bits`; the first
        and the last row of each gate; all else as the attributes are called.
        """
        found: dict[str, Any] = {}
        for name, weight in self.weights.items():
            grid = weight.qparams
            about = {"scale": grid.scale, "zero_point": grid.zero_point, "axis": grid.axis, "block": grid.block}
            found[name] = weight.values
            found |= {f"{name}_{key}": value for key, value in {**about, "bits": grid.bits}.items()}
        rest = {key: value for key, value in vars(self).items() if key not in ("weights", "biases")}
        return {
            **found,
            **(self.biases or {"bias": None}),
            **rest,
            "gates": {name: [rows.start, rows.stop - 1] for name, rows in self.gates.items()},
        }


def layers_of(gm: fx.GraphModule) -> dict[str, LayerQParams]:
    """The integers of every layer of a qdq or lowered graph whose weight is in integers, by module path.

    A functional call outside any module goes by its node's name; a layer called again gets `@2`, `@3`, ... appended.
    """
    layers: dict[str, LayerQParams] = {}
    calls: defaultdict[str, int] = defaultdict(lambda: 1)
    for node in gm.graph.nodes:
        kernel = submodule(gm, node)
        if isinstance(kernel, Kernel) and kernel.form is not None:
            form = kernel.form.module(kernel)
            inputs = form.graph.find_nodes(op="placeholder")
            outside = {inner: (gm, read) for inner, read in zip(inputs, node.args, strict=False)}
            found = [pair for inside in form.graph.nodes for pair in _layers(form, inside, outside)]
        else:
            found = list(_layers(gm, node, {}))
        for path, layer in found:
            key = path
            while key in layers:
                calls[path] += 1
                key = f"{path}@{calls[path]}"
            layers[key] = replace(layer, node=node.name)
    return layers


Outside = Mapping[fx.Node, tuple[fx.GraphModule, Any]]
"""What the inputs of a graph inside a kernel stand for: a node of the graph that calls it."""


def _layers(gm: fx.GraphModule, node: fx.Node, outside: Outside) -> Iterator[tuple[str, LayerQParams]]:
    """The layers that a node runs, each with its module path: the one that a unit begins with, or those inside."""
    region, about = read_region(gm, node), info(node)
    if region is None:
        return
    for i, call in enumerate(region.calls):
        found = _layer(gm, node, call, out_grids(gm, region)[0] if i == 0 else None, outside)
        if found is not None:
            inside = about.paths[i] if i and about.paths else about.path
            yield inside or about.path or node.name, found


def _layer(
    gm: fx.GraphModule, node: fx.Node, call: OpCall, out: QParams | None, outside: Outside
) -> LayerQParams | None:
    quant = call.op.traits
    read = {
        name: integer_weight(gm, call.tensors.get(name)) for name in call.op.tensors if quant.role(name) == "weight"
    }
    weights = {name: _on_cpu(weight) for name, weight in read.items() if weight is not None}
    if not weights:
        return None
    first = next(iter(weights.values()))
    value = call.tensors.get(quant.inputs[0])
    source, reads = integer_input(gm, value), _reads(gm, value)
    input_scale = source.grid.s if source is not None and reads == "integers" else None
    reason = _float_accumulator(quant.axis, weights, reads, input_scale is not None)
    scale = first.qparams.scale * input_scale if input_scale is not None and not reason else None
    found = {name: constant(gm, call.tensors.get(name)) for name in call.op.tensors if quant.role(name) == "bias"}
    biases = {name: bias.detach().cpu() for name, bias in found.items() if bias is not None}
    if scale is not None and biases:
        if scale.dim():  # a transposed convolution's groups share the scales of their channels
            scale = scale.repeat(next(iter(biases.values())).numel() // scale.numel())
        if all(bool(((bias.double() / scale.double()).abs() < 2**31).all()) for bias in biases.values()):
            biases = {name: int32_bias(bias, scale) for name, bias in biases.items()}
        else:  # as behind tiny weights
            scale, reason = None, "it has more steps of input_scale * weight_scale than int32 holds"
    gates = quant.recurrence.gates if quant.recurrence is not None else ()
    size = len(first.values) // max(len(gates), 1)
    return LayerQParams(
        weights=weights,
        gates={name: slice(i * size, (i + 1) * size) for i, name in enumerate(gates)},
        biases=biases,
        bias_scale=scale,
        float_bias_reason=reason if biases else "",
        reads=reads,
        input_scale=input_scale,
        input_zero_point=source.grid.z if source is not None and len(source.dynamic_nodes) < 2 else None,
        output_scale=out.s if out is not None else None,
        output_zero_point=out.z if out is not None else None,
        node=node.name,
        input_factors=_factors(*outside.get(source.values, (gm, source.values))) if source is not None else None,
    )


def _factors(gm: fx.GraphModule, integers: fx.Node) -> Tensor | None:
    """What a pass has put in to multiply a value with before it becomes these integers, on the CPU."""
    made: Any = integers.args[0] if integers.args else None
    factors = constant(gm, made.args[1]) if is_op(made, "mul") and info(made).origins == () else None
    return factors.cpu() if factors is not None else None


def _on_cpu(weight: Weight) -> Weight:
    grid = weight.qparams
    return Weight(weight.values.cpu(), replace(grid, scale=grid.scale.cpu(), zero_point=grid.zero_point.cpu()))


def _reads(gm: fx.GraphModule, value: Any) -> Reads:
    """What a layer reads, of which this is the value: see `LayerQParams.reads`."""
    if not is_op(value, "dequantize"):
        return "float"
    return "dynamic" if grid_of(gm, value) is None else "integers"


def _float_accumulator(axis: int | None, weights: Mapping[str, Weight], reads: Reads, one_scale: bool) -> str:
    """Why no scale is known beforehand of what a layer adds its bias to; empty where one is.

    Args:
        axis: the output-channel axis of the layer's weight.
        weights: its weights by name.
        reads: what it reads.
        one_scale: whether this has one scale for the whole tensor, known beforehand.
    """
    if reads == "float":
        return "its input is float"
    if reads == "dynamic":
        return "the scale of its input is measured at run time"
    if not one_scale:
        return "its input has several scales"
    if len(weights) > 1:
        return "the products of its weights are on different scales"
    grid = next(iter(weights.values())).qparams
    if grid.block is not None or grid.axis not in (None, axis):
        return "the weights of one output have several scales"
    return ""


def int32_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """round(bias / scale) as int32; the scale is input_scale * weight_scale, the zero point 0.

    Args:
        bias: float32, (C,).
        scale: float32, (C,) or ().

    Source: Jacob et al. 2018, section 2.4.
    """
    limit = 2**31 - 1
    return torch.round(bias.detach().cpu().double() / scale.cpu().double()).clamp(-limit - 1, limit).to(torch.int32)
