"""Grids that are measured on the values themselves."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxq
from fxq.quant.dynamic_grid import MIN_SCALE, DynamicGrid, dynamic_range, dynamic_scale, dynamic_zero_point

SPEC = fxq.TensorSpec(symmetric=True, per="row", range="dynamic")
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4)
AXES = st.sampled_from([None, -1, -2, -3])


@pytest.mark.parametrize(("bits", "steps", "zero"), [(8, 127, 128), (7, 63, 64)])
def test_the_grid_is_symmetric_around_its_middle(bits, steps, zero):
    grid = DynamicGrid.of(fxq.TensorSpec(bits=bits, symmetric=True, range="dynamic"), None)
    assert (grid.steps, grid.middle, grid.qmin, grid.qmax) == (steps, zero, 0, 2 * zero - 1)
    assert DynamicGrid.of(SPEC, -1).axis == -1


@pytest.mark.parametrize(("bits", "axis", "steps"), [(8, -1, 254), (7, -1, 126), (8, None, 255)])
def test_rows_that_are_not_keep_a_step_for_the_zero_point(bits, axis, steps):
    assert DynamicGrid.of(fxq.TensorSpec(bits=bits, range="dynamic"), axis).steps == steps


def rows_of(shape, axis, seed):
    """Values, and their rows as a (N, ...) array."""
    if axis is not None and -axis > len(shape):
        shape = [2] * -axis
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + 2 * torch.randn((), generator=generator)
    wanted = () if axis is None else (*shape[:axis], *[1] * -axis)
    return x, x.reshape(math.prod(shape[:axis]) if axis is not None else 1, -1).numpy(), wanted


@given(SHAPES, AXES, st.integers(0, 99))
def test_every_row_has_the_scale_of_its_largest_magnitude(shape, axis, seed):
    x, rows, wanted = rows_of(shape, axis, seed)
    scale = dynamic_scale(*dynamic_range(x, axis), 127)
    assert scale.shape == wanted
    assert torch.equal(scale.reshape(-1), torch.tensor(abs(rows).max(-1)) / 127)


@given(SHAPES, AXES, st.integers(0, 99), st.sampled_from([(8, 0), (7, 0), (8, -128)]))
def test_every_row_fills_a_grid_that_is_not_symmetric(shape, axis, seed, grid):
    """Nothing is clamped, less than two of the steps are left over, and zero is an integer."""
    bits, qmin = grid
    x, _, wanted = rows_of(shape, axis, seed)
    low, high = dynamic_range(x, axis)
    scale = dynamic_scale(low, high, 2**bits - 2, symmetric=False)
    zero_point = dynamic_zero_point(low, scale, qmin)
    assert scale.shape == zero_point.shape == wanted and torch.equal(zero_point, zero_point.round())
    first, last = (end.double() / scale.double() + zero_point - qmin for end in (low, high))
    assert bool((first > -1e-4).all() and (last < 2**bits - 1 + 1e-4).all() and (last - first > 2**bits - 2.001).all())


@pytest.mark.parametrize(
    ("values", "wanted"), [((1.0, 3.0), (0.0, 3.0)), ((-1.0, -3.0), (-3.0, 0.0)), ((-1.0, 2.0), (-1.0, 2.0))]
)
def test_zero_is_part_of_every_range(values, wanted):
    assert tuple(map(float, dynamic_range(torch.tensor(values)))) == wanted


def test_zeros_nan_infinity_and_nothing():
    x = torch.tensor([[0.0, 0.0], [1.0, torch.nan], [-torch.inf, 1.0]])
    for symmetric in (True, False):
        scale = dynamic_scale(*dynamic_range(x, -1), 127, symmetric)
        assert scale[0] == torch.tensor(MIN_SCALE) and scale[1].isnan() and scale[2] == torch.inf
        assert dynamic_zero_point(dynamic_range(x, -1)[0], scale, 0)[0] == 0
    for of_none, axis, shape in (
        (torch.ones(0, 3), -1, (0, 1)),
        (torch.ones(2, 0), -1, (2, 1)),
        (torch.ones(0), None, ()),
    ):
        assert all(end.shape == shape for end in dynamic_range(of_none, axis))
