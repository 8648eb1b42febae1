"""Steps that read images and rows, each against PyTorch in float64, or exactly."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.programs.areas import ABSOLUTE, Area
from fxq.backends.loops.programs.program_steps import (
    CLAMP,
    Function,
    MoveStep,
    NormStep,
    PointwiseStep,
    PoolStep,
    QuantizeStep,
)
from fxq.quant.qparams import QParams
from tests.support.program_runs import EXACT, applied, distance, real, run_steps

pytestmark = pytest.mark.any_cpu

image_loops = pytest.importorskip("fxq.backends.loops.code.image_loops", reason="needs Numba", exc_type=ImportError)

GRIDS = st.sampled_from([None, QParams.per_tensor(0.0271, 100), QParams.per_tensor(0.05, 3, 2, 201)])
SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 5), st.integers(1, 40))
SEEDS = st.integers(0, 99)
FUNCTIONS = [
    CLAMP,
    Function("clamp", 0.0, 2.0),
    Function("prelu", slope=torch.tensor([-0.3])),
    *map(Function, EXACT),
]


def values(shape, grid):
    """Integers of a grid, or floats."""
    return torch.randn(shape) if grid is None else torch.randint(grid.qmin, grid.qmax + 1, shape, dtype=torch.uint8)


def check(result, exact, grid, tolerance):
    """Floats within a tolerance; integers are the nearest ones, but for what is as near to a half."""
    if grid is not None:
        assert distance(result, exact, grid) <= 0.5 + 2e-3
    else:
        torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


# ---- quantize


def quantized(x, grid, room=0, border=0):
    """Floats (N, H, W, C) as integers; they are read where they lie."""
    n, h, w, c = x.stride()
    area = Area(tuple(x.shape), True, base=ABSOLUTE, offset=x.data_ptr())
    out = Area(area.shape, False, room, border=(border,) * 4)
    return run_steps([QuantizeStep("q", out, grid=grid, x=area, strides=lambda: (n, c, h, w))], {})


def lay_out(x, layout):
    if layout == "channels first":
        return x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    return x if layout == "channels last" else F.pad(x, (0, 3, 0, 1))[:, :, : x.shape[2], : x.shape[3]]


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 50), st.integers(1, 40)),
    layout=st.sampled_from(["channels first", "channels last", "with gaps"]),
    dense=st.booleans(), border=st.integers(0, 1),
    numbers=st.sampled_from([(0.25, 0), (2**-5, 100), (2**-6, 255), (0.125, 17, 3, 100)]), seed=SEEDS,
)  # fmt: skip
def test_quantize(shape, layout, dense, border, numbers, seed):
    """Scales are powers of two, so that everything is exact, and halves become even."""
    grid = QParams.per_tensor(*numbers)
    torch.manual_seed(seed)
    x = lay_out(torch.randint(-1000, 1000, shape) * (grid.s / 4), layout)
    wanted = ((x / grid.s).round() + grid.z).clamp(grid.qmin, grid.qmax)
    assert torch.equal(quantized(x, grid, shape[3] if dense else 0, border), wanted.to(torch.uint8))


@pytest.mark.parametrize("pixels", [4, 20])
@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_quantize_what_has_no_integer(layout, pixels):
    x = torch.tensor([math.nan, -math.inf, math.inf, 3e38, -3e38, 1e-45]).repeat(1, 1, pixels, 1)
    for first, count in ((0, 6), (0, 3), (3, 2), (5, 1)):
        part = lay_out(x[..., first : first + count].contiguous(), layout)
        result = quantized(part, QParams.per_tensor(0.1, 20, 5, 250), room=count)
        assert result[0, 0].tolist() == [[5, 5, 250, 250, 5, 20][first : first + count]] * pixels


# ---- pointwise


@settings(deadline=None)
@given(
    shape=SHAPES, grids=st.tuples(GRIDS, GRIDS, GRIDS), op=st.sampled_from(["alone", "add", "mul"]),
    other=st.sampled_from(["same", "a pixel", "a channel", "a constant"]), function=st.sampled_from(FUNCTIONS),
    rooms=st.tuples(*[st.booleans()] * 3), border=st.integers(0, 1), seed=SEEDS,
)  # fmt: skip
def test_pointwise(shape, grids, op, other, function, rooms, border, seed):
    torch.manual_seed(seed)
    n, _, _, c = shape
    room = [c if dense else 0 for dense in rooms]
    x, out = Area(shape, grids[0] is None, room[0]), Area(shape, grids[2] is None, room[2], border=(border, 0, 0, 1))
    step = PointwiseStep("f", out, function, grids[2], x=x, x_grid=grids[0])
    memory = {x: values(shape, grids[0])}
    exact = real(memory[x], grids[0])
    if op != "alone":
        constant = torch.randn(c + 15)  # with room after it, as other values have
        if other == "a constant":
            step.y = Area((n, 1, 1, c), True, base=ABSOLUTE, offset=constant.data_ptr())
            exact_y = constant[:c].double()
        else:
            y_shape = {"same": shape, "a pixel": (n, 1, 1, c), "a channel": (*shape[:3], 1)}[other]
            step.y = Area(y_shape, grids[1] is None, room[1])
            step.y_grid = grids[1]
            memory[step.y] = values(step.y.shape, grids[1])
            exact_y = real(memory[step.y], grids[1])
        step.multiplies = op == "mul"
        exact = exact * exact_y if step.multiplies else exact + exact_y
    check(run_steps([step], memory), applied(function, exact), grids[2], 3e-6)


@pytest.mark.parametrize("count", [1, 0, -1])
@pytest.mark.parametrize("grid", [None, QParams.per_tensor(0.0271, 100)], ids=["floats", "integers"])
def test_rows_longer_than_what_is_computed_at_once(grid, count):
    shape = (2, 1, 3, 2 * image_loops.CHUNK + count)
    for room, y_shape in ((0, shape), (shape[3], shape), (shape[3], (*shape[:3], 1))):
        x, y, out = Area(shape, grid is None, room), Area(y_shape, False), Area(shape, True, room)
        step = PointwiseStep(
            "f", out, Function("tanh"), None, x=x, x_grid=grid, y=y, y_grid=QParams.per_tensor(0.01, 9)
        )
        memory = {x: values(shape, grid), y: values(y_shape, QParams.per_tensor(0.01, 9))}
        exact = torch.tanh(real(memory[x], grid) + real(memory[y], step.y_grid))
        check(run_steps([step], memory), exact, None, 3e-6)


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize("channels", [1, 21, 32, 300, image_loops.CHUNK, image_loops.CHUNK + 1])
def test_a_pixel_for_all_of_a_long_row(channels, is_constant):
    """Each sample has its own, but of a constant."""
    shape = (2, 2, 1300 // channels + 1, channels)
    for room in (0, channels):
        x, out = Area(shape, False, room), Area(shape, True, room)
        y = Area((2, 1, 1, channels), True, room)
        pixel = torch.randn(2, 1, 1, channels)
        if is_constant:
            pixel = pixel[:1].expand(2, 1, 1, channels)
            padded = F.pad(pixel[0, 0, 0], (0, 15))
            y.base, y.offset = ABSOLUTE, padded.data_ptr()
        step = PointwiseStep(
            "f", out, Function("clamp", -1.0), x=x, x_grid=QParams.per_tensor(0.01, 100), y=y, multiplies=True
        )
        memory = {x: values(shape, QParams.per_tensor(0.01, 100)), **({} if is_constant else {y: pixel})}
        check(run_steps([step], memory), (real(memory[x], step.x_grid) * pixel.double()).clamp(min=-1), None, 1e-6)


@pytest.mark.parametrize("room", [0, 7])
def test_conversions(room):
    """Of integers to the same grid nothing is changed, nor of floats."""
    shape = (1, 3, 5, 7)
    x, y = Area(shape, False, room), Area(shape, False)
    q = torch.randint(0, 256, shape, dtype=torch.uint8)
    for grid in (QParams.per_tensor(1.0, 0), QParams.per_tensor(0.0271, 100), QParams.per_tensor(3e-5, 255)):
        assert torch.equal(run_steps([PointwiseStep("copy", y, grid=grid, x=x, x_grid=grid)], {x: q}), q)
    x, y = Area(shape, True, room), Area(shape, True)
    f = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 3e38, 1e-45, 1.0]).expand(shape)
    result = run_steps([PointwiseStep("copy", y, x=x, x_grid=None)], {x: f})
    assert torch.equal(result.view(torch.int32), f.contiguous().view(torch.int32))


def test_floats_that_have_no_integer():
    x, out = Area((1, 1, 1, 6), True), Area((1, 1, 1, 6), False)
    f = torch.tensor([math.nan, -math.inf, math.inf, 3e38, -3e38, 1e-45]).view(1, 1, 1, 6)
    result = run_steps([PointwiseStep("q", out, grid=QParams.per_tensor(0.1, 20, 5, 250), x=x, x_grid=None)], {x: f})
    assert result.flatten().tolist() == [5, 5, 250, 250, 5, 20]


# ---- pools


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(4, 8), st.integers(4, 12), st.integers(1, 140)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)), stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    pads=st.booleans(), grids=st.tuples(GRIDS, GRIDS), takes_mean=st.booleans(), counts_padding=st.booleans(),
    dense=st.booleans(), seed=SEEDS,
)  # fmt: skip
def test_pools(shape, kernel, stride, pads, grids, takes_mean, counts_padding, dense, seed):
    torch.manual_seed(seed)
    padding = tuple(size // 2 if pads else 0 for size in kernel)
    windows = [(a + 2 * p - k) // s + 1 for a, p, k, s in zip(shape[1:3], padding, kernel, stride, strict=True)]
    x_grid, grid = grids if takes_mean else (QParams.per_tensor(1.0, 0), QParams.per_tensor(1.0, 0))
    x = Area(shape, x_grid is None, shape[3] if dense else 0)
    out = Area((shape[0], *windows, shape[3]), grid is None, 0 if dense else shape[3])
    step = PoolStep(
        "pool", out, grid=grid, x=x, x_grid=x_grid, kernel=kernel, stride=stride, padding=padding,
        takes_mean=takes_mean, counts_padding=counts_padding,
    )  # fmt: skip
    memory = {x: values(shape, x_grid)}
    exact = real(memory[x], x_grid).permute(0, 3, 1, 2)
    if takes_mean:
        exact = F.avg_pool2d(exact, kernel, stride, padding, count_include_pad=counts_padding)
        check(run_steps([step], memory), exact.permute(0, 2, 3, 1), grid, 1e-6)
    else:
        exact = F.max_pool2d(exact, kernel, stride, padding).permute(0, 2, 3, 1)
        assert torch.equal(run_steps([step], memory), exact.to(torch.uint8))


@pytest.mark.parametrize("value", [0, 255])
def test_the_mean_of_a_large_image(value):
    """The sum of its integers is exact."""
    shape, grid = (1, 300, 200, 3), QParams.per_tensor(0.5, 128)
    x, out = Area(shape, False), Area((1, 1, 1, 3), False)
    about = {"kernel": shape[1:3], "stride": shape[1:3], "x_grid": grid}
    result = run_steps(
        [PoolStep("pool", out, grid=grid, x=x, **about)], {x: torch.full(shape, value, dtype=torch.uint8)}
    )
    assert result.flatten().tolist() == [value] * 3


# ---- norms


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.integers(2, 70)),
    grids=st.tuples(GRIDS, GRIDS), dense=st.booleans(), seed=SEEDS,
)  # fmt: skip
def test_norms(shape, grids, dense, seed):
    torch.manual_seed(seed)
    c = shape[3]
    x, out = Area(shape, grids[0] is None, c if dense else 0), Area(shape, grids[1] is None, 0 if dense else c)
    weight, bias, eps = torch.randn(c), torch.randn(c), 1e-3
    step = NormStep("norm", out, grid=grids[1], x=x, x_grid=grids[0], weight=weight, bias=bias, eps=eps)
    memory = {x: values(shape, grids[0])}
    exact = F.layer_norm(real(memory[x], grids[0]), (c,), weight.double(), bias.double(), eps)
    check(run_steps([step], memory), exact, grids[1], 2e-5)


@pytest.mark.parametrize("channels", [1, 15, 16, 33])
def test_norms_of_equal_channels(channels):
    """They have no variance, and the bias is left; a row that is not a number is none of the others' business."""
    shape = (1, 1, 3, channels)
    x, out, bias = Area(shape, True), Area(shape, True), torch.randn(channels)
    f = torch.tensor([2.0, math.nan, -7.0])[:, None].expand(shape)
    step = NormStep("norm", out, x=x, x_grid=None, weight=torch.ones(channels), bias=bias, eps=1e-5)
    result = run_steps([step], {x: f})[0, 0]
    torch.testing.assert_close(result[::2], bias.expand(2, channels), rtol=0, atol=1e-3)
    assert bool(result[1].isnan().all())


