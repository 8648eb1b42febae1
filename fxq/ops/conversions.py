"""Rows of the op table: conversions between floats and integers.

They hold all there is to know of a grid (see `fxq/graph/grid.py`). Scale and zero point are numbers, one for the whole
tensor, or nodes: with `axis`, tensors (C,), scale float32 and zero point int32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fxq.quant.qparams  # noqa: F401  (registers fxq::quantize and fxq::dequantize)
from fxq.ops.registry import row
from fxq.ops.table import float_only, spell


@row(
    torch.ops.fxq.quantize.default,
    spell(torch.ops.fxq.quantize.channel, "x scale zero_point axis qmin qmax dtype"),
    quant=float_only("x"),
)
def quantize(
    x: Tensor,
    *,
    scale: Any,
    zero_point: Any,
    qmin: int = 0,
    qmax: int = 255,
    dtype: torch.dtype = torch.uint8,
    axis: int | None = None,
) -> Tensor:
    """x float32 -> `dtype`, on one grid, or with one scale and zero point per entry of `axis`."""
    if axis is None:
        return torch.ops.fxq.quantize.default(x, scale, zero_point, qmin, qmax, dtype)
    return torch.ops.fxq.quantize.channel(x, scale, zero_point, axis, qmin, qmax, dtype)


@row(
    torch.ops.fxq.dequantize.default,
    spell(torch.ops.fxq.dequantize.channel, "x scale zero_point axis"),
    quant=float_only("x"),
)
def dequantize(
    x: Tensor, *, scale: Any, zero_point: Any, qmin: int = 0, qmax: int = 255, axis: int | None = None
) -> Tensor:
    """x integer -> float32: the inverse of `quantize`. Its value does not depend on `qmin` and `qmax`."""
    if axis is None:
        return torch.ops.fxq.dequantize.default(x, scale, zero_point)
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
