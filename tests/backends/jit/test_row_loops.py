"""Products of rows that one loop scales; what measures rows is tested in plain/test_measured_quantize.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

row_loops = pytest.importorskip("fxq.backends.jit.row_loops", reason="needs Numba", exc_type=ImportError)


@settings(deadline=None)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 40), each=st.tuples(st.booleans(), st.booleans()),
    clamp=st.sampled_from([(-math.inf, math.inf), (0.0, math.inf), (-1.0, 6.0)]), seed=st.integers(0, 99),
)  # fmt: skip
def test_float64(rows, columns, each, clamp, seed):
    torch.manual_seed(seed)
    sums = torch.randint(-(2**27), 2**27, (rows, columns), dtype=torch.int32)
    scale, zero = torch.rand(rows if each[0] else 1) + 0.1, torch.randint(0, 256, (rows if each[1] else 1,)).float()
    ones = torch.randint(-(2**18), 2**18, (columns,), dtype=torch.int32)
    by, bias, out = torch.rand(columns) / 2**26, torch.randn(columns), torch.empty(rows, columns)
    row_loops.scale_rows(
        sums.data_ptr(), scale.data_ptr(), int(each[0]), zero.data_ptr(), int(each[1]),
        *(t.data_ptr() for t in (ones, by, bias, out)), rows, columns, *clamp,
    )  # fmt: skip
    exact = (sums.double() - zero.double()[:, None] * ones.double()) * (scale.double()[:, None] * by.double())
    torch.testing.assert_close(out.double(), (exact + bias.double()).clamp(*clamp), rtol=1e-6, atol=1e-6)


def test_what_is_not_a_number_stays_that():
    """In the row that has it, also behind a clamp."""
    tensors = torch.ones(2, 3, dtype=torch.int32), torch.tensor([math.nan, 1.0]), torch.zeros(1)
    ones, by, bias, out = torch.ones(3, dtype=torch.int32), torch.ones(3), torch.zeros(3), torch.empty(2, 3)
    sums, scale, zero = (t.data_ptr() for t in tensors)
    row_loops.scale_rows(
        sums, scale, 1, zero, 0, *(t.data_ptr() for t in (ones, by, bias, out)), 2, 3, 0.0, math.inf
    )  # fmt: skip
    assert bool(out[0].isnan().all()) and out[1].tolist() == [1, 1, 1]
