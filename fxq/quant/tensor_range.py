"""Smallest and largest values of a tensor: of all of it, of each channel, of each block."""

from __future__ import annotations

import torch
from torch import Tensor


def range_of(x: Tensor, axis: int | None = None, block: int | None = None) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of `x`, which is not empty.

    Two passes over it, as `torch.aminmax` is slower than both, for rows most of all.

    Args:
        x: any shape, floating point. NaN anywhere makes the range NaN.
        axis: None for one range of all of it, 0-d; or the axis of the channels, for one each, (C,).
        block: for one range of so many channels, with all that they have along the axes behind the first two, the
            kernel: of the shape that `QParams.scale` has.
    """
    if axis is None:
        values = flat(x)
        return values.amin(), values.amax()
    if block is None:
        rows = x.movedim(axis, 0).flatten(1) if x.dim() > 1 else x[:, None]
        return rows.amin(1), rows.amax(1)
    parts, inside = x.split(block, axis), (axis, *range(2, x.dim()))
    return (
        torch.cat([part.amin(inside, keepdim=True) for part in parts], axis),
        torch.cat([part.amax(inside, keepdim=True) for part in parts], axis),
    )


def flat(x: Tensor) -> Tensor:
    """The elements of `x` in one dimension, in the order of memory: without a copy if `x` is dense in any layout.

    Reductions are faster on this than on a channels-last tensor as it stands.
    """
    if x.is_contiguous():
        return x.view(-1)
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return x.permute(order).reshape(-1)
