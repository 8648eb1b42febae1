"""Ops that give values another shape or order: which of them take a step, and sizes that are read for them."""

import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.loops.programs.program_steps import MoveStep, PointwiseStep
from tests.support.programs import LAST, Draft, check, check_both, kinds, plan_of, refused, steps_of

pytestmark = pytest.mark.any_cpu


def layer(draft, x, columns=16):
    return draft.op("linear", x, draft.weight(columns, draft.values[x].shape[-1]), draft.vector(columns))


# ---- flatten


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (5, 16, 1, 1), (2, 17, 2, 1), (1, 64, 3, 3)])
def test_what_is_flattened_is_read_by_a_layer(shape):
    draft = Draft()
    x = draft.op("flatten", draft.quantize(draft.op("relu", draft.image(*shape))), start_dim=1)
    features = draft.values[x].shape[1]
    y = draft.op("linear", draft.dequantize(x), draft.weight(10, features), draft.vector(10))
    compiled = check(draft, draft.quantize(y))
    assert len(steps_of(compiled, MoveStep)) == (shape[2:] != (1, 1))


def test_axes_that_are_not_flattened():
    draft = Draft()
    x = draft.quantize(draft.input(draft.normal(2, 3, 4, 5)))
    for start, end in ((0, -1), (1, 2), (0, 1)):
        y = draft.op("flatten", x, start_dim=start, end_dim=end)
        assert refused(draft, y) == "it does not join all axes of a sample"
    draft = Draft()
    y = draft.conv(draft.image(2, 3, 4, 5), 16)
    assert refused(draft, draft.op("flatten", y, start_dim=2)) == "it does not join all axes of a sample"
    draft = Draft()
    x = draft.quantize(draft.input(draft.normal(2, 3, 4)))
    assert refused(draft, draft.op("flatten", x, start_dim=1)) == "its input is no image"


def test_a_result_in_float_that_is_flattened():
    draft = Draft()
    check_both(draft, draft.op("flatten", draft.conv(draft.image(2, 3, 4, 5), 16), start_dim=1))


def test_joined_after_flattening():
    """The samples of a part lie as far apart as those of the whole."""
    draft = Draft()
    x = draft.image(3, 3, 4, 5)
    parts = [draft.op("flatten", draft.qdq(draft.conv(x, 16), (0.05, 100)), start_dim=1) for _ in range(2)]
    check_both(draft, draft.qdq(draft.op("cat", parts, dim=1), (0.05, 100)))


def test_what_is_reshaped_to_a_row_for_each_sample():
    """As `flatten`."""
    draft = Draft()
    x = draft.quantize(draft.image(2, 3, 4, 5))
    y = draft.op("reshape", x, shape=(2, 60))
    check(draft, y, draft.quantize(layer(draft, draft.dequantize(y))))
    y = draft.op("reshape", draft.conv(draft.image(2, 3, 4, 5), 16), shape=(-1, 320))
    assert kinds(check(draft, y)) == ["QuantizeStep", "ProductStep", "MoveStep"]


def test_an_image_of_one_pixel_that_is_reshaped():
    """Squeeze-and-excite: the two first axes stay."""
    draft = Draft()
    y = draft.op("mean", draft.conv(draft.image(2, 3, 4, 5), 16), dim=(2, 3), keepdim=True)
    y = draft.op("reshape", y, shape=(2, 16))
    check_both(draft, y)
    check(draft, draft.op("linear", draft.qdq(y), draft.weight(5, 16)))


def test_an_input_of_one_pixel_that_is_reshaped():
    draft = Draft()
    check(draft, draft.op("reshape", draft.input(draft.normal(2, 16, 1, 1)), shape=(2, 16)))


# ---- heads

