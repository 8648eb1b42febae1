"""The range of least divergence, against the divergence written out bin by bin."""

import numpy as np
import pytest
import torch

import fxq
from fxq.quant.entropy import _Divergence, entropy_range
from fxq.quant.histogram import SIDE
from fxq.quant.observers import Entropy
from fxq.quant.qparams import choose_qparams

SPECS = {
    "uint8": fxq.TensorSpec(),
    "uint4": fxq.TensorSpec(bits=4),
    "int8 symmetric": fxq.TensorSpec(signed=True, symmetric=True),
    "uint8 symmetric": fxq.TensorSpec(symmetric=True),
}
NORMAL = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
DATA = {
    "normal": NORMAL,
    "relu": NORMAL.relu(),
    "negative": -3 * NORMAL.relu(),
    "heavy tails": NORMAL**3,
    "outliers": torch.cat([NORMAL, torch.tensor([30.0, -5.1])]),
    "shifted": NORMAL + 2,
}


def observed(x, spec):
    observer = Entropy(spec)
    observer(x)
    return observer


def divergence(counts, width, low, high, spec):
    """As the docstring of `entropy_range` says it, one bin and one integer at a time."""
    counts = counts.double().numpy().copy()
    counts[SIDE - 1] = 0
    slots = np.arange(1 - SIDE, SIDE)
    middles = (slots + 0.5 * np.sign(slots)) * width
    inside = np.nonzero((slots * width >= low) & (slots * width <= high) & (counts > 0))[0]
    if len(inside) < 2:
        return np.inf
    seen, told = counts[inside], np.zeros(len(inside))
    seen[0] += counts[: inside[0]].sum()
    seen[-1] += counts[inside[-1] + 1 :].sum()
    grid = choose_qparams(torch.tensor(low).float(), torch.tensor(high).float(), spec)
    integers = np.clip(np.round(middles[inside] / grid.s) + grid.z, grid.qmin, grid.qmax)
    for integer in np.unique(integers):
        bins = integers == integer
        told[bins] = counts[inside][bins].mean()
    seen, told = seen / seen.sum(), told / told.sum()
    return (seen * np.log(seen / told)).sum()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("x", DATA.values(), ids=DATA)
def test_the_divergence_is_that_of_the_bins(x, spec):
    observer = observed(x, spec)
    computed = _Divergence(observer.counts, int(observer.exponent), spec)
    low, high = float(x.min().clamp(max=0)), float(x.max().clamp(min=0))
    for left, right in ((1, 1), (0.7, 0.7), (0.2, 0.9), (1, 0.13), (1e-5, 1e-5)):
        ends = torch.tensor([[left * low, right * high]], dtype=torch.float64)
        wanted = divergence(observer.counts, 2.0 ** int(observer.exponent), left * low, right * high, spec)
        assert float(computed(ends)) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("x", DATA.values(), ids=DATA)
def test_the_range_is_better_than_that_of_the_data_and_within_it(x, spec):
    observer = observed(x, spec)
    width, (low, high) = 2.0 ** int(observer.exponent), observer.range()
    least, most = observer.clipped(low, high)
    assert min(low, 0) <= least <= 0 <= most <= max(high, 0) and least < most
    whole = divergence(observer.counts, width, float(low.clamp(max=0)), float(high.clamp(min=0)), spec)
    assert divergence(observer.counts, width, float(least), float(most), spec) <= whole + 1e-9
    assert (most - least) / width >= spec.qmax - spec.qmin - 1


def test_outliers_are_cut_off_at_their_end_alone():
    """A grid of 8 bits for the whole range would have 30 integers where nearly all values are."""
    observer = observed(torch.cat([NORMAL, torch.tensor([30.0])]), fxq.TensorSpec())
    low, high = (float(end) for end in observer.clipped(*observer.range()))
    assert 2.5 < high < 5 and -4.5 < low < -2.5


def test_zeros_do_not_count():
    """Outputs of a relu have the range of its positive values."""
    zeros = torch.cat([NORMAL.relu(), torch.zeros(100_000)])
    assert observed(zeros, fxq.TensorSpec()).qparams().same_as(observed(NORMAL.relu(), fxq.TensorSpec()).qparams())


def test_nothing_but_the_bin_around_zero():
    """Of 4,096 bins, those of 1e-9 beside an outlier are the one around zero."""
    counts = torch.zeros(2 * SIDE - 1, dtype=torch.int64)
    counts[SIDE - 1] = 7
    assert entropy_range(counts, 0, -0.5, 0.25, fxq.TensorSpec()) == (-0.5, 0.25)
