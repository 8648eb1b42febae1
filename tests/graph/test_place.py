"""Description of a node in messages."""

import torch
from torch import nn

from fxq.graph.info import info
from fxq.graph.place import where
from tests.support.graphs import graph, node
from tests.support.helpers import module

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_where_names_node_op_layer_and_line():
    model = module(lambda self, x: torch.relu(self.fc(x)), fc=nn.Linear(4, 4))
    gm = graph(model, X)
    assert where(gm, node(gm, "fc")) == f'%fc (linear, layer "fc", {info(node(gm, "fc")).source})'
    assert info(node(gm, "fc")).source.startswith("graph/test_place.py:")
    fused = graph(model, X, until="fuse")
    assert where(fused, node(fused, "fc_relu")).startswith('%fc_relu (linear_relu, layer "fc", graph/test_place.py:')
    assert where(gm, node(gm, "x")) == "%x (placeholder)"