def test_norms_far_from_zero():
    """The variance is that of what the mean is taken from: its digits are not lost."""
    shape = (1, 1, 4, 48)
    x, out = Area(shape, True), Area(shape, True)
    f = 1000 + torch.randn(shape)
    step = NormStep("norm", out, x=x, x_grid=None, weight=torch.ones(48), bias=torch.zeros(48), eps=1e-5)
    check(run_steps([step], {x: f}), F.layer_norm(f.double(), (48,)), None, 1e-3)


# ---- moves


@settings(deadline=None)
@given(shape=SHAPES, is_float=st.booleans(), dense=st.booleans(), border=st.integers(0, 1), seed=SEEDS)
def test_moves(shape, is_float, dense, border, seed):
    """An image becomes a row, its channels first, as `flatten` has them."""
    torch.manual_seed(seed)
    n, h, w, c = shape
    x = Area(shape, is_float, c if dense else 0, border=(border, border, 0, border))
    out = Area((n, 1, 1, c * h * w), is_float)
    x_values = values(shape, None if is_float else QParams.per_tensor(1.0, 0))
    result = run_steps([MoveStep("move", out, x=x, out_strides=lambda _: (w, 1, h * w))], {x: x_values})
    assert torch.equal(result.flatten(1), x_values.permute(0, 3, 1, 2).flatten(1))