SPLITS = {
    "unflatten": lambda draft, x: draft.op("unflatten", x, dim=2, sizes=(4, 8)),
    "unflatten, from the end": lambda draft, x: draft.op("unflatten", x, dim=-1, sizes=(-1, 8)),
    "reshape": lambda draft, x: draft.op("reshape", x, shape=(2, 5, 4, 8)),
    "reshape, one open": lambda draft, x: draft.op("reshape", x, shape=(2, 5, -1, 8)),
    "size()": lambda draft, x: draft.op(
        "reshape", x, shape=(draft.size("size", x, 0), draft.size("size", x, 1), 4, -1)
    ),
    "shape[i]": lambda draft, x: draft.op("reshape", x, shape=(*sizes(draft, x)[:2], 4, 8)),
    "computed": lambda draft, x: draft.op(
        "reshape", x, shape=(*sizes(draft, x)[:2], draft.size(operator.floordiv, sizes(draft, x)[2], 8), 8)
    ),
}  # fmt: skip
JOINS = {
    "flatten": lambda draft, x: draft.op("flatten", x, start_dim=2),
    "flatten, from the end": lambda draft, x: draft.op("flatten", x, start_dim=-2, end_dim=-1),
    "reshape": lambda draft, x: draft.op("reshape", x, shape=(2, 5, 32)),
    "reshape, one open": lambda draft, x: draft.op("reshape", x, shape=(2, -1, 32)),
    "size()": lambda draft, x: draft.op("reshape", x, shape=(draft.size("size", x, 0), draft.size("size", x, -3), -1)),
    "computed": lambda draft, x: draft.op(
        "reshape", x, shape=(*sizes(draft, x)[:2], draft.size(operator.mul, *sizes(draft, x)[2:]))
    ),
}  # fmt: skip
TURNS = {
    "transpose": lambda draft, x: draft.op("transpose", x, dim0=1, dim1=2),
    "the other way": lambda draft, x: draft.op("transpose", x, dim0=2, dim1=1),
    "from the end": lambda draft, x: draft.op("transpose", x, dim0=-3, dim1=-2),
    "mixed": lambda draft, x: draft.op("transpose", x, dim0=-2, dim1=1),
    "permute": lambda draft, x: draft.op("permute", x, dims=(0, 2, 1, 3)),
    "permute, from the end": lambda draft, x: draft.op("permute", x, dims=[0, -2, -3, -1]),
    "laid out anew": lambda draft, x: draft.op(
        "contiguous", draft.op("transpose", draft.op("contiguous", x), dim0=1, dim1=2)
    ),
}


def sizes(draft, x):
    """Each size of a value by its shape."""
    shape = draft.size(getattr, x, "shape")
    return [draft.size(operator.getitem, shape, k) for k in range(draft.values[x].dim())]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("join", JOINS)
def test_heads_that_are_split_and_joined(split, join):
    """No step moves anything."""
    draft = Draft()
    x = draft.quantize(layer(draft, draft.image(2, 5, 16), 32))
    y = draft.dequantize(JOINS[join](draft, SPLITS[split](draft, x)))
    assert kinds(check(draft, layer(draft, y))) == ["QuantizeStep", *["ProductStep"] * 2]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("turn", TURNS)
def test_heads_that_are_turned(split, turn):
    """No step moves them, returned or not: they are views, as in PyTorch."""
    draft = Draft()
    x = SPLITS[split](draft, layer(draft, draft.image(2, 5, 16), 32))
    turned = TURNS[turn](draft, x)
    compiled = check(draft, turned)
    assert draft.values[turned].shape == (2, 4, 5, 8) and kinds(compiled) == ["QuantizeStep", "ProductStep"]
    assert compiled(*draft.inputs).stride() == (160, 8, 32, 1)
    check(draft, draft.quantize(turned))
    back = draft.op("flatten", draft.op("transpose", turned, dim0=1, dim1=2), start_dim=2)
    assert "MoveStep" not in kinds(check(draft, draft.quantize(back)))


@settings(deadline=None, max_examples=12)
@given(
    batch=st.integers(1, 3), length=st.integers(1, 6), heads=st.integers(1, 5), depth=st.integers(1, 20),
    ops=st.lists(st.sampled_from(["turn", "contiguous", "qdq", "join", "split", "identity"]), max_size=7),
    is_float=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_heads_in_any_order(batch, length, heads, depth, ops, is_float, seed):
    """Each op that can be, as floats or as integers that stand for them, and all of it is returned at the end."""
    draft = Draft(seed)
    shape = batch, length, heads * depth
    x = draft.input(draft.normal(*shape)) if is_float else draft.image(*shape)
    is_split = is_turned = False
    compiled = [x]
    for op in ops:
        if op == "turn" and is_split:
            x, is_turned = draft.op("transpose", x, dim0=1, dim1=2), not is_turned
        elif op == "join" and is_split and not is_turned:
            x, is_split = draft.op("flatten", x, start_dim=2), False
        elif op == "split" and not is_split:
            x, is_split = draft.op("unflatten", x, dim=2, sizes=(heads, depth)), True
        elif op == "qdq":
            x = draft.qdq(x)
        elif op in ("contiguous", "identity"):
            x = draft.op(op, x)
        compiled.append(x)
    check(draft, x)
    check(draft, draft.quantize(x), *compiled)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 7, 16), (2, 6, 1, 33)])
