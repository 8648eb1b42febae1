"""Operands of layers on dequantized values, written so that engines compute with the integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxq.graph.analysis.integer_sums import MAX_INT32, largest_sum
from fxq.onnx.onnx_objects import INT4, UINT4, OnnxNode
from fxq.onnx.writer import MOVING_OP_TYPES, Operand, Value, Writer
from fxq.quant.qparams import QParams


@dataclass(frozen=True)
class DequantizeNode:
    """DequantizeLinear node with a static grid; its output is (q - zero) * scale.

    Attributes:
        node: the node; its first input is the integers.
        scale: float32: 0-d, (C,) along an axis, or one per block.
        zero: zero point, of the shape of `scale`, in the dtype of the integers.
    """

    node: OnnxNode
    scale: Tensor
    zero: Tensor


def dequantize_node(w: Writer, value: Value) -> DequantizeNode | None:
    """Node that dequantizes a value with a static grid; None if another node computes it."""
    node = w.producer(value.name)
    if node is None or node.op_type != "DequantizeLinear":
        return None
    scale, zero = w.constant_of(node.inputs[1]), w.constant_of(node.inputs[2])
    return DequantizeNode(node, scale, zero) if scale is not None and zero is not None else None


def stored_weight(w: Writer, value: Value) -> tuple[OnnxNode, list[Tensor]] | None:
    """Node that converts a stored weight to float, and its constant inputs; None if another node computes the value."""
    node = w.producer(value.name)
    if node is None or node.op_type not in ("DequantizeLinear", "Cast"):
        return None
    constants = [part for name in node.inputs if (part := w.constant_of(name)) is not None]
    return (node, constants) if len(constants) == len(node.inputs) else None


def is_dequantized(w: Writer, value: Value) -> bool:
    """Whether a value is dequantized, directly or before nodes that only move values."""
    name = value.name
    while (node := w.producer(name)) is not None and node.op_type in MOVING_OP_TYPES:
        name = node.inputs[0]
    return node is not None and node.op_type == "DequantizeLinear"


def dynamic_dequantize_node(w: Writer, value: Value) -> OnnxNode | None:
    """Node that dequantizes a value with a dynamic range; None if another node computes it.

    Its inputs are the integers, the scale and the zero point. With a `block_size`, each row has a scale.
    """
    node = w.producer(value.name)
    is_static = node is None or node.op_type != "DequantizeLinear" or w.constant_of(node.inputs[1]) is not None
    return None if is_static else node


def weight_for(w: Writer, x: Value, weight: Value) -> Value | Tensor:
    """Weight operand for a layer that reads `x`.

    If `x` is float, an 8-bit weight becomes a float32 constant, because engines would dequantize it in every call.
    Weights with 4 bits or per block stay quantized: engines have kernels for them. So do all weights of a portable
    model, for its size.

    If `x` is quantized, a second layer that shares the weight gets a copy of its integers, because ONNX Runtime fails
    to convert shared ones to unsigned.
    """
    source = dequantize_node(w, weight)
    q = w.constant_of(source.node.inputs[0]) if source is not None else None
    if source is None or q is None or w.type_number_of(source.node.inputs[0]) in (INT4, UINT4):
        return weight
    attributes = source.node.attributes
    if is_dequantized(w, x):
        if weight.name not in w.weights:
            w.weights.add(weight.name)
            return weight
        copy = w.emit("DequantizeLinear", q.clone(), source.scale, source.zero.clone(), **attributes)
        return Value(copy, weight.like)
    if attributes.get("block_size") or w.portable:
        return weight
    return w.cached_constant(
        ("real", weight.name), lambda: float_values(q, source.scale, source.zero, attributes.get("axis"))
    )


def float_values(q: Tensor, scale: Tensor, zero: Tensor, axis: int | None, block: int | None = None) -> Tensor:
    """Dequantize integers with a static grid."""
    values: Tensor = torch.ops.fxq.dequantize.tensor(q, scale, zero.to(torch.int32), axis, block)
    return values


def bias_for(w: Writer, x: Value, weight: Value, bias: Value | None, axis: int = 0) -> Operand:
    """Bias of a layer: int32 with the accumulator's scale if input and weight are quantized and it fits, else float.

    Args:
        w: writer of the model.
        x: input of the layer.
        weight: weight of the layer.
        bias: bias of the layer, or None.
        axis: axis of the output channels in the weight.
    """
    float_bias = w.constant_of(bias.name) if bias is not None else None
    grids = [dequantize_node(w, x), dequantize_node(w, weight)]
    if float_bias is None or not w.integer_bias or any(g is None or g.node.attributes.get("block_size") for g in grids):
        return bias
    first, second = (grid.scale.double() for grid in grids if grid is not None)
    scale = (first * second).to(torch.float32)
    if scale.numel() not in (1, float_bias.numel()) or scale.min() < torch.finfo(torch.float32).tiny:
        return bias  # a transposed convolution in groups has fewer scales than channels
    scale = scale.expand(float_bias.shape).contiguous()
    steps = (float_bias.detach().double() / scale.double()).round()
    q = w.constant_of(grids[1].node.inputs[0]) if grids[1] is not None else None
    rows = torch.empty(1, 0) if q is None else q.movedim(axis, 0).flatten(1)
    if not largest_sum(rows, _ANY_GRID, steps.abs().max()) <= MAX_INT32:  # also catches NaN
        return bias
    return w.emit("DequantizeLinear", steps.to(torch.int32), scale, axis=0)


_ANY_GRID = QParams.per_tensor(1.0, 0, 0, 255)


def transposed(w: Writer, matrix: Value | Tensor) -> str:
    """Transpose a matrix (O, I) to (I, O); constants and constant integers are transposed here, not by a node."""
    constant = matrix if isinstance(matrix, Tensor) else w.constant_of(matrix.name)
    if constant is not None:
        return w.constant(_transposed_constant(w, constant))
    source = dequantize_node(w, matrix) if isinstance(matrix, Value) else None
    q = w.constant_of(source.node.inputs[0]) if source is not None else None
    if source is None or q is None:
        return w.emit("Transpose", matrix, perm=[1, 0])
    attributes = dict(source.node.attributes)
    if "axis" in attributes:
        attributes["axis"] = 1 - attributes["axis"] % 2
    sources = zip((q, source.scale, source.zero), source.node.inputs, strict=True)
    constants = [w.constant(_transposed_constant(w, part), w.type_number_of(name)) for part, name in sources]
    return w.emit("DequantizeLinear", *constants, **attributes)


def _transposed_constant(w: Writer, constant: Tensor) -> Tensor:
    """Transpose a constant matrix; constants of another rank stay unchanged."""
    return (
        w.cached_constant(("t", id(constant)), lambda: constant.t().contiguous()) if constant.dim() == 2 else constant
    )