@settings(deadline=None)
@given(
    batch=st.integers(1, 2), length=st.integers(1, 5), heads=st.integers(1, 4), depth=st.integers(1, 20),
    is_turned=st.booleans(), is_float=st.booleans(), dense=st.booleans(), seed=SEEDS,
)  # fmt: skip
def test_moves_of_heads(batch, length, heads, depth, is_turned, is_float, dense, seed):
    """The parts of each pixel become pixels, or with `is_turned` rows; what is written has a border, and room."""
    torch.manual_seed(seed)
    x = Area((batch, 1, length, heads * depth), is_float, heads * depth if dense else 0)
    shape = (batch, heads, length, depth) if is_turned else (batch, length, heads, depth)
    out = Area(shape, is_float, border=(1, 0, 0, 2))
    x_values = values(x.shape, None if is_float else QParams.per_tensor(1.0, 0))

    def by(to):
        return (to.row_stride, to.pixel_stride, 1) if is_turned else (to.pixel_stride, to.row_stride, 1)

    result = run_steps([MoveStep("move", out, x=x, out_strides=by, heads=heads)], {x: x_values})
    wanted = x_values[:, 0].unflatten(-1, (heads, depth))
    assert torch.equal(result, wanted.transpose(1, 2) if is_turned else wanted)
