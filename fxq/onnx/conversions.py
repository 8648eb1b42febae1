"""ONNX of conversions between floats and integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxq.onnx.writer import Value, Writer, refuse, writes

_LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


def _constant(w: Writer, value: Any, dtype: torch.dtype) -> Tensor:
    """A scale or zero point as a constant of this type."""
    if isinstance(value, Value):
        found = w.value_of(value.name)
        refuse(found is None, "its scale is measured at run time")
        value = found
    key = (value if isinstance(value, (int, float)) else id(value), dtype)
    return w.kept(key, lambda: torch.as_tensor(value, device="cpu").to(dtype))


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
    refuse(dtype not in _LIMITS, f"integers of {dtype}")
    refuse(block is not None, "its blocks have scales of their own")
    step, zero = _constant(w, scale, torch.float32), _constant(w, zero_point, dtype)
    read = x.name
    while step.dim() == 0 and read in w.clamps and _covers(w.clamps[read], float(step), int(zero), qmin, qmax):
        read = w.clamps[read][0]
    if (qmin, qmax) == _LIMITS[dtype]:
        return w.emit("QuantizeLinear", read, step, zero, axis=axis)
    refuse(axis is not None, "a grid for each channel that leaves out integers")
    low, high = ((q - int(zero)) * float(step) for q in (qmin, qmax))
    limits = (torch.tensor(limit, device="cpu") for limit in (low, high))
    return w.emit("QuantizeLinear", w.emit("Clip", read, *limits), step, zero)


def _covers(clamp: tuple[str, float, float], scale: float, zero: int, qmin: int, qmax: int) -> bool:
    """Whether a grid ends within the bounds of a clamp, so that to round to it clamps as much."""
    _, low, high = clamp
    return low / scale + zero <= qmin + 0.5 and high / scale + zero >= qmax - 0.5


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
) -> str:
    stored = w.value_of(x.name)
    if w.floats and stored is None:
        return x.name
    refuse(packed is not None, "two integers stand in a byte")
    refuse(block is not None, "its blocks have scales of their own")
    refuse(x.dtype not in _LIMITS, f"integers of {x.dtype}")
    step, zero = _constant(w, scale, torch.float32), _constant(w, zero_point, x.dtype)
    if step.dim() == 1 and zero.dim() == 0:
        zero = w.kept(("like", id(step), x.dtype), lambda: zero.expand_as(step).contiguous())
    if w.floats and stored is not None:
        shape = [1] * stored.dim()
        if step.dim() == 1 and axis is not None:
            shape[axis] = -1
        real = w.kept(("real", x.name), lambda: (stored.float() - zero.reshape(shape)) * step.reshape(shape))
        return w.constant(real)
    return w.emit("DequantizeLinear", x, step, zero, axis=axis if step.dim() == 1 else None)


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
    real = dequantize(
        w, x, scale=from_scale, zero_point=from_zero_point, qmin=0, qmax=255, axis=None, block=None, packed=None
    )
    return quantize(
        w, Value(real, x.like.float()), scale=scale, zero_point=zero_point, qmin=qmin, qmax=qmax, dtype=dtype,
        axis=None, block=None,
    )  # fmt: skip
