"""Who changes the memory that a value lies in, as a traced run saw it."""

import pytest
import torch
from torch import fx, nn

from fxq.graph.analysis.mutation import MemoryWriters, changes
from fxq.graph.info import set_info
from tests.support.graphs import graph, node
from tests.support.helpers import REFERENCE, module

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture
def seen():
    """x + 1 and a view of it share block 1; another value lies in block 2; the last one changes block 1."""
    made = fx.Graph()
    x = made.placeholder("x")
    value = made.call_function(torch.add, (x, 1))
    view = made.call_method("view", (value, -1))
    other = made.call_function(torch.mul, (x, 2))
    writer = made.call_method("add_", (view, 1))
    made.output((value, other))
    for each, memory in ((value, (1,)), (view, (1,)), (other, (2,)), (writer, (1,))):
        set_info(each, memory=memory)
    set_info(writer, changes=(1,))
    return made, value, view, other, writer


def test_a_view_shares_the_memory_of_what_it_is_a_view_of(seen):
    made, value, view, other, writer = seen
    found = MemoryWriters(made.nodes)
    assert found.of(value) is found.of(view) is writer
    assert found.of(other) is None
    assert changes(writer) == (1,) and changes(value) == ()


@pytest.mark.parametrize("edit", ["erase", "describe"])
def test_a_writer_that_is_gone_or_changes_nothing_any_more_is_forgotten(seen, edit):
    made, value, _, _, writer = seen
    found = MemoryWriters(made.nodes)
    if edit == "erase":
        made.erase_node(writer)
    else:
        set_info(writer, changes=())
    assert found.of(value) is None


def test_what_a_leaf_overwrites_is_a_copy_of_its_own():
    class Doubles(nn.Module):
        def forward(self, x):
            return x.mul_(2).sum()

    def forward(self, x):
        y = x * 2
        return self.doubles(y) + y

    gm = graph(module(forward, doubles=Doubles()), X, "trace", REFERENCE.leaf("doubles"))
    found = MemoryWriters(gm.graph.nodes)
    assert found.of(node(gm, "own_copy")) is node(gm, "doubles")
    assert found.of(node(gm, "mul")) is None


def test_a_new_writer_is_noted():
    gm = graph(module(lambda self, x: x * 2), X, until="trace")
    found, value = MemoryWriters(gm.graph.nodes), node(gm, "mul")
    assert found.of(value) is None
    with gm.graph.inserting_after(value):
        writer = gm.graph.call_method("mul_", (value, 3))
    set_info(value, memory=(7,))
    set_info(writer, changes=(7,))
    found.note(writer)
    assert found.of(value) is writer
