"""ONNX form of conversions between floats and integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxq.onnx.dequantized import float_values
from fxq.onnx.dynamic_steps import dequantized_steps, shifted_steps, unit_grid
from fxq.onnx.onnx_objects import INT4, UINT4, NotInOnnx
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Operand, Value, Writer, refuse, writes
from fxq.quant.dynamic_grid import MIN_SCALE
from fxq.quant.packing import Packing

_LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
_MIN_BLOCK = 32
"""Smallest size of a block that is made of larger ones."""
_DYNAMIC_QUANTIZE = "DynamicQuantizeLinear"
"""Op type that computes the range of a tensor and quantizes it to 0..255. Its outputs: integers, scale, zero point."""


@writes("choose_scale")
def choose_scale(
    w: Writer, x: Value, *, steps: int, axis: int | None, symmetric: bool, block: int | None = None
) -> str:
    if block is not None:
        scale = choose_scale(w, in_blocks(w, x, block), steps=steps, axis=axis, symmetric=symmetric)
        return w.reshaped(scale, (*x.shape[:-1], x.shape[-1] // block))
    if axis is None and not symmetric and steps == 255 and not w.for_openvino:
        return w.emit_several(_DYNAMIC_QUANTIZE, [x], 3)[1]
    below, above = _extents(w, x, axis)
    if w.for_openvino and not symmetric:  # whose Clip of an infinite size is infinite
        shares = (w.emit("Div", extent, w.number(steps, x)) for extent in (below, above))
        return w.emit("Max", w.emit("Add", *shares), w.number(MIN_SCALE, x))
    size = w.emit("Max", below, above) if symmetric else w.emit("Add", below, above)
    largest = 2 * torch.finfo(torch.float32).max / steps  # scale of the largest range, whose size overflows float32
    return w.emit("Clip", w.emit("Div", size, w.number(steps, x)), w.number(MIN_SCALE, x), w.number(largest, x))


@writes("choose_zero_point")
def choose_zero_point(w: Writer, x: Value, *, scale: Value, qmin: int, axis: int | None) -> str:
    outputs = _dynamic_quantize_outputs(w, x, scale)
    if outputs is not None:
        zero = w.cast(outputs[2], torch.float32)
    else:
        zero = w.emit("Round" if axis is None else "Ceil", w.emit("Div", _extents(w, x, axis)[0], scale))
    return w.emit("Add", zero, w.number(qmin, x)) if qmin else zero


def _extents(w: Writer, x: Value, axis: int | None) -> tuple[str, str]:
    """Write -min and max of a value, each at least 0; with an `axis`, for each row.

    Engines merge equal nodes, so calls may repeat.
    """
    axes = w.ints(range(0 if axis is None else axis % x.rank, x.rank))
    low, high = (w.emit(op_type, x, axes, keepdims=int(axis is not None)) for op_type in ("ReduceMin", "ReduceMax"))
    return w.emit("Relu", w.emit("Neg", low)), w.emit("Relu", high)


def _dynamic_quantize_outputs(w: Writer, x: Value, scale: Any) -> tuple[str, ...] | None:
    """Outputs of the DynamicQuantizeLinear that computes this scale from `x`; None if other nodes compute it."""
    node = w.producer(scale.name) if isinstance(scale, Value) else None
    return node.outputs if node is not None and node.op_type == _DYNAMIC_QUANTIZE and node.inputs == (x.name,) else None


def _computed_zero(w: Writer, scale: Value, zero_point: Any, dtype: torch.dtype) -> str:
    """Zero point of a dynamic grid, in the shape of its scale and the dtype of the integers."""
    if isinstance(zero_point, Value):
        cast = w.producer(zero_point.name)
        node = w.producer(cast.inputs[0]) if cast is not None else None
        return cast.inputs[0] if cast and node and node.op_type == _DYNAMIC_QUANTIZE else w.cast(zero_point, dtype)
    if w.sizes is not None and scale.rank:
        return w.emit("Expand", torch.tensor(zero_point, dtype=dtype, device="cpu"), w.ints(scale.shape))
    key = "zero", zero_point, scale.shape, dtype
    return w.constant(w.cached_constant(key, lambda: torch.full(scale.shape, zero_point, dtype=dtype, device="cpu")))


def _rows(w: Writer, x: Value, scale: Value, zero: str) -> tuple[tuple[Operand, Operand], dict[str, int]]:
    """Scale, zero point and attributes of a conversion with a dynamic range, per tensor or per row."""
    if scale.rank == 0 or x.rank == 1:
        return (scale, zero), {}
    if scale.shape == (*x.shape[:-1], 1) and not varies(x.shape[-1]):
        return (scale, zero), {"axis": -1, "block_size": x.shape[-1]}
    refuse(not w.portable or scale.shape[1:] != (1,) * (x.rank - 1), "each of its rows spans several axes")
    parts = (w.reshaped(Value(name, scale.like), scale.shape[:1]) for name in (scale.name, zero))
    return (next(parts), next(parts)), {"axis": 0}


def _computed(w: Writer, scale: Any) -> bool:
    """Whether a scale is computed at run time."""
    return isinstance(scale, Value) and w.constant_of(scale.name) is None


def in_blocks(w: Writer, x: Value, block: int) -> Value:
    """Write a value (..., N) as rows of one block each: (..., N / block, block)."""
    shape = (*x.shape[:-1], x.shape[-1] // block, block)
    return Value(w.reshaped(x, shape), w.empty(shape, x.dtype))


def _written_out(w: Writer, x: Value, scale: Any, zero_point: Any, qmin: int, qmax: int, dtype: torch.dtype) -> str:
    """Write a quantize in basic ops."""
    shifted = w.emit("Add", w.emit("Round", w.emit("Div", x, scale)), _float_zero(w, x, zero_point))
    return w.cast(w.emit("Clip", shifted, w.number(qmin, x), w.number(qmax, x)), dtype)


def _dequantized(w: Writer, x: Value, scale: Any, zero_point: Any) -> str:
    """Write a dequantize in basic ops."""
    steps = Value(w.cast(x, torch.float32), torch.empty_like(x.like, dtype=torch.float32))
    return w.emit("Mul", w.emit("Sub", steps, _float_zero(w, steps, zero_point)), scale)


def _is_written_out(w: Writer, x: Value, scale: Value) -> bool:
    """Whether a conversion is written in basic ops: in files, of rows of keys and values (..., heads, length, size).

    ONNX Runtime would move the Transpose before it across a QuantizeLinear, without transposing the scales.
    """
    return w.portable and x.rank > 3 and x.shape[-3] != 1 and scale.shape == (*x.shape[:-1], 1)


def _float_zero(w: Writer, x: Value, zero_point: Any) -> Operand:
    """Zero point as float32."""
    return w.cast(zero_point, torch.float32) if isinstance(zero_point, Value) else w.number(zero_point, x)


@writes("quantize")
def quantize(
    w: Writer,
    x: Value,
    *,
    scale: Any,
    zero_point: Any,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    axis: int | None,
    block: int | None,
) -> str:
    if w.floats:
        return x.name
    if _computed(w, scale):
        outputs = _dynamic_quantize_outputs(w, x, scale)
        if outputs is not None and dtype is torch.uint8:
            return outputs[0]
        if block is not None:
            steps, zeros = in_blocks(w, scale, 1), in_blocks(w, zero_point, 1)
            return w.reshaped(_written_out(w, in_blocks(w, x, block), steps, zeros, qmin, qmax, dtype), x.shape)
        if w.for_openvino:
            read = shifted_steps(w, x, scale, _float_zero(w, x, zero_point))
            return _rounded(w, read, *unit_grid(dtype), qmin, qmax)
        if _is_written_out(w, x, scale):
            return _written_out(w, x, scale, zero_point, qmin, qmax, dtype)
        grid, attributes = _rows(w, x, scale, _computed_zero(w, scale, zero_point, dtype))
        return w.emit("QuantizeLinear", x, *grid, **attributes)
    step, zero = _grid(w, x, scale, zero_point, dtype, axis, block)
    if step.dim() == 0:
        read = x.name
        while read in w.clamps and _covers(w.clamps[read], step, zero, qmin, qmax):
            read = w.clamps[read][0]
        return _rounded(w, read, step, zero, qmin, qmax)
    refuse((qmin, qmax) != _LIMITS[dtype], "several grids that do not use all integers of their dtype")
    return w.emit("QuantizeLinear", x, step, zero, axis=axis, block_size=block)


def _rounded(w: Writer, read: str, step: Tensor, zero: Tensor, qmin: int, qmax: int) -> str:
    """Write a QuantizeLinear, after a Clip if the grid does not use all integers of its dtype."""
    if (qmin, qmax) != _LIMITS[zero.dtype]:
        bounds = (torch.tensor((q - int(zero)) * float(step), dtype=torch.float32, device="cpu") for q in (qmin, qmax))
        read = w.emit("Clip", read, *bounds)
    return w.emit("QuantizeLinear", read, step, zero)


def _covers(clamp: tuple[str, float, float], step: Tensor, zero: Tensor, qmin: int, qmax: int) -> bool:
    """Whether the limits of a grid are at least as tight as a clamp, so that the clamp has no effect before it."""
    low, high = (torch.round(torch.tensor(bound, device="cpu") / step) + int(zero) for bound in clamp[1:])
    return bool(low <= qmin) and bool(high >= qmax)


@writes("dequantize")
def dequantize(
    w: Writer,
    x: Value,
    *,
    scale: Any,
    zero_point: Any,
    qmin: int,
    qmax: int,
    axis: int | None,
    block: int | None,
    packed: tuple[int, ...] | None,
    bits: int = 4,
) -> Value:
    stored = w.constant_of(x.name)
    if stored is None:
        refuse(packed is not None, "its integers are computed, and packed into bytes")
        if w.floats:
            return x
        if _computed(w, scale):
            floats = torch.empty_like(x.like, dtype=torch.float32)
            if block is not None:
                grids = (in_blocks(w, grid, 1) for grid in (scale, zero_point))
                return Value(w.reshaped(_dequantized(w, in_blocks(w, x, block), *grids), x.shape), floats)
            if w.for_openvino:
                return dequantized_steps(w, x, scale, _float_zero(w, Value(x.name, floats), zero_point))
            if _is_written_out(w, x, scale):
                return Value(_dequantized(w, x, scale, zero_point), floats)
            grid, attributes = _rows(w, x, scale, _computed_zero(w, scale, zero_point, x.dtype))
            return Value(w.emit("DequantizeLinear", x, *grid, **attributes), floats)
        return _dequantize(w, x, _grid(w, x, scale, zero_point, x.dtype, axis, block), axis, block)
    if x.dtype is torch.float16:
        return Value(w.cast(x, torch.float32), x.like.float())
    type_number = None
    if packed is not None:
        packing, in_bytes = Packing(packed, bits, qmin < 0), stored
        stored = w.cached_constant(("unpacked", x.name), lambda: packing.unpack(in_bytes))
        is_odd = w.for_openvino and stored.shape[-1] % 2  # OpenVINO's products read wrong values of such 4-bit weights
        type_number = None if bits > 4 or is_odd else INT4 if packing.signed else UINT4
        x = Value(w.constant(stored, type_number), torch.empty_like(stored, device="meta"))
    grid = _grid(w, x, scale, zero_point, x.dtype, axis, block)
    if not w.floats:
        return _dequantize_constant(w, x, stored, grid, axis, block, type_number)
    q = stored
    values = w.cached_constant(("real", x.name), lambda: float_values(q, *grid, axis, block))
    return Value(w.constant(values), torch.empty_like(values, device="meta"))


def _dequantize_constant(
    w: Writer,
    x: Value,
    stored: Tensor,
    grid: tuple[Tensor, Tensor],
    axis: int | None,
    block: int | None,
    type_number: int | None,
) -> Value:
    """Write a DequantizeLinear of constant integers, per channel or in blocks that the runtime takes."""
    if axis is None or block is None:
        return _dequantize(w, x, grid, axis, block, type_number)
    channel_axis = _channel_axis(grid, x.shape)
    if channel_axis is not None:  # every runtime has per-channel grids
        step, zero = (t.movedim(channel_axis, 0).flatten(1)[:, 0].contiguous() for t in grid)
        return _dequantize(w, x, (step, zero), channel_axis, None, type_number)
    step, zero, block = _in_equal_blocks(grid, x.shape[axis], axis, block)
    if w.for_openvino and x.shape[axis] % block:
        whole = _in_whole_blocks(w, x.name, stored, axis, block, type_number)
        return _cut(w, _dequantize(w, whole, (step, zero), axis, block, type_number), axis, x.shape[axis])
    return _dequantize(w, x, (step, zero), axis, block, type_number)


def _channel_axis(grid: tuple[Tensor, Tensor], shape: Sequence[int]) -> int | None:
    """Axis along which a per-block grid of a tensor of this shape is in fact per-channel; None if there is none."""

    def is_per_channel(axis: int) -> bool:
        rows = (values.movedim(axis, 0).flatten(1) for values in grid)
        return all(bool((row == row[:, :1]).all()) for row in rows)

    sizes = enumerate(zip(grid[0].shape, shape, strict=True))
    return next((axis for axis, (own, size) in sizes if own == size and is_per_channel(axis)), None)


def _in_equal_blocks(grid: tuple[Tensor, Tensor], size: int, axis: int, block: int) -> tuple[Tensor, Tensor, int]:
    """Scale, zero point and block size for blocks that divide an axis of this size, as OpenVINO requires.

    Each block is cut into smaller ones with equal scales. Blocks stay as they are if they would be too small.
    """
    smaller = math.gcd(size, block)
    if smaller == block or smaller < _MIN_BLOCK:
        return *grid, block
    places = torch.arange(0, size, smaller, device="cpu") // block
    step, zero = (values.index_select(axis, places) for values in grid)
    return step, zero, smaller


def _in_whole_blocks(w: Writer, name: str, stored: Tensor, axis: int, block: int, type_number: int | None) -> Value:
    """Write integers with zeros after them along an axis, up to a multiple of the block size, as OpenVINO requires."""
    zeros = torch.zeros_like(stored.narrow(axis, 0, 1)).repeat_interleave(-stored.shape[axis] % block, axis)
    whole = w.cached_constant(("whole blocks", name, axis, block), lambda: torch.cat([stored, zeros], axis))
    return Value(w.constant(whole, type_number), torch.empty_like(whole, device="meta"))


def _cut(w: Writer, x: Value, axis: int, size: int) -> Value:
    """Write the first entries of a value along an axis."""
    return Value(w.cut(x, axis, 0, size), x.like.narrow(axis, 0, size))


def _dequantize(
    w: Writer,
    x: Value,
    grid: tuple[Tensor, Tensor],
    axis: int | None,
    block: int | None,
    type_number: int | None = None,
) -> Value:
    """Write a DequantizeLinear with a static grid; the zero point has ONNX's `type_number` if that is given."""
    step, zero = grid
    attributes = {"axis": axis, "block_size": block} if step.dim() else {}
    dequantized = w.emit("DequantizeLinear", x, step, w.constant(zero, type_number), **attributes)
    return Value(dequantized, torch.empty_like(x.like, dtype=torch.float32))


