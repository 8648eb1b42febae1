"""A graph with private copies of its stateful modules."""

import torch
from torch import fx, nn

from fxq.graph.program import IsolatedGraph


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(3)), 0

    def forward(self, x):
        self.calls += 1
        return x * self.weight


def graph_of(module):
    graph = fx.Graph()
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    return fx.GraphModule(nn.ModuleDict({"layer": module}), graph)


def test_modules_are_copies_that_share_their_weights():
    gm = graph_of(Counts())
    isolated = IsolatedGraph(gm, gm.graph)
    layer = isolated.modules["layer"]
    layer(torch.ones(3))
    assert (layer.calls, gm.layer.calls, isolated.fresh.modules["layer"].calls) == (1, 0, 0)
    assert layer.weight is gm.layer.weight


def test_what_cannot_be_copied_stays():
    module = Counts()
    module.kept = (value for value in ())
    gm = graph_of(module)
    assert IsolatedGraph(gm, gm.graph).modules == {}


def test_an_op_in_place_overwrites():
    gm = graph_of(nn.ReLU(inplace=True))
    assert IsolatedGraph(gm, gm.graph).overwrites
    gm = graph_of(nn.ReLU())
    assert not IsolatedGraph(gm, gm.graph).overwrites
