"""Steps that are divided among threads: where parts begin, which axes are used, and that no result changes by a bit."""

from itertools import pairwise

import pytest
import torch

from fxq.backends.loops.code.step_fields import PointwiseField, ProductField
from fxq.backends.loops.programs.layer_steps import LinearStep
from fxq.backends.loops.programs.split_rows import Axis, split_row
from fxq.common.timed_calls import threads_set_to
from tests.support.programs import LOOPS, Draft, compare_exactly, divided, program

pytestmark = pytest.mark.any_cpu

THREADS = [2, 3, 7, 32]


@pytest.mark.parametrize("parts", THREADS)
@pytest.mark.parametrize("unit", [1, 4, 12])
@pytest.mark.parametrize("size", [1, 11, 49, 784])
def test_cuts(size, unit, parts):
    """Every element is in one part, parts begin at multiples of the unit, and none is larger than it needs to be."""
    cuts = Axis(0, {}, unit).cuts(size, parts)
    assert cuts[0] == 0 and cuts[-1] == size and cuts == sorted(cuts)
    assert all(cut % unit == 0 for cut in cuts[:-1] if cut < size)
    assert max(end - first for first, end in pairwise(cuts)) < size / parts + 2 * unit


def test_parts_of_a_row():
    parts = list(Axis(0, {1: 10, 2: -1}, 2).divided([9, 100, 9], 4))
    assert parts == [[2, 100, 9], [2, 120, 7], [2, 140, 5], [3, 160, 3]]


def image_step(draft, kind):
    """A region of a step of some kind, and of the steps around it that it needs."""
    x = draft.image(2, 80, 14, 15)
    if kind in ("relu", "hardswish", "tanh"):
        return draft.quantize(draft.op(kind, draft.conv(x, 144, 3)))
    if kind in ("residual", "floats"):
        y = draft.conv(x, 80, 1)
        y = draft.qdq(y) if kind == "residual" else y
        return draft.quantize(draft.op("add", draft.conv(x, 80, 3), y))
    if kind == "transposed":
        return draft.op("conv_transpose2d", x, draft.weight(80, 24, 2, 2, axis=1), draft.vector(24), stride=(2, 2))
    if kind in ("depthwise", "narrow"):  # with VNNI, two or four pixels share a register for 48 channels
        channels = 80 if kind == "depthwise" else 48
        return draft.quantize(draft.conv(draft.image(2, channels, 14, 15), channels, 5, groups=channels))
    if kind == "strided":
        return draft.conv(x, 33, 3, stride=(2, 2))
    if kind == "max_pool2d":
        window = {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1)}
        return draft.dequantize(draft.op(kind, draft.quantize(draft.conv(x, 80)), **window))
    if kind == "avg_pool2d":
        return draft.op(kind, x, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), count_include_pad=False)
    if kind == "mean":
        return draft.op("mean", x, dim=(2, 3))
    if kind == "gate":
        return draft.quantize(draft.op("mul", x, draft.op("sigmoid", draft.op("mean", x, dim=(2, 3), keepdim=True))))
    return draft.op("add", x, draft.op("mul", x, x))


KINDS = [
    "relu", "hardswish", "tanh", "residual", "floats", "transposed", "depthwise", "narrow", "strided", "max_pool2d",
    "avg_pool2d",
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [*KINDS, "mean", "gate", "add"])
@pytest.mark.parametrize("threads", THREADS)
def test_images(kind, threads):
    draft = Draft()
    form = draft.form(image_step(draft, kind))
    compiled = divided(form, draft.inputs, threads)
    assert all(len(parts) > 1 for parts in compiled._rows.parts)
    compare_exactly(compiled(*draft.inputs), program(form, draft.inputs)(*draft.inputs))


@pytest.mark.parametrize("read_as", ["floats", "integers"])
def test_columns_of_a_layer_that_adds_another_value(read_as):
    """Of few pixels and many columns, parts have some of the columns."""
    draft = Draft()
    x = draft.image(1, 256, 2, 2)
    y = draft.conv(x, 320)
    y = y if read_as == "floats" else draft.qdq(y)
    form = draft.form(draft.op("add", draft.conv(x, 320, 3), y))
    compare_exactly(divided(form, draft.inputs, 3)(*draft.inputs), program(form, draft.inputs)(*draft.inputs))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("threads", THREADS)