@writes("requantize")
def requantize(
    w: Writer,
    x: Value,
    *,
    from_scale: float,
    from_zero_point: int,
    scale: float,
    zero_point: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
) -> str:
    if w.floats:
        return x.name
    dequantized = w.emit("DequantizeLinear", x, *_grid(w, x, from_scale, from_zero_point, x.dtype, None, None))
    return _rounded(w, dequantized, *_grid(w, x, scale, zero_point, dtype, None, None), qmin, qmax)


def _grid(
    w: Writer, x: Value, scale: Any, zero_point: Any, dtype: torch.dtype, axis: int | None, block: int | None
) -> tuple[Tensor, Tensor]:
    """Scale and zero point of a static grid as constants of one shape.

    Args:
        w: writer of the model.
        x: value on the grid, or to quantize.
        scale: a number or a constant: 0-d, (C,) along `axis`, or per block.
        zero_point: a number, or a constant like `scale`.
        dtype: dtype of the integers.
        axis: axis with several scales, or None.
        block: number of entries along `axis` that share a scale, or None.
    """
    refuse(dtype not in _LIMITS, f"integers of {dtype}")
    (first, step), (second, zero) = _constant(w, scale), _constant(w, zero_point)
    refuse(bool((zero != zero.round()).any()), "its zero points lie between integers")
    refuse(axis is None and step.numel() > 1, "each of its rows has a separate scale")
    low, high = _LIMITS[dtype]
    refuse(bool(((zero < low) | (zero > high)).any()), "its zero point does not fit its dtype")
    shape: tuple[int, ...] = () if axis is None else tuple(step.shape)
    if axis is not None and block is not None:
        shape = tuple(step.shape[i] if i == axis % x.rank else size for i, size in enumerate(x.shape))

    def shaped(values: Tensor, to: torch.dtype) -> Tensor:
        return (values.reshape(()) if shape == () else values.expand(shape)).to(to).contiguous()

    key = first, second, shape
    step = w.cached_constant((*key, torch.float32), lambda: shaped(step, torch.float32))
    return step, w.cached_constant((*key, dtype), lambda: shaped(zero, dtype))


def _constant(w: Writer, value: Any) -> tuple[Any, Tensor]:
    """Cache key and value of a scale or zero point.

    Raises:
        NotInOnnx: it is computed at run time.
    """
    if not isinstance(value, Value):
        return value, torch.tensor(value, device="cpu")
    constant = w.constant_of(value.name)
    if constant is None:
        raise NotInOnnx("its scale is computed at run time")
    return value.name, constant.detach().cpu()
