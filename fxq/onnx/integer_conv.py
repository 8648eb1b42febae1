"""Integer convolutions with float results, as ONNX ConvInteger followed by scales.

ONNX Runtime runs a convolution between DequantizeLinear and QuantizeLinear on integers, but in float if no
QuantizeLinear follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fxq.onnx.dequantized import DequantizeNode, dequantize_node
from fxq.onnx.onnx_objects import OnnxNode, onnx_type
from fxq.onnx.writer import Value, Writer


def write_integer_convolutions(w: Writer, outputs: Sequence[Value]) -> None:
    """Rewrite integer convolutions whose result is not quantized as ConvInteger.

    Before: y = Conv(DequantizeLinear(x), DequantizeLinear(w), b)
    After: y = Cast(ConvInteger(x, w + 128, zero_point, 128)) * (s_x * s_w) + b

    Args:
        w: writer of the model.
        outputs: outputs of the model.
    """
    readers = w.readers(outputs)
    w.rewrite(lambda node: node.op_type == "Conv" and not _is_rounded(node, readers) and _write(w, node))


def _is_rounded(node: OnnxNode, readers: Mapping[str, list[OnnxNode]]) -> bool:
    """Whether only a QuantizeLinear reads a node's result, directly or through Relu or Clip."""
    read_by = readers.get(node.outputs[0], [])
    if len(read_by) != 1:
        return False
    only = read_by[0]
    return only.op_type == "QuantizeLinear" or (only.op_type in ("Relu", "Clip") and _is_rounded(only, readers))


def _write(w: Writer, node: OnnxNode) -> bool:
    """Rewrite a convolution; False unless x is uint8 per tensor and the weight symmetric int8."""
    x, weight = (_grid(w, name) for name in node.inputs[:2])
    q = w.constant_of(weight.node.inputs[0]) if weight is not None else None
    if x is None or weight is None or q is None or x.scale.dim() or x.zero.dtype is not torch.uint8:
        return False
    if (
        bool(weight.zero.any())
        or w.type_number_of(weight.node.inputs[0]) != onnx_type(torch.int8)
        or weight.scale.dim() > 1
    ):
        return False
    bias = _bias(w, node.inputs[2]) if len(node.inputs) > 2 else None
    if bias is None and len(node.inputs) > 2:
        return False
    # uint8 x uint8: for uint8 x int8, ONNX Runtime accumulates in 16 bits on CPUs without VNNI.
    unsigned, middle = (q.to(torch.int16) + 128).to(torch.uint8), torch.tensor(128, dtype=torch.uint8, device="cpu")
    summed = w.emit("ConvInteger", x.node.inputs[0], unsigned, x.node.inputs[2], middle, **node.attributes)
    channels = (-1, *[1] * (q.dim() - 2))
    scale = (x.scale.double() * weight.scale.double()).float()
    real, scale = w.cast(summed, torch.float32), scale.reshape(channels) if scale.dim() else scale
    if bias is None:
        w.emit_as(node.outputs[0], "Mul", real, scale)
    else:
        w.emit_as(node.outputs[0], "Add", w.emit("Mul", real, scale), bias.reshape(channels))
    return True


def _grid(w: Writer, name: str) -> DequantizeNode | None:
    """The DequantizeLinear that computes a value, or None."""
    return dequantize_node(w, Value(name, torch.empty(0, device="meta")))


def _bias(w: Writer, name: str) -> torch.Tensor | None:
    """Bias as a float32 tensor, or None if it is not constant."""
    node = w.producer(name)
    if node is None or node.op_type != "DequantizeLinear":
        return w.constant_of(name)
    steps, scale = (w.constant_of(read) for read in node.inputs)
    return (steps.double() * scale.double()).float() if steps is not None and scale is not None else None
