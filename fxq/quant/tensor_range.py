"""Smallest and largest values of a tensor, per tensor, channel or block."""

from __future__ import annotations

import torch
from torch import Tensor


def range_of(x: Tensor, axis: int | None = None, block: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of `x`: 0-d, (C,), or per block the shape of `QParams.scale`.

    Takes two reductions, since `torch.aminmax` is slower than both, most of all for rows.

    Args:
        x: floating point, any shape, not empty. NaN makes its range NaN.
        axis: the channel axis, or the axis that is cut into blocks; None: one range.
        block: number of entries along `axis` in a block, which also has all entries along the axes after the first two
            (the kernel).
    """
    if axis is None:
        values = flat(x)
        return values.amin(), values.amax()
    if block is None:
        rows = x.movedim(axis, 0).flatten(1) if x.dim() > 1 else x[:, None]
        return rows.amin(1), rows.amax(1)
    if x.shape[axis] % block:
        blocks, axes = x.split(block, axis), (axis, *range(2, x.dim()))
        return (
            torch.cat([values.amin(axes, keepdim=True) for values in blocks], axis),
            torch.cat([values.amax(axes, keepdim=True) for values in blocks], axis),
        )
    axis %= x.dim()
    whole = x.unflatten(axis, (-1, block))  # one reduction takes less time than one for each block
    axes = (axis + 1, *range(3, whole.dim()))
    return whole.amin(axes, keepdim=True).squeeze(axis + 1), whole.amax(axes, keepdim=True).squeeze(axis + 1)


def flat(x: Tensor) -> Tensor:
    """Return the elements of `x` in one dimension, in memory order; a view if `x` is dense, in any layout.

    Reductions of it are faster than of a channels-last tensor.
    """
    if x.is_contiguous():
        return x.view(-1)
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return x.permute(order).reshape(-1)
