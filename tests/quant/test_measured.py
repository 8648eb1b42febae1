"""Scales that are measured on the values themselves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxq
from fxq.quant.measured import SMALLEST, MeasuredGrid, measured_scale

SPEC = fxq.TensorSpec(symmetric=True, per="row", range="measured")


@pytest.mark.parametrize(("bits", "steps", "zero"), [(8, 127, 128), (7, 63, 64)])
def test_the_grid_is_symmetric_around_its_middle(bits, steps, zero):
    grid = MeasuredGrid.of(fxq.TensorSpec(bits=bits, symmetric=True, range="measured"), None)
    assert (grid.steps, grid.zero_point, grid.qmin, grid.qmax) == (steps, zero, 0, 2 * zero - 1)
    assert MeasuredGrid.of(SPEC, -1).axis == -1


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from([None, -1, -2, -3]), st.integers(0, 99))
def test_every_row_has_the_scale_of_its_largest_magnitude(shape, axis, seed):
    if axis is not None and -axis > len(shape):
        shape = [2] * -axis
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    scale = measured_scale(x, 127, axis)
    rows = x.reshape(-1) if axis is None else x.reshape(*shape[:axis], -1)
    wanted = torch.tensor(rows.abs().numpy().max(-1)) / 127
    assert scale.shape == (() if axis is None else (*shape[:axis], *[1] * -axis))
    assert torch.equal(scale.reshape(wanted.shape), wanted)


def test_zeros_nan_infinity_and_nothing():
    x = torch.tensor([[0.0, 0.0], [1.0, torch.nan], [-torch.inf, 1.0]])
    scale = measured_scale(x, 127, -1)
    assert scale[0] == torch.tensor(SMALLEST) and scale[1].isnan() and scale[2] == torch.inf
    assert measured_scale(torch.ones(0, 3), 127, -1).shape == (0, 1)
    assert measured_scale(torch.ones(2, 0), 127, -1).shape == (2, 1)
    assert measured_scale(torch.ones(0, 3), 127).shape == ()
