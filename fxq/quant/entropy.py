"""Clipping range with the smallest Kullback-Leibler divergence, computed from a histogram."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.quant.histogram import SIDE
from fxq.quant.qparams import choose_qparams
from fxq.quant.spec import TensorSpec

_CANDIDATES = 120
"""Number of ranges to try in each direction. Few enough for PyTorch to use one thread, see `histogram._ROUND`."""


def entropy_range(counts: Tensor, exponent: int, low: float, high: float, spec: TensorSpec) -> tuple[float, float]:
    """Return the range whose grid has the smallest Kullback-Leibler divergence from the distribution of the values.

    Two distributions over the bins are compared: P, the values clipped to the range, where clipped values count in the
    outermost bins; and Q, the share of each integer, spread evenly over its bins that have values, without the clipped
    values. The bin around zero is left out, since its values quantize without error and, after a relu, half of all
    values are there. A range has at least as many bins as the grid has steps.

    Args:
        counts: the histogram, int64 (SLOTS,), see `fxq.quant.histogram`; not empty.
        exponent: exponent of its bins.
        low: smallest value in it.
        high: largest value in it.
        spec: spec of the grid. The two ends shrink together; if it is affine, each end also shrinks alone.

    Returns:
        (low, high) within the range of the data; that range itself if all values are in the bin around zero.

    Source: Migacz 2017 (TensorRT, entropy calibration), here for ranges with two ends.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    divergence = _Divergence(counts, exponent, spec)
    if not divergence.total:
        return low, high
    bounds = torch.tensor([low, high], dtype=torch.float64)
    ends = torch.tensor([-1.0, 1.0], dtype=torch.float64) * bounds.abs().max() if spec.symmetric else bounds
    both_ends, single_ends = torch.ones(2), torch.eye(2)
    only_both = spec.symmetric or low == 0 or high == 0
    directions = [both_ends] if only_both else [both_ends, single_ends[1], single_ends[0]]
    min_factor = min((spec.qmax - spec.qmin) * 2.0**exponent / (high - low), 1.0)
    factors = torch.linspace(1.0, min_factor, _CANDIDATES, dtype=torch.float64)[:, None]
    for direction in directions:
        candidates = ends * torch.where(direction > 0, factors, 1.0)
        ends = candidates[divergence(candidates.clamp(low, high)).argmin()]
    clipped_low, clipped_high = ends.clamp(low, high).tolist()
    return clipped_low, clipped_high


class _Divergence:
    """Function from ranges to their divergence. Sums over the bins of an integer are differences of cumulative sums.

    Attributes:
        total: number of values outside of the bin around zero.
    """

    def __init__(self, counts: Tensor, exponent: int, spec: TensorSpec) -> None:
        self._spec, self._width = spec, 2.0**exponent
        self._counts = counts.to(torch.float64)
        self._counts[SIDE - 1] = 0.0
        filled = self._counts > 0
        self._below, self._filled_below = (F.pad(x.cumsum(0), (1, 0)) for x in (self._counts, filled.double()))
        self._logs_below = F.pad(_xlogx(self._counts).cumsum(0), (1, 0))
        self._filled = filled.nonzero().flatten()
        self.total = float(self._below[-1])

    def __call__(self, ends: Tensor) -> Tensor:
        """Return the divergences in nats, float64 (C,), of ranges (C, 2), float64; infinite for less than two bins."""
        first = torch.searchsorted(self._filled, (ends[:, :1] / self._width).ceil().long() + SIDE - 1)
        last = torch.searchsorted(self._filled, (ends[:, 1:] / self._width).floor().long() + SIDE - 1, right=True) - 1
        has_two_bins = (first < last).flatten()
        first, last = self._filled[first.clamp(max=len(self._filled) - 1)], self._filled[last.clamp(min=0)]
        left, right = self._below[first], self.total - self._below[last + 1]
        edges = self._edges(ends, first, last + 1)
        mass = self._below[edges].diff(dim=1)
        per_bin = mass / (self._filled_below[edges].diff(dim=1).clamp(min=1.0) * mass.sum(1, keepdim=True))  # Q
        used = (mass > 0).double()
        lowest, highest = used.argmax(1, keepdim=True), mass.shape[1] - 1 - used.flip(1).argmax(1, keepdim=True)
        p_log_p = (self._logs_below[last + 1] - self._logs_below[first]).flatten()
        for end, clipped in ((first, left), (last, right)):
            inside = self._counts[end]
            p_log_p += (_xlogx(inside + clipped) - _xlogx(inside)).flatten()
        p_log_q = torch.special.xlogy(mass, per_bin).sum(1)
        for level, clipped in ((lowest, left), (highest, right)):
            p_log_q += torch.special.xlogy(clipped, per_bin.gather(1, level)).flatten()
        return torch.where(has_two_bins, (p_log_p - p_log_q) / self.total - math.log(self.total), torch.inf)

    def _edges(self, ends: Tensor, first: Tensor, stop: Tensor) -> Tensor:
        """Return the first bin of each integer, by bin centres, and `stop` at the end: int64 (C, integers + 1)."""
        grid = choose_qparams(ends[:, 0].float(), ends[:, 1].float(), self._spec, axis=0)
        thresholds = torch.arange(grid.qmin, grid.qmax) + 0.5 - grid.zero_point[:, None]
        bins = thresholds * grid.scale.double()[:, None] / self._width
        above, below = (bins - 0.5).ceil().clamp(min=1.0), (bins + 0.5).ceil().clamp(max=0.0)
        slots = torch.where(bins > 0, above, below).long() + SIDE - 1
        return torch.cat([first, torch.minimum(torch.maximum(slots, first), stop), stop], 1)


def _xlogx(x: Tensor) -> Tensor:
    return torch.special.xlogy(x, x)