def test_tokens(causal, threads):
    """Linear layers, layer norm, a move to heads, and attention, in float and on integers."""
    draft = Draft()
    x = draft.qdq(draft.input(draft.normal(2, 13, 64)))
    normed = draft.op("layer_norm", x, draft.vector(64), draft.vector(64), normalized_shape=(64,))
    y = draft.qdq(draft.op("linear", draft.qdq(normed), draft.weight(64, 64), draft.vector(64)))
    heads = draft.op("transpose", draft.op("reshape", y, shape=(2, 13, 4, 16)), dim0=1, dim1=2)
    attended = draft.op("scaled_dot_product_attention", heads, heads, heads, is_causal=causal)
    form = draft.form(draft.op("reshape", draft.op("transpose", attended, dim0=1, dim1=2), shape=(2, 13, 64)), normed)
    compiled = divided(form, draft.inputs, threads)
    kinds = {type(step).__name__ for step in compiled.plan.steps}
    assert kinds >= {"ProductStep", "NormStep", "AttentionStep", "QuantizeStep"}
    compare_exactly(compiled(*draft.inputs), program(form, draft.inputs)(*draft.inputs))


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("threads", THREADS)
def test_float_layers(rows, threads):
    draft = Draft()
    x = draft.op("relu", draft.input(draft.normal(rows, 40)))
    form = draft.form(draft.op("linear", x, draft.constant(draft.normal(100, 40)), draft.vector(100)))
    compiled = divided(form, draft.inputs, threads)
    (layer,) = (k for k, step in enumerate(compiled._steps) if isinstance(step, LinearStep))
    assert len(compiled._rows.parts[layer]) > 1  # relu and the copy of one row have one part
    compare_exactly(compiled(*draft.inputs), program(form, draft.inputs)(*draft.inputs))


def parts_of(form, inputs, threads):
    """Numbers of parts of the steps of a program."""
    with threads_set_to(threads):
        return [len(split_row(LOOPS, row, threads)) for row in program(form, inputs)._rows.rows]


def test_small_steps_are_not_divided():
    draft = Draft()
    form = draft.form(draft.conv(draft.image(1, 16, 4, 4), 16))
    assert parts_of(form, draft.inputs, 8) == [1, 1]
    assert not divided(form, draft.inputs, 1)._rows.threads > 1


def test_large_steps_have_a_part_for_each_thread():
    draft = Draft()
    form = draft.form(draft.conv(draft.image(1, 64, 56, 56), 64, 3))
    for threads in (2, 3, 8):
        assert parts_of(form, draft.inputs, threads)[-1] == threads


def test_columns_are_divided_where_a_weight_is_large():
    """And pixels where the image is: each part reads less."""
    for channels, size, divided_field in ((512, 7, ProductField.BLOCKS), (32, 112, ProductField.PIXELS)):
        draft = Draft()
        form = draft.form(draft.conv(draft.image(1, channels, size, size), channels, 3))
        row = program(form, draft.inputs)._rows.rows[-1]
        parts = split_row(LOOPS, row, 2)
        assert len(parts) == 2
        for field in (ProductField.BLOCKS, ProductField.PIXELS):
            counts = [part[field] for part in parts]
            assert counts == [row[field]] * 2 if field != divided_field else sum(counts) == row[field]


def test_rows_are_divided_before_the_elements_of_each_row():
    draft = Draft()
    x = draft.image(1, 240, 28, 28)
    form = draft.form(draft.quantize(draft.op("mul", x, x)))
    rows = [row for row in program(form, draft.inputs)._rows.rows if row[0] == LOOPS.POINTWISE]
    (row,) = [row for row in rows if row[PointwiseField.OPERATION] == 3]
    assert [part[PointwiseField.RUNS + 1] for part in split_row(LOOPS, row, 2)] == [14, 14]


def test_threads_that_are_no_divisor_of_anything():
    """Seven threads of two samples with 49 pixels and 5 blocks: two axes are divided, or not all threads are used."""
    draft = Draft()
    x = draft.image(2, 64, 7, 7)
    form = draft.form(draft.conv(x, 80, 3))
    torch.manual_seed(0)
    assert 1 < parts_of(form, draft.inputs, 7)[-1] <= 7
