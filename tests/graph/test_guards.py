"""Checks inside a graph: they accept arguments that the graph was traced for, and report others."""

from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxq.errors import InputError
from fxq.graph.guards import OutputFields, check_fixed, check_same, check_sizes, make_output, own_copy, structure

pytestmark = pytest.mark.any_cpu

leaves = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.integers(), st.floats(allow_nan=False), st.just(torch.ones(2, 3))
)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


def numbers_changed(value):
    """Copy of nested arguments with other numbers and tensors."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(numbers_changed, value))
    if isinstance(value, dict):
        return {key: numbers_changed(v) for key, v in value.items()}
    if isinstance(value, torch.Tensor):
        return torch.zeros(5, 1)
    return value + 1 if isinstance(value, (int, float)) and not isinstance(value, bool) else value


@given(nested)
def test_values_of_tensors_and_numbers_are_free(value):
    check_fixed({"x": numbers_changed(value)}, {"x": structure(value, dtypes=True, ranks=True, devices=True)})


@given(nested, nested)
def test_an_argument_goes_through_where_its_structure_is_that_of_the_example(a, b):
    expected = structure(a, dtypes=True, ranks=True)
    if expected == structure(b, dtypes=True, ranks=True):
        check_fixed({"x": b}, {"x": expected})
    else:
        with pytest.raises(InputError, match="the graph was traced for x"):
            check_fixed({"x": b}, {"x": expected})


@pytest.mark.parametrize(
    ("expected", "argument", "message"),
    [
        (["list", True, "<a number>"], [False, 2], r"x\[0\]=True, as in the example, but got bool False"),
        (["tuple", "<a tensor>"], [torch.ones(1)], "got .*a tensor"),
        ({"a": "<a tensor>"}, {"b": torch.ones(1)}, "x={'a': a tensor}"),
        ("<a tensor of float32 with 2 axes>", torch.ones(2), "got a tensor of float32 with 1 axes"),
        ("<a tensor of float32>", torch.ones(2).int(), "got a tensor of int32"),
        ("<a tensor on cpu>", torch.ones(2, device="meta"), "got a tensor of float32 on meta"),
        (3, 4, "x=3, as in the example, but got int 4"),
        (None, torch.ones(1), "x=None"),
    ],
)
def test_what_another_argument_is_told(expected, argument, message):
    with pytest.raises(InputError, match=message):
        check_fixed({"x": argument}, {"x": expected})


def test_star_arguments_may_be_a_tuple_or_a_list():
    for value in ((1, 2), [1, 2]):
        check_fixed({"x": value}, {"x": ["any", "<a number>", "<a number>"]})
    with pytest.raises(InputError):
        check_fixed({"x": (1,)}, {"x": ["any", "<a number>", "<a number>"]})


def test_a_value_that_decided_must_be_the_same():
    check_same(torch.tensor(3), 3, "int", "net.py:4", "if n == 3:")
    with pytest.raises(InputError, match=r"net.py:4: .* int of a value in `if n == 3:` is 3, but here it is 5"):
        check_same(torch.tensor(5), 3, "int", "net.py:4", "if n == 3:")


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        ((2, 3), True),
        ((2, (1, None)), True),
        ((2, (3, 3)), True),
        ((2, (4, None)), False),
        ((2,), False),
        ((1, 3), False),
    ],
)
def test_sizes_of_an_exported_program(sizes, fits):
    if fits:
        check_sizes(torch.ones(2, 3), "x", sizes)
    else:
        with pytest.raises(InputError, match=r"x has the shape \[2, 3\], but the program was exported for \["):
            check_sizes(torch.ones(2, 3), "x", sizes)


@dataclass
class Pair:
    a: int
    b: int


@dataclass(frozen=True)
class Doubled:
    """Class whose constructor changes one field and sets another."""

    a: int
    b: int = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "a", self.a * 2)
        object.__setattr__(self, "b", self.a + 1)


def test_fields_that_a_constructor_sets_get_the_values_of_the_graph():
    output = make_output(f"{__name__}:Doubled", {"a": 6, "b": 7})
    assert type(output) is Doubled and (output.a, output.b) == (6, 7)


def test_outputs_are_made_again_or_stand_as_fields():
    assert make_output(f"{__name__}:Pair", {"a": 1, "b": 2}) == Pair(1, 2)
    assert make_output("collections:OrderedDict", {"a": 1}) == OrderedDict(a=1)
    for kind in ("no.such.module:Pair", f"{__name__}:Missing", "enum:Enum"):
        output = make_output(kind, {"a": 1})
        assert type(output) is OutputFields and output.a == output["a"] == 1
    with pytest.raises(AttributeError, match="missing"):
        _ = OutputFields(a=1).missing


def test_a_constant_is_handed_out_as_a_copy():
    constant = torch.ones(2)
    own_copy(constant).zero_()
    assert constant.tolist() == [1, 1]
