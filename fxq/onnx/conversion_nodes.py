"""ONNX of conversions between floats and integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxq.onnx.dequantized import real_values
from fxq.onnx.onnx_objects import INT4, UINT4, NotInOnnx
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Operand, Value, Writer, refuse, writes
from fxq.quant.dynamic_grid import MIN_SCALE
from fxq.quant.packing import unpack

_LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
_WHOLE = "DynamicQuantizeLinear"
"""Measures one range, and puts its values onto the grid 0..255: the integers, their scale and their zero point."""


@writes("choose_scale")
def choose_scale(w: Writer, x: Value, *, steps: int, axis: int | None, symmetric: bool) -> str:
    if axis is None and not symmetric and steps == 255:
        return w.emit_several(_WHOLE, [x], 3)[1]
    below, above = _ends(w, x, axis)
    size = w.emit("Max", below, above) if symmetric else w.emit("Add", below, above)
    most = 2 * torch.finfo(torch.float32).max / steps  # of the longest range, whose size float32 does not hold
    return w.emit("Clip", w.emit("Div", size, w.number(steps, x)), w.number(MIN_SCALE, x), w.number(most, x))


@writes("choose_zero_point")
def choose_zero_point(w: Writer, x: Value, *, scale: Value, qmin: int, axis: int | None) -> str:
    whole = _dynamic_whole(w, x, scale)
    if whole is not None:
        zero = w.cast(whole[2], torch.float32)
    else:
        zero = w.emit("Round" if axis is None else "Ceil", w.emit("Div", _ends(w, x, axis)[0], scale))
    return w.emit("Add", zero, w.number(qmin, x)) if qmin else zero


def _ends(w: Writer, x: Value, axis: int | None) -> tuple[str, str]:
    """How far values reach below zero and above it, at least 0; of each row with an `axis`.

    Engines make one node of two that are alike.
    """
    axes = w.ints(range(0 if axis is None else axis % x.rank, x.rank))
    low, high = (w.emit(kind, x, axes, keepdims=int(axis is not None)) for kind in ("ReduceMin", "ReduceMax"))
    return w.emit("Relu", w.emit("Neg", low)), w.emit("Relu", high)


def _dynamic_whole(w: Writer, x: Value, scale: Any) -> tuple[str, ...] | None:
    """What the node makes that has measured a scale, and put the values onto its grid; None: another one measures."""
    node = w.made_by(scale.name) if isinstance(scale, Value) else None
    return node.makes if node is not None and node.kind == _WHOLE and node.reads == (x.name,) else None


def _computed_zero(w: Writer, scale: Value, zero_point: Any, dtype: torch.dtype) -> str:
    """A zero point beside a scale that is measured: of its shape, of the integers' type."""
    if isinstance(zero_point, Value):
        cast = w.made_by(zero_point.name)
        whole = w.made_by(cast.reads[0]) if cast is not None else None
        return cast.reads[0] if cast and whole and whole.kind == _WHOLE else w.cast(zero_point, dtype)
    if w.sizes is not None and scale.rank:
        return w.emit("Expand", torch.tensor(zero_point, dtype=dtype, device="cpu"), w.ints(scale.shape))
    key = "zero", zero_point, scale.shape, dtype
    return w.constant(w.kept(key, lambda: torch.full(scale.shape, zero_point, dtype=dtype, device="cpu")))


def _rows(w: Writer, x: Value, scale: Value, zero: str) -> tuple[tuple[Operand, Operand], dict[str, int]]:
    """Scale, zero point and attributes of a conversion with one scale for the value, or one for each row."""
    if scale.rank == 0 or x.rank == 1:
        return (scale, zero), {}
    if scale.shape == (*x.shape[:-1], 1) and not varies(x.shape[-1]):
        return (scale, zero), {"axis": -1, "block_size": x.shape[-1]}
    refuse(not w.portable or scale.shape[1:] != (1,) * (x.rank - 1), "its rows have several axes")
    parts = (w.reshaped(Value(name, scale.like), scale.shape[:1]) for name in (scale.name, zero))
    return (next(parts), next(parts)), {"axis": 0}


def _computed(w: Writer, scale: Any) -> bool:
    """Whether a scale is measured at run time."""
    return isinstance(scale, Value) and w.value_of(scale.name) is None


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
        whole = _dynamic_whole(w, x, scale)
        if whole is not None and dtype is torch.uint8:
            return whole[0]
        grid, attributes = _rows(w, x, scale, _computed_zero(w, scale, zero_point, dtype))
        return w.emit("QuantizeLinear", x, *grid, **attributes)
    step, zero = _grid(w, x, scale, zero_point, dtype, axis, block)
    if step.dim() == 0:
        read = x.name
        while read in w.clamps and _covers(w.clamps[read], step, zero, qmin, qmax):
            read = w.clamps[read][0]
        return _rounded(w, read, step, zero, qmin, qmax)
    refuse((qmin, qmax) != _LIMITS[dtype], "several grids that leave out integers")
    return w.emit("QuantizeLinear", x, step, zero, axis=axis, block_size=block)


