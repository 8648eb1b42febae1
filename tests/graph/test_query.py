"""Queries on nodes, on graphs with known answers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import fxq
from fxq.graph.info import info
from fxq.graph.query import (
    argument,
    constant,
    flat_nodes,
    is_op,
    is_pure,
    makes_no_tensor,
    merge_origins,
    op_of,
    options_of,
    producer_of,
    reads_only_metadata,
    taken_part,
    unobserved,
)
from fxq.graph.unit import reads_of
from fxq.quant.observer_base import Observer
from tests.support.graphs import graph, node
from tests.support.helpers import REFERENCE, module

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def model():
    return module(lambda self, x: torch.relu(self.fc(x)), fc=nn.Linear(4, 4))


def test_which_op_a_node_calls_and_with_what():
    gm = graph(module(lambda self, x: nn.functional.hardtanh(self.fc(x), 0.0, 2.0) + 1, fc=nn.Linear(4, 4)), X)
    fc, clamp, x = node(gm, "fc"), node(gm, "hardtanh"), node(gm, "x")
    assert [op.name if (op := op_of(n)) else None for n in gm.graph.nodes if n.op == "call_function"] == [
        "linear",
        "hardtanh",
        "add",
    ]
    assert is_op(fc, "conv2d", "linear") and not is_op(clamp, "linear") and not is_op(3, "linear") and op_of(x) is None
    assert options_of(clamp) == {"min_val": 0.0, "max_val": 2.0}
    assert argument(fc, "x") is x and argument(fc, "nothing") is None
    assert torch.equal(constant(gm, argument(fc, "bias")), gm.get_parameter("fc.bias")) and constant(gm, x) is None


a, b = (fx.Graph().placeholder(name) for name in "ab")
values = st.recursive(
    st.sampled_from([a, b, 1, None, "a"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(slice, inner, inner, inner),
    ),
    max_leaves=8,
)


@given(values)
def test_nodes_in_nested_arguments_are_those_that_fx_maps_in_its_order(nested):
    seen = []
    fx.node.map_arg(nested, seen.append)
    assert list(flat_nodes(nested)) == seen


@pytest.mark.parametrize(
    ("forward", "name", "answer"),
    [
        (lambda self, x: x.view(x.size(0), -1), "size", True),
        (lambda self, x: x.view(x.shape[0], -1), "getattr_1", True),
        (lambda self, x: x + x.new_zeros(4, dtype=torch.float32), "new_zeros", True),
        (lambda self, x: x + x.sum().item(), "item", False),
        (lambda self, x: x + x, "add", False),
    ],
)
def test_what_looks_at_shapes_alone(forward, name, answer):
    gm = graph(module(forward), X, until="trace")
    assert reads_only_metadata(node(gm, name)) is answer


def test_sizes_are_no_tensors():
    gm = graph(module(lambda self, x: x.view(x.size(0) * 2, -1)), X)
    assert makes_no_tensor(node(gm, "size")) and makes_no_tensor(node(gm, "mul"))
    assert not makes_no_tensor(node(gm, "view"))


def test_a_part_of_a_tuple_and_the_whole_of_it():
    def forward(self, x):
        parts = x.split(2, -1)
        return torch.cat(parts) if self.whole else parts[1]

    for whole, taken in ((False, 1), (True, None)):
        model_ = module(forward)
        model_.whole = whole
        gm = graph(model_, X, until="trace")
        split = node(gm, "split")
        assert [taken_part(user, split) for user in split.users] == [taken]


def test_unread_values_that_may_be_removed():
    class Prints(nn.Module):
        def forward(self, x):
            return x

    leaf = graph(nn.Sequential(Prints()), X, until="trace", recipe=REFERENCE.leaf("0"))
    assert not is_pure(leaf, node(leaf, "_0"))
    gm = graph(model(), X, until="fuse")
    assert is_pure(gm, node(gm, "fc_relu")) and is_pure(gm, node(gm, "fc_weight"))
    assert not is_pure(gm, node(gm, "x"))


def test_unread_sizes_may_be_removed():
    """Sizes that are computed count, too."""
    gm = graph(module(lambda self, x: x.view(x.size(0) * 2, -1)), X)
    assert is_pure(gm, node(gm, "size")) and is_pure(gm, node(gm, "mul"))


def test_observers_and_conversions_are_seen_through():
    gm = graph(model(), X, until="insert-observers")
    watches = [n for n in gm.graph.nodes if n.op == "call_module" and isinstance(gm.get_submodule(n.target), Observer)]
    assert watches and {unobserved(gm, n) for n in watches} <= {n for n in gm.graph.nodes if n not in watches}
    unit = node(gm, "fc_relu")
    assert [value.name for value in reads_of(gm, unit)] == ["x"]
    quantized = fxq.quantize(model(), REFERENCE, data=[X])
    unit = node(quantized, "fc_relu")
    assert producer_of(unit.args[0]).name == "x" and producer_of(unit) is unit


def test_origins_are_merged_each_once_in_order():
    gm = graph(model(), X)
    fc, relu = node(gm, "fc"), node(gm, "relu")
    assert merge_origins([fc, relu, fc]) == (*info(fc).origins, *info(relu).origins)
