"""The clipping range in which integers tell most of how values are distributed, read off a histogram."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.quant.histogram import SIDE
from fxq.quant.qparams import choose_qparams
from fxq.quant.spec import TensorSpec

_CANDIDATES = 120
"""Ranges that are tried in each direction: so many that one thread does the work (see `fxq/quant/histogram.py`)."""


def entropy_range(counts: Tensor, exponent: int, low: float, high: float, spec: TensorSpec) -> tuple[float, float]:
    """The range whose grid has the least Kullback-Leibler divergence from the values' distribution.

    The distribution of the values, clipped to the range, is compared with what the integers tell of it: the share of
    each integer, spread evenly over those of its bins that hold values. What is clipped counts in the outermost bins of
    the first and is missing in the second. Values in the bin around zero are left out, as they quantize without error:
    after a relu half of all values are there, and would outweigh all others. A range is at least as many bins wide as
    the grid has steps.

    Args:
        counts: the histogram, int64 as `fxq.quant.histogram` says, not empty.
        exponent: of its bins.
        low: smallest value in it.
        high: largest value in it.
        spec: the grid that the range is for. If symmetric, the two ends move together; else first together, then each.

    Returns:
        (low, high) within the data's own range; that range itself where all values are in the bin around zero.

    Source: Migacz 2017 (TensorRT, entropy calibration), here for ranges with two ends.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    divergence = _Divergence(counts, exponent, spec)
    if not divergence.total:
        return low, high
    bounds = torch.tensor([low, high], dtype=torch.float64)
    ends = torch.tensor([-1.0, 1.0], dtype=torch.float64) * bounds.abs().max() if spec.symmetric else bounds
    both, each = torch.ones(2), torch.eye(2)
    directions = [both] if spec.symmetric or low == 0 or high == 0 else [both, each[1], each[0]]
    narrowest = min((spec.qmax - spec.qmin) * 2.0**exponent / (high - low), 1.0)
    steps = torch.linspace(1.0, narrowest, _CANDIDATES, dtype=torch.float64)[:, None]
    for direction in directions:
        tried = ends * torch.where(direction > 0, steps, 1.0)
        ends = tried[divergence(tried.clamp(low, high)).argmin()]
    found = ends.clamp(low, high).tolist()
    return found[0], found[1]


class _Divergence:
    """The divergence for ranges. Sums over the bins of an integer are differences of sums over all bins below.

    Attributes:
        total: how many values the histogram has outside of the bin around zero.
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
        """In nats, float64 (C,), for ranges (C, 2), float64; infinite where a range holds less than two bins."""
        first = torch.searchsorted(self._filled, (ends[:, :1] / self._width).ceil().long() + SIDE - 1)
        last = torch.searchsorted(self._filled, (ends[:, 1:] / self._width).floor().long() + SIDE - 1, right=True) - 1
        holds = (first < last).flatten()
        most = len(self._filled) - 1
        first, last = self._filled[first.clamp(max=most)], self._filled[last.clamp(min=0)]
        left, right = self._below[first], self.total - self._below[last + 1]
        edges = self._edges(ends, first, last + 1)
        mass = self._below[edges].diff(dim=1)
        told = mass / (self._filled_below[edges].diff(dim=1).clamp(min=1.0) * mass.sum(1, keepdim=True))
        holding = (mass > 0).double()
        at_first, at_last = holding.argmax(1, keepdim=True), mass.shape[1] - 1 - holding.flip(1).argmax(1, keepdim=True)
        seen = (self._logs_below[last + 1] - self._logs_below[first]).flatten()
        for end, beyond in ((first, left), (last, right)):
            inside = self._counts[end]
            seen += (_xlogx(inside + beyond) - _xlogx(inside)).flatten()
        shared = torch.special.xlogy(mass, told).sum(1)
        for level, beyond in ((at_first, left), (at_last, right)):
            shared += torch.special.xlogy(beyond, told.gather(1, level)).flatten()
        return torch.where(holds, (seen - shared) / self.total - math.log(self.total), torch.inf)

    def _edges(self, ends: Tensor, first: Tensor, stop: Tensor) -> Tensor:
        """The first bin whose middle is on each integer, and `stop` behind the last: int64 (C, integers + 1)."""
        grid = choose_qparams(ends[:, 0].float(), ends[:, 1].float(), self._spec, axis=0)
        between = torch.arange(grid.qmin, grid.qmax) + 0.5 - grid.zero_point[:, None]
        at = between * grid.scale.double()[:, None] / self._width
        slots = (
            torch.where(at > 0, (at - 0.5).ceil().clamp(min=1.0), (at + 0.5).ceil().clamp(max=0.0)).long() + SIDE - 1
        )
        return torch.cat([first, torch.minimum(torch.maximum(slots, first), stop), stop], 1)


def _xlogx(x: Tensor) -> Tensor:
    return torch.special.xlogy(x, x)
