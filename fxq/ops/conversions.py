"""Rows of the op table: conversions between floats and integers, and grids that are measured.

They hold all there is to know of a grid (see `fxq/graph/grid.py`). Scale and zero point are numbers, one for the whole
tensor, or tensors, float32 and whole numbers, which are constants of the graph or computed in it: 0-d for the tensor;
(..., 1), one for each row; with `axis`, (C,), one for each of its entries; with `block` besides, of as many axes as x,
where `axis` has an entry for each so many of x. A zero point that is a number goes with scales of any shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fxq.quant.qparams  # noqa: F401  (registers fxq::quantize and fxq::dequantize)
from fxq.ops.registry import row
from fxq.ops.table import spell
from fxq.ops.traits import float_only
from fxq.quant.dynamic_grid import dynamic_range, dynamic_scale, dynamic_zero_point
from fxq.quant.packing import unpack


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
    """x float32 -> `dtype`, on one grid or several."""
    if not isinstance(scale, Tensor):
        return torch.ops.fxq.quantize.default(x, scale, zero_point, qmin, qmax, dtype)
    zero_point = torch.as_tensor(zero_point, dtype=torch.int32, device=x.device)
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
) -> Tensor:
    """x integer -> float32: the inverse of `quantize`. Its value does not depend on `qmin` and `qmax`.

    With `packed`, the shape of an entry of its first axis, x holds integers of four bits, two to a byte (see
    `fxq/quant/packing.py`), signed where `qmin` is below zero. A weight in float16 has the scale 1.
    """
    if packed is not None:
        x = unpack(x, packed, qmin < 0)
    if not isinstance(scale, Tensor):
        return torch.ops.fxq.dequantize.default(x, scale, zero_point)
    zero_point = torch.as_tensor(zero_point, dtype=torch.int32, device=x.device)
    return torch.ops.fxq.dequantize.tensor(x, scale, zero_point, axis, block)


@row(traits=float_only("x"))
def choose_scale(x: Tensor, *, steps: int, axis: int | None = None, symmetric: bool = True) -> Tensor:
    """The scale of a grid, from the values themselves.

    Args:
        x: float32.
        steps: the largest magnitude of a value is that many steps; if not `symmetric`, the range of them and zero is.
        axis: None: one scale, 0-d. Else a scale for each row: the values from this axis, counted from the end, on; the
            result has the shape of x with ones there.
        symmetric: whether the grid has as many integers on either side of zero.
    """
    return dynamic_scale(*dynamic_range(x, axis), steps, symmetric)


@row(traits=float_only("x"))
def choose_zero_point(x: Tensor, *, scale: Tensor, qmin: int = 0, axis: int | None = None) -> Tensor:
    """The integer for float zero with which the smallest of the values and zero is `qmin`, in float32.

    Of rows it is rounded up, so that nothing lies below `qmin`; of the whole tensor it is the nearest one.

    Args:
        x: float32.
        scale: as `choose_scale` gives it, not symmetric.
        qmin: smallest integer of the grid.
        axis: as there.
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
    """x integer on one grid -> integer on another: quantize(dequantize(x))."""
    return torch.ops.fxq.quantize.default(
        torch.ops.fxq.dequantize.default(x, from_scale, from_zero_point), scale, zero_point, qmin, qmax, dtype
    )
