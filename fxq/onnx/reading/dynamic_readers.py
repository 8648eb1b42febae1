"""Readers of ONNX ops on integers with dynamic ranges: products of them are read as layers with rounded inputs.

ONNX has no layer with a dynamic range: DynamicQuantizeLinear, MatMulInteger or ConvInteger, Cast, and Mul with the
product of both scales make one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxq.onnx.reading.graph_builder import Traced
from fxq.onnx.reading.layer_readers import conv, matmul
from fxq.onnx.reading.pointwise_readers import cast_to, plain_product
from fxq.onnx.reading.quantized_readers import dequantize, quantize, shifted
from fxq.onnx.reading.reader import Reader, reads


@dataclass(frozen=True)
class DynamicRange:
    """Values that DynamicQuantizeLinear quantizes, and the scale and zero point that it computes."""

    x: Traced
    scale: Any
    zero_point: Any


@dataclass(frozen=True)
class IntegerProduct:
    """Product of integers with a dynamic range and a constant weight.

    Attributes:
        range: the range.
        layer: returns the layer's result in float, from the scales of the weight.
        rank: number of axes of the result.
        channels: shape that one scale for each output channel has, to be multiplied with the result.
    """

    range: DynamicRange
    layer: Callable[[Tensor], Any]
    rank: int
    channels: tuple[int, ...]

    def takes(self, scale: Tensor) -> bool:
        """Whether these are scales of the weight: one, or one for each output channel."""
        own = tuple(scale.shape[-len(self.channels) :])
        per_channel = own == self.channels and scale.numel() == math.prod(own)
        return scale.dim() <= self.rank and (scale.numel() == 1 or per_channel)


@dataclass(frozen=True)
class ScaleProduct:
    """Product of the scale of a dynamic range and the constant scales of a weight."""

    range: DynamicRange
    weight_scale: Tensor


@reads("DynamicQuantizeLinear")
def dynamic_quantize(r: Reader, x: Any) -> Any:
    low = r.call(torch.clamp, r.call(torch.amin, x), None, 0.0)
    high = r.call(torch.clamp, r.call(torch.amax, x), 0.0)
    scale = r.call(torch.div, r.call(torch.sub, high, low), 255.0)
    offset = r.call(torch.clamp, r.call(torch.round, r.call(torch.div, r.call(torch.neg, low), scale)), 0, 255)
    zero_point = cast_to(r, offset, torch.uint8)
    q = quantize(r, x, scale, zero_point)
    if isinstance(x, Traced):
        r.noted(DynamicRange(x, scale, zero_point), q, scale)
    return q, scale, zero_point


def _product(
    r: Reader, q: Any, zero_point: Any, weight: Any, weight_zero: Any, result: Any, axis: int, layer: Any
) -> Any:
    """Return the integers `result`, with a note of the layer that they belong to.

    Args:
        r: the reader.
        q: the integers.
        zero_point: their zero point.
        weight: integers of the weight.
        weight_zero: their zero point.
        result: product of the two, int32.
        axis: axis of the output channels of the weight.
        layer: computes the layer from its input and its weight in float.
    """
    own = r.notes.get(id(q))
    constants = isinstance(weight, Tensor) and isinstance(weight_zero, Tensor | None)
    if isinstance(own, DynamicRange) and own.zero_point is zero_point and constants:

        def real(scale: Tensor) -> Any:
            x = r.call(torch.ops.fxq.round_to_range.default, own.x)
            return layer(x, _real_weight(r, weight, scale, weight_zero, axis))

        channels = (weight.shape[axis], *[1] * (0 if axis else weight.dim() - 2))
        r.noted(IntegerProduct(own, real, r.like(result).dim(), channels), result)
    return result


def _real_weight(r: Reader, weight: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> Any:
    """Weight in float; scale and zero point have one entry, or one for each index of `axis`."""
    parts = [scale.flatten(), *([] if zero_point is None else [zero_point.flatten()])]
    per_channel = any(part.numel() > 1 for part in parts)
    scale, *zero = [part.expand(weight.shape[axis]) if per_channel else part.reshape(()) for part in parts]
    return dequantize(r, weight, scale, *zero, axis=axis)


def _column(r: Reader, value: Any, rank: int) -> Any:
    return r.call(torch.reshape, value, (-1, *[1] * (rank - 1))) if value is not None and r.like(value).dim() else value


@reads("ConvInteger")
def conv_integer(r: Reader, x: Any, w: Any, x_zero: Any = None, w_zero: Any = None, **attributes: Any) -> Any:
    weight = shifted(r, w, _column(r, w_zero, r.like(w).dim()))
    result = cast_to(r, conv(r, shifted(r, x, x_zero), weight, **attributes), torch.int32)

    def layer(real: Any, real_weight: Any) -> Any:
        return conv(r, real, real_weight, **attributes)

    return _product(r, x, x_zero, w, w_zero, result, 0, layer)


@reads("MatMulInteger")
def matmul_integer(r: Reader, x: Any, w: Any, x_zero: Any = None, w_zero: Any = None) -> Any:
    rows = _column(r, x_zero, 2) if x_zero is not None and r.like(x_zero).numel() > 1 else x_zero
    result = cast_to(r, matmul(r, shifted(r, x, rows), shifted(r, w, w_zero)), torch.int32)

    def layer(real: Any, real_weight: Any) -> Any:
        return matmul(r, real, real_weight)

    return _product(r, x, x_zero, w, w_zero, result, r.like(w).dim() - 1, layer)


@reads("Mul")
def multiply(r: Reader, x: Any, other: Any, **attributes: Any) -> Any:
    """Read a product; that of integers and their scales is the result of a layer."""
    notes = [r.notes.get(id(value)) for value in (x, other)]
    for first, second in (notes, notes[::-1]):
        if not isinstance(first, IntegerProduct) or not isinstance(second, ScaleProduct):
            continue
        if first.range is second.range and first.takes(second.weight_scale):
            return first.layer(second.weight_scale)
    result = plain_product(r, x, other)
    for own, value, factor in ((notes[0], x, other), (notes[1], other, x)):
        if isinstance(own, DynamicRange) and value is own.scale and isinstance(factor, Tensor):
            r.noted(ScaleProduct(own, factor), result)
    return result
