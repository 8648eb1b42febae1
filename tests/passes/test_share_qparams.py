"""share-qparams: which edges can have one scale and zero point."""

import math

import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from fxq.graph.unit import wanted_forms
from fxq.passes import ShareQParams
from tests.support.graphs import MINMAX, node, program, run_pass
from tests.support.helpers import REFERENCE, module
from tests.support.models import settled

INT8 = "plan=Plan(Decision('int8'), reads=TensorSpec())"
MOVES = "plan=Plan(Decision('moves'), reads=TensorSpec())"
CAT = f"""
    x: float32[2, 4] = input()
    w: float32[4, 4] = tensor('w')
    v: float32[3, 8] = tensor('v')
    a = linear(x, w)  # {INT8}
    b = linear(x, w)  # {INT8}
    flat = reshape(b, shape=(2, -1))  # {MOVES}
    cat = cat([a, flat], dim=1)  # {MOVES}
    c = linear(cat, v)  # {INT8}
    d = relu(c)  # {INT8}
    erf = erf(d)
    return erf
"""


def groups(gm):
    """The names of the values of each group, those that are made (not moved) marked with a star."""
    numbers = {}
    for value in gm.graph.nodes:
        for edge in info(value).edges:
            numbers.setdefault(edge.group, set()).add(value.name + "*" * edge.source)
    return sorted(map(sorted, numbers.values()))


def test_groups_of_what_moves_data():
    """The graph stays; a value without an integer reader has no edge."""
    gm = run_pass(ShareQParams(), CAT)
    assert groups(gm) == [["a*", "b*", "cat", "flat"], ["c*"], ["x*"]]
    assert program(gm) == program(fxq.extend.read_graph(CAT, fxq.extend.graph_tensors(gm)))


def test_residual_sums_share_nothing():
    written = CAT.replace("cat([a, flat], dim=1)", "add(a, flat)").replace(f"flat)  # {MOVES}", f"flat)  # {INT8}")
    assert groups(run_pass(ShareQParams(), written)) == [["a*"], ["b*", "flat"], ["c*"], ["cat*"], ["x*"]]


def test_what_is_selected_or_may_hold_constants_is_observed_besides_what_is_made():
    gm = run_pass(
        ShareQParams(),
        f"""
        x: float32[64, 4] = input()
        w: float32[4, 4] = tensor('w')
        a = linear(x, w)  # {INT8}
        sigmoid = sigmoid(a)  # {INT8}
        flat = reshape(sigmoid, shape=(-1, 4))  # {MOVES}
        some = getitem(flat, index=(slice(None, 8, None),))  # {MOVES}
        pad = pad(flat, pad=(0, 0, 1, 1), value=-2.0)  # {MOVES}
        flip = flip(pad, dims=(0,))  # {MOVES}
        b = linear(some, w)  # {INT8}
        c = linear(flip, w)  # {INT8}
        return (b, c)
        """,
    )
    edges = {n.name: e for n in gm.graph.nodes for e in info(n).edges}
    assert {name: (edge.source, edge.observed, edge.constants) for name, edge in edges.items()} == {
        "x": (True, True, (-math.inf,)),
        "a": (True, True, ()),
        "sigmoid": (True, True, ()),
        "flat": (False, False, ()),
        "some": (False, True, ()),
        "pad": (False, True, (-2.0,)),
        "flip": (False, True, (-2.0,)),
    }


def test_a_weight_is_an_edge_alone_in_its_group():
    weight = "TensorSpec(signed=True, symmetric=True, per='channel')"
    gm = run_pass(ShareQParams(), CAT.replace(INT8, f"{INT8[:-1]}, weight={weight})"))
    edges = {n.name: info(n).edges for n in gm.graph.find_nodes(op="get_attr")}
    facts = {name: [(str(e.spec.per), e.axis, e.observed) for e in of_weight] for name, of_weight in edges.items()}
    assert facts == {"w": [("channel", 0, True)], "v": [("channel", 0, True)]}
    assert groups(gm) == [["a*", "b*", "cat", "flat"], ["c*"], ["v*"], ["w*"], ["x*"]]


