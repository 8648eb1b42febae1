"""The bins of a histogram, against numpy and against each other."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.quant import histogram

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(values=st.lists(FINITE, min_size=1, max_size=20).map(torch.tensor), shift=st.integers(0, 40))
@settings(max_examples=15, deadline=None)
def test_coarser_bins_are_exactly_the_sums_of_finer_ones(values, shift):
    exponent = histogram.exponent_for(float(values.abs().max()))
    fine = histogram.count(values, exponent)
    assert int(fine.sum()) == len(values)
    if exponent + shift <= 120:
        assert torch.equal(histogram.coarsen(fine, shift), histogram.count(values, exponent + shift))


def test_counts_are_those_of_numpy():
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(0))  # more than one chunk
    exponent = histogram.exponent_for(float(x.abs().max()))
    edges = np.arange(1 - histogram.SIDE, histogram.SIDE + 1)
    index = np.trunc(x.double().numpy() / 2.0**exponent)
    np.testing.assert_array_equal(histogram.count(x, exponent), np.histogram(index, edges)[0])


def test_zeros_are_counted_in_any_kind_of_tensor():
    x = torch.randn(3, 5, 70, 300, generator=torch.Generator().manual_seed(0)).relu()  # more than one chunk
    x[0, 0, 0, :4] = torch.tensor([-0.0, 1e-45, float("inf"), float("nan")])
    zeros = int((x == 0).sum())
    assert 0 < zeros < x.numel()
    forms = (x, x.bool(), x.transpose(1, 2), x[:, :, ::2], torch.complex(x, -x).conj().imag, x.clone().requires_grad_())
    for form in (*forms, x.bfloat16(), torch.zeros(0), torch.tensor(0.0)):
        assert histogram.zeros_in(form) == form.numel() - int(form.count_nonzero())
    assert histogram.zeros_in(x) == zeros
