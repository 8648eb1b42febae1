"""Histogram that is streamed and merged exactly, and the clipping ranges computed from it.

Bins are 2**exponent wide and start at zero, so that two neighbours are one bin of the next coarser histogram: counts do
not depend on the size or order of batches.

`counts` is int64 (2 * SIDE - 1,). With w = 2**exponent, slot SIDE - 1 + i counts the values x with trunc(x / w) = i: in
[i * w, (i+1) * w) for i > 0, in ((i-1) * w, i * w] for i < 0, and in (-w, w) for i = 0.
"""

from __future__ import annotations

import math

import numpy
import torch
from torch import Tensor

from fxq.quant.qparams import scale_and_zero_point
from fxq.quant.spec import TensorSpec
from fxq.quant.tensor_range import flat

SIDE_BITS = 12
SIDE = 2**SIDE_BITS
"""Bins on each side of zero. The data reaches at least half of one side: 8 bins or more per step of an 8-bit grid."""

SLOTS = 2 * SIDE - 1

MIN_EXPONENT = -126
"""Smallest exponent: that of the smallest scale, which is the smallest normal float32."""

_CHUNK = 131072  # elements; the intermediate results of one chunk stay in the L2 cache
_EVAL = 32767  # float64 elements per step of the clip search: they fit in the L2 cache, and PyTorch uses one thread

_ROUND = 1.5 * 2.0**52
"""Adding this number to a float64 and subtracting it rounds to the nearest integer, ties to even, like `torch.round`.

The clip search must run on one thread: on a busy machine, waiting for a second thread takes far longer than the work.
`torch.round` uses all threads from 2,048 elements on, and a product of a matrix and a vector always does.
"""

_ZOOMS = ((-10.0, 0.0, 41), (-0.25, 0.25, 13), (-0.05, 0.05, 9))
"""Passes of the clip search, from coarse to fine: first and last factor (in octaves), number of candidates."""


def exponent_for(bound: float) -> int:
    """Return the smallest exponent whose bins hold all values of magnitude up to `bound` (finite float32 range)."""
    return max(math.frexp(bound)[1] - SIDE_BITS, MIN_EXPONENT) if bound else MIN_EXPONENT


def empty_counts() -> Tensor:
    """Return the histogram of no data, int64 zeros (SLOTS,). Do not write to it: all its entries share memory."""
    return torch.zeros((), dtype=torch.int64).expand(SLOTS)


def count(x: Tensor, exponent: int) -> Tensor:
    """Count the values of `x` (float32, 1-d, finite, |x| < SIDE * 2**exponent): int64 (SLOTS,), on x's device.

    Every value is counted in its own bin, since multiplying by a power of two and truncating are exact, an underflow to
    zero included.
    """
    counts = torch.zeros(SLOTS, dtype=torch.int64, device=x.device)
    for chunk in x.split(_CHUNK):
        slots = (chunk * 2.0**-exponent).to(torch.int32).add_(SIDE - 1)  # the conversion truncates
        counts += torch.bincount(slots, minlength=SLOTS)
    return counts


def zeros_in(x: Tensor) -> int:
    """Count the values of a tensor that are zero, or False."""
    if not x.is_cpu or x.dtype is torch.bfloat16:
        return x.numel() - int(x.count_nonzero())
    # NumPy counts bools many times as fast as PyTorch counts numbers
    chunks = flat(x.detach().resolve_neg()).split(_CHUNK)
    return x.numel() - sum(int(numpy.count_nonzero(chunk.numpy() != 0)) for chunk in chunks)


def coarsen(counts: Tensor, shift: int) -> Tensor:
    """Return the histogram of the same data with bins 2**shift times as wide. Exact."""
    if shift == 0:
        return counts
    index = torch.arange(1 - SIDE, SIDE, device=counts.device)
    coarse = index.sign() * (index.abs() >> min(shift, SIDE_BITS))
    return torch.zeros_like(counts).index_add_(0, coarse + SIDE - 1, counts)


def count_up_to(counts: Tensor, exponent: int, bound: float) -> int:
    """Return the number of values in the bins that hold magnitudes up to `bound`, the bin around zero included.

    Args:
        counts: the histogram, int64 (SLOTS,).
        exponent: exponent of its bins.
        bound: magnitude, at least 0.
    """
    reach = min(int(bound * 2.0**-exponent), SIDE - 1)
    return int(counts[SIDE - 1 - reach : SIDE + reach].sum())


def widest_gap(counts: Tensor, exponent: int) -> tuple[float, float]:
    """Return the widest interval between two values that has no value in it, to a bin; (0.0, 0.0) for one bin."""
    filled = counts.nonzero().flatten() - (SIDE - 1)
    if len(filled) < 2:
        return 0.0, 0.0
    index = int(filled.diff().argmax())
    left, right = int(filled[index]), int(filled[index + 1])
    return (left + (left >= 0)) * 2.0**exponent, (right - (right <= 0)) * 2.0**exponent


def percentile(counts: Tensor, exponent: int, low: float, high: float, percent: float) -> float:
    """Return the value below which `percent` % of the data is: linear within a bin, 0.0 in the bin around zero.

    Args:
        counts: the histogram, int64 (SLOTS,), not empty.
        exponent: exponent of its bins.
        low: smallest value in it.
        high: largest value in it.
        percent: 0 to 100.
    """
    below = counts.cumsum(0)
    rank = percent / 100 * int(below[-1])
    slot = int(torch.searchsorted(below.to(torch.float64), rank).clamp(max=SLOTS - 1))
    index = slot - (SIDE - 1)
    if index == 0:
        return 0.0
    left = max((index if index > 0 else index - 1) * 2.0**exponent, low)
    right = min((index if index < 0 else index + 1) * 2.0**exponent, high)
    filled = (rank - int(below[slot] - counts[slot])) / max(int(counts[slot]), 1)
    return left + filled * (right - left)


