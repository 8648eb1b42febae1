"""Which layers become steps, and which do not, with the reason."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.programs.layer_steps import ProductStep
from fxq.backends.loops.programs.plan import planned
from fxq.backends.loops.programs.planned_values import NotPlannedError
from tests.support.programs import Draft, check, check_both, kinds, plan_of, refused, steps_of

pytestmark = pytest.mark.any_cpu

PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


# ---- linear


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [(5, 33), (2, 16), (2, 7, 16), (1, 1, 5), (2, 3, 4, 17), (1, 2, 2, 64)])
@pytest.mark.parametrize("columns", [1, 16, 21])
def test_linear_layers_on_any_axes(shape, columns):
    draft = Draft()
    y = draft.op("linear", draft.image(*shape), draft.weight(columns, shape[-1]), draft.vector(columns))
    check_both(draft, y)
    assert draft.values[y].shape == (*shape[:-1], columns)


def test_a_scale_for_the_whole_weight():
    draft = Draft()
    weight = draft.constant(torch.randint(-127, 128, (5, 16), dtype=torch.int8))
    weight = draft.op("dequantize", weight, scale=0.02, zero_point=0, qmin=-127, qmax=127)
    check_both(draft, draft.op("linear", draft.image(2, 16), weight))


def test_linear_layers_that_are_refused():
    draft = Draft()
    assert refused(draft, draft.op("linear", draft.image(16), draft.weight(5, 16))) == "it has 1 axes"
    draft = Draft()
    x = draft.image(2, 16)
    assert refused(draft, draft.op("linear", x, draft.weight(5, 16, axis=1))) == "its weight has scales of another axis"
    assert refused(draft, draft.op("linear", x, draft.constant(draft.normal(5, 16)))) == "its weight is float"
    assert refused(draft, draft.op("linear", x, draft.input(draft.normal(5, 16)))) == "its weight is no constant"
    bias = draft.input(draft.normal(5))
    assert refused(draft, draft.op("linear", x, draft.weight(5, 16), bias)) == "it has 1 axes"
    draft = Draft()
    x = draft.input(draft.normal(2, 3, 16))
    y = draft.op("linear", x, draft.constant(draft.normal(5, 16)))
    assert refused(draft, y) == "it is a float layer on several pixels"


def test_a_bias_that_is_computed():
    draft = Draft()
    x, bias = draft.image(1, 16), draft.input(draft.normal(1, 5))
    assert refused(draft, draft.op("linear", x, draft.weight(5, 16), bias)) == "its bias is no constant"


@pytest.mark.parametrize(("value", "fits"), [(127, True), (-128, False)])
def test_sums_that_leave_int32(value, fits):
    """66,311 * 255 * 127 is within int32."""
    draft = Draft()
    weight = draft.constant(torch.full((1, 66_311), value, dtype=torch.int8))
    weight = draft.op("dequantize", weight, scale=0.1, zero_point=0)
    y = draft.op("linear", draft.image(1, 66_311), weight)
    if fits:
        assert kinds(plan_of(draft, y)) == ["QuantizeStep", "ProductStep"]
    else:
        assert refused(draft, y) == "its sums can reach 2.2e+09, beyond int32 (2.1e+09)"


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"dtype": torch.uint8, "zero_point": 0}, "its weight is not int8, or is grouped or packed"),
        ({"dtype": torch.int8, "zero_point": 3}, "its weight has zero points"),
    ],
)
def test_weights_on_other_grids(about, reason):
    draft = Draft()
    weight = draft.constant(torch.ones(5, 16, dtype=about["dtype"]))
    weight = draft.op("dequantize", weight, scale=0.1, zero_point=about["zero_point"])
    assert refused(draft, draft.op("linear", draft.image(2, 16), weight)) == reason


# ---- conv2d


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("channels", "columns"), [(1, 16), (3, 16), (5, 17), (33, 5), (17, 33), (64, 1)])
@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions(channels, columns, size, stride):
    draft = Draft()
    check_both(draft, draft.conv(draft.image(2, channels, 9, 8), columns, size, stride=(stride, stride)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kernel", [(2, 2), (4, 3), (1, 6)])
@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("groups", [1, 32])
def test_same_padding_that_is_not_the_same_on_both_sides(kernel, dilation, groups):
    draft = Draft()
    x, weight = draft.image(2, 32, 8, 9), draft.weight(32, 32 // groups, *kernel)
    y = draft.op("conv2d", x, weight, padding="same", dilation=(dilation, dilation), groups=groups)
    assert draft.values[y].shape == draft.values[x].shape
    check_both(draft, y)


def test_an_image_smaller_than_the_window():
    draft = Draft()
    check_both(draft, draft.conv(draft.image(2, 16, 1, 2), 16, 7))


@pytest.mark.parametrize(
    ("channels", "columns", "groups"), [(16, 16, 2), (16, 32, 16), (32, 16, 16)], ids=["two", "twice", "pairs"]
)
def test_groups_of_several_channels_are_refused(channels, columns, groups):
    draft = Draft()
    y = draft.conv(draft.image(2, channels, 5, 5), columns, 3, groups=groups)
    assert refused(draft, y) == "it has groups of several channels"


def test_depthwise_layers_of_few_channels():
    """Values have room for 16 channels, also inputs, and beside a layer that reads pixels side by side."""
    draft = Draft()
    x = draft.image(2, 3, 5, 5)
    check_both(draft, draft.conv(x, 3, 3, groups=3))
    check_both(draft, draft.conv(draft.qdq(draft.conv(x, 3, 1)), 3, 3, groups=3))


def test_convolutions_that_are_refused():
    draft = Draft()
    x = draft.image(2, 16, 5, 5)
    reflects = draft.op("conv2d", x, draft.weight(8, 16, 3, 3), padding=(1, 1), padding_mode="reflect")
    assert refused(draft, reflects) == "it pads with reflect"
    by_input = draft.op("conv2d", x, draft.weight(8, 16, 3, 3, axis=1))
    assert refused(draft, by_input) == "its weight has scales of another axis"
    draft = Draft()
    x = draft.input(draft.normal(2, 16, 5, 5))
    windows = draft.op("conv2d", x, draft.constant(draft.normal(8, 16, 3, 3)))
    assert refused(draft, windows) == "it is a float layer with windows or groups"
    pixels = draft.op("conv2d", x, draft.constant(draft.normal(8, 16, 1, 1)))
    assert refused(draft, pixels) == "it is a float layer on several pixels"


def test_a_convolution_of_an_image_without_a_batch_is_refused():
    draft = Draft()
    y = draft.op("conv2d", draft.image(16, 5, 5), draft.weight(8, 16, 3, 3))
    assert refused(draft, y) == "its input is no image or sequence with its channels first"


@pytest.mark.parametrize(
    ("channels", "columns", "size", "options"),
    [
        (16, 33, 3, {"padding": (1,)}),
        (3, 5, 7, {"stride": (2,), "padding": (3,)}),
        (40, 1, 5, {"dilation": (3,), "padding": "same"}),
        (16, 16, 1, {}),
        (80, 80, 5, {"groups": 80, "padding": (4,), "dilation": (2,)}),
    ],
)
def test_convolutions_of_sequences(channels, columns, size, options):
    draft = Draft()
    groups = options.get("groups", 1)
    weight = draft.weight(columns, channels // groups, size)
    y = draft.op("conv1d", draft.image(2, channels, 19), weight, draft.vector(columns), **options)
    assert kinds(check(draft, y))[:2] == ["QuantizeStep", "ProductStep"]
    check_both(draft, draft.op("leaky_relu", y, negative_slope=0.1))


def test_a_block_of_a_vocoder_is_one_program():
    """Sums of floats and of integers on sequences, whose channels are axis 1 in memory of the caller."""
    draft = Draft()
    x = draft.input(draft.normal(2, 20, 12))
    noise = draft.input(draft.normal(2, 24, 24))
    up = draft.op("conv_transpose1d", draft.qdq(x), draft.weight(20, 24, 4, axis=1), stride=(2,), padding=(1,))
    up = draft.qdq(draft.op("add", up, noise))
    y = draft.op("conv1d", up, draft.weight(24, 24, 3), draft.vector(24), padding=(1,))
    y = draft.qdq(draft.op("add", draft.op("leaky_relu", y, negative_slope=0.1), up))
    halves = [draft.op("split", y, sizes=12, dim=1, index=i) for i in (0, 1)]
    check(draft, draft.op("mul", draft.op("tanh", halves[0]), draft.op("sigmoid", halves[1])))
    check(draft, draft.op("linear", draft.op("transpose", y, dim0=1, dim1=2), draft.weight(7, 24)))


# ---- conv_transpose1d, conv_transpose2d


def transposed(draft, x, columns, size, stride, padding=0, output_padding=0, has_bias=True):
    channels = draft.values[x].shape[1]
    bias = [draft.vector(columns)] if has_bias else []
    about = {"stride": (stride,) * 2, "padding": (padding,) * 2, "output_padding": (output_padding,) * 2}
    return draft.op("conv_transpose2d", x, draft.weight(channels, columns, size, size, axis=1), *bias, **about)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("channels", "columns", "size", "stride", "padding", "output_padding"),
    [
        (16, 16, 2, 2, 0, 0),
        (17, 33, 2, 2, 0, 0),
        (16, 3, 2, 2, 0, 0),
        (32, 1, 9, 2, 4, 1),
        (16, 16, 4, 2, 2, 0),
        (16, 5, 4, 2, 0, 0),
        (3, 16, 3, 3, 0, 0),
        (16, 32, 3, 1, 1, 0),
        (16, 8, 2, 3, 0, 1),
        (16, 16, 4, 2, 1, 0),
        (17, 5, 3, 2, 1, 1),
    ],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_transposed_convolutions(channels, columns, size, stride, padding, output_padding, has_bias):
    draft = Draft()
    y = transposed(draft, draft.image(2, channels, 5, 4), columns, size, stride, padding, output_padding, has_bias)
    assert kinds(check(draft, y)) == ["QuantizeStep", "ProductStep"]
    check(draft, draft.quantize(y))
    check(draft, draft.quantize(draft.op("silu", y)))


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([3, 16, 20]), st.sampled_from([1, 7, 16]), PAIRS, PAIRS, PAIRS, st.integers(0, 3),
    st.integers(0, 2**16),
)  # fmt: skip
def test_transposed_convolutions_of_any_window(channels, columns, size, kernel, stride, more, seed):
    """With so much of padding and output padding as its stride takes."""
    draft = Draft(seed)
    x = draft.image(1 + seed % 3, channels, *size)
    extra = [(s - (n - 1) * s - k) % s for n, k, s in zip(size, kernel, stride, strict=True)]
    kernel = [k + e + more * s for k, e, s in zip(kernel, extra, stride, strict=True)]
    padding = [s if k + (n - 1) * s > 2 * s else 0 for n, k, s in zip(size, kernel, stride, strict=True)]
    weight = draft.weight(channels, columns, *kernel, axis=1)
    check_both(draft, draft.op("conv_transpose2d", x, weight, stride=stride, padding=padding))


@pytest.mark.parametrize(("size", "stride", "padding"), [(16, 8, 4), (4, 2, 1), (11, 5, 3), (7, 3, 2), (1, 4, 0)])
def test_transposed_convolutions_of_sequences(size, stride, padding):
    draft = Draft()
    x, weight = draft.image(2, 20, 9), draft.weight(20, 16, size, axis=1)
    more = (stride - (9 - 1) * stride + 2 * padding - size) % stride
    options = {"stride": (stride,), "padding": (padding,), "output_padding": (more,)}
    check_both(draft, draft.op("conv_transpose1d", x, weight, draft.vector(16), **options))


def test_a_transposed_convolution_adds_nothing_and_is_not_scaled():
    draft = Draft()
    x = draft.image(2, 16, 4, 4)
    skip = draft.qdq(draft.input(draft.normal(2, 16, 8, 8)))
    y = draft.op("add", transposed(draft, x, 16, 2, 2), skip)
    compiled = check(draft, draft.quantize(y))
    assert kinds(compiled)[-2:] == ["PointwiseStep", "PointwiseStep"]  # the sum, and the copy to what is returned
    factor = draft.constant(torch.rand(1, 16, 1, 1))
    check_both(draft, draft.op("mul", transposed(draft, x, 16, 2, 2), factor))


def test_slopes_after_a_transposed_convolution():
    draft = Draft()
    for columns in (5, 16):
        y = transposed(draft, draft.image(2, 16, 4, 4), columns, 2, 2)
        check_both(draft, draft.op("prelu", y, draft.constant(torch.rand(columns))))


def test_transposed_convolutions_that_are_refused():
    draft = Draft()
    x = draft.image(2, 16, 5, 5)
    assert refused(draft, transposed(draft, x, 8, 3, 2)) == "the size of its result is no multiple of its stride"
    grouped = draft.op("conv_transpose2d", x, draft.weight(16, 1, 2, 2, axis=1), stride=(2, 2), groups=16)
    assert refused(draft, grouped) == "it has groups, or a dilation"
    dilated = draft.op("conv_transpose2d", x, draft.weight(16, 8, 2, 2, axis=1), dilation=(2, 2))
    assert refused(draft, dilated) == "it has groups, or a dilation"
    by_input = draft.op("conv_transpose2d", x, draft.weight(16, 8, 2, 2), stride=(2, 2))
    assert refused(draft, by_input) == "its weight has scales of its input's channels"
    draft = Draft()
    x = draft.input(draft.normal(2, 16, 5, 5))
    assert refused(draft, transposed(draft, x, 8, 2, 2)) == "it is a float layer"


# ---- batch_norm


def norm(draft, x, has_weight=True):
    channels = draft.values[x].shape[1]
    statistics = [draft.vector(channels), draft.constant(0.5 + torch.rand(channels))]
    about = [draft.vector(channels), draft.vector(channels)] if has_weight else []
    return draft.op("batch_norm", x, *statistics, *about, eps=1e-3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", [(2, 16, 5, 4), (2, 33, 1, 1), (2, 64, 3, 3), (2, 144, 3, 3), (2, 16), (5, 40)])
@pytest.mark.parametrize("has_weight", [True, False])
def test_norms_of_integers(shape, has_weight):
    draft = Draft()
    y = norm(draft, draft.image(*shape), has_weight)
    assert kinds(check(draft, y)) == ["QuantizeStep", "ProductStep"]
    check(draft, draft.quantize(draft.op("relu", y)))


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (2, 16, 5, 4), (2, 17)])
def test_norms_of_floats(shape):
    draft = Draft()
    check_both(draft, norm(draft, draft.input(draft.normal(*shape))))
    check_both(draft, norm(draft, draft.op("tanh", draft.image(*shape))))


def test_norms_of_few_channels():
    draft = Draft()
    check_both(draft, norm(draft, draft.image(2, 3, 5, 4)))


def test_norms_of_sequences():
    draft = Draft()
    check_both(draft, norm(draft, draft.image(2, 16, 5)))
    check_both(draft, norm(draft, draft.input(draft.normal(2, 16, 5))))


def test_a_norm_and_what_its_result_is_added_to():
    """It is a layer, so it adds integers itself."""
    draft = Draft()
    x = draft.image(2, 32, 4, 4)
    compiled = check(draft, draft.quantize(draft.op("relu", draft.op("add", norm(draft, x), x))))
    (step,) = steps_of(compiled, ProductStep)
    assert step.residual is step.x


# ---- what does not fit


@pytest.mark.parametrize(("features", "input_features"), [(16, 20), (20, 16)])
def test_linear_layers_of_other_features(features, input_features):
    """As it comes when a loaded model is given images of another size."""
    draft = Draft()
    y = draft.op("linear", draft.image(2, 5, features), draft.weight(7, features), draft.vector(7))
    with pytest.raises(NotPlannedError, match=f"its input has {input_features} channels, its weight {features}"):
        planned(draft.form(y), [draft.normal(2, 5, input_features)])


def test_transposed_layers_of_other_channels():
    draft = Draft()
    y = draft.op("conv_transpose2d", draft.image(2, 1, 3, 3), draft.weight(1, 4, 2, 2, axis=1), stride=(2, 2))
    with pytest.raises(NotPlannedError, match="its input has 3 channels, its weight 1"):
        planned(draft.form(y), [draft.normal(2, 3, 3, 3)])


def test_convolutions_and_norms_of_other_channels():
    draft = Draft()
    x = draft.image(2, 3, 5, 4)
    for y in (draft.conv(x, 4, 3), norm(draft, x)):
        with pytest.raises(NotPlannedError, match="its input has 6 channels"):
            planned(draft.form(y), [draft.normal(2, 6, 5, 4)])


def test_a_bias_of_integers():
    draft = Draft()
    values = draft.constant(torch.tensor([100, -100, 3, 90], dtype=torch.int8))
    bias = draft.op("dequantize", values, scale=draft.constant(torch.tensor(0.01)), zero_point=0)
    x = draft.image(2, 3, 5, 4)
    check_both(draft, draft.op("conv2d", x, draft.weight(4, 3, 1, 1), bias))
    check_both(draft, draft.op("conv_transpose2d", x, draft.weight(3, 4, 2, 2, axis=1), bias, stride=(2, 2)))


def test_integers_on_two_grids():
    """Both convolutions read around the same pixels, which cannot be two zero points."""
    draft = Draft()
    x = draft.quantize(draft.input(draft.normal(1, 3, 5, 5)), (0.02, 100))
    parts = [draft.conv(draft.dequantize(x, (0.02, zero)), 4, 3) for zero in (100, 90)]
    assert refused(draft, *parts) == "its input would need a border with two zero points"
    check(draft, *(draft.conv(draft.dequantize(x, (0.02, zero)), 4, 1) for zero in (100, 90)))