def test_axes_of_an_input_that_are_turned(shape):
    draft = Draft()
    source = draft.input(draft.normal(*shape))
    for x in (source, draft.quantize(source)):
        y = draft.op("transpose", x, dim0=1, dim1=2)
        check(draft, y)
        check(draft, y, draft.op("permute", y, dims=(0, 2, 1, 3)), x)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 7, 16), (2, 6, 1, 33)])
def test_axes_of_an_input_that_are_joined(shape):
    draft = Draft()
    x = draft.input(draft.normal(*shape))
    joined = draft.op("flatten", draft.quantize(x), start_dim=2)
    check(draft, joined, layer(draft, draft.dequantize(joined)))
    check(draft, draft.op("reshape", x, shape=(*shape[:2], -1)))


def test_heads_that_are_refused():
    draft = Draft()
    x = draft.image(2, 5, 32)
    heads = SPLITS["unflatten"](draft, x)
    turned = TURNS["transpose"](draft, heads)
    for dims in ((1, 3), (-1, -2), (0, 1), (1, 1)):
        y = draft.op("transpose", heads, dim0=dims[0], dim1=dims[1])
        assert refused(draft, y) == "it reorders values in memory"
    assert refused(draft, draft.op("transpose", x, dim0=0, dim1=2)) == "it reorders values in memory"
    assert refused(draft, draft.op("permute", turned, dims=(0, 2, 3, 1))) == "its input is no image"
    reason = "it joins other axes than heads and their depth"
    assert refused(draft, draft.op("flatten", heads, start_dim=1, end_dim=2)) == reason
    reason = "it reads values that are split into heads"
    for op in ("relu", "gelu"):
        assert refused(draft, draft.op(op, heads)) == reason
    assert refused(draft, draft.op("add", heads, heads)) == reason


# ---- chunk and split


@pytest.mark.parametrize("shape", [(2, 5, 48), (2, 48), (2, 48, 3, 4)])
@pytest.mark.parametrize("is_integer", [True, False])
@pytest.mark.parametrize(
    ("op", "about"), [("chunk", {"chunks": 3}), ("split", {"sizes": (16, 30, 2)}), ("split", {"sizes": 20})]
)
def test_parts_of_channels(shape, is_integer, op, about):
    """Each is read where it lies."""
    draft = Draft()
    x = draft.op("relu", draft.image(*shape))
    x = draft.quantize(x) if is_integer else x
    axis = 1 if len(shape) != 3 else 2
    parts = [draft.op(op, x, dim=dim, index=k, **about) for k, dim in enumerate((axis, axis, axis - len(shape)))]
    check(draft, *(draft.op("gelu", draft.dequantize(part) if is_integer else part) for part in parts))


def test_layers_of_parts():
    draft = Draft()
    x = draft.quantize(draft.image(2, 5, 48))
    parts = [draft.dequantize(draft.op("chunk", x, chunks=3, dim=-1, index=k)) for k in (-1, 1)]
    check_both(draft, draft.op("add", *(layer(draft, part) for part in parts)))


def test_parts_of_an_input():
    draft = Draft()
    x = draft.input(draft.normal(2, 5, 20))
    check(draft, *(draft.op("chunk", x, chunks=3, dim=2, index=k) for k in range(3)))


