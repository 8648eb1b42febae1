"""Graphs as plain data: a restored graph runs the same, and has the same names and metadata."""

import pickle

import pytest
import torch
from torch import fx

from fxq.graph.info import info
from fxq.graph.plain_data import from_data, to_data
from tests.support.graphs import equal, graph
from tests.support.helpers import REFERENCE
from tests.support.models import NETWORKS, batch, build, call


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_graph_comes_back_out_of_a_pickle(name):
    gm = graph(build(name), batch(name), "insert-observers", REFERENCE)
    copied = from_data(pickle.loads(pickle.dumps(to_data(gm.graph))))
    assert [n.format_node() for n in copied.nodes] == [n.format_node() for n in gm.graph.nodes]
    assert [info(n) for n in copied.nodes] == [info(n) for n in gm.graph.nodes]
    assert equal(call(fx.GraphModule(gm, copied), batch(name)), call(gm, batch(name)))


def test_nested_arguments_name_the_right_nodes():
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output(graph.call_function(torch.cat, ([b, a, b],), {"dim": 0}))
    restored = from_data(to_data(graph))
    restored.lint()
    module = fx.GraphModule({}, restored)
    assert module(torch.tensor([1]), torch.tensor([2])).tolist() == [2, 1, 2]


def test_the_data_does_not_follow_later_edits():
    graph = fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    data = to_data(graph)
    next(n for n in graph.nodes if n.op == "call_function").target = torch.abs
    assert fx.GraphModule({}, from_data(data))(torch.tensor([3])).tolist() == [-3]


def test_functions_that_pickle_does_not_find_by_itself():
    graph = fx.Graph()
    unique = graph.call_function(torch.unique, (graph.placeholder("x"),))
    graph.output(graph.call_function(torch.ops.aten.new_zeros.default, (unique, [2])))
    restored = from_data(pickle.loads(pickle.dumps(to_data(graph))))
    assert [n.target for n in restored.nodes] == [n.target for n in graph.nodes]
