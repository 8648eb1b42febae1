"""Axes of inputs that vary in size: the batch axis, none, or those that a user names."""

import pytest
import torch
from torch import fx

from fxq.errors import InputError
from fxq.graph.analysis.varying_axes import inputs_of, size_names, varying_axes

pytestmark = pytest.mark.any_cpu

INPUTS = {"x": torch.rand(2, 3), "mask": torch.rand(2), "table": torch.rand(7, 4), "scale": torch.tensor(1.0)}


def test_true_is_the_batch_of_the_first_input():
    assert varying_axes(INPUTS, True) == {"x": {0: "batch"}, "mask": {0: "batch"}}


def test_a_number_in_a_tensor_is_no_batch():
    assert varying_axes(dict(reversed(INPUTS.items())), True) == {"table": {0: "batch"}}
    assert varying_axes({"scale": INPUTS["scale"]}, True) == varying_axes({}, True) == {}


def test_false_is_none():
    assert varying_axes(INPUTS, False) == {}


def test_names_by_input_and_axis():
    wanted = {"x": {0: "batch", 1: "length"}, "mask": {0: "batch"}, "table": {0: "rows", 1: "batch + batch"}}
    assert varying_axes(INPUTS, wanted) == wanted
    assert size_names(wanted) == "'batch' or 'length' or 'rows' or 'batch + batch'"


@pytest.mark.parametrize(
    "dynamic, message",
    [
        ({"y": {0: "batch"}}, r"dynamic: unknown input 'y'"),
        ({"scale": {0: "batch"}}, r"dynamic: unknown input 'scale'"),
        ({"x": {2: "batch"}}, r"dynamic: 2: 'batch' is not an axis of 'x' .* It has axes 0 to 1"),
        ({"x": {-1: "batch"}}, r"-1: 'batch' is not an axis of 'x'"),
        ({"x": {"0": "batch"}}, r"'0': 'batch' is not an axis of 'x'"),
        ({"x": {0: 5}}, r"0: 5 is not an axis of 'x' with a name of its size"),
        ({"x": {1: "length"}, "table": {1: "length"}}, r"axis 1 of 'table' is 'length', which is 3 .* the size 4"),
        ({"table": {1: "rows + x"}}, r"no axis has the size 'rows' alone"),
    ],
)
def test_what_is_no_axis_of_an_input_is_refused(dynamic, message):
    with pytest.raises(InputError, match=message):
        varying_axes(INPUTS, dynamic)


def test_tensors_inside_of_containers_are_inputs_of_their_own():
    graph = fx.Graph()
    x, more, flag = (graph.placeholder(name) for name in ("x", "*more", "flag"))
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    named = dict(inputs_of({x: a, more: (b, [c], {"a key": d}, None), flag: True}))
    assert {name: float(value) for name, value in named.items()} == {
        "x": 0,
        "more_0": 1,
        "more_1_0": 2,
        "more_2_a_key": 3,
    }