@pytest.mark.parametrize("shape", [(2, 48), (2, 48, 3, 4), (2, 48, 9)])
@pytest.mark.parametrize("is_integer", [True, False])
def test_ranges_of_channels(shape, is_integer):
    """Each is read where it lies, as parts are."""
    draft = Draft()
    x = draft.op("relu", draft.image(*shape))
    x = draft.quantize(x) if is_integer else x
    full, rest = slice(None), (slice(None),) * (len(shape) - 2)
    indices = [(full, slice(16, 46)), (slice(0, 2), slice(-2, None), *rest), (full, slice(None, 9), *rest), (full,)]
    parts = [draft.op("getitem", x, index=index) for index in (indices[0], indices[2])]
    check(draft, *(draft.op("gelu", draft.dequantize(part) if is_integer else part) for part in parts))
    for index in (indices[1], (0,), (full, 3), (None, full), (full, slice(0, 8, 2), *rest), (full, slice(5, 5))):
        assert refused(draft, draft.op("getitem", x, index=index)) == "it takes no range of channels"


def test_gates_of_the_channels_of_a_sequence():
    """A layer of WaveNet: one half of the channels gates the other, and a mask has one number for each place."""
    draft = Draft()
    x, mask = draft.input(draft.normal(2, 32, 19)), draft.input((draft.normal(2, 1, 19) > 0).float())
    x = draft.op("mul", x, mask)
    options = {"padding": (4,), "dilation": (2,)}
    y = draft.op("conv1d", draft.qdq(x), draft.weight(64, 32, 5), draft.vector(64), **options)
    halves = [draft.op("getitem", y, index=(slice(None), part)) for part in (slice(None, 32), slice(32, None))]
    gated = draft.qdq(draft.op("mul", draft.op("tanh", halves[0]), draft.op("sigmoid", halves[1])))
    y = draft.op("conv1d", gated, draft.weight(32, 32, 1), draft.vector(32))
    check_both(draft, draft.op("mul", draft.op("add", x, y), mask))


def test_parts_of_other_axes_are_refused():
    draft = Draft()
    x = draft.image(2, 6, 48)
    reason = "it splits another axis than the channels"
    chunk = draft.op("chunk", x, chunks=3, dim=1, index=0)
    both = draft.op("linear", chunk, draft.weight(5, 48))  # each op takes another axis as the channels
    assert refused(draft, both) == "its channels are not the last axis"
    assert refused(draft, draft.op("split", x, sizes=1, dim=0, index=1)) == reason


def test_splits_that_are_refused():
    """Into three, as of queries, keys and values that one layer makes; and of other axes than the last."""
    draft = Draft()
    x = draft.image(2, 6, 48)
    assert refused(draft, draft.op("unflatten", x, dim=2, sizes=(3, 2, 8))) == "it splits an axis into 3"
    assert refused(draft, draft.op("reshape", x, shape=(2, 6, 3, 2, 8))) == "it splits an axis into 3"
    assert refused(draft, draft.op("unflatten", x, dim=1, sizes=(2, 3))) == "it splits another axis than the last"
    heads = draft.op("unflatten", x, dim=2, sizes=(6, 8))
    assert refused(draft, draft.op("unflatten", heads, dim=3, sizes=(2, 4))) == "it splits another axis than the last"
    reason = "it splits or joins other axes than the last ones"
    for y, shape in ((x, (2, 288)), (x, (12, 48)), (x, (2, 3, 2, 48)), (heads, (2, 288)), (heads, (12, 6, 8))):
        assert refused(draft, draft.op("reshape", y, shape=shape)) == reason


def test_turned_heads_whose_places_are_joined():
    draft = Draft()
    turned = draft.op("transpose", draft.op("unflatten", draft.image(2, 6, 48), dim=2, sizes=(4, 12)), dim0=1, dim1=2)
    check_both(draft, draft.op("flatten", turned, start_dim=2))
    check_both(draft, layer(draft, draft.op("reshape", turned, shape=(2, 4, 72))))


@pytest.mark.parametrize("shape", [(2, 6, 8, 6), (2, 6, 3, 16), (2, 6, 2, 3, 8)])
def test_heads_that_are_split_anew_are_refused(shape):
    draft = Draft()
    heads = draft.op("unflatten", draft.image(2, 6, 48), dim=2, sizes=(6, 8))
    assert refused(draft, draft.op("reshape", heads, shape=shape))


def test_axes_of_an_input_that_are_split_anew_are_refused():
    draft = Draft()
    assert refused(draft, draft.op("reshape", draft.input(draft.normal(2, 3, 4, 5)), shape=(2, 3, 5, 4)))


