"""The range whose grid has the smallest error on values at hand, for many rows at once: each a channel, or a block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.quant.qparams import choose_qparams
from fxq.quant.spec import TensorSpec

_CHUNK = 131072  # elements; the intermediate results of one chunk stay in the L2 cache

_ZOOMS = ((-5.0, 0.0, 31), (-0.1, 0.1, 9), (-0.02, 0.02, 5))
"""Passes of the search, a wide one and then narrow ones: from and to (in octaves), in how many candidates."""


def rows_of(x: Tensor, axis: int | None, block: int | None) -> Tensor:
    """The values of a tensor by what has a scale of its own.

    Args:
        x: any shape.
        axis: the channel axis, or the one that is cut into blocks; None: one scale.
        block: how many entries along `axis` a block has, each with all that lies along the axes behind the first two.

    Returns:
        The shape of the scales and one axis more, the values that share a scale: (n,), (C, n), or for blocks (..., n),
        with zeros behind what is left over at the end.

    Example:
        >>> rows_of(torch.arange(6.0).view(2, 3), 1, 2).squeeze().tolist()
        [[[0.0, 1.0], [2.0, 0.0]], [[3.0, 4.0], [5.0, 0.0]]]
    """
    if axis is None:
        return x.flatten()
    if block is None:
        return x.movedim(axis, 0).flatten(1) if x.dim() > 1 else x[:, None]
    missing = -x.shape[axis] % block
    whole = F.pad(x.movedim(axis, -1), (0, missing)).unflatten(-1, (-1, block))  # (other, kernel..., blocks, block)
    rows = whole.movedim(-2, 1).flatten(2) if axis % x.dim() else whole.movedim(-2, 0).flatten(2)
    return rows.view(*rows.shape[:2], *[1] * (x.dim() - 2), -1)


def least_range(values: Tensor, low: Tensor, high: Tensor, spec: TensorSpec, power: float) -> tuple[Tensor, Tensor]:
    """The range of each row whose grid has the smallest summed error, of magnitudes to the `power`.

    The error is that of quantize then dequantize with the grid that `choose_qparams` gives for the range, clipped
    values included. Both ends shrink together, and where the grid is not symmetric each end alone, too.

    Args:
        values: float32, the shape of `low` and one axis more.
        low: smallest value of each row, float32.
        high: largest value of each row, same shape.
        spec: the grid that the range is for.
        power: what magnitudes of errors are raised to.

    Returns:
        (low, high), each like `low`, within the range given; that one where nothing is better.

    Example:
        >>> x = torch.cat([torch.linspace(-1, 1, 99), torch.tensor([3.0])])
        >>> ends = least_range(x, x.min(), x.max(), TensorSpec(bits=4, signed=True, symmetric=True), 2.0)
        >>> float(ends[1]) < 2.5
        True

    Source: Banner et al. 2019, section 2; Choukroun et al. 2019 (least squares); Frantar et al. 2022, whose code takes
    a power of 2.4 for weights.
    """
    rows = values.reshape(low.numel(), -1)
    ends = torch.stack([low.flatten().clamp(max=0.0), high.flatten().clamp(min=0.0)], 1)
    each = max(_CHUNK // max(rows.shape[1], 1), 1)
    pairs = zip(rows.split(each), ends.split(each), strict=True)
    found = torch.cat([_search(chunk, part, spec, power) for chunk, part in pairs])
    least, most = found.unbind(1)
    return least.reshape(low.shape), most.reshape(high.shape)


def _search(rows: Tensor, ends: Tensor, spec: TensorSpec, power: float) -> Tensor:
    """The best ends (R, 2) for rows (R, n) whose values lie between the `ends`, (R, 2)."""
    together, each = torch.ones(2), torch.eye(2)
    directions = [together] if spec.symmetric else [together, each[1], each[0]]
    best = torch.ones_like(ends)
    least = _error(rows, ends, spec, power)
    for first, last, points in _ZOOMS:
        steps = torch.linspace(first, last, points)
        for direction in directions:
            # The wide pass starts at the end of the data, the narrow ones at the best end so far.
            origin = torch.where(direction > 0, 1.0, best) if last == 0 else best
            for step in steps:
                tried = (origin * torch.exp2(step * direction)).clamp(max=1.0)
                error = _error(rows, tried * ends, spec, power)
                better = error < least
                least = torch.where(better, error, least)
                best = torch.where(better[:, None], tried, best)
    return best * ends


def _error(rows: Tensor, ends: Tensor, spec: TensorSpec, power: float) -> Tensor:
    """Summed error of each row (R, n) on the grid for its ends (R, 2): (R,)."""
    grid = choose_qparams(ends[:, 0], ends[:, 1], spec, axis=0)
    scale, zero_point = grid.scale[:, None], grid.zero_point[:, None]
    steps = (rows / scale).round_()
    apart = torch.minimum(torch.maximum(steps, grid.qmin - zero_point), grid.qmax - zero_point).mul_(scale).sub_(rows)
    return apart.square_().sum(1) if power == 2.0 else apart.abs_().pow_(power).sum(1)
