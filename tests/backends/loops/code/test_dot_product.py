"""Sums of products of small integers, which are exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.code import MULTIPLE

step_loops = pytest.importorskip("fxq.backends.loops.code.step_loops", reason="needs Numba", exc_type=ImportError)


def product(state, weight):
    """uint8 (K,) and int8 (O, K) -> int32 (O,)."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % MULTIPLE))
    wide, sums = torch.zeros(padded.shape[1], dtype=torch.int16), torch.empty(len(weight), dtype=torch.int32)
    pointers = state.data_ptr(), len(state), wide.data_ptr(), padded.data_ptr(), sums.data_ptr(), padded.shape[1]
    part, fields = torch.tensor([[0, len(weight)]]), torch.tensor(pointers)
    step_loops.multiply(part.data_ptr(), 1, fields.data_ptr())
    return sums


@settings(deadline=None)
@given(width=st.integers(1, 200), count=st.integers(1, 9), seed=st.integers(0, 99))
def test_exact(width, count, seed):
    torch.manual_seed(seed)
    state, weight = torch.randint(0, 256, (width,), dtype=torch.uint8), torch.randint(-128, 128, (count, width)).char()
    assert torch.equal(product(state, weight), weight.int() @ state.int())


@pytest.mark.parametrize("end", [-128, 127])
def test_the_largest_products(end):
    """Pairs of them leave 16 bits."""
    state, weight = torch.full((512,), 255, dtype=torch.uint8), torch.full((3, 512), end, dtype=torch.int8)
    assert product(state, weight).tolist() == [512 * 255 * end] * 3
