"""Sizes that a region reads, and inputs of types of which it reads nothing else."""

import operator

import pytest
import torch

from fxq.backends.loops.programs.plan import planned
from fxq.backends.loops.programs.planned_values import NotPlannedError
from tests.support.programs import LAST, Draft, check, compare, kinds, plan_of, program

pytestmark = pytest.mark.any_cpu

OTHERS = [torch.float64, torch.float16, torch.int8, torch.int64, torch.bool]


def with_other(build, shape, dtype):
    """Why a region is no program that reads floats (2, 3, 4), and an input of another type."""
    draft = Draft()
    y = build(draft, draft.image(2, 3, 4), draft.input(torch.ones(shape)))
    with pytest.raises(NotPlannedError) as caught:
        planned(draft.form(y), [draft.inputs[0], torch.ones(shape).to(dtype)])
    return str(caught.value)


READERS = {
    "a function": ((2, 3), lambda draft, x, second: draft.op("relu", second)),
    "a sum": ((2, 3, 4), lambda draft, x, second: draft.op("add", x, second)),
    "a product with a constant": ((2, 4), lambda draft, x, second: draft.op("mul", second, draft.vector(4))),
    "a layer": ((2, 4), lambda draft, x, second: draft.op("linear", second, draft.weight(5, 4))),
    "rounding": ((2, 3), lambda draft, x, second: draft.quantize(second, (0.1, 0))),
    "another shape": ((2, 3), lambda draft, x, second: draft.op("reshape", second, shape=(6,))),
}


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("reader", READERS)
def test_nothing_computes_with_inputs_of_other_types(dtype, reader):
    shape, build = READERS[reader]
    assert with_other(build, shape, dtype) == "it reads a value that the region does not compute"


@pytest.mark.parametrize("dtype", OTHERS)
def test_axes_of_inputs_of_other_types_are_not_moved(dtype):
    for op, about in (
        ("flatten", {"start_dim": 2}), ("transpose", {"dim0": 1, "dim1": 2}), ("permute", {"dims": (0, 2, 1, 3)}),
        ("permute", {"dims": (0, 2, 3, 1)}), ("chunk", {"chunks": 2, "dim": 1}), ("split", {"sizes": 1, "dim": 3}),
        ("flatten", {"start_dim": 1}), ("unflatten", {"dim": 3, "sizes": (2, 2)}),
    ):  # fmt: skip
        assert with_other(
            lambda draft, x, second, op=op, about=about: draft.op(op, second, **about), (2, 3, 4, 4), dtype
        )


def test_inputs_of_other_types_are_no_constants_of_a_layer():
    def layer(draft, x, second):
        return draft.op("linear", x, draft.weight(5, 4), second)

    assert with_other(layer, (5,), torch.float64) == "its bias is no constant"
    weighted = with_other(lambda draft, x, second: draft.op("linear", x, second), (5, 4), torch.int8)
    assert weighted == "its weight is no constant"


@pytest.mark.parametrize("dtype", OTHERS)
def test_inputs_of_other_types_are_not_returned(dtype):
    for build in (lambda draft, x, second: second, lambda draft, x, second: draft.op("identity", second)):
        assert with_other(build, (2, 3), dtype) == "it returns a value that it does not compute"


@pytest.mark.parametrize("place", ["weight", "bias"])
def test_inputs_of_other_types_are_no_constants_of_a_norm(place):
    def norm(draft, x, second):
        return draft.op("layer_norm", x, **{place: second}, normalized_shape=(4,))

    assert with_other(norm, (4,), torch.float64)


# ---- sizes


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("shape", [(5, 4), (4, 5, 1, 1), (5, 4, 3, 2, 1), (4,)])
def test_sizes_of_inputs_of_other_types(dtype, shape):
    """They may have any rank, since only their sizes are read; other values do not change the result."""
    draft = Draft()
    x, second = draft.image(2, 3, 32), draft.input(torch.ones(shape, dtype=dtype))
    heads = draft.size("size", second, shape.index(4))
    y = draft.op("linear", x, draft.weight(32, 32), draft.vector(32))
    y = draft.op("transpose", draft.op("unflatten", y, dim=2, sizes=(heads, -1)), dim0=1, dim1=2)
    form = draft.form(draft.quantize(y))
    compiled = program(form, draft.inputs)
    for example in (draft.inputs[1], torch.zeros(shape, dtype=dtype)):
        compare(compiled(draft.inputs[0], example), form(draft.inputs[0], example))


