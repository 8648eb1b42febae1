"""Rows of the op table: conversions between floats and integers."""

from __future__ import annotations

import torch
from torch import Tensor

import fxq.quant.qparams  # noqa: F401  (registers fxq::quantize and fxq::dequantize)
from fxq.ops.registry import row
from fxq.ops.table import float_only


@row(torch.ops.fxq.quantize.default, quant=float_only("x"))
def quantize(
    x: Tensor, *, scale: float, zero_point: int, qmin: int = 0, qmax: int = 255, dtype: torch.dtype = torch.uint8
) -> Tensor:
    """x float32 -> `dtype`, per tensor (see `fxq/quant/qparams.py`)."""
    return torch.ops.fxq.quantize.default(x, scale, zero_point, qmin, qmax, dtype)


@row(torch.ops.fxq.dequantize.default, quant=float_only("x"))
def dequantize(x: Tensor, *, scale: float, zero_point: int) -> Tensor:
    """x integer -> float32, per tensor."""
    return torch.ops.fxq.dequantize.default(x, scale, zero_point)


@row(torch.ops.fxq.dequantize.channel, quant=float_only("x"))
def dequantize_channel(x: Tensor, scale: Tensor, zero_point: Tensor, *, axis: int) -> Tensor:
    """x integer -> float32, one scale per entry of `axis`."""
    return torch.ops.fxq.dequantize.channel(x, scale, zero_point, axis)


@row(quant=float_only("x"))
def requantize(
    x: Tensor,
    *,
    from_scale: float,
    from_zero_point: int,
    scale: float,
    zero_point: int,
    qmin: int = 0,
    qmax: int = 255,
    dtype: torch.dtype = torch.uint8,
) -> Tensor:
    """x integer on one grid -> integer on another: quantize(dequantize(x))."""
    return torch.ops.fxq.quantize.default(
        torch.ops.fxq.dequantize.default(x, from_scale, from_zero_point), scale, zero_point, qmin, qmax, dtype
    )
