"""What layers ask of values that a DequantizeLinear makes: so written that engines compute with the integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxq.graph.analysis.integer_sums import MAX_INT32, largest_sum
from fxq.onnx.onnx_objects import INT4, UINT4, OnnxNode
from fxq.onnx.writer import MOVES, Operand, Value, Writer
from fxq.quant.qparams import QParams


@dataclass(frozen=True)
class Dequantized:
    """The node that makes a value of integers, and its grid: (q - zero) * scale.

    Attributes:
        node: the DequantizeLinear; it reads the integers first.
        scale: 0-d, (C,) along an axis, or of blocks.
        zero: of its shape.
    """

    node: OnnxNode
    scale: Tensor
    zero: Tensor


def dequantized(w: Writer, value: Value) -> Dequantized | None:
    """What makes a value of integers; None where something else makes it."""
    node = w.made_by(value.name)
    if node is None or node.kind != "DequantizeLinear":
        return None
    scale, zero = w.value_of(node.reads[1]), w.value_of(node.reads[2])
    return Dequantized(node, scale, zero) if scale is not None and zero is not None else None


def stored_weight(w: Writer, value: Value) -> tuple[OnnxNode, list[Tensor]] | None:
    """The node that makes floats of a stored weight, and the constants that it reads; None: no such node makes it."""
    node = w.made_by(value.name)
    if node is None or node.kind not in ("DequantizeLinear", "Cast"):
        return None
    parts = [part for name in node.reads if (part := w.value_of(name)) is not None]
    return (node, parts) if len(parts) == len(node.reads) else None


def is_of_integers(w: Writer, value: Value) -> bool:
    """Whether a value was dequantized, and moved at most since then."""
    name = value.name
    while (node := w.made_by(name)) is not None and node.kind in MOVES:
        name = node.reads[0]
    return node is not None and node.kind == "DequantizeLinear"


def measured(w: Writer, value: Value) -> OnnxNode | None:
    """What makes a value of integers whose scale is measured at run time: it reads these, the scale, the zero point.

    With a block, each row has a scale.
    """
    node = w.made_by(value.name)
    is_known = node is None or node.kind != "DequantizeLinear" or w.value_of(node.reads[1]) is not None
    return None if is_known else node


def weight_for(w: Writer, x: Value, weight: Value) -> Value | Tensor:
    """A weight; in float32 where the input is none of integers: else an engine would make it that in every call.

    In a model for any runtime, all are as they are, for the sake of its size.

    Of integers of four bits, or in blocks, engines have kernels for inputs in float. A second layer that reads a weight
    has integers of its own: ONNX Runtime fails to make unsigned ones of those that layers share.
    """
    found = dequantized(w, weight)
    q = w.value_of(found.node.reads[0]) if found is not None else None
    if found is None or q is None or w.type_of(found.node.reads[0]) in (INT4, UINT4):
        return weight
    attributes = found.node.attributes
    if is_of_integers(w, x):
        if weight.name not in w.weights:
            w.weights.add(weight.name)
            return weight
        own = w.emit("DequantizeLinear", q.clone(), found.scale, found.zero.clone(), **attributes)
        return Value(own, weight.like)
    if attributes.get("block_size") or w.portable:
        return weight
    return w.kept(("real", weight.name), lambda: real_values(q, found.scale, found.zero, attributes.get("axis")))


def real_values(q: Tensor, scale: Tensor, zero: Tensor, axis: int | None, block: int | None = None) -> Tensor:
    """The values of integers."""
    made: Tensor = torch.ops.fxq.dequantize.tensor(q, scale, zero.to(torch.int32), axis, block)
    return made


def bias_for(w: Writer, x: Value, weight: Value, bias: Value | None, axis: int = 0) -> Operand:
    """Bias of a layer: int32 with the accumulator's scale if input and weight are integers and it fits, else float.

    Args:
        w: writer of the model.
        x: the input of the layer.
        weight: its weight.
        bias: its bias, or None.
        axis: axis of the output channels in the weight.
    """
    real = w.value_of(bias.name) if bias is not None else None
    grids = [dequantized(w, x), dequantized(w, weight)]
    if real is None or not w.integer_bias or any(g is None or g.node.attributes.get("block_size") for g in grids):
        return bias
    first, second = (grid.scale.double() for grid in grids if grid is not None)
    scale = (first * second).to(torch.float32)
    if scale.numel() not in (1, real.numel()) or scale.min() < torch.finfo(torch.float32).tiny:
        return bias  # a transposed convolution in groups has fewer scales than channels
    scale = scale.expand(real.shape).contiguous()
    steps = (real.detach().double() / scale.double()).round()
    q = w.value_of(grids[1].node.reads[0]) if grids[1] is not None else None
    rows = torch.empty(1, 0) if q is None else q.movedim(axis, 0).flatten(1)
    if not largest_sum(rows, _ANY_GRID, steps.abs().max()) <= MAX_INT32:  # also catches NaN
        return bias
    return w.emit("DequantizeLinear", steps.to(torch.int32), scale, axis=0)


_ANY_GRID = QParams.per_tensor(1.0, 0, 0, 255)


def transposed(w: Writer, matrix: Value | Tensor) -> str:
    """A matrix (O, I) as (I, O); where it is one of constant integers, those are turned."""
    constant = matrix if isinstance(matrix, Tensor) else w.value_of(matrix.name)
    if constant is not None:
        return w.constant(_turned(w, constant))
    found = dequantized(w, matrix) if isinstance(matrix, Value) else None
    q = w.value_of(found.node.reads[0]) if found is not None else None
    if found is None or q is None:
        return w.emit("Transpose", matrix, perm=[1, 0])
    attributes = dict(found.node.attributes)
    if "axis" in attributes:
        attributes["axis"] = 1 - attributes["axis"] % 2
    parts = zip((q, found.scale, found.zero), found.node.reads, strict=True)
    turned = [w.constant(_turned(w, part), w.type_of(name)) for part, name in parts]
    return w.emit("DequantizeLinear", *turned, **attributes)


def _turned(w: Writer, constant: Tensor) -> Tensor:
    """A matrix with its axes exchanged; what is none, as it is."""
    return w.kept(("t", id(constant)), lambda: constant.t().contiguous()) if constant.dim() == 2 else constant
