"""The steps that are no layers: each computes what its ops do, of values of any shape, in floats and integers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.code.step_fields import MoveField
from fxq.backends.loops.programs.areas import Area
from fxq.backends.loops.programs.program_steps import CLAMP, Function, PointwiseStep, PoolStep, RowWriter
from fxq.quant.qparams import QParams
from tests.support.programs import LAST, LOOPS, Draft, check, check_both, compare, kinds, program

pytestmark = pytest.mark.any_cpu

CHANNELS = st.sampled_from([1, 3, 5, 15, 16, 17, 32, 33, 40])
SIZES = st.tuples(st.sampled_from([1, 2, 5]), CHANNELS, st.integers(1, 7), st.integers(1, 7))
quick = settings(max_examples=8, deadline=None)


@given(st.floats(0.001, 1.0), st.integers(0, 255), st.floats(-9, 9), st.floats(-9, 9))
def test_bounds_of_integers_are_those_of_floats_rounded(scale, zero, low, high):
    low, high = sorted((low, high))
    step = PointwiseStep(
        "clamp", Area((1, 1, 1, 1)), Function("clamp", low, high), QParams.per_tensor(scale, zero), x=None, x_grid=None
    )
    least, most, factor, added = step.numbers()
    x = torch.linspace(-12, 12, 500, dtype=torch.float64)
    rounded = (x * factor).round() + added
    wanted = ((x.clamp(low, high) * factor).round() + zero).clamp(0, 255)
    assert torch.equal(rounded.clamp(least, most), wanted)


def test_bounds_of_a_grid_of_fewer_integers():
    step = PointwiseStep(
        "relu", Area((1, 1, 1, 1)), Function("clamp", 0.0), QParams.per_tensor(0.5, 20, 10, 127), x=None, x_grid=None
    )
    assert step.numbers() == (20.0, 127.0, 2.0, 20.0)
    step.function = CLAMP
    assert step.numbers()[:2] == (10.0, 127.0)


def test_constants_stay_where_they_are():
    rows = RowWriter(LOOPS)
    addresses = [rows.constant(torch.full((1000,), float(i))[::2]) for i in range(20)]
    assert [t.data_ptr() for t in rows.constants] == addresses
    assert [t[499].item() for t in rows.constants] == list(range(20))


def test_a_conversion_is_what_computes_nothing():
    x = Area((1, 1, 1, 1))
    assert PointwiseStep("copy", x, x=x, x_grid=None).is_conversion
    assert not PointwiseStep("relu", x, Function("clamp", 0.0), x=x, x_grid=None).is_conversion
    assert not PointwiseStep("add", x, x=x, x_grid=None, y=x).is_conversion
    assert [step.takes_function for step in (PointwiseStep, PoolStep)] == [True, False]


# ---- Quantize


@quick
@given(SIZES, st.integers(0, 2**16))
def test_an_input_is_rounded(size, seed):
    draft = Draft(seed)
    assert kinds(check(draft, draft.quantize(draft.input(draft.normal(*size))))) == ["QuantizeStep", "PointwiseStep"]


@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7), (1, 1, 16), (2, 16)])
def test_an_input_of_fewer_axes_is_rounded(shape):
    draft = Draft()
    check(draft, draft.quantize(draft.input(draft.normal(*shape))))


def test_rounding_is_to_even_and_within_the_grid():
    draft = Draft()
    x = draft.input(torch.tensor([[0.25, 0.75, 1.25, -0.25, 1e9, -1e9, torch.inf, -torch.inf]]))
    form = draft.form(draft.op("quantize", x, scale=0.5, zero_point=10, qmin=1, qmax=200))
    assert program(form, draft.inputs)(*draft.inputs).tolist() == [[10, 12, 12, 10, 200, 1, 200, 1]]


# ---- Pointwise


@quick
@given(SIZES, st.booleans(), st.booleans(), st.sampled_from(["add", "mul"]), st.integers(0, 2**16))
def test_two_values(size, one_is_float, other_is_float, op, seed):
    draft = Draft(seed)
    x, y = (draft.input(draft.normal(*size)) for _ in range(2))
    x, y = x if one_is_float else draft.qdq(x), y if other_is_float else draft.qdq(y)
    check_both(draft, draft.op(op, x, y))


@quick
@given(SIZES, st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["add", "mul"]), st.integers(0, 2**16))
def test_a_value_and_one_pixel_of_each_sample(size, one_is_float, other_is_float, swapped, op, seed):
    draft = Draft(seed)
    x, y = draft.input(draft.normal(*size)), draft.input(draft.normal(*size[:2], 1, 1))
    x, y = x if one_is_float else draft.qdq(x), y if other_is_float else draft.qdq(y)
    compiled = draft.op(op, *((y, x) if swapped else (x, y)))
    check_both(draft, compiled)
    check(draft, draft.op("silu", compiled))


def test_more_elements_than_are_computed_at_once():
    """Long rows, and pixels of many channels."""
    for shape in ((1, 16, 2, 125), (1, 1200, 1, 2), (2, 1213)):
        draft = Draft()
        x, y = draft.image(*shape), draft.image(*shape)
        check_both(draft, draft.op("silu", draft.op("mul", x, y)))
        if len(shape) == 4:
            pixel = draft.qdq(draft.input(draft.normal(*shape[:2], 1, 1)))
            check_both(draft, draft.op("silu", draft.op("mul", x, pixel)))
            check_both(draft, draft.op("add", x, draft.constant(draft.normal(shape[1], 1, 1))))


# ---- Pool


@quick
@given(
    SIZES,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_means_of_windows(size, kernel, stride, pads, counts, is_float, seed):
    padding = tuple(k // 2 if pads else 0 for k in kernel)
    size = (*size[:2], *map(max, size[2:], kernel))
    draft = Draft(seed)
    x = draft.input(draft.normal(*size))
    x = x if is_float else draft.qdq(x)
    about = {"kernel_size": kernel, "stride": stride, "padding": padding, "count_include_pad": counts}
    check_both(draft, draft.op("avg_pool2d", x, **about))


@quick
@given(
    SIZES,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_the_largest_of_windows(size, kernel, stride, pads, seed):
    padding = tuple(k // 2 if pads else 0 for k in kernel)
    size = (*size[:2], *map(max, size[2:], kernel))
    draft = Draft(seed)
    x = draft.quantize(draft.input(draft.normal(*size)))
    check(draft, draft.op("max_pool2d", x, kernel_size=kernel, stride=stride, padding=padding))


# ---- Norm and Move


@quick
@given(SIZES, st.booleans(), st.booleans(), st.integers(0, 2**16))
def test_norms_of_pixels(size, is_float, has_weight, seed):
    draft = Draft(seed)
    channels = size[1]
    x = draft.input(draft.normal(size[0], *size[2:], channels))
    x = x if is_float else draft.qdq(x)
    about = [draft.vector(channels), draft.vector(channels)] if has_weight else []
    check_both(draft, draft.op("layer_norm", x, *about, normalized_shape=(channels,), eps=1e-3))


@quick
@given(SIZES, st.booleans(), st.integers(0, 2**16))
def test_all_values_of_an_image_in_a_row(size, is_float, seed):
    draft = Draft(seed)
    x = draft.input(draft.normal(*size))
    check(draft, draft.op("flatten", x if is_float else draft.quantize(x), start_dim=1))


def test_a_copy_of_an_input_that_lies_otherwise():
    """A step that reads an input directly has it channels-last; one that quantizes it reads any format."""
    draft = Draft()
    x = draft.input(draft.normal(2, 5, 4, 6))
    y = draft.op("relu", x)
    for given_ in (draft.inputs[0], draft.inputs[0].contiguous(memory_format=LAST)):
        form = draft.form(y, draft.quantize(x))
        compare(program(form, [given_])(given_), form(given_))


MOVED = {"x": (1, 2), "x_strides": [3, 4, 5], "out": (6, 7), "out_strides": range(8, 12), "shape": range(12, 16)}


def test_a_row_has_its_values_at_the_positions_of_their_fields():
    row = RowWriter(LOOPS).row(LOOPS.MOVE, MoveField, **MOVED, item_size=True)
    assert row == [LOOPS.MOVE, *range(1, 16), 1] and all(type(number) is int for number in row)
    assert (row[MoveField.OUT], row[MoveField.ITEM_SIZE]) == (6, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": 1}, "x_strides is at 3, but 2 numbers are before it"),
        ({"y": 1}, "missing or unknown: .*'item_size', 'y'"),
    ],
)
def test_a_row_of_other_fields_is_refused(changes, message):
    item_size = {} if "y" in changes else {"item_size": 4}
    with pytest.raises(ValueError, match=message):
        RowWriter(LOOPS).row(LOOPS.MOVE, MoveField, **{**MOVED, **item_size, **changes})
