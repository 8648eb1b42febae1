"""Products of rows that one loop scales; what measures rows is tested in plain/test_measured_quantize.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

row_loops = pytest.importorskip("fxq.backends.loops.code.row_loops", reason="needs Numba", exc_type=ImportError)


@settings(deadline=None)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 40), by_row=st.tuples(*[st.booleans()] * 3),
    clamp=st.sampled_from([(-math.inf, math.inf), (0.0, math.inf), (-1.0, 6.0)]),
    gelu=st.integers(0, 1), seed=st.integers(0, 99),
)  # fmt: skip
def test_float64(rows, columns, by_row, clamp, gelu, seed):
    torch.manual_seed(seed)
    sums = torch.randint(-(2**27), 2**27, (rows, columns), dtype=torch.int32)
    scale, zero = torch.rand(rows if by_row[0] else 1) + 0.1, torch.randint(0, 256, (rows if by_row[1] else 1,)).float()
    ones = torch.randint(-(2**18), 2**18, (columns,), dtype=torch.int32)
    by, bias, out = (
        torch.rand(columns) / 2**26,
        torch.randn(rows if by_row[2] else 1, columns),
        torch.empty(rows, columns),
    )
    row_loops.scale_sums(
        sums.data_ptr(), scale.data_ptr(), int(by_row[0]), zero.data_ptr(), int(by_row[1]),
        *(t.data_ptr() for t in (ones, by, bias)), int(by_row[2]), out.data_ptr(), rows, columns, *clamp, gelu,
    )  # fmt: skip
    exact = (sums.double() - zero.double()[:, None] * ones.double()) * (scale.double()[:, None] * by.double())
    exact = F.gelu(exact + bias.double()) if gelu else (exact + bias.double()).clamp(*clamp)
    torch.testing.assert_close(out.double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("gelu", [0, 1])
def test_what_is_not_a_number_stays_that(gelu):
    """In the row that has it, also after a clamp."""
    tensors = torch.ones(2, 3, dtype=torch.int32), torch.tensor([math.nan, 1.0]), torch.zeros(1)
    ones, by, bias, out = torch.ones(3, dtype=torch.int32), torch.ones(3), torch.zeros(3), torch.empty(2, 3)
    sums, scale, zero = (t.data_ptr() for t in tensors)
    row_loops.scale_sums(
        sums, scale, 1, zero, 0, *(t.data_ptr() for t in (ones, by, bias)), 0, out.data_ptr(), 2, 3, 0.0, math.inf, gelu
    )  # fmt: skip
    assert bool(out[0].isnan().all()) and bool(out[1].isfinite().all())
