"""Rounding of a block of columns of a weight, one after the other, and the grids of such a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxq.backends.loops.code.compiler import loops_for
from fxq.backends.loops.range_search import search_columns
from fxq.quant.least_error import least_range
from fxq.quant.qparams import choose_qparams, scale_dtype
from fxq.quant.spec import TensorSpec

_MODULE = "rounding_loops"
"""Module of the compiled loops."""
_ZOOMS = ((-0.6, 0.0, 5),)
"""Passes of the search for the range of a block. Later columns compensate, so that a finer search gains little."""


def block_grid(values: Tensor, weights: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each row of a block, of least weighted squared error.

    Args:
        values: weights of the block by column, float32, (G, n, R).
        weights: weight of each column in the error, float32, (G, n).
        spec: spec of the grid.

    Returns:
        Scales, float32, as they are stored, and zero points, float32, (G, R).
    """
    values, weights = values.contiguous(), weights.contiguous()
    loops = loops_for(_MODULE, values.numel(), values, weights)
    if loops is None:
        rows, by_row = values.mT, weights[:, None].expand_as(values.mT)
        ends = least_range(rows, rows.amin(2), rows.amax(2), spec, 2.0, by_row, _ZOOMS)
    else:
        low, high = values.new_empty(2, *values[:, 0].shape)
        ends = low, high
        for parts in zip(values, weights, *ends, strict=True):
            search_columns(loops, *parts[:2], spec, _ZOOMS, 0.0, *parts[2:])
    grid = choose_qparams(*ends, spec)
    return grid.scale.to(scale_dtype(grid.scale)).float(), grid.zero_point.float()


def round_block(
    target: Tensor, real: Tensor, scale: Tensor, low: Tensor, high: Tensor, ahead: Tensor
) -> tuple[Tensor, Tensor]:
    """Round the columns of a block one after the other; each compensates the errors of those before it.

    Args:
        target: float weights by column, float32, (G, n, R).
        real: these weights, moved to compensate the errors of earlier blocks and of the inputs.
        scale: scales, float32, (G, n, R).
        low: smallest integers minus zero points, float32, (G, n, R).
        high: largest integers minus zero points, float32, (G, n, R).
        ahead: how much a column (second axis) compensates the error of an earlier one, float32, (G, n, n).

    Returns:
        Integers minus zero points, and `target` minus what they represent, float32, (G, n, R).
    """
    tensors = [values.contiguous() for values in (target, real, scale, low, high, ahead)]
    steps, errors = torch.empty_like(tensors[0]), torch.empty_like(tensors[0])
    loops = loops_for(_MODULE, target.numel(), *tensors)
    if loops is None:
        _round_columns(tensors, steps, errors)
        return steps, errors
    for parts in zip(*tensors, steps, errors, strict=True):
        loops.round_columns(*(part.data_ptr() for part in parts), *target.shape[1:])
    return steps, errors


def _round_columns(tensors: Sequence[Tensor], steps: Tensor, errors: Tensor) -> None:
    """`round_block` with ops of PyTorch, for its arguments; writes `steps` and `errors`."""
    target, real, scale, low, high, ahead = tensors
    for i in range(real.shape[1]):
        column = slice(i, i + 1)
        wanted = torch.baddbmm(real[:, column], ahead[:, column, :i], errors[:, :i]) if i else real[:, column]
        torch.div(wanted, scale[:, column], out=steps[:, column]).round_().clamp_(low[:, column], high[:, column])
        torch.addcmul(target[:, column], steps[:, column], scale[:, column], value=-1, out=errors[:, column])