# ---- pad


GRID = (0.05, 100)


def framed(draft, x, frame, value=0.0):
    """A value in a frame, both on one grid, as in graphs: the value 0 of the frame is not the integer 0."""
    return draft.qdq(draft.op("pad", draft.qdq(x, GRID), pad=frame, value=value), GRID)


def conv3(draft, x, columns=16, **options):
    """A layer with windows of three pixels along each axis."""
    channels, axes = draft.values[x].shape[1], draft.values[x].dim() - 2
    weight = draft.weight(columns, channels // options.get("groups", 1), *[3] * axes)
    return draft.op(f"conv{axes}d", x, weight, draft.vector(columns), **options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("frame", [(1, 1, 1, 1), (0, 1, 0, 1), (2, 0, 1, 3), (0, 0, 2, 2), (1, 2), (0, 0, 0, 0)])
@pytest.mark.parametrize("stride", [1, 2])
def test_frames_before_layers_take_no_step(frame, stride):
    draft = Draft()
    y = conv3(draft, framed(draft, draft.conv(draft.image(2, 3, 7, 6), 16), frame), stride=(stride, stride))
    assert kinds(check(draft, y)) == ["QuantizeStep", "ProductStep", "ProductStep"]


@pytest.mark.parametrize("padding", [(0, 0), (1, 2)])
def test_frames_of_depthwise_layers_that_pad_as_well(padding):
    draft = Draft()
    x = framed(draft, draft.conv(draft.image(2, 3, 7, 6), 32), (0, 1, 2, 0))
    y = conv3(draft, x, 32, groups=32, padding=padding)
    assert kinds(check(draft, y)) == ["QuantizeStep", "ProductStep", "ProductStep"]


def test_frames_of_sequences():
    draft = Draft()
    check_both(draft, conv3(draft, framed(draft, draft.input(draft.normal(2, 16, 9)), (2, 1))))


@settings(deadline=None, max_examples=14)
@given(
    frames=st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=1, max_size=3), channels=st.integers(1, 40),
    last=st.sampled_from(["layer", "max", "mean", "relu", "cat", "both"]), value=st.sampled_from([0.0, 0.7, -9.0]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_frames_in_frames_and_what_reads_them(frames, channels, last, value, seed):
    """Layers, pools, functions and concatenations read a framed value, and others read it without the frame."""
    draft = Draft(seed)
    inner = y = draft.qdq(draft.conv(draft.image(2, 3, 5, 4), channels), GRID)
    for frame in frames:
        y = framed(draft, y, frame, value)
    if last == "layer":
        y = conv3(draft, y, padding=(1, 1) if value == 0 else (0, 0))
    elif last == "max":
        y = draft.op("max_pool2d", y, kernel_size=(2, 2), stride=(2, 2), padding=(1, 1))
    elif last == "mean":
        y = draft.op("mean", y, dim=(2, 3), keepdim=True)
    elif last == "cat":
        y = draft.qdq(draft.op("cat", [y, y], dim=1), GRID)
    elif last == "relu":
        y = draft.op("relu", y)
    check(draft, y, *([draft.op("relu", inner)] if last == "both" else []))


def test_frames_that_are_returned_or_of_inputs():
    draft = Draft()
    x = draft.input(draft.normal(2, 3, 4, 5))
    check(draft, draft.op("pad", draft.quantize(x), pad=(1, 0, 2, 3)))
    check(draft, draft.op("pad", draft.op("relu", x), pad=(1, 0, 2, 3)))
    check_both(draft, conv3(draft, draft.qdq(draft.op("pad", draft.op("relu", x), pad=(1, 0, 2, 3)))))


def test_framed_floats_share_no_memory_with_integers_that_have_the_same_border():
    """Steps write floats where the border of integers, which is filled only once, would be."""
    draft = Draft()
    x = draft.qdq(draft.op("pad", draft.op("relu", draft.image(2, 16, 7, 6)), pad=(1, 1, 1, 1)))
    check(draft, conv3(draft, draft.qdq(conv3(draft, x), (0.05, 0)), padding=(1, 1)))


def test_two_frames_of_one_value_with_other_bytes_are_refused():
    draft = Draft()
    x = draft.quantize(draft.conv(draft.image(2, 3, 7, 6), 16))
    parts = [draft.op("pad", x, pad=(1, 1), value=value) for value in (0, 5)]
    y = draft.op("add", *(draft.dequantize(part) for part in parts))
    assert refused(draft, y) == "its input would need a border with two zero points"


def test_frames_that_are_refused():
    draft = Draft()
    x = draft.quantize(draft.conv(draft.image(2, 3, 7, 6), 16))
    other_axes = "it pads other axes than height and width, or cuts"
    assert refused(draft, draft.op("pad", x, pad=(1, 1, 1, 1), mode="reflect")) == "it pads with reflect"
    assert refused(draft, draft.op("pad", x, pad=(1, -1))) == other_axes
    assert refused(draft, draft.op("pad", x, pad=(0, 0, 0, 0, 1, 0))) == other_axes
    real = draft.op("relu", draft.image(2, 3, 7, 6))
    assert refused(draft, draft.op("pad", real, pad=(1, 1), value=1.0)) == "it pads floats with other numbers than 0"
    real = draft.op("relu", draft.image(2, 7, 16))
    assert refused(draft, draft.op("linear", draft.qdq(draft.op("pad", real, pad=(0, 0, 1, 0))), draft.weight(4, 16)))
    draft = Draft()
    assert refused(draft, draft.op("pad", layer(draft, draft.image(4, 16)), pad=(1, 2))) == other_axes


# ---- permute


def test_a_turned_result():
    draft = Draft()
    x = draft.conv(draft.image(2, 3, 4, 5), 7)
    turned = draft.op("permute", x, dims=(0, 2, 3, 1))
    compiled = check(draft, turned)
    assert kinds(compiled) == ["QuantizeStep", "ProductStep", "PointwiseStep"]
    check(draft, draft.op("permute", turned, dims=(0, -1, 1, 2)))


def test_permutations_that_are_refused():
    draft = Draft()
    assert (
        refused(draft, draft.op("permute", draft.image(2, 3, 4, 5), dims=(0, 1, 3, 2)))
        == "it reorders values in memory"
    )
    draft = Draft()
    assert refused(draft, draft.op("permute", draft.image(2, 3, 4), dims=(2, 0, 1))) == "its input is no image"


def test_sequences_whose_axes_change_places():
    """Their values stay where they are."""
    draft = Draft()
    x = draft.image(2, 20, 7)
    turned = draft.op("permute", x, dims=(0, 2, 1))
    check_both(draft, draft.op("relu", turned))
    check_both(draft, draft.op("linear", turned, draft.weight(16, 20)))
    y = draft.op("transpose", draft.op("conv1d", x, draft.weight(16, 20, 3)), dim0=-1, dim1=1)
    assert kinds(check(draft, draft.op("linear", draft.qdq(y), draft.weight(3, 16)))).count("ProductStep") == 2
    check_both(draft, draft.op("chunk", draft.image(2, 6, 48), chunks=3, dim=1, index=1))


# ---- what changes nothing


def test_what_changes_nothing():
    draft = Draft()
    y = draft.op("identity", draft.op("identity", draft.conv(draft.image(2, 3, 4, 5), 16)))
    compiled = check(draft, draft.quantize(draft.op("relu", y)))
    assert (
        kinds(compiled) == ["QuantizeStep", "ProductStep", "PointwiseStep"]
        and len(steps_of(compiled, PointwiseStep)) == 1
    )


@pytest.mark.parametrize("options", [{}, {"memory_format": LAST}])
def test_values_that_are_laid_out_anew(options):
    draft = Draft()
    y = draft.op("contiguous", draft.conv(draft.image(2, 3, 4, 5), 16), **options)
    assert kinds(check(draft, draft.quantize(draft.op("relu", y)))) == ["QuantizeStep", "ProductStep", "PointwiseStep"]


@pytest.mark.parametrize("shape", [(2, 5, 16), (2, 16), (2, 3, 4, 5)])
def test_a_shape_that_values_have_already(shape):
    draft = Draft()
    y = draft.op("reshape", draft.op("relu", draft.image(*shape)), shape=(-1, *shape[1:]))
    assert kinds(plan_of(draft, y)) == ["QuantizeStep", "PointwiseStep"]
    check_both(draft, y)
