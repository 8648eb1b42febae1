"""Stored grids: those that a quantized file gives its weights, carried by the parameters that are read from it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.names import in_short
from fxq.errors import warn
from fxq.quant.qparams import QParams, dequantize, quantize
from fxq.quant.spec import TensorSpec

_TOLERANCE = 1e-3
"""How far from its grid a weight may lie, in steps, besides one rounding of its dtype, or to float16."""


class StoredGridParameter(nn.Parameter):
    """Float parameter with the grid of its file, which copies and pickles of it have, too.

    Attributes:
        grid: the grid. It stays when the values are changed, see `lies_on_grid`.
    """

    grid: QParams

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredGridParameter:
        copied: StoredGridParameter = super().__deepcopy__(memo)
        copied.grid = self.grid
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.data, self.requires_grad, self.grid)


PLAIN_TENSORS = Tensor, nn.Parameter, StoredGridParameter
"""Types of tensors that are their values in memory, and compute as PyTorch's own; other subclasses may not."""


def _rebuilt(data: Tensor, requires_grad: bool, grid: QParams) -> nn.Parameter:
    parameter = nn.Parameter(data, requires_grad)
    store_grid(parameter, grid)
    return parameter


def store_grid(parameter: Tensor, grid: QParams) -> None:
    """Give a float parameter the grid that its values lie on. It stays one object, which tied weights share."""
    parameter.__class__ = StoredGridParameter
    vars(parameter)["grid"] = grid


def stored_grid(tensor: Tensor | None) -> QParams | None:
    """Return the grid that the file of a weight gave it; None if it has none."""
    return tensor.grid if isinstance(tensor, StoredGridParameter) else None


def grid_within(spec: TensorSpec, axis: int | None, grid: QParams) -> QParams | None:
    """Return a grid with the integers of a spec that has the same floats; None if the spec has no such grid.

    Args:
        spec: the spec of a weight.
        axis: channel axis of the spec's scales, or the axis that is cut into blocks.
        grid: the grid; signed integers become unsigned ones, and the reverse, where the spec has those.
    """
    if grid.bits > spec.bits or grid.block != spec.block or grid.axis not in (axis, None):
        return None
    if grid.dtype is not spec.dtype:
        shift = 2 ** (grid.bits - 1) * (-1 if spec.signed else 1)
        qmin, qmax = grid.qmin + shift, grid.qmax + shift
        grid = replace(grid, zero_point=grid.zero_point + shift, qmin=qmin, qmax=qmax, dtype=spec.dtype)
    centered = not spec.symmetric or bool((grid.zero_point == (spec.qmin + spec.qmax + 1) // 2).all())
    return grid if centered else None


def lies_on_grid(weight: Tensor, grid: QParams) -> bool:
    """Whether all values of a weight are on a grid, up to rounding. Those of a weight that was trained are not.

    One rounding to float16 is allowed in float32, too, since the model may be converted from a float16 file.
    """
    values = weight.detach().float()
    eps = max(torch.finfo(dtype).eps for dtype in (weight.dtype, torch.float16))
    integers = quantize(values, grid)
    steps = dequantize(torch.ones_like(integers), replace(grid, zero_point=torch.zeros_like(grid.zero_point)))
    bounds = steps.abs_().mul_(_TOLERANCE).add_(values.abs(), alpha=eps)
    return bool((dequantize(integers, grid).sub_(values).abs_() <= bounds).all())


def warn_off_grid(weights: Collection[str], consequence: str) -> None:
    """Warn that weights were changed since they were read, if there are any.

    Args:
        weights: their names. A weight with several readers may be among them more than once.
        consequence: sentence about what happens to them.
    """
    if weights:
        names = in_short([*dict.fromkeys(weights)])
        warn(f"weights that were changed are no longer on the grids of their file: {names}. {consequence}")
