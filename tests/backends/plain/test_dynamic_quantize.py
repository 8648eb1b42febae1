"""Quantize with a dynamic range, against the ops of the qdq graph that it replaces."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fxq.backends.loops.code import compiler
from fxq.backends.plain.dynamic_quantize import DynamicQuantize
from fxq.errors import InputError
from fxq.ops.conversions import choose_scale, choose_zero_point, quantize
from fxq.quant.dynamic_grid import MIN_SCALE, DynamicGrid, dynamic_range
from tests.support.kernels import copies

pytestmark = pytest.mark.usefixtures("loops")
AXES = [None, -1, -3]
FLOAT32 = torch.finfo(torch.float32).max


def by_definition(x, bits, axis, symmetric):
    qmax = 2**bits - 1
    if symmetric:
        scale = choose_scale(x, steps=qmax // 2, axis=axis)
        return scale, quantize(x, scale=scale, zero_point=qmax // 2 + 1, qmax=qmax)
    scale = choose_scale(x, steps=qmax - (axis is not None), axis=axis, symmetric=False)
    zero_point = choose_zero_point(x, scale=scale, axis=axis)
    return scale, zero_point, quantize(x, scale=scale, zero_point=zero_point, qmax=qmax)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [7, 8])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(0, 9), min_size=3, max_size=4), axis=st.sampled_from(AXES),
    size=st.floats(1e-20, 1e20), middle=st.sampled_from([0.0, 1.0, 9.0, -9.0]), seed=st.integers(0, 99),
    channels_last=st.booleans(),
)  # fmt: skip
def test_the_same_integers_and_grids(bits, symmetric, shape, axis, size, middle, seed, channels_last):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + middle) * size
    if x.dim() == 4 and channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    *grid, q = DynamicQuantize(0, 2**bits - 1, axis, symmetric)(x)
    *wanted_grid, wanted = by_definition(x, bits, axis, symmetric)
    assert len(grid) == 2 - symmetric and q.dtype == torch.uint8
    torch.testing.assert_close(grid[0], wanted_grid[0], rtol=2e-7, atol=0)  # a scale is rounded twice
    if compiler.loops("row_loops") is None:  # the same ops
        assert all(map(torch.equal, grid, wanted_grid))
        assert (
            torch.equal(q, wanted) or not symmetric
        )  # halves are rounded to even before the zero point is added, or after
    # Near a half, which integer is the nearest follows from how the scale is rounded, and so does a zero point.
    for result, expected in [*zip(grid[1:], wanted_grid[1:], strict=True), (q, wanted)]:
        assert result.shape == expected.shape and bool(((result.int() - expected.int()).abs() <= 1).all())
    zero = grid[1].double() if grid[1:] else 2.0 ** (bits - 1)
    off = ((q.double() - zero) * grid[0].double() - x.double()).abs()
    ends = 1.0 if axis is None and not symmetric else 0.5  # in steps; the nearest zero point cuts an end off
    assert bool((off <= (ends + 1e-4) * grid[0].double()).all())


def test_the_ends_of_a_range_are_on_the_grid():
    """Ranges whose end is half a step, or a rounding error, from an integer."""
    low = -torch.linspace(0.0, 3.0, 20001).unsqueeze(1)
    x = torch.cat([low, low + 127.0, torch.zeros_like(low)], 1)
    scale, zero_point, q = DynamicQuantize(0, 255, -1, symmetric=False)(x)
    real = (q.double() - zero_point.double()) * scale.double()
    assert bool(((real - x).abs() <= 0.5001 * scale).all()) and bool((q[:, 2] == zero_point[:, 0]).all())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("axis", [None, -1])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.floats(-FLOAT32, FLOAT32, width=32), min_size=3, max_size=3), min_size=1))
def test_all_finite_values_up_to_the_ends_of_float32(axis, symmetric, rows):
    """The error is at most half a step. A step is the range over the grid's integers, and at least MIN_SCALE."""
    x = torch.tensor(rows)
    grid = DynamicGrid(0, 255, torch.uint8, axis, symmetric)
    scale, *zero_point, q = DynamicQuantize(0, 255, axis, symmetric)(x)
    zero = zero_point[0].double() if zero_point else 128.0
    off = ((q.double() - zero) * scale.double() - x.double()).abs()
    assert bool((off <= (0.5001 if axis is not None or symmetric else 1.0001) * scale.double()).all())
    low, high = (end.double() for end in dynamic_range(x, axis))
    size = torch.maximum(high, -low) if symmetric else high - low
    assert bool(((scale.double() / (size / grid.steps).clamp(min=MIN_SCALE) - 1).abs() < 3e-7).all())


@pytest.mark.parametrize("bits", [7, 8])
def test_the_smallest_value_at_a_half_step_is_the_first_integer(bits):
    """The zero point is rounded to one side, and the value to the other."""
    qmax = 2**bits - 1
    n = torch.arange(1, qmax - 1).float().repeat_interleave(10)
    most = torch.rand(len(n), generator=torch.Generator().manual_seed(0)) + 0.1
    for low, high in zip(-(n + 0.5) * most / (qmax - 0.5 - n), most, strict=True):
        x = torch.stack([low, high, torch.zeros_like(low)])
        _, zero_point, q = DynamicQuantize(0, qmax, None, symmetric=False)(x)
        assert q[0] <= 1 and q[1] >= qmax - 1 and q[2] == zero_point


def test_infinity_is_lost_with_its_row():
    for symmetric in (True, False):
        scale, *_ = DynamicQuantize(0, 255, -1, symmetric)(torch.tensor([[1.0, -torch.inf], [1.0, 2.0]]))
        assert not scale[0].isfinite() and scale[1].isfinite()


def test_what_has_no_memory_of_its_own_values():
    """Lazily negated tensors, meta tensors, and traced tensors."""
    kernel, x = DynamicQuantize(0, 255, -1, symmetric=False), torch.randn(3, 5)
    wanted = kernel(x)
    for run in (kernel, kernel.bind(torch._neg_view(-x))):
        assert all(map(torch.equal, run(torch._neg_view(-x)), wanted))
    assert all(y.is_meta for y in kernel(x.to("meta")))
    traced = make_fx(kernel)(x)
    assert all(map(torch.equal, traced(2 * x), kernel(2 * x)))


def test_zeros_and_ties():
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0], [254.0, 1.0, 3.0, -1.0]])
    _, q = DynamicQuantize(0, 255, -1)(x)
    assert q.tolist() == [[128] * 4, [255, 128, 130, 128]]  # of 2: halves go to the even integer


def test_what_is_not_a_number_shows_in_the_scale():
    for symmetric in (True, False):
        scale, *_ = DynamicQuantize(0, 255, -1, symmetric)(torch.tensor([[1.0, torch.nan], [1.0, 2.0]]))
        assert scale[0].isnan() and scale[1].isfinite()


def test_an_input_of_another_type_is_refused():
    with pytest.raises(InputError, match="float64"):
        DynamicQuantize(0, 255)(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("symmetric", [True, False])
def test_copies(symmetric):
    x = torch.randn(3, 5)
    for kernel in copies(DynamicQuantize(0, 127, -1, symmetric)):
        assert all(map(torch.equal, kernel(x), DynamicQuantize(0, 127, -1, symmetric)(x)))