def clip_range(counts: Tensor, exponent: int, low: float, high: float, spec: TensorSpec) -> tuple[float, float]:
    """Return the range whose grid has the smallest sum of squared quantization errors over the histogram.

    The error is that of quantize and dequantize with the grid that `choose_qparams` gives for the range, clipped values
    included. Values count as evenly distributed within their bin, which has a closed form; centres of bins would be
    wrong when an outlier makes bins as wide as a step of the grid. Values in the bin around zero count as zero, since
    after a relu half of all values are zero and quantize without error.

    Args:
        counts: the histogram, int64 (SLOTS,), not empty.
        exponent: exponent of its bins.
        low: smallest value in it.
        high: largest value in it.
        spec: spec of the grid. If symmetric, the two ends move together.

    Returns:
        (low, high) within the range of the data; that range itself unless clipping gains more than 1 %.

    Source: Migacz 2017 (TensorRT, clipping chosen on a histogram) with the squared error of Banner et al. 2019,
    section 2, and Choukroun et al. 2019 (minimum mean squared error).
    """
    low, high = min(low, 0.0), max(high, 0.0)
    error = _ClipError(counts, exponent, low, high, spec)
    full = torch.ones(1, 2, dtype=torch.float64)
    best, unclipped = full, float(error(full))
    smallest = unclipped
    both_ends, single_ends = torch.tensor([[1.0, 1.0]]), torch.eye(2)
    only_both = spec.symmetric or low == 0 or high == 0
    directions = [both_ends] if only_both else [both_ends, single_ends[1:], single_ends[:1]]
    for first, last, points in _ZOOMS:
        steps = torch.linspace(first, last, points, dtype=torch.float64)[:, None]
        for direction in directions:
            # The coarse pass starts at the ends of the data, the finer ones at the best ends so far.
            origin = torch.where(direction > 0, full, best) if last == 0 else best
            candidates = (origin * torch.exp2(steps * direction)).clamp_(max=1.0)
            errors = error(candidates)
            if float(errors.min()) < smallest:
                smallest, best = float(errors.min()), candidates[errors.argmin()][None]
    low_clipped, high_clipped = error.bounds(best if smallest < 0.99 * unclipped else full)
    return float(low_clipped), float(high_clipped)


class _ClipError:
    """Function from ranges, as fractions of the range of the data, to the error of their grids."""

    def __init__(self, counts: Tensor, exponent: int, low: float, high: float, spec: TensorSpec) -> None:
        self.low, self.high, self.spec = low, high, spec
        width = 2.0**exponent
        first, last = min(int(low / width), -1), max(int(high / width), 1)  # the outermost bins
        edges = torch.cat([torch.arange(first - 1, 0), torch.arange(1, last + 2)]).to(torch.float64) * width
        density = counts[first + SIDE - 1 : last + SIDE].to(torch.float64) / width
        density[-first] = 0.0  # the bin around zero has no error
        # The integral of density * error is a sum over edges of (density to the left - density to the right) * F(edge)
        weights = torch.nn.functional.pad(density, (1, 0)) - torch.nn.functional.pad(density, (0, 1))
        used = weights != 0
        self.edges, self.weights = edges[used], weights[used]

    def bounds(self, fractions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (low, high), float32 (C,) each, for `fractions` (C, 2) of the two ends of the data."""
        ends = torch.tensor([self.low, self.high], dtype=torch.float64)
        if self.spec.symmetric:
            ends = torch.tensor([-1.0, 1.0], dtype=torch.float64) * ends.abs().max()
        low, high = (fractions * ends).to(torch.float32).unbind(1)
        return low.clamp(min=self.low), high.clamp(max=self.high)

    def __call__(self, fractions: Tensor) -> Tensor:
        """Return the sums of squared errors, float64 (C,), for `fractions` (C, 2)."""
        spec = self.spec
        scale, zero_point = scale_and_zero_point(*self.bounds(fractions), spec.qmin, spec.qmax, spec.symmetric)
        scale, zero_point = scale.to(torch.float64)[:, None], zero_point.to(torch.float64)[:, None]
        low, high = spec.qmin - zero_point, spec.qmax - zero_point
        rows = max(_EVAL // max(len(self.edges), 1), 1)
        pieces = zip(scale.split(rows), low.split(rows), high.split(rows), strict=True)
        return torch.cat([self._integral(*piece).mul_(self.weights).sum(1) for piece in pieces])

    def _integral(self, scale: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Integrate the squared error from -scale/2 to each edge: (C, E), up to a constant per row.

        A whole step adds scale**3 / 12; the part of a step at r from its grid point, or clipped by r, adds r**3 / 3.

        Args:
            scale: float64 (C, 1).
            low: smallest integer minus the zero point, float64 (C, 1).
            high: largest integer minus the zero point, float64 (C, 1).
        """
        steps = self.edges / scale
        nearest = (steps + _ROUND).sub_(_ROUND).clamp_(low, high)
        rest = steps.sub_(nearest)
        return (rest * rest).mul_(rest).mul_(4.0).add_(nearest).mul_(scale**3 / 12)
