"""Dynamic grids and linear layers on them, as OpenVINO runs them on integers.

OpenVINO runs a layer on integers if its input has a constant scale and zero point. So the model divides x by its scale
and adds its zero point, which gives the integers as floats ("steps"), and quantizes these with scale 1 and zero point
0. The layer multiplies the steps. Its result is scaled and corrected by the zero points afterwards.

x / scale + zero_point is rounded after the sum, so that a value half-way between two integers can become the other one
of the two than in the op `quantize`, which rounds x / scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxq.onnx.dequantized import dequantize_node, float_values, transposed
from fxq.onnx.writer import DynamicSteps, Operand, Value, Writer


def unit_grid(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale 1 and zero point 0 for integers of this dtype."""
    return torch.ones((), device="cpu"), torch.zeros((), dtype=dtype, device="cpu")


def shifted_steps(w: Writer, x: Value, scale: Value, zero_point: Operand) -> str:
    """Write x / scale + zero_point."""
    return w.emit("Add", w.emit("Div", x, scale), zero_point)


def dequantized_steps(w: Writer, q: Value, scale: Value, zero_point: Operand) -> Value:
    """Write (q - zero_point) * scale, and record its steps in the writer."""
    steps = w.emit("DequantizeLinear", q, *unit_grid(q.dtype))
    value = w.emit("Mul", w.emit("Sub", steps, zero_point), scale)
    w.dynamic_steps[value] = DynamicSteps(steps, scale, zero_point)
    return Value(value, torch.empty_like(q.like, dtype=torch.float32))


def linear_of_steps(w: Writer, x: Value, weight: Value, bias: Value | None) -> str | None:
    """Write a linear layer whose input has a dynamic grid; None if its weight is not a quantized constant.

    It computes x @ W.T = scale * (steps @ W.T - zero_point * (row sums of W)).
    """
    source, own = w.dynamic_steps[x.name], dequantize_node(w, weight)
    integers = w.constant_of(own.node.inputs[0]) if own is not None else None
    attributes: Mapping[str, Any] = own.node.attributes if own is not None else {}
    if own is None or integers is None or attributes.get("block_size"):
        return None
    stored = (integers, own.scale, own.zero, attributes.get("axis"))
    sums = w.cached_constant(("row sums", weight.name), lambda: -float_values(*stored).double().sum(1).float())
    shape = (*x.shape[:-1], weight.shape[0])
    steps: Operand = w.reshaped(source.steps, (1, *x.shape)) if x.rank == 1 else source.steps
    product = w.emit("MatMul", steps, transposed(w, weight))
    if not _is_zero(source.zero_point):
        product = w.emit("Add", product, w.emit("Mul", source.zero_point, sums))
    product = w.emit("Mul", product, source.scale)
    product = product if bias is None else w.emit("Add", product, bias)
    return w.reshaped(product, shape) if x.rank == 1 else product  # OpenVINO returns vectors in another shape


def _is_zero(zero_point: Operand) -> bool:
    """Whether a zero point is the constant 0."""
    return isinstance(zero_point, Tensor) and not bool(zero_point.any())
