"""Quantize with a measured scale, against the two ops that it stands for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxq.backends.plain.measured_quantize import MeasuredQuantize
from fxq.errors import InputError
from fxq.ops.conversions import choose_scale, quantize
from tests.kernels import copies

AXES = [None, -1, -3]


def by_definition(x, steps, axis):
    scale = choose_scale(x, steps=steps, axis=axis)
    return scale, quantize(x, scale=scale, zero_point=steps + 1, qmin=0, qmax=2 * steps + 1)


@pytest.mark.parametrize("bits", [7, 8])
@given(st.lists(st.integers(0, 9), min_size=3, max_size=4), st.sampled_from(AXES), st.floats(1e-20, 1e20), st.data())
def test_the_same_integers_and_scales(bits, shape, axis, size, data):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) * size
    if x.dim() == 4 and data.draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
    steps = 2 ** (bits - 1) - 1
    scale, q = MeasuredQuantize(0, 2 * steps + 1, axis)(x)
    wanted_scale, wanted = by_definition(x, steps, axis)
    assert torch.equal(scale, wanted_scale) and torch.equal(q, wanted) and q.dtype == torch.uint8


def test_zeros_and_ties():
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0], [254.0, 1.0, 3.0, -1.0]])
    _, q = MeasuredQuantize(0, 255, -1)(x)
    assert q.tolist() == [[128] * 4, [255, 128, 130, 128]]  # of 2: halves go to the even integer


def test_what_is_not_a_number_shows_in_the_scale():
    scale, _ = MeasuredQuantize(0, 255, -1)(torch.tensor([[1.0, torch.nan], [1.0, 2.0]]))
    assert scale[0].isnan() and scale[1].isfinite()


def test_an_input_of_another_type_is_refused():
    with pytest.raises(InputError, match="float64"):
        MeasuredQuantize(0, 255)(torch.ones(2, dtype=torch.float64))


def test_copies():
    x = torch.randn(3, 5)
    for kernel in copies(MeasuredQuantize(0, 127, -1)):
        assert all(map(torch.equal, kernel(x), by_definition(x, 63, -1)))
