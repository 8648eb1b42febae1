"""Which ops on images become steps: pools, means, joined channels, norms."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.programs.layer_steps import ProductStep
from fxq.backends.loops.programs.program_steps import NormStep, PoolStep
from tests.support.programs import Draft, check, check_both, kinds, plan_of, program, refused, steps_of

pytestmark = pytest.mark.any_cpu

TWO, ONE, NONE = (2, 2), (1, 1), (0, 0)
WINDOW = {"kernel_size": (3, 3), "stride": TWO, "padding": ONE}


# ---- pools


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (9, 4), (None, 2)])
@pytest.mark.parametrize("channels", [3, 16, 17])
def test_adaptive_pools(size, channels):
    draft = Draft()
    x = draft.image(2, channels, 9, 4)
    check_both(draft, draft.op("adaptive_avg_pool2d", x, output_size=size))


def test_adaptive_pools_with_windows_of_several_sizes_are_refused():
    draft = Draft()
    y = draft.op("adaptive_avg_pool2d", draft.image(2, 3, 9, 4), output_size=(2, 4))
    assert refused(draft, y) == "its windows differ in size"


@pytest.mark.parametrize("counts", [True, False])
def test_padding_of_means(counts):
    draft = Draft()
    x = draft.image(2, 17, 7, 6)
    y = draft.op("avg_pool2d", x, **WINDOW, count_include_pad=counts)
    assert kinds(check(draft, draft.quantize(y))) == ["QuantizeStep", "PoolStep", "PointwiseStep"]
    check(draft, y)


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("dims", [(2, 3), (-1, -2), [3, 2]])
def test_means_of_images(keepdim, dims):
    draft = Draft()
    check_both(draft, draft.op("mean", draft.image(2, 33, 5, 3), dim=dims, keepdim=keepdim))


@pytest.mark.parametrize(("shape", "dims"), [((2, 3, 4, 5), 1), ((2, 3, 4, 5), (1, 2)), ((2, 3, 4), (1,)), ((2, 3), 1)])
def test_means_of_other_axes_are_refused(shape, dims):
    draft = Draft()
    y = draft.op("mean", draft.image(*shape), dim=dims)
    assert refused(draft, y) == "it is the mean of other axes than height and width"


def test_pools_that_are_refused():
    draft = Draft()
    floats = draft.input(draft.normal(2, 3, 7, 7))
    integers = draft.quantize(floats)
    x = draft.dequantize(integers)
    outside = {**WINDOW, "ceil_mode": True}
    for about in (outside, {**WINDOW, "divisor_override": 5}):
        assert "it has ceil_mode or divisor_override" in refused(draft, draft.op("avg_pool2d", x, **about))
    assert refused(draft, draft.op("max_pool2d", integers, **{**WINDOW, "dilation": TWO})) == "its windows have gaps"
    assert refused(draft, draft.op("max_pool2d", floats, **WINDOW)) == "it reads no integers"


@pytest.mark.parametrize("shape", [(2, 8, 4, 4), (2, 4, 8)])
def test_pools_of_other_axes_are_refused(shape):
    """A sequence is no image, nor is what was turned to channels-last."""
    draft = Draft()
    x = draft.image(*shape)
    x = draft.op("permute", x, dims=(0, 2, 3, 1)) if len(shape) == 4 else x
    y = draft.op("avg_pool2d", x, kernel_size=TWO, stride=TWO)
    assert refused(draft, y) == "its input is no image"


@pytest.mark.parametrize("zero", [0, 100, 255])
def test_the_largest_value_and_a_window_after_it(zero):
    """Padding of the pool counts less than any value; that of the layer, which reads integers, as zero."""
    draft = Draft()
    x = draft.quantize(draft.conv(draft.image(2, 3, 9, 8), 16, 3), (0.02, zero))
    pooled = draft.op("max_pool2d", x, **WINDOW)
    y = draft.conv(draft.dequantize(pooled), 16, 3)
    compiled = check(draft, pooled)
    assert kinds(compiled) == ["QuantizeStep", "ProductStep", "PoolStep", "PointwiseStep"]
    (step,) = steps_of(check(draft, draft.quantize(y)), PoolStep)
    assert step.out.zero == zero and step.out.border == (1, 1, 1, 1)


def test_a_mean_and_a_function_of_it():
    """A pool computes none: another step does."""
    draft = Draft()
    y = draft.op("hardswish", draft.op("mean", draft.image(2, 32, 4, 4), dim=(2, 3), keepdim=True))
    compiled = check(draft, draft.quantize(y))
    assert kinds(compiled) == ["QuantizeStep", "PoolStep", "PointwiseStep", "PointwiseStep"]


@pytest.mark.parametrize("size", [6, 7, 8])
def test_max_pool_of_windows_that_end_outside(size):
    draft = Draft()
    x = draft.image(2, 5, size, size)
    check(draft, draft.op("max_pool2d", x, **{**WINDOW, "padding": (0, 0), "ceil_mode": True}))


# ---- cat


def joined(draft, *parts, dim=1):
    return draft.op("cat", list(parts), dim=dim)


def rounded_conv(draft, x, columns, grid=(0.02, 120), size=1):
    return draft.quantize(draft.conv(x, columns, size), grid)


def test_parts_of_sixteen_channels_are_written_in_place():
    draft = Draft()
    x = draft.image(2, 5, 6, 5)
    parts = [rounded_conv(draft, x, columns) for columns in (16, 48, 32)]
    compiled = check(draft, draft.quantize(draft.conv(draft.dequantize(joined(draft, *parts)), 16, 3)))
    assert kinds(compiled) == ["QuantizeStep", *["ProductStep"] * 4, "PointwiseStep"]
    whole = compiled.plan.steps[4].x
    assert [step.out.root is whole for step in compiled.plan.steps[1:4]] == [True] * 3
    assert [step.out.parent_channel for step in compiled.plan.steps[1:4]] == [0, 16, 64]
    assert whole.border == (1, 1, 1, 1)


@pytest.mark.parametrize("columns", [(5, 17), (16, 5, 16), (1, 1, 1), (33, 16)])
def test_other_parts_are_copied(columns):
    draft = Draft()
    x = draft.image(2, 5, 6, 5)
    y = joined(draft, *(rounded_conv(draft, x, c) for c in columns))
    check(draft, y)
    compiled = check(draft, draft.quantize(draft.conv(draft.dequantize(y), 16, 5)))
    in_place = columns[0] == 16
    assert kinds(compiled).count("PointwiseStep") == len(columns) - in_place + 1  # and what is returned


@pytest.mark.parametrize("columns", [5, 16, 32])
def test_one_value_twice(columns):
    draft = Draft()
    part = rounded_conv(draft, draft.image(2, 5, 6, 5), columns)
    y = draft.dequantize(joined(draft, part, part))
    check_both(draft, draft.conv(y, 16, 3))
    check(draft, part, joined(draft, part, part, part))


@pytest.mark.parametrize("columns", [7, 16])
def test_parts_of_parts(columns):
    """Dense blocks: a concatenation is read, and concatenated with results computed from it."""
    draft = Draft()
    grid = 0.02, 120
    dense = rounded_conv(draft, draft.image(2, 5, 6, 5), columns)
    for _ in range(3):
        more = rounded_conv(draft, draft.dequantize(dense), columns, grid, 3)
        dense = joined(draft, dense, more)
    compiled = check(draft, dense, draft.quantize(draft.op("mean", draft.dequantize(dense), dim=(2, 3))))
    if columns == 16:
        assert len({step.out.root for step in steps_of(compiled, ProductStep)}) == 1


def test_a_value_in_two_unions():
    draft = Draft()
    x = draft.image(2, 5, 6, 5)
    a, b, c = (rounded_conv(draft, x, 16) for _ in range(3))
    first, second = joined(draft, a, b), joined(draft, c, a)
    y = [draft.quantize(draft.conv(draft.dequantize(u), 16, 3)) for u in (first, second)]
    check(draft, *y)


def test_a_union_with_an_input_of_the_region():
    draft = Draft()
    x, skip = draft.image(2, 5, 6, 5), draft.input(torch.randint(0, 256, (2, 16, 6, 5), dtype=torch.uint8))
    part = rounded_conv(draft, x, 16)
    y = joined(draft, draft.quantize(draft.dequantize(skip, (0.02, 120)), (0.02, 120)), part)
    check(draft, draft.quantize(draft.conv(draft.dequantize(y), 16, 3)))


@pytest.mark.parametrize("channels", [16, 64, 80])
def test_depthwise_layers_on_parts_and_to_parts(channels):
    draft = Draft()
    x = draft.dequantize(rounded_conv(draft, draft.image(2, 5, 6, 5), channels))
    second = draft.quantize(draft.conv(x, channels, 3, groups=channels), (0.02, 120))
    y = draft.dequantize(joined(draft, second, rounded_conv(draft, x, channels)))
    check(draft, draft.quantize(draft.conv(y, 2 * channels, 5, groups=2 * channels)))


@pytest.mark.parametrize("shape", [(2, 16), (2, 3, 16), (2, 5)])
def test_unions_of_what_is_no_image(shape):
    draft = Draft()
    x = draft.image(*shape)
    parts = [draft.quantize(draft.op("linear", x, draft.weight(16, shape[-1])), (0.02, 120)) for _ in range(2)]
    check(draft, joined(draft, *parts, dim=-1))


def test_unions_that_are_refused():
    draft = Draft()
    x = draft.image(2, 5, 6, 5)
    a, b = rounded_conv(draft, x, 16), rounded_conv(draft, x, 16, (0.03, 120))
    assert refused(draft, joined(draft, a, a, dim=2)) == "it joins other axes than the channels"
    floats = draft.input(draft.normal(2, 5, 6, 5))
    assert refused(draft, joined(draft, floats, floats)) == "it reads no integers"
    turned = draft.op("permute", a, dims=(0, 2, 3, 1))
    assert refused(draft, joined(draft, turned, turned)) == "it joins other axes than the channels"
    assert plan_of(draft, joined(draft, a, b))  # integers of two grids, which count for themselves


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1, 5, 16, 32, 33]), st.integers(0, 9)), min_size=1, max_size=6), st.data())
def test_unions_of_any_parts(parts, data):
    """Each reads one of those that are there: a layer of it, with windows, or itself joined with another."""
    draft = Draft(len(parts))
    compiled = [rounded_conv(draft, draft.image(2, 5, 4, 3), 16)]
    for columns, which in parts:
        x = compiled[which % len(compiled)]
        if data.draw(st.booleans()):
            compiled.append(rounded_conv(draft, draft.dequantize(x), columns, size=3))
        else:
            compiled.append(joined(draft, x, compiled[data.draw(st.integers(0, len(compiled) - 1))]))
    check(draft, *compiled[-2:], share=0.1)  # a value that is rounded otherwise changes what several layers make of it


# ---- layer_norm


@pytest.mark.parametrize("channels", [5, 16, 96])
def test_a_block_of_convnext(channels):
    """Depthwise, channels-last, norm, two layers, back, scaled, and added to what came in: no step moves anything."""
    draft = Draft()
    x = draft.qdq(draft.conv(draft.image(2, 3, 6, 5), channels))
    y = draft.qdq(draft.conv(x, channels, 7, groups=channels))
    y = draft.op("permute", y, dims=(0, 2, 3, 1))
    y = draft.op("layer_norm", y, draft.vector(channels), draft.vector(channels), normalized_shape=(channels,))
    y = draft.op("gelu", draft.op("linear", draft.qdq(y), draft.weight(4 * channels, channels)))
    y = draft.op("linear", draft.qdq(y), draft.weight(channels, 4 * channels), draft.vector(channels))
    y = draft.qdq(draft.op("mul", y, draft.constant(torch.rand(channels))))
    y = draft.op("add", x, draft.op("permute", y, dims=(0, 3, 1, 2)))
    compiled = check(draft, draft.quantize(y))
    assert kinds(compiled) == [
        "QuantizeStep",
        *["ProductStep"] * 2,
        "NormStep",
        *["ProductStep"] * 2,
        "PointwiseStep",
        "PointwiseStep",
    ]


def test_inputs_that_are_channels_last_by_their_axes():
    """(N, H, W, C) without a permutation: what reads them says so."""
    draft = Draft()
    x = draft.input(draft.normal(2, 4, 5, 17))
    y = draft.op("layer_norm", x, normalized_shape=(17,))
    check_both(draft, draft.op("linear", draft.qdq(y), draft.weight(5, 17)))


@pytest.mark.parametrize("shape", [(2, 16), (2, 5, 33), (2, 3, 4, 5)])
def test_norms(shape):
    draft = Draft()
    compiled = check(draft, draft.quantize(draft.op("layer_norm", draft.image(*shape), normalized_shape=shape[-1:])))
    assert len(steps_of(compiled, NormStep)) == 1


def test_norms_of_values_that_lie_far_from_zero():
    """The variance is of what is left without the mean."""
    draft = Draft()
    x = draft.input(300 + draft.normal(2, 4, 48))
    form = draft.form(draft.op("layer_norm", x, normalized_shape=(48,)))
    torch.testing.assert_close(program(form, draft.inputs)(*draft.inputs), form(*draft.inputs), rtol=0, atol=1e-4)


def test_norms_that_are_refused():
    draft = Draft()
    y = draft.op("layer_norm", draft.image(2, 3, 4, 5), normalized_shape=(4, 5))
    assert refused(draft, y) == "it normalizes other axes than the channels"


def test_the_border_of_a_part():
    """The first part has no zero point of its own: the border is that of what is read with one."""
    draft = Draft()
    pixels = draft.input(torch.randint(0, 256, (2, 16, 5, 5), dtype=torch.uint8))
    part = draft.quantize(draft.conv(draft.image(2, 3, 5, 5), 16), (0.05, 77))
    joined = draft.op("cat", [pixels, part], dim=1)
    check(draft, joined, draft.conv(draft.dequantize(part, (0.05, 77)), 4, 3), share=0.1)
