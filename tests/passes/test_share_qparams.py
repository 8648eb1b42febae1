"""share-qparams: which edges can have one scale and zero point."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from fxq.passes import ShareQParams
from tests.graphs import MINMAX, again, text, until
from tests.helpers import REFERENCE, module
from tests.models import batch, build, settled


def groups(manager):
    """The names of the values of each group, those that are made (not moved) marked with a star."""
    found = {}
    for node in manager.gm.graph.nodes:
        for edge in info(node).edges if node.op != "get_attr" else ():
            found.setdefault(edge.group, set()).add(node.name + "*" * edge.source)
    return sorted(map(sorted, found.values()))


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.c, self.fc = nn.Conv2d(8, 4, 1), nn.Linear(16, 3)

    def forward(self, x):
        y = torch.cat([F.max_pool2d(self.a(x), 2), F.max_pool2d(self.b(x), 2)], 1)
        z = F.max_pool2d(torch.relu(self.c(y)), 2)
        return self.fc(z.flatten(1))


def test_groups_of_what_moves_data():
    manager = until(settled(Chain), torch.randn(2, 3, 8, 8), "share-qparams", REFERENCE)
    assert groups(manager) == [
        ["a*", "b*", "cat", "max_pool2d", "max_pool2d_1"],
        ["c_relu*", "flatten", "max_pool2d_2"],
        ["x*"],
    ]
    assert text(manager.history["share-qparams"].graph) == text(manager.history["annotate"].graph)
    before = groups(manager)
    assert again(manager, ShareQParams()) == []
    assert groups(manager) == before


def test_one_group_has_one_grid_that_covers_all_of_it():
    model, x = settled(Chain), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        model.a.weight *= 10  # two branches of different ranges
    quantized = fxq.quantize(model, fxq.Recipe.static(backend="reference", activation=MINMAX), data=[x])
    history = quantized.history
    grids = {n.name: (n.scale, n.zero_point) for n in history["insert-qdq"].graph if n.label == "quantize"}
    assert grids["a_q"] == grids["b_q"] == grids["cat_q"] != grids["c_relu_q"]
    layers = quantized.qparams()
    a, b = model.a(x).detach(), model.b(x).detach()
    span = float(torch.maximum(a.max(), b.max()) - torch.minimum(a.min(), b.min()))
    assert layers["a"].output_scale == layers["b"].output_scale == layers["c"].input_scale
    assert abs(layers["a"].output_scale - span / 255) < 0.01 * span / 255  # int8 weights move the ends a little


def test_a_weight_is_an_edge_alone_in_its_group():
    manager = until(settled(Chain), torch.randn(2, 3, 8, 8), "share-qparams", REFERENCE)
    edges = {n.target: info(n).edges for n in manager.gm.graph.find_nodes(op="get_attr") if info(n).edges}
    assert list(edges) == ["a.weight", "b.weight", "c.weight", "fc.weight"]
    assert all((edge.spec.bits, edge.axis, edge.observed) == (8, 0, True) for (edge,) in edges.values())
    taken = {edge.group for n in manager.gm.graph.nodes if n.op != "get_attr" for edge in info(n).edges}
    groups_of_weights = [edge.group for (edge,) in edges.values()]
    assert len({*groups_of_weights, *taken}) == len(taken) + 4


def test_residual_sums_share_nothing():
    manager = until(build("residual"), batch("residual"), "share-qparams", REFERENCE)
    assert all(len(group) == 1 for group in groups(manager))


def test_what_is_selected_or_may_hold_constants_is_observed_besides_what_is_made():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = torch.sigmoid(self.a(x)).reshape(-1, 4)
            return self.b(y[:8]), self.b(F.pad(y, (0, 0, 1, 1), value=-2.0).flip(0))

    manager = until(settled(Model), torch.randn(64, 4), "share-qparams", REFERENCE)
    edges = {n.name: e for n in manager.gm.graph.nodes for e in info(n).edges if n.op != "get_attr"}
    observed = {name: (edge.source, edge.observed, edge.constants) for name, edge in edges.items()}
    assert observed == {
        "x": (True, True, (-math.inf,)),
        "a": (True, True, ()),
        "sigmoid": (True, True, ()),
        "reshape": (False, False, ()),
        "getitem": (False, True, ()),
        "pad": (False, True, (-2.0,)),
        "flip": (False, True, (-2.0,)),
    }


def test_a_group_covers_a_function_and_what_is_beside_it():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(8, 4)

        def forward(self, x):
            y = self.a(x)
            return self.b(torch.cat([torch.sigmoid(y), y * 10], 1))

    model, x = settled(Model), torch.randn(64, 4)
    quantized = fxq.quantize(model, REFERENCE, data=[x])
    history = quantized.history
    assert {"sigmoid_observer", "mul_observer"} <= history["insert-observers"].graph.by_name.keys()
    assert quantized.qparams()["b"].input_scale > 2 / 255
    assert sqnr(model(x), quantized(x)) > 30


def test_two_specs_of_one_value_are_two_groups():
    recipe = REFERENCE.override("b", fxq.QuantConfig(activation=fxq.TensorSpec(bits=4)))
    manager = until(build("dense"), batch("dense"), "share-qparams", recipe)
    value = next(n for n in manager.gm.graph.nodes if n.name == "a_relu")
    assert sorted(e.spec.bits for e in info(value).edges) == [4, 8]
    assert len({e.group for e in info(value).edges}) == 2


def test_limits_that_are_values_of_the_graph():
    """What a clamp makes of a constant in front of it is not known before the model runs."""
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 2)}
    model = module(lambda self, x, limit: self.b(torch.clamp(self.a(x), -limit, limit)), **layers)
    x = torch.randn(8, 4)
    qmodel = fxq.quantize(model, REFERENCE, data=[(x, 1.5)])
    assert sqnr(model(x, 1.5), qmodel(x, 1.5)) > 25
