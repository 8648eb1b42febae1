"""Rows of the op table: conversions between floats and integers, and the computation of dynamic grids.

Their options define the grid (see `fxq/graph/grid.py`). Scale and zero point are either numbers, for a per-tensor grid,
or tensors (float32; whole numbers), which are constants of the graph or computed in it. Shapes of the tensors:

    per-tensor     0-d
    per-row        (..., 1), one entry per row
    per-channel    (C,), one entry per index of `axis`
    per-block      as many axes as x; along `axis`, one entry for each `block` indices of x

A zero point that is a number may be combined with scales of any shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxq.ops.registry import row
from fxq.ops.table import spell
from fxq.ops.traits import float_only
from fxq.quant.dynamic_grid import dynamic_range, dynamic_scale, dynamic_zero_point
from fxq.quant.packing import Packing
from fxq.quant.qparams import as_zero_point


@row(
    torch.ops.fxq.quantize.default,
    spell(torch.ops.fxq.quantize.tensor, "x scale zero_point axis block qmin qmax dtype"),
    traits=float_only("x"),
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
    block: int | None = None,
) -> Tensor:
    """Quantize x, float32, to `dtype`: clamp(round(x / scale) + zero_point, qmin, qmax)."""
    if not isinstance(scale, Tensor):
        return torch.ops.fxq.quantize.default(x, scale, zero_point, qmin, qmax, dtype)
    zero_point = as_zero_point(zero_point, x.device)
    return torch.ops.fxq.quantize.tensor(x, scale, zero_point, axis, block, qmin, qmax, dtype)


@row(
    torch.ops.fxq.dequantize.default,
    spell(torch.ops.fxq.dequantize.tensor, "x scale zero_point axis block"),
    traits=float_only("x"),
)
def dequantize(
    x: Tensor,
    *,
    scale: Any,
    zero_point: Any,
    qmin: int = 0,
    qmax: int = 255,
    axis: int | None = None,
    block: int | None = None,
    packed: tuple[int, ...] | None = None,
    bits: int = 4,
) -> Tensor:
    """Dequantize x, integer, to float32: (x - zero_point) * scale. `qmin` and `qmax` do not affect the value.

    With `packed`, the shape of one entry of the first axis, x holds integers of `bits` bits that are packed into bytes
    (see `fxq/quant/packing.py`), signed if `qmin` is negative. A float16 weight has scale 1.
    """
    if packed is not None:
        x = Packing(packed, bits, qmin < 0).unpack(x)
    if not isinstance(scale, Tensor):
        return torch.ops.fxq.dequantize.default(x, scale, zero_point)
    zero_point = as_zero_point(zero_point, x.device)
    return torch.ops.fxq.dequantize.tensor(x, scale, zero_point, axis, block)


@row(traits=float_only("x"))
def choose_scale(
    x: Tensor, *, steps: int, axis: int | None = None, symmetric: bool = True, block: int | None = None
) -> Tensor:
    """Scale of a dynamic grid, computed from the values.

    Args:
        x: float32, any shape.
        steps: number of steps that the largest magnitude covers; if not `symmetric`, that the range of the values,
            including zero, covers.
        axis: None for one 0-d scale. Else the first axis of a row, counted from the end (negative), for a scale per
            row; the result has the shape of x with 1 from this axis on.
        symmetric: whether the grid has as many integers on either side of zero.
        block: number of values of a block of the last axis, for a scale per block instead of per row.
    """
    return dynamic_scale(*dynamic_range(x, axis, block), steps, symmetric)


@row(traits=float_only("x"))
def choose_zero_point(x: Tensor, *, scale: Tensor, qmin: int = 0, axis: int | None = None) -> Tensor:
    """Zero point of a dynamic grid, float32: the smallest of the values and zero becomes `qmin`.

    Per row, it is rounded up, so that no value is below `qmin`; for the whole tensor, it is rounded to nearest.

    Args:
        x: float32, any shape.
        scale: scale by `choose_scale` with `symmetric=False`.
        qmin: smallest integer of the grid.
        axis: as for `choose_scale`.
    """
    return dynamic_zero_point(dynamic_range(x, axis)[0], scale, qmin, nearest=axis is None)


@row(traits=float_only("x"))
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
    """Convert x, integer, from one grid to another: quantize(dequantize(x))."""
    return torch.ops.fxq.quantize.default(
        torch.ops.fxq.dequantize.default(x, from_scale, from_zero_point), scale, zero_point, qmin, qmax, dtype
    )
