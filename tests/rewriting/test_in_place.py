"""In-place calls: the argument that they write to, and the call that computes its new value."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fxq.graph.info import set_info
from fxq.rewriting.in_place import dtype_of_call, out_of_place, written_by

pytestmark = pytest.mark.any_cpu
aten = torch.ops.aten


def call(kind, target, *more, **kwargs):
    """A node that calls this on a float32 tensor of 2 x 3."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    set_info(x, shape=(2, 3), dtype=torch.float32)
    kwargs = {key: x if value == "x" else value for key, value in kwargs.items()}
    return graph.create_node(kind, target, (x, *more), kwargs), x


@pytest.mark.parametrize(
    ("kind", "target", "more", "plain"),
    [
        ("call_method", "index_fill_", (0, 1, 2.0), "index_fill"),
        ("call_method", "add_", (1,), "add"),
        ("call_function", torch.relu_, (), torch.relu),
        ("call_function", F.elu_, (), F.elu),
        ("call_function", operator.iadd, (1,), operator.add),
        ("call_function", operator.iand, (1,), operator.and_),
        ("call_function", aten.mul_.Tensor, (2,), aten.mul.Tensor),
    ],
)
def test_the_call_without_side_effects(kind, target, more, plain):
    node, x = call(kind, target, *more)
    assert written_by(node) is x
    assert out_of_place(node)[:3] == (kind, plain, (x, *more))


def test_options_that_say_where_to_write():
    node, x = call("call_function", F.relu, inplace=True)
    assert written_by(node) is x and out_of_place(node) == ("call_function", F.relu, (x,), {})
    node, x = call("call_function", torch.add, 1, out="x")
    assert written_by(node) is x and out_of_place(node) == ("call_function", torch.add, (x, 1), {})


def test_fills():
    node, x = call("call_method", "zero_")
    assert out_of_place(node) == ("call_function", torch.full_like, (x, 0), {})


@pytest.mark.parametrize("name", ["normal_", "bernoulli_", "fill_diagonal_"])
def test_none_where_torch_has_no_such_call(name):
    assert out_of_place(call("call_method", name, 0.5)[0]) is None


@pytest.mark.parametrize("name", ["add", "__len__", "relu"])
def test_other_calls_write_to_nothing(name):
    assert written_by(call("call_method", name)[0]) is None


def test_the_dtype_of_what_is_computed():
    assert dtype_of_call(out_of_place(call("call_method", "gt_", 0)[0])) is torch.bool
    assert dtype_of_call(out_of_place(call("call_method", "mul_", 2)[0])) is torch.float32
