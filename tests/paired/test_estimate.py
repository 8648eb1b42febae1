"""A mean is pulled to zero by what its parts disagree on."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.paired.estimate import ShrunkMean
from tests.support.estimates import trusted


@settings(deadline=None)  # the first call of torch is slow
@given(st.integers(1, 6), st.integers(1, 5), st.floats(0, 3))
def test_estimates_are_pulled_to_zero_by_what_parts_disagree_on(count, channels, level):
    torch.manual_seed(count + 10 * channels)
    parts = level + torch.randn(count, channels, dtype=torch.float64)
    estimate = ShrunkMean()
    for some in parts.split(2):
        estimate.add(some)
    wanted = trusted(parts) if count > 1 else parts[0]
    torch.testing.assert_close(estimate(), wanted, rtol=1e-9, atol=1e-12)
