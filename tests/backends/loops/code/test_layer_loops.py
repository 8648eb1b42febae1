"""Layers as steps of a program, against convolutions in float64, whose sums of integers are exact."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fxq.backends.loops.programs.areas import Area
from fxq.backends.loops.programs.layer_steps import LinearStep, ProductStep
from fxq.backends.loops.programs.program_steps import CLAMP, Function
from fxq.quant.qparams import QParams
from tests.support.layers import FLOATS, FUNCTIONS, GRID, GRIDS, X_GRID, check, conv, pixels, weights
from tests.support.program_runs import applied, real, run_steps

pytestmark = pytest.mark.any_cpu

pytest.importorskip("fxq.backends.loops.code.program_loops", reason="needs Numba", exc_type=ImportError)


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(3, 7), st.integers(3, 7), st.integers(1, 40)),
    columns=st.integers(1, 40), size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 3)), padding=st.tuples(st.integers(0, 1), st.integers(0, 2)),
    dilation=st.tuples(st.just(1), st.integers(1, 2)), function=st.sampled_from(FUNCTIONS), grid=GRIDS,
    residual=st.sampled_from([None, QParams.per_tensor(0.07, 9), FLOATS]), dense=st.booleans(),
    border=st.integers(0, 1), seed=st.integers(0, 99),
)  # fmt: skip
def test_convolutions(
    shape, columns, size, stride, padding, dilation, function, grid, residual, dense, border, seed
):  # fmt: skip
    torch.manual_seed(seed)
    if (size[1] - 1) * dilation[1] + 1 > shape[2] + 2 * padding[1]:
        dilation = (1, 1)
    about = {"stride": stride, "padding": padding, "dilation": dilation, "function": function, "residual": residual}
    room = shape[3] if dense else 0
    check(*conv(shape, columns, size, **about, grid=grid, room=room, border=(border, 0, border, border)), grid)


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 6)),
    channels=st.one_of(st.integers(1, 70), st.sampled_from([79, 80, 96, 112, 113, 128, 130, 176])),
    size=st.tuples(st.integers(1, 3), st.integers(1, 3)), stride=st.integers(1, 2),
    function=st.sampled_from(FUNCTIONS), grid=GRIDS, residual=st.sampled_from([None, QParams.per_tensor(0.07, 9)]),
    border=st.integers(0, 1), seed=st.integers(0, 99),
)  # fmt: skip
def test_depthwise_convolutions(shape, channels, size, stride, function, grid, residual, border, seed):
    torch.manual_seed(seed)
    about = {"stride": (stride, stride), "padding": (1, 1), "function": function, "grid": grid, "residual": residual}
    check(*conv((*shape, channels), channels, size, depthwise=True, **about, border=(0, border, border, 0)), grid)


@pytest.mark.parametrize("grid", [None, GRID], ids=["floats", "integers"])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 11, 12, 13, 16, 17, 24, 29])
def test_any_number_of_pixels(count, grid):
    """Tiles are of 12, of four, and of one."""
    check(*conv((1, 1, count, 21), 19, grid=grid), grid)
    check(*conv((1, 1, count, 19), 19, grid=grid, depthwise=True), grid)
    for channels in (16, 32, 64, 112):  # of four pixels or of two a register, or of one
        check(*conv((1, 1, count, channels), channels, grid=grid, depthwise=True), grid)


def test_an_input_larger_than_the_cache():
    """All columns of some pixels are computed before the next pixels are read."""
    check(*conv((1, 14, 15, 1024), 33), GRID)


@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("value", [0, 255])
@pytest.mark.parametrize("end", [-128, 127])
def test_the_largest_products(value, end, depthwise):
    shape = (1, 3, 5, 64)
    x, weight = torch.full(shape, value, dtype=torch.uint8), weights(64, *([] if depthwise else [64]), 3, 3)
    weight[:] = end
    about = {"x": x, "weight": weight, "padding": (1, 1), "depthwise": depthwise}
    for grid in (None, GRID):
        check(*conv(shape, 64, (3, 3), grid=grid, **about), grid)


@pytest.mark.parametrize("grid", [None, GRID], ids=["floats", "integers"])
@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("channels", [20, 64, 150])
@pytest.mark.parametrize("is_shared", [False, True], ids=["slopes", "a slope"])
def test_slopes(is_shared, channels, depthwise, grid):
    """Each channel may have its own."""
    function = Function("prelu", slope=torch.randn(1 if is_shared else channels))
    check(*conv((2, 3, 3, channels), channels, (2, 2), function=function, grid=grid, depthwise=depthwise), grid)


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 5), st.integers(1, 20)),
    columns=st.sampled_from([1, 3, 4, 5, 15, 16, 17, 32, 33]), function=st.sampled_from([*FUNCTIONS, "prelu"]),
    grid=GRIDS, seed=st.integers(0, 99),
)  # fmt: skip
@example(shape=(1, 2, 2, 8), columns=5, function=CLAMP, grid=GRID, seed=0)
def test_several_pixels_of_each_window(shape, columns, function, grid, seed):
    """A transposed convolution, the window of which is as large as its stride."""
    torch.manual_seed(seed)
    n, h, w, channels = shape
    down, right = 2, 3
    weight = weights(channels, columns, down, right)
    scale, bias = torch.rand(columns) / (50 * channels), torch.randn(columns)
    if function == "prelu":
        function = Function("prelu", slope=torch.randn(columns))
    area, out = Area(shape, False), Area((n, down * h, right * w, columns), grid is None)
    many = down * right
    step = ProductStep(
        "layer", out, function, grid, x=area, x_grid=X_GRID,
        weight=weight.permute(2, 3, 1, 0).reshape(many * columns, 1, channels), taps=[(0, 0)], scale=scale.repeat(many),
        bias=bias.repeat(many), windows=(h, w), out_stride=(down, right),
        spread=[(r, s, c) for r in range(down) for s in range(right) for c in range(columns)],
    )  # fmt: skip
    x = pixels(*shape)
    exact = (x.double() - X_GRID.z).permute(0, 3, 1, 2)
    exact = F.conv_transpose2d(exact, weight.double(), stride=(down, right)).permute(0, 2, 3, 1)
    exact = applied(function, exact * (scale.double() * X_GRID.s) + bias.double())
    check(run_steps([step], {area: x}), exact, grid)


def test_among_the_channels_of_others():
    """A layer may read and write a part of the channels, for the ones beside it."""
    read, written = Area((2, 3, 3, 64), False), Area((2, 3, 3, 80), False)
    x, y = Area((2, 3, 3, 20), False), Area((2, 3, 3, 17), False)
    x.become_part(read, 32)
    y.become_part(written, 16)
    weight, scale = weights(17, 1, 20), torch.rand(17) / 100
    step = ProductStep(
        "layer", y, grid=GRID, x=x, x_grid=X_GRID, weight=weight, taps=[(0, 0)], scale=scale, bias=None, windows=(3, 3)
    )
    values = pixels(2, 3, 3, 20)
    exact = real(values, X_GRID) @ (weight[:, 0].double() * scale.double()[:, None]).t()
    check(run_steps([step], {x: values}), exact, GRID)


@settings(deadline=None)
@given(
    rows=st.integers(1, 5), depth=st.integers(1, 70), columns=st.integers(1, 40),
    function=st.sampled_from([*FUNCTIONS, Function("prelu", slope=torch.tensor([0.1]))]), bias=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_layers_in_float(rows, depth, columns, function, bias, seed):
    torch.manual_seed(seed)
    x, out = Area((rows, 1, 1, depth), True), Area((rows, 1, 1, columns), True)
    weight, added = torch.randn(columns, depth), torch.randn(columns)
    step = LinearStep("layer", out, function, x=x, weight=weight, bias=added if bias else None)
    values = torch.randn(rows, 1, 1, depth)
    exact = applied(function, F.linear(values.double(), weight.double(), added.double() if bias else None))
    torch.testing.assert_close(run_steps([step], {x: values}).double(), exact, rtol=1e-5, atol=1e-5)


def test_a_row_in_float_that_is_not_a_number():
    """No other row is one for it."""
    x, out = Area((3, 1, 1, 5), True), Area((3, 1, 1, 18), True)
    values = torch.ones(3, 1, 1, 5)
    values[1, 0, 0, 2] = math.nan
    step = LinearStep("layer", out, x=x, weight=torch.ones(18, 5), bias=None)
    result = run_steps([step], {x: values})
    assert bool(result[1].isnan().all()) and bool((result[[0, 2]] == 5).all())