def test_two_specs_of_one_value_are_two_groups():
    coarse = CAT.replace(f"b = linear(x, w)  # {INT8}", f"b = linear(x, w)  # {INT8[:-2]}bits=4))")
    edges = info(node(run_pass(ShareQParams(), coarse), "x")).edges
    assert [e.spec.bits for e in edges] == [8, 4]  # readers in float read the first form
    assert len({e.group for e in edges}) == 2


def test_what_a_kernel_emits_has_an_edge_whoever_reads_it():
    emits = CAT.replace(f"d = relu(c)  # {INT8}", f"d = relu(c)  # {INT8[:-1]}, emits=TensorSpec())")
    assert ["d*"] in groups(run_pass(ShareQParams(), emits))


def test_every_form_that_a_node_wants_is_an_edge_of_the_value():
    """Two calibrated forms of one value, a dynamic one, and weights with a scale per channel and per block."""
    coarse, rows = "TensorSpec(bits=4)", "TensorSpec(per='row', range='dynamic')"
    channels, blocks = (f"TensorSpec(signed=True, symmetric=True, per={per})" for per in ("'channel'", "2"))
    gm = run_pass(
        ShareQParams(),
        f"""
        x: float32[2, 4] = input()
        w: float32[4, 4] = tensor('w')
        v: float32[4, 4] = tensor('v')
        a = linear(x, w)  # plan=Plan(Decision('int8'), reads=TensorSpec(), weight={channels})
        b = linear(a, w)  # plan=Plan(Decision('int8'), reads={coarse}, weight={channels})
        c = linear(a, v)  # plan=Plan(Decision('int8'), reads={rows}, weight={blocks})
        d = linear(a, v)  # plan=Plan(Decision('int8'), reads=TensorSpec())
        return (b, c, d)
        """,
    )
    forms = {n.name: {edge.form for edge in info(n).edges} for n in gm.graph.nodes if info(n).edges}
    read = [(value.name, form) for n in gm.graph.nodes for value, form in wanted_forms(gm, n).items()]
    assert forms == {name: {form for value, form in read if value == name} for name in ("x", "w", "v", "a")}
    assert {(form.spec.per, form.spec.bits, form.axis) for form in forms["a"]} == {
        ("tensor", 8, None),
        ("tensor", 4, None),
        ("row", 8, -1),
    }
    assert [{form.axis for form in forms[name]} for name in ("w", "v")] == [{0}, {1}]


# ---- whole models


def test_one_group_has_one_grid_that_covers_all_of_it():
    layers = {"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(3, 4, 3), "c": nn.Conv2d(8, 4, 1)}
    model = module(lambda self, x: self.c(torch.cat([self.a(x), self.b(x)], 1)), **layers)
    model, x = settled(lambda: model), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        model.a.weight *= 10  # two branches of different ranges
    quantized = fxq.quantize(model, fxq.Recipe.static(backend="reference", activation=MINMAX), data=[x])
    layers = quantized.qparams()
    a, b = model.a(x).detach(), model.b(x).detach()
    span = float(torch.maximum(a.max(), b.max()) - torch.minimum(a.min(), b.min()))
    assert layers["a"].output_scale == layers["b"].output_scale == layers["c"].input_scale
    assert abs(layers["b"].output_scale - span / 255) < 0.01 * span / 255  # int8 weights move the ends a little


def test_a_group_covers_a_function_and_what_is_beside_it():
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(8, 4)}
    forward = lambda self, x: self.b(torch.cat([torch.sigmoid(y := self.a(x)), y * 10], 1))  # noqa: E731
    model, x = settled(lambda: module(forward, **layers)), torch.randn(64, 4)
    quantized = fxq.quantize(model, REFERENCE, data=[x])
    assert quantized.qparams()["b"].input_scale > 2 / 255
    assert sqnr(model(x), quantized(x)) > 30


def test_limits_that_are_values_of_the_graph():
    """The result of a clamp of an earlier constant is not known before the model runs."""
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 2)}
    model = module(lambda self, x, limit: self.b(torch.clamp(self.a(x), -limit, limit)), **layers)
    x = torch.randn(8, 4)
    qmodel = fxq.quantize(model, REFERENCE, data=[(x, 1.5)])
    assert sqnr(model(x, 1.5), qmodel(x, 1.5)) > 25
