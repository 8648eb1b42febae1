"""Clipping range with the smallest error, computed from the values, for many channels or blocks at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.quant.qparams import scale_and_zero_point
from fxq.quant.spec import TensorSpec

_CHUNK = 131072  # elements; the intermediate results of one chunk stay in the L2 cache

Zooms = Sequence[tuple[float, float, int]]
ZOOMS: Zooms = ((-5.0, 0.0, 31), (-0.1, 0.1, 9), (-0.02, 0.02, 5))
"""Passes of the search, from coarse to fine: first and last factor (in octaves), number of candidates."""
FITS = 3
"""Number of times that scales are fitted to the integers."""
MAX_QUICK_VALUES = 256
"""Number of values that share a scale, up to which `QUICK_ZOOMS` suffice."""
QUICK_ZOOMS: Zooms = ((-0.8, 0.0, 9), (-0.06, 0.06, 3))
"""Passes for blocks of some tens of values, whose best range is not much smaller than that of the values."""


def rows_of(x: Tensor, axis: int | None, block: int | None) -> Tensor:
    """Return the values of a tensor in rows that share a scale.

    Args:
        x: any shape.
        axis: the channel axis, or the axis that is cut into blocks; None: one scale.
        block: number of entries along `axis` in a block, which also has all entries along the axes after the first two.

    Returns:
        (n,), (C, n), or per block the shape of `QParams.scale` and one axis more, (..., n); the last block is padded
        with zeros.

    Example:
        >>> rows_of(torch.arange(6.0).view(2, 3), 1, 2).squeeze().tolist()
        [[[0.0, 1.0], [2.0, 0.0]], [[3.0, 4.0], [5.0, 0.0]]]
    """
    if axis is None:
        return x.flatten()
    if block is None:
        return x.movedim(axis, 0).flatten(1) if x.dim() > 1 else x[:, None]
    padding = -x.shape[axis] % block
    blocks = F.pad(x.movedim(axis, -1), (0, padding)).unflatten(-1, (-1, block))  # (other, kernel..., blocks, block)
    rows = blocks.movedim(-2, 1).flatten(2) if axis % x.dim() else blocks.movedim(-2, 0).flatten(2)
    return rows.view(*rows.shape[:2], *[1] * (x.dim() - 2), -1)


def least_range(
    values: Tensor,
    low: Tensor,
    high: Tensor,
    spec: TensorSpec,
    power: float,
    weights: Tensor | None = None,
    zooms: Zooms = ZOOMS,
    emphasis: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return for each row the range whose grid has the smallest sum of abs(error) ** power.

    The error is that of quantize and dequantize with the grid that `choose_qparams` gives for the range, clipped values
    included. The two ends shrink together; if the grid is affine, each end also shrinks alone. With a power of 2, the
    scale is then fitted to the integers.

    Args:
        values: float32, the shape of `low` and one axis more, along which values share a scale.
        low: smallest value of each row, float32.
        high: largest value of each row, same shape.
        spec: spec of the grid.
        power: exponent of the error.
        weights: weights of the values in the sum, float32, shape of `values`; None: all equal.
        zooms: passes of the search, from coarse to fine: first and last factor in octaves, number of candidates.
        emphasis: how much more the errors of large values count: each is multiplied by 1 + emphasis * x**2 / m, with
            the value x and the mean m of the squares in its row.

    Returns:
        (low, high), float32, same shape as `low`; the ranges of the arguments if none is better.

    Example:
        >>> x = torch.cat([torch.linspace(-1, 1, 99), torch.tensor([3.0])])
        >>> ends = least_range(x, x.min(), x.max(), TensorSpec(bits=4, signed=True, symmetric=True), 2.0)
        >>> float(ends[1]) < 2.5
        True

    Source: Banner et al. 2019, section 2; Choukroun et al. 2019 (least squares); Frantar et al. 2022, whose code takes
    a power of 2.4 for weights. An emphasis of 4 is that of ik_llama.cpp, which has no paper: its types for weights have
    the factors m / 4 + x**2 where no importance matrix is given.
    """
    rows = values.reshape(low.numel(), -1)
    ends = torch.stack([low.flatten().clamp(max=0.0), high.flatten().clamp(min=0.0)], 1)
    rows_per_chunk = max(_CHUNK // max(rows.shape[1], 1), 1)
    chunks = [slice(i, i + rows_per_chunk) for i in range(0, len(rows), rows_per_chunk)]
    of_rows = None if weights is None else weights.reshape(rows.shape)

    def best_ends_at(at: slice) -> Tensor:
        factors = _emphasized(rows[at], None if of_rows is None else of_rows[at], emphasis)
        return _search(rows[at], ends[at], spec, power, factors, zooms)

    best_ends = torch.cat([best_ends_at(at) for at in chunks])
    best_low, best_high = best_ends.unbind(1)
    return best_low.reshape(low.shape), best_high.reshape(high.shape)


def _emphasized(rows: Tensor, weights: Tensor | None, emphasis: float) -> Tensor | None:
    """Weights (R, n) of the values in the error, with the emphasis of large ones; None: all equal."""
    if not emphasis:
        return weights
    squares = rows.square()
    mean = squares.mean(1, keepdim=True)
    is_normal = (mean >= torch.finfo(torch.float32).tiny) & mean.isfinite()
    factors = torch.where(is_normal, 1 + emphasis * (squares / mean), 1.0)
    return factors if weights is None else weights * factors


def _search(rows: Tensor, ends: Tensor, spec: TensorSpec, power: float, weights: Tensor | None, zooms: Zooms) -> Tensor:
    """Return the best ends (R, 2) for rows (R, n) with values between `ends` (R, 2)."""
    both_ends, single_ends = torch.ones(2, device=rows.device), torch.eye(2, device=rows.device)
    directions = [both_ends] if spec.symmetric else [both_ends, single_ends[1], single_ends[0]]
    best, error_of = torch.ones_like(ends), _Error(rows, spec, power, weights)
    smallest, each_row = error_of(*_grid(ends, spec)), torch.arange(len(rows), device=rows.device)
    for first, last, points in zooms:
        steps = torch.linspace(first, last, points, device=rows.device)[:, None, None]
        for direction in directions:
            # The coarse pass starts at the ends of the data, the finer ones at the best ends so far.
            origin = torch.where(direction > 0, 1.0, best) if last == 0 else best
            candidates = (origin * torch.exp2(steps * direction)).clamp(max=1.0)
            chosen = torch.zeros_like(each_row)
            for i, error in enumerate(map(error_of, *_grid(candidates * ends, spec)), 1):
                chosen = torch.where(error < smallest, i, chosen)
                smallest = torch.minimum(error, smallest)
            best = torch.cat([best[None], candidates])[chosen, each_row]
    return _fitted(rows, best * ends, smallest, spec, weights, error_of) if power == 2.0 else best * ends


def _fitted(
    rows: Tensor, ends: Tensor, smallest: Tensor, spec: TensorSpec, weights: Tensor | None, error_of: _Error
) -> Tensor:
    """Return the ends (R, 2) after fitting the scale to the integers of the values, and rounding again, in turns.

    Args:
        rows: the values, (R, n).
        ends: range of each row, (R, 2).
        smallest: error of each row, (R,). A row keeps its ends if this does not become smaller.
        spec: spec of the grid.
        weights: weights of the values, (R, n); None: all equal.
        error_of: the error of the rows.
    """
    for _ in range(FITS):
        scale, zero_point = _grid(ends, spec)
        limits = torch.stack([spec.qmin - zero_point, spec.qmax - zero_point], 1)
        exact = rows / scale[:, None]
        steps = torch.minimum(torch.maximum(exact.round(), limits[:, :1]), limits[:, 1:])
        weighted = steps if weights is None else steps * weights
        power = (steps * weighted).sum(1)
        factor = torch.where(power > 0, (exact * weighted).sum(1) / power, 1.0).clamp(min=0.0)
        candidate = limits * (factor * scale)[:, None]
        candidate = torch.where(candidate.isfinite().all(1, keepdim=True), candidate, ends)  # at the end of float32
        error = error_of(*_grid(candidate, spec))
        better = error < smallest
        smallest = torch.where(better, error, smallest)
        ends = torch.where(better[:, None], candidate, ends)
    return ends


def _grid(ends: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Scales and zero points, float32 (..., R), of the grids that `choose_qparams` gives for ends (..., R, 2)."""
    scale, zero_point = scale_and_zero_point(ends[..., 0], ends[..., 1], spec.qmin, spec.qmax, spec.symmetric)
    return scale, zero_point.float()


class _Error:
    """Weighted sum of abs(error) ** power of each row (R, n), as a function of the grids of the rows."""

    def __init__(self, rows: Tensor, spec: TensorSpec, power: float, weights: Tensor | None) -> None:
        self.rows, self.spec, self.power, self.weights = rows, spec, power, weights
        self.buffer = torch.empty_like(rows)

    def __call__(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Return the sums, float32 (R,), for scales and zero points, float32 (R,)."""
        scale, zero_point, steps = scale[:, None], zero_point[:, None], self.buffer
        torch.div(self.rows, scale, out=steps).round_()
        torch.maximum(steps, self.spec.qmin - zero_point, out=steps)
        torch.minimum(steps, self.spec.qmax - zero_point, out=steps)
        errors = steps.mul_(scale).sub_(self.rows)
        errors = errors.square_() if self.power == 2.0 else errors.abs_().pow_(self.power)
        return (errors if self.weights is None else errors.mul_(self.weights)).sum(1)
