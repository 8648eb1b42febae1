"""The steps of layers: products of integers of any shape, their borders, residuals, and layers in float."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.programs.areas import Area
from fxq.backends.loops.programs.layer_steps import LinearStep, ProductStep
from fxq.backends.loops.programs.program_steps import Function, RowWriter
from fxq.quant.qparams import QParams
from tests.support.programs import LOOPS, Draft, check, check_both, kinds, plan_of, program, steps_of

pytestmark = pytest.mark.any_cpu

CHANNELS = st.sampled_from([1, 3, 5, 16, 17, 33, 64])
PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))
quick = settings(max_examples=8, deadline=None)


# ---- products


@quick
@given(
    st.sampled_from([1, 2, 5]), CHANNELS, CHANNELS, st.integers(1, 3), st.tuples(st.integers(1, 4), st.integers(1, 5)),
    PAIRS, PAIRS, st.sampled_from(["none", "some", "same"]), st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.integers(0, 2**16),
)  # fmt: skip
def test_convolutions(batch, channels, columns, count, kernel, stride, dilation, padding, more, seed):
    """Images are as large as the window needs, or larger."""
    draft = Draft(seed)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    pads = {"none": (0, 0), "some": (seed % 3, seed // 3 % 4), "same": "same"}[padding]
    stride = (1, 1) if padding == "same" else stride
    x = draft.image(batch, channels, *(r + m for r, m in zip(reach, more, strict=True)))
    bias = [draft.vector(columns)] if count > 1 else []
    about = {"stride": stride, "padding": pads, "dilation": dilation}
    check_both(draft, draft.op("conv2d", x, draft.weight(columns, channels, *kernel), *bias, **about))


@pytest.mark.parametrize("channels", [16, 32, 40, 64, 96, 144])
@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_convolutions(channels, size, stride):
    draft = Draft()
    x = draft.image(2, channels, 9, 8)
    y = draft.conv(x, channels, size, groups=channels, stride=(stride, stride))
    check_both(draft, y)
    check(draft, draft.quantize(draft.op("relu6", y)))


@quick
@given(
    st.sampled_from([1, 2, 5]), st.sampled_from([16, 17, 33, 64, 100, 128]), PAIRS, PAIRS, PAIRS, st.integers(0, 2**16)
)  # fmt: skip
def test_depthwise_convolutions_of_any_window(batch, channels, kernel, stride, dilation, seed):
    draft = Draft(seed)
    weight = draft.weight(channels, 1, *kernel)
    x = draft.image(batch, channels, 9, 7)
    about = {"stride": stride, "dilation": dilation, "padding": (1, 2), "groups": channels}
    check_both(draft, draft.op("conv2d", x, weight, **about))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("function", ["relu", "silu", "hardswish", "gelu", "sigmoid", "tanh", "hardsigmoid"])
@pytest.mark.parametrize("groups", [1, 80])
def test_functions_of_layers(function, groups):
    draft = Draft()
    y = draft.op(function, draft.conv(draft.image(2, 80, 5, 5), 80, 3, groups=groups))
    assert kinds(check(draft, y)) == ["QuantizeStep", "ProductStep"]
    check(draft, draft.quantize(y))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("channels", [16, 40, 64, 80, 128])
@pytest.mark.parametrize("is_depthwise", [False, True])
def test_slopes_of_each_channel(channels, is_depthwise):
    draft = Draft()
    y = draft.conv(draft.image(2, channels, 5, 5), channels, 3, groups=channels if is_depthwise else 1)
    y = draft.op("prelu", y, draft.constant(torch.rand(channels)))
    assert kinds(check(draft, y)) == ["QuantizeStep", "ProductStep"]
    check(draft, draft.quantize(y))  # with VNNI, 64 depthwise channels are computed at once


@pytest.mark.parametrize("channels", [16, 64, 80])
def test_one_slope(channels):
    draft = Draft()
    y = draft.conv(draft.image(2, channels, 5, 5), channels, 3, groups=channels)
    check_both(draft, draft.op("leaky_relu", y, negative_slope=0.2))


def test_sums_are_exact():
    """Of the largest integers, 9 * 64 of them: float sums in PyTorch are not, and so are not compared."""
    draft = Draft()
    x = draft.dequantize(draft.quantize(draft.input(torch.full((1, 64, 4, 4), 255.0)), (1.0, 0)))
    weight = torch.full((16, 64, 3, 3), 127, dtype=torch.int8)
    weight[1], weight[2, 1::2] = -127, -127
    zero = draft.constant(torch.zeros(16, dtype=torch.int32))
    about = {"scale": draft.constant(torch.full((16,), 2.0**-8)), "zero_point": zero, "axis": 0}
    y = draft.op("conv2d", x, draft.op("dequantize", draft.constant(weight), **about))
    form = draft.form(y)
    got = program(form, draft.inputs)(*draft.inputs)[0, :3, 0, 0]
    whole = 255 * 127 * 9 * 64
    assert got.tolist() == [whole / 256, -whole / 256, 0]


@pytest.mark.parametrize("zero", [0, 1, 128, 255])
def test_zero_points_of_what_is_read(zero):
    """Padding counts as zero, whatever integer that is."""
    draft = Draft()
    x = draft.qdq(draft.input(draft.normal(2, 16, 5, 5)), (0.02, zero))
    check_both(draft, draft.conv(x, 16, 5))
    check_both(draft, draft.conv(x, 16, 5, groups=16))


@pytest.mark.parametrize(
    ("channels", "columns", "size", "pixels"), [(64, 33, 3, (47, 51)), (1024, 40, 1, (15, 14)), (4099, 5, 1, (1, 3))]
)
def test_more_pixels_than_are_read_at_once(channels, columns, size, pixels):
    """And many channels."""
    draft = Draft()
    check_both(draft, draft.conv(draft.image(1, channels, *pixels), columns, size))


def test_two_windows_on_one_value():
    """The border is as wide as the wider one, and what needs none reads past it."""
    draft = Draft()
    x = draft.qdq(draft.conv(draft.image(2, 16, 7, 6), 16, 1))
    y = [draft.conv(x, 16, 7), draft.conv(x, 16, 3, stride=(2, 2)), draft.conv(x, 16, 1)]
    compiled = check(draft, *y, draft.op("mean", x, dim=(2, 3)))
    assert compiled.plan.steps[1].out.border == (3, 3, 3, 3)


# ---- what a window reaches


def product(shape, taps, windows, first=(0, 0), stride=(1, 1)):
    weight = torch.ones(16, len(taps), shape[3], dtype=torch.int8)
    area, scale = Area(shape, False), torch.ones(16)
    about = {"taps": taps, "windows": windows, "first": first, "stride": stride, "scale": scale, "bias": None}
    return ProductStep(
        "conv", Area((1, *windows, 16)), x=area, x_grid=QParams.per_tensor(1.0, 0), weight=weight, **about
    )


def test_borders():
    square = [(i, j) for i in range(3) for j in range(3)]
    assert product((1, 5, 5, 16), square, (3, 3)).border() == (0, 0, 0, 0)
    assert product((1, 5, 5, 16), square, (5, 5), first=(-1, -1)).border() == (1, 1, 1, 1)
    assert product((1, 5, 4, 16), square, (3, 2), first=(-1, 0), stride=(2, 2)).border() == (1, 0, 1, 1)
    assert product((1, 2, 2, 16), [(0, 0), (-1, -2)], (3, 2)).border() == (1, 2, 1, 0)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1), PAIRS, PAIRS, PAIRS)
def test_a_border_has_all_that_windows_read(taps, size, windows, stride):
    step = product((1, *size, 16), taps, windows, (-1, 1), stride)
    rows = {-1 + i * stride[0] + r for i in range(windows[0]) for r, _ in taps}
    columns = {1 + j * stride[1] + c for j in range(windows[1]) for _, c in taps}
    high, wide = size
    wanted = max(-min(rows), 0), max(-min(columns), 0), max(max(rows) - high + 1, 0), max(max(columns) - wide + 1, 0)
    assert step.border() == wanted


def test_what_may_be_folded():
    step = product((1, 5, 5, 16), [(0, 0)], (5, 5))
    assert step.can_fold_scale
    step.fold_scale(torch.full((16,), -2.0))
    assert step.scale.tolist() == [-2.0] * 16 and step.bias is None and step.can_fold_scale
    step.function = Function("gelu")
    assert not step.can_fold_scale
    step = product((1, 5, 5, 16), [(0, 0)], (5, 5))
    step.residual = step.x
    assert not step.can_fold_scale and step.reads == [step.x, step.x]


def test_a_row_of_numbers_fits():
    draft = Draft()
    x = draft.image(2, 80, 5, 5)
    y = draft.op("add", draft.conv(x, 80, 3), draft.qdq(draft.conv(x, 80)))
    form = draft.form(draft.qdq(y), draft.quantize(draft.conv(x, 80, 3, groups=80)))
    compiled = program(form, draft.inputs)
    rows = [row for step in compiled.plan.steps for row in step.rows(RowWriter(LOOPS))]
    assert max(map(len, rows)) <= LOOPS.MAX_STEP_FIELDS and len(rows) == len(compiled._steps)
    wide = [step for step in steps_of(compiled, ProductStep) if step.weight.dim() == 2]
    assert sum(step is wide[0] for step in compiled._steps) == (
        2 if LOOPS.KIND.wide_channels else 1
    )  # 64 channels, and 16


# ---- layers in float


@pytest.mark.parametrize("shape", [(1, 5), (2, 16), (5, 33)])
@pytest.mark.parametrize("columns", [1, 16, 21])
def test_layers_in_float(shape, columns):
    draft = Draft()
    x, weight = draft.input(draft.normal(*shape)), draft.constant(draft.normal(columns, shape[1]))
    y = draft.op("linear", x, weight, draft.vector(columns))
    assert "LinearStep" in kinds(check(draft, y))
    check(draft, draft.op("linear", x, draft.weight(columns, shape[1])))  # integers that count as floats


@pytest.mark.parametrize("function", ["relu", "relu6", "silu", "gelu", "sigmoid", "hardsigmoid", "leaky_relu"])
def test_functions_of_layers_in_float(function):
    draft = Draft()
    y = draft.op("linear", draft.input(draft.normal(2, 16)), draft.constant(draft.normal(20, 16)))
    check(draft, draft.op(function, y))


def test_a_layer_in_float_whose_result_is_rounded():
    """The step itself writes floats."""
    draft = Draft()
    y = draft.op("linear", draft.input(draft.normal(2, 16)), draft.constant(draft.normal(20, 16)))
    check(draft, draft.quantize(y))
    check(draft, draft.quantize(draft.op("silu", y)))


def test_two_layers_in_float():
    draft = Draft()
    x = draft.op("mean", draft.image(2, 16, 4, 4), dim=(2, 3))
    x = draft.op("relu", draft.op("linear", x, draft.constant(draft.normal(9, 16)), draft.vector(9)))
    x = draft.op("linear", x, draft.constant(draft.normal(40, 9)))
    compiled = check(draft, draft.op("sigmoid", x))
    assert [step.out.is_float for step in steps_of(compiled, LinearStep)] == [True, True]


def test_a_convolution_of_one_pixel_in_float():
    draft = Draft()
    x = draft.input(draft.normal(2, 16, 1, 1))
    assert (
        kinds(check(draft, draft.op("conv2d", x, draft.constant(draft.normal(5, 16, 1, 1))))).count("LinearStep") == 1
    )


# ---- residuals


@pytest.mark.one_in(3)
@pytest.mark.parametrize("channels", [3, 16, 17, 64])
@pytest.mark.parametrize("function", [None, "relu", "relu6", "silu", "hardswish", "leaky_relu", "prelu"])
def test_a_layer_adds_integers(channels, function):
    """Of 70 pixels, which are no whole number of large tiles, nor of small ones."""
    draft = Draft()
    x = draft.image(2, channels, 7, 5)
    y = draft.op("add", draft.conv(x, channels, 3), x)
    slopes = [draft.constant(torch.rand(channels))] if function == "prelu" else []
    y = draft.op(function, y, *slopes) if function else y
    assert kinds(plan_of(draft, draft.qdq(y)))[:2] == ["QuantizeStep", "ProductStep"]
    check_both(draft, y)
    check_both(draft, draft.op("add", x, draft.conv(x, channels)))


@pytest.mark.parametrize("channels", [16, 64, 80])
def test_a_depthwise_layer_adds_integers(channels):
    draft = Draft()
    x = draft.image(2, channels, 6, 5)
    check_both(draft, draft.op("add", draft.conv(x, channels, 3, groups=channels), x))