def _rounded(w: Writer, read: str, step: Tensor, zero: Tensor, qmin: int, qmax: int) -> str:
    """Integers of a grid; a clamp in front keeps out those of their type that the grid does not have."""
    if (qmin, qmax) != _LIMITS[zero.dtype]:
        ends = (torch.tensor((q - int(zero)) * float(step), dtype=torch.float32, device="cpu") for q in (qmin, qmax))
        read = w.emit("Clip", read, *ends)
    return w.emit("QuantizeLinear", read, step, zero)


def _covers(clamp: tuple[str, float, float], step: Tensor, zero: Tensor, qmin: int, qmax: int) -> bool:
    """Whether both bounds of a clamp are rounded to the ends of a grid, so that without it all is rounded alike."""
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
) -> Value:
    stored = w.value_of(x.name)
    if stored is None:
        refuse(packed is not None, "its integers are computed, and two of them in a byte")
        if w.floats:
            return x
        if _computed(w, scale):
            grid, attributes = _rows(w, x, scale, _computed_zero(w, scale, zero_point, x.dtype))
            made = w.emit("DequantizeLinear", x, *grid, **attributes)
            return Value(made, torch.empty_like(x.like, dtype=torch.float32))
        return _real(w, x, _grid(w, x, scale, zero_point, x.dtype, axis, block), axis, block)
    if x.dtype is torch.float16:
        return Value(w.cast(x, torch.float32), x.like.float())
    kind = None
    if packed is not None:
        kind, row, halves = (INT4 if qmin < 0 else UINT4), packed, stored
        stored = w.kept(("unpacked", x.name), lambda: unpack(halves, row, kind == INT4))
        x = Value(w.constant(stored, kind), torch.empty_like(stored, device="meta"))
    step, zero = _grid(w, x, scale, zero_point, x.dtype, axis, block)
    if not w.floats:
        whole = _channels_of((step, zero)) if block is not None else None
        if whole is not None:  # which every runtime takes
            step, zero = (t.movedim(whole, 0).flatten(1)[:, 0].contiguous() for t in (step, zero))
            axis, block = whole, None
        return _real(w, x, (step, zero), axis, block, kind)
    q = stored
    real = w.kept(("real", x.name), lambda: real_values(q, step, zero, axis, block))
    return Value(w.constant(real), torch.empty_like(real, device="meta"))


def _channels_of(grid: tuple[Tensor, Tensor]) -> int | None:
    """The axis whose entries have one scale each, where blocks are as long as the weight; else None."""

    def alike(axis: int) -> bool:
        rows = (values.movedim(axis, 0).flatten(1) for values in grid)
        return all(bool((row == row[:, :1]).all()) for row in rows)

    return next((axis for axis in range(grid[0].dim()) if alike(axis)), None)


def _real(
    w: Writer, x: Value, grid: tuple[Tensor, Tensor], axis: int | None, block: int | None, kind: int | None = None
) -> Value:
    """The values of integers, which are of the type `kind`, or else of their own."""
    step, zero = grid
    given = {"axis": axis, "block_size": block} if step.dim() else {}
    made = w.emit("DequantizeLinear", x, step, w.constant(zero, kind), **given)
    return Value(made, torch.empty_like(x.like, dtype=torch.float32))


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
    real = w.emit("DequantizeLinear", x, *_grid(w, x, from_scale, from_zero_point, x.dtype, None, None))
    return _rounded(w, real, *_grid(w, x, scale, zero_point, dtype, None, None), qmin, qmax)


def _grid(
    w: Writer, x: Value, scale: Any, zero_point: Any, dtype: torch.dtype, axis: int | None, block: int | None
) -> tuple[Tensor, Tensor]:
    """The scale and the zero point of a grid as constants of one shape.

    Args:
        w: the model.
        x: what is on the grid, or is put onto it.
        scale: a number, or a constant: 0-d, (C,) along `axis`, or of blocks.
        zero_point: the same, or a number beside a scale of several.
        dtype: of the integers.
        axis: what has several scales.
        block: how many entries along it share one.
    """
    refuse(dtype not in _LIMITS, f"integers of {dtype}")
    (first, step), (second, zero) = _constant(w, scale), _constant(w, zero_point)
    refuse(axis is None and step.numel() > 1, "each row has a scale of its own")
    low, high = _LIMITS[dtype]
    refuse(bool(((zero < low) | (zero > high)).any()), "its zero point is no integer of its type")
    shape: tuple[int, ...] = () if axis is None else tuple(step.shape)
    if axis is not None and block is not None:
        shape = tuple(step.shape[i] if i == axis % x.rank else size for i, size in enumerate(x.shape))

    def shaped(values: Tensor, to: torch.dtype) -> Tensor:
        return (values.reshape(()) if shape == () else values.expand(shape)).to(to).contiguous()

    key = first, second, shape
    step = w.kept((*key, torch.float32), lambda: shaped(step, torch.float32))
    return step, w.kept((*key, dtype), lambda: shaped(zero, dtype))


def _constant(w: Writer, value: Any) -> tuple[Any, Tensor]:
    """A scale or zero point: by what it is known, and its value."""
    if not isinstance(value, Value):
        return value, torch.tensor(value, device="cpu")
    found = w.value_of(value.name)
    if found is None:
        raise NotInOnnx("its scale is computed at run time")
    return value.name, found.detach().cpu()