def test_what_is_computed_with_sizes():
    """Of values that are floats, integers, heads, turned, or weights; of functions, methods and attributes."""
    draft = Draft()
    x = draft.input(draft.normal(2, 6, 24))
    heads = draft.op("unflatten", draft.quantize(x), dim=2, sizes=(4, 6))
    turned, weight = draft.op("transpose", heads, dim0=1, dim1=2), draft.weight(8, 24)
    shape, size = draft.size(getattr, turned, "shape"), draft.size("size", x)
    result = [
        draft.size(operator.getitem, shape, 1),
        draft.size(operator.getitem, size, -2),
        draft.size("size", heads, -1),
        draft.size("dim", heads),
        draft.size(torch.numel, weight),
        draft.size(operator.sub, draft.size("numel", x), draft.size(getattr, x, "ndim")),
        draft.size(operator.getitem, draft.size(getattr, weight, "shape"), 0),
    ]
    assert [draft.values[node] for node in result] == [4, 6, 6, 4, 192, 285, 8]
    four, six, _, _, _, _, eight = result
    y = draft.op("reshape", draft.dequantize(draft.quantize(x)), shape=(-1, six, four, six))
    z = draft.op("unflatten", draft.op("relu", x), dim=2, sizes=(eight, draft.size(operator.floordiv, 24, eight)))
    check(draft, y, z, turned)


def test_an_input_of_which_sizes_are_read_stays_as_it_lies():
    draft = Draft()
    x, second = draft.image(2, 5, 24), draft.input(draft.normal(4, 3, 2, 2))
    form = draft.form(draft.op("unflatten", x, dim=2, sizes=(draft.size("size", second, 0), -1)))
    for layout in (torch.contiguous_format, LAST):
        example = [draft.inputs[0], draft.inputs[1].contiguous(memory_format=layout)]
        assert planned(form, example).format(1) == layout
        compare(program(form, example)(*example), form(*example))


def test_a_size_that_does_not_fit_is_refused():
    """In PyTorch's words."""
    draft = Draft()
    x, second = draft.image(2, 5, 24), draft.input(draft.normal(4, 3))
    form = draft.form(draft.op("unflatten", x, dim=2, sizes=(draft.size("size", second, 0), -1)))
    with pytest.raises(NotPlannedError, match="shape") as caught:
        planned(form, [draft.inputs[0], torch.zeros(5, 3)])
    assert caught.value.node == "unflatten"


@pytest.mark.parametrize(("target", "args"), [("stride", (2,)), (getattr, ("device",))])
def test_where_values_lie_is_not_known(target, args):
    """In PyTorch a transposed value has other strides than here."""
    draft = Draft()
    x = draft.image(2, 6, 24)
    heads = draft.op("transpose", draft.op("unflatten", x, dim=2, sizes=(4, 6)), dim0=1, dim1=2)
    form = draft.form(draft.op("relu", x), draft.size(target, heads, *args))
    with pytest.raises(NotPlannedError, match="it reads strides or a device"):
        planned(form, draft.inputs)


def test_a_size_by_keyword():
    draft = Draft()
    x = draft.image(2, 6, 24)
    count = draft.size(torch.numel, input=x)
    check(draft, draft.op("reshape", x, shape=(2, 6, 4, draft.size(operator.floordiv, count, 48))))


def test_an_axis_that_is_not_there():
    """An example of another rank, for which PyTorch raises, too."""
    draft = Draft()
    x, second = draft.image(2, 6, 24), draft.input(torch.ones(4, 4, dtype=torch.int64))
    y = draft.op("unflatten", x, dim=2, sizes=(draft.size("size", second, 1), -1))
    with pytest.raises(NotPlannedError, match="out of range"):
        planned(draft.form(y), [draft.inputs[0], torch.ones(4, dtype=torch.int64)])


def test_who_reads_a_size_does_not_keep_a_function_out_of_a_layer():
    draft = Draft()
    y = draft.op("linear", draft.image(2, 6, 24), draft.weight(32, 24), draft.vector(32))
    heads = draft.op("unflatten", draft.quantize(draft.op("relu", y)), dim=2, sizes=(draft.size("size", y, 0), -1))
    assert kinds(check(draft, heads))[:2] == ["QuantizeStep", "ProductStep"]
    assert kinds(plan_of(draft, heads)).count("PointwiseStep") == 1  # to the output
