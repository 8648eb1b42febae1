"""Nodes that write to the memory of values, as observed in a traced run."""

import pytest
import torch
from torch import fx, nn

from fxq.graph.analysis.mutation import MemoryWriters, changes
from fxq.graph.info import TracedInfo, set_info
from tests.support.graphs import graph, node
from tests.support.helpers import REFERENCE, module

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture
def traced_nodes():
    """Graph in which x + 1 and a view of it share block 1, another value has block 2, and `writer` changes block 1."""
    traced = fx.Graph()
    x = traced.placeholder("x")
    value = traced.call_function(torch.add, (x, 1))
    view = traced.call_method("view", (value, -1))
    separate = traced.call_function(torch.mul, (x, 2))
    writer = traced.call_method("add_", (view, 1))
    traced.output((value, separate))
    for value_node, memory in ((value, (1,)), (view, (1,)), (separate, (2,)), (writer, (1,))):
        set_info(value_node, traced=TracedInfo(memory))
    set_info(writer, traced=TracedInfo((1,), changes=(1,)))
    return traced, value, view, separate, writer


def test_a_view_shares_the_memory_of_what_it_is_a_view_of(traced_nodes):
    traced, value, view, separate, writer = traced_nodes
    writers = MemoryWriters(traced.nodes)
    assert writers.of(value) is writers.of(view) is writer
    assert writers.of(separate) is None
    assert changes(writer) == (1,) and changes(value) == ()


@pytest.mark.parametrize("edit", ["erase", "describe"])
def test_a_writer_that_is_gone_or_changes_nothing_any_more_is_forgotten(traced_nodes, edit):
    traced, value, _, _, writer = traced_nodes
    writers = MemoryWriters(traced.nodes)
    if edit == "erase":
        traced.erase_node(writer)
    else:
        set_info(writer, traced=TracedInfo((1,)))
    assert writers.of(value) is None


def test_what_a_leaf_overwrites_is_a_copy_of_its_own():
    class Doubles(nn.Module):
        def forward(self, x):
            return x.mul_(2).sum()

    def forward(self, x):
        y = x * 2
        return self.doubles(y) + y

    gm = graph(module(forward, doubles=Doubles()), X, "trace", REFERENCE.leaf("doubles"))
    writers = MemoryWriters(gm.graph.nodes)
    assert writers.of(node(gm, "own_copy")) is node(gm, "doubles")
    assert writers.of(node(gm, "mul")) is None


def test_a_new_writer_is_noted():
    gm = graph(module(lambda self, x: x * 2), X, until="trace")
    writers, value = MemoryWriters(gm.graph.nodes), node(gm, "mul")
    assert writers.of(value) is None
    with gm.graph.inserting_after(value):
        writer = gm.graph.call_method("mul_", (value, 3))
    set_info(value, traced=TracedInfo((7,)))
    set_info(writer, traced=TracedInfo(changes=(7,)))
    writers.note(writer)
    assert writers.of(value) is writer
