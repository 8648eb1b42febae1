"""Readers of ONNX ops on integers with a grid: QDQ nodes, QOperator layers and integer products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxq.onnx.reading.graph_builder import Traced
from fxq.onnx.reading.layer_readers import average_pool, conv, gemm, matmul
from fxq.onnx.reading.onnx_file import FOUR_BIT, dtype_of_number
from fxq.onnx.reading.pointwise_readers import cast_to
from fxq.onnx.reading.reader import Reader, reads
from fxq.onnx.writer import refuse
from fxq.quant.packing import unpack_adjacent
from fxq.quant.qparams import QParams


def _grid(r: Reader, x: Any, scale: Any, zero_point: Any, axis: int, block_size: int) -> tuple[Any, Any]:
    """Scale and zero point in the shape in which they broadcast against x."""
    shape = r.shape_of(x)
    parts = []
    for part in (scale, zero_point):
        if part is None or r.like(part).dim() == 0 or (not block_size and r.like(part).numel() == 1):
            parts.append(part if part is None or r.like(part).dim() == 0 else r.call(torch.reshape, part, ()))
        elif block_size:
            parts.append(
                r.call(torch.narrow, r.call(torch.repeat_interleave, part, block_size, axis), axis, 0, shape[axis])
            )
        else:
            spread = [1] * len(shape)
            spread[axis] = -1
            parts.append(r.call(torch.reshape, part, tuple(spread)))
    return parts[0], parts[1]


@dataclass(frozen=True)
class FloatIntegers:
    """Floats with the values of integers that a node computes, which its readers take instead of the integers."""

    values: Traced


def _no_grid(x: Tensor, scale: Any, zero_point: Any, dtype: torch.dtype) -> str | None:
    """Reason why an activation is computed in float ops; None if it has a grid of fxq: one positive float32 scale.

    Runtimes take other scales, too, such as 0 for values that are always 0.

    Args:
        x: the floats, without data.
        scale: scale of the file.
        zero_point: zero point of the file; None: 0.
        dtype: type of the integers.
    """
    if not isinstance(scale, Tensor) or not isinstance(zero_point, Tensor | None):
        return "its scale is computed at run time"
    if scale.numel() > 1 or (zero_point is not None and zero_point.numel() > 1):
        return "it has several scales"
    if not (scale.dtype is x.dtype is torch.float32):
        return f"its values or scale are {x.dtype if scale.dtype is torch.float32 else scale.dtype}"
    if dtype not in (torch.uint8, torch.int8):
        return f"its integers are {dtype}"
    return None if bool(torch.isfinite(scale) & (scale > 0)) else f"its scale is {float(scale):g}"


def grid_of_integers(
    r: Reader, integers: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int | None, block: int | None
) -> QParams | None:
    """Grid of a constant of integers; None if no layer of fxq stores such integers.

    Args:
        r: the reader.
        integers: the integers, int8 or uint8.
        scale: 0-d, (C,) along `axis`, or one for each block.
        zero_point: of the shape of `scale`; None: 0.
        axis: axis of the scales, or axis of the blocks; None per tensor.
        block: number of integers along `axis` that share a scale; None: all.
    """
    if integers.dtype not in (torch.int8, torch.uint8) or not bool((torch.isfinite(scale) & (scale > 0)).all()):
        return None
    low, high = (
        {torch.uint8: (0, 15), torch.int8: (-8, 7)}[integers.dtype]
        if id(integers) in r.four_bit
        else _BOUNDS[integers.dtype]
    )
    zero = torch.zeros_like(scale) if zero_point is None else zero_point
    if low == 0 and bool((zero == (high + 1) // 2).all()):  # unsigned around the middle: int8 with a zero point of 0
        low, high, zero = -(high + 1) // 2, high // 2, torch.zeros_like(zero)
    smallest = int((integers.to(torch.int32)).min()) if integers.numel() else 0
    if low < 0 and smallest + (low if integers.dtype is torch.uint8 else 0) > low and not bool(zero.any()):
        low += 1  # symmetric
    dtype = torch.int8 if low < 0 else torch.uint8
    return QParams(scale.to(torch.float32), zero.to(torch.int32), low, high, dtype, axis, block)


_BOUNDS = {torch.uint8: (0, 255), torch.int8: (-128, 127), torch.uint16: (0, 65535), torch.int16: (-32768, 32767)}


@reads("QuantizeLinear")
def quantize(
    r: Reader, x: Any, scale: Any, zero_point: Any = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0,
    saturate: int = 1, **attributes: Any,
) -> Any:  # fmt: skip
    dtype = (
        dtype_of_number(output_dtype)
        if output_dtype
        else r.like(zero_point).dtype
        if zero_point is not None
        else torch.uint8
    )
    four_bit = output_dtype in FOUR_BIT or id(zero_point) in r.four_bit
    refuse(four_bit, "it quantizes to 4-bit integers")
    refuse(dtype not in _BOUNDS, f"it quantizes to {dtype}")
    reason = _no_grid(r.like(x), scale, zero_point, dtype)
    if reason is None:
        zero = 0 if zero_point is None else int(zero_point)
        return r.call(torch.ops.fxq.quantize.default, x, float(scale), zero, *_BOUNDS[dtype], dtype)
    steps, offset = _grid(r, x, scale, zero_point, axis, block_size)
    result = r.call(torch.round, r.call(torch.div, x, steps))
    if offset is not None:
        result = r.call(torch.add, result, cast_to(r, offset, torch.float32))
    values = r.call(torch.clamp, result, *_BOUNDS[dtype])
    integers = cast_to(r, values, dtype)
    if isinstance(integers, Traced):
        r.noted(FloatIntegers(values), integers)
        r.in_float[values.node] = f"{r.label!r} ({reason})"
    return integers


@reads("DequantizeLinear")
def dequantize(
    r: Reader, x: Any, scale: Any, zero_point: Any = None, *, axis: int = 1, block_size: int = 0, **attributes: Any
) -> Any:
    own = r.notes.get(id(x))
    is_grid = _no_grid(r.like(scale), scale, zero_point, r.like(x).dtype) is None
    if isinstance(x, Traced) and is_grid and id(x) not in r.four_bit and not isinstance(own, FloatIntegers):
        zero = 0 if zero_point is None else int(zero_point)
        return r.call(torch.ops.fxq.dequantize.default, x, float(scale), zero)
    steps, offset = _grid(r, x, scale, zero_point, axis, block_size)
    values = cast_to(r, own.values if isinstance(own, FloatIntegers) else x, r.like(scale).dtype)
    if offset is not None:
        values = r.call(torch.sub, values, cast_to(r, offset, r.like(scale).dtype))
    result = r.call(torch.mul, values, steps)
    if isinstance(result, Tensor) and isinstance(x, Tensor):
        result = r.constant(r.names.get(id(x), r.label).removesuffix("_quantized"), result)
        if scale.is_floating_point() and isinstance(zero_point, Tensor | None):
            per_tensor = scale.numel() == 1 and not block_size
            shaped: list[Any] = [t.reshape(()) if per_tensor and t is not None else t for t in (scale, zero_point)]
            grid = grid_of_integers(
                r, x, shaped[0], shaped[1], None if per_tensor else axis % x.dim(), block_size or None
            )
            if grid is not None:
                r.grids[id(result)] = grid
    return result


def shifted(r: Reader, x: Any, zero_point: Any) -> Any:
    """Integers without their zero point, in float32."""
    whole = cast_to(r, x, torch.float32)
    return whole if zero_point is None else r.call(torch.sub, whole, cast_to(r, zero_point, torch.float32))


@reads("QLinearConv")
def qlinear_conv(
    r: Reader, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any, y_scale: Any, y_zero: Any,
    bias: Any = None, **attributes: Any,
) -> Any:  # fmt: skip
    weight = dequantize(r, w, w_scale, w_zero, axis=0)
    if bias is not None:
        bias = r.constant(f"{r.label}.bias", r.call(torch.mul, cast_to(r, bias, torch.float32), x_scale * w_scale))
    result = conv(r, dequantize(r, x, x_scale, x_zero), weight, bias, **attributes)
    return quantize(r, result, y_scale, y_zero)


@reads("QLinearMatMul")
def qlinear_matmul(
    r: Reader, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any, y_scale: Any, y_zero: Any
) -> Any:
    axis = r.like(w).dim() - 1
    product = matmul(r, dequantize(r, x, x_scale, x_zero, axis=0), dequantize(r, w, w_scale, w_zero, axis=axis))
    return quantize(r, product, y_scale, y_zero)


def _qlinear(operator: Any) -> Any:
    def read(
        r: Reader,
        a: Any,
        a_scale: Any,
        a_zero: Any,
        b: Any,
        b_scale: Any,
        b_zero: Any,
        c_scale: Any,
        c_zero: Any = None,
    ) -> Any:
        result = r.call(operator, dequantize(r, a, a_scale, a_zero), dequantize(r, b, b_scale, b_zero))
        return quantize(r, result, c_scale, c_zero)

    return read


reads("QLinearAdd")(_qlinear(torch.add))
reads("QLinearMul")(_qlinear(torch.mul))


@reads("QLinearSigmoid")
def qlinear_sigmoid(r: Reader, x: Any, x_scale: Any, x_zero: Any, y_scale: Any, y_zero: Any = None) -> Any:
    return quantize(r, r.call(torch.sigmoid, dequantize(r, x, x_scale, x_zero)), y_scale, y_zero)


@reads("QLinearLeakyRelu")
def qlinear_leaky_relu(
    r: Reader, x: Any, x_scale: Any, x_zero: Any, y_scale: Any, y_zero: Any = None, *, alpha: float = 0.01
) -> Any:
    values = r.call(torch.nn.functional.leaky_relu, dequantize(r, x, x_scale, x_zero), alpha)
    return quantize(r, values, y_scale, y_zero)


@reads("QLinearConcat")
def qlinear_concat(r: Reader, y_scale: Any, y_zero: Any, *parts: Any, axis: int) -> Any:
    values = [dequantize(r, *parts[i : i + 3]) for i in range(0, len(parts), 3)]
    return quantize(r, r.call(torch.cat, values, axis), y_scale, y_zero)


@reads("QLinearGlobalAveragePool")
def qlinear_global_average_pool(
    r: Reader, x: Any, x_scale: Any, x_zero: Any, y_scale: Any, y_zero: Any, *, channels_last: int = 0
) -> Any:
    axes = tuple(range(1, r.like(x).dim() - 1)) if channels_last else tuple(range(2, r.like(x).dim()))
    return quantize(r, r.call(torch.mean, dequantize(r, x, x_scale, x_zero), axes, True), y_scale, y_zero)


@reads("QGemm")
def qgemm(
    r: Reader, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, bias: Any = None,
    y_scale: Any = None, y_zero: Any = None, *, alpha: float = 1.0, transA: int = 0, transB: int = 0,
) -> Any:  # fmt: skip
    x = dequantize(r, a, a_scale, a_zero)
    weight = dequantize(r, b, b_scale, b_zero, axis=0 if transB else 1)
    if bias is not None:
        bias = r.constant(f"{r.label}.bias", r.call(torch.mul, cast_to(r, bias, torch.float32), a_scale * b_scale))
    product = gemm(r, x, weight, bias, alpha=alpha, transA=transA, transB=transB)
    return product if y_scale is None else quantize(r, product, y_scale, y_zero)


@reads("MatMulNBits")
def matmul_nbits(
    r: Reader, x: Any, packed: Any, scales: Any, zero_points: Any = None, order: Any = None, bias: Any = None, *,
    K: int, N: int, block_size: int, bits: int = 4, **attributes: Any,
) -> Any:  # fmt: skip
    refuse(bits not in (4, 8), f"its weight has {bits} bits")
    refuse(order is not None, "its input channels are in another order")
    refuse(not all(isinstance(part, Tensor | None) for part in (packed, scales, zero_points)), "its weight is computed")
    integers = unpack_adjacent(packed.reshape(N, -1), bits, K)
    scale = scales.reshape(N, -1)
    count = scale.shape[1]
    if zero_points is None:
        zero = torch.full_like(scale, 2 ** (bits - 1))
    elif zero_points.is_floating_point():
        zero = zero_points.reshape(N, count)
    else:
        zero = unpack_adjacent(zero_points.reshape(N, -1), bits, count).to(torch.float32)
    name = r.names.get(id(packed), r.label)
    grid = QParams(scale.float(), zero.float(), 0, 2**bits - 1, torch.uint8, 1, block_size)
    if bool((zero == zero.round()).all()):
        grid = replace(grid, zero_point=zero.to(torch.int32))
    values = torch.ops.fxq.dequantize.tensor(integers, grid.scale, grid.zero_point, 1, block_size)
    weight = r.constant(name, values.to(r.like(x).dtype))
    if bool((torch.isfinite(scale) & (scale != 0)).all()):
        r.grids[id(weight)] = grid
    return gemm(r, x, weight, bias, transB=1)


@reads("QLinearSoftmax")
def qlinear_softmax(
    r: Reader, x: Any, x_scale: Any, x_zero: Any, y_scale: Any, y_zero: Any = None, *, axis: int = -1, opset: int = 13
) -> Any:
    refuse(opset < 13 and axis % r.like(x).dim() != r.like(x).dim() - 1, "it is over several axes")
    return quantize(r, r.call(torch.softmax, dequantize(r, x, x_scale, x_zero), axis), y_scale, y_zero)


@reads("QLinearAveragePool")
def qlinear_average_pool(
    r: Reader, x: Any, x_scale: Any, x_zero: Any, y_scale: Any, y_zero: Any = None, *, channels_last: int = 0,
    **attributes: Any,
) -> Any:  # fmt: skip
    refuse(channels_last, "its channels are last")
    return quantize(r, average_pool(r, dequantize(r, x, x_scale, x_zero), **attributes), y_scale, y_zero)
