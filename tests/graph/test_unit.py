"""Units: their shared bodies, their metadata, their captures, their copies."""

import copy
import pickle
from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxq
from fxq.graph.info import info
from fxq.graph.plain_data import from_data, to_data
from fxq.graph.unit import InnerValue, calls_of, unit_of
from fxq.rewriting.pattern import FUSIONS, rewrite
from tests.support.graphs import graph
from tests.support.helpers import module, rewriter, run
from tests.support.models import conv_block

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-2, 2, 12).reshape(3, 4)
IMAGE = torch.linspace(-1, 1, 50).reshape(1, 2, 5, 5)


def units(gm):
    return [node for node in gm.graph.nodes if unit_of(gm, node) is not None]


@rewrite
def relu_of_one(op, x):
    return op.relu(op.sigmoid(x))


@rewrite
def relu_of_another(op, x):
    return op.relu(op.tanh(x))


@rewrite
def clipped(op, x):
    return op.hardtanh(op.relu(x))


@rewrite
def relu_of_itself_less(op, x):
    return op.sub(op.relu(x), x)


@rewrite
def less_its_relu(op, x):
    return op.sub(x, op.relu(x))


@rewrite
def scaled(op, x, factor):
    return op.mul(op.relu(x), factor)


@rewrite
def doubled(op, x):
    return op.mul(op.relu(x), 2)


@pytest.mark.parametrize(
    ("rules", "forward", "modules"),
    [
        ([relu_of_one], lambda self, x: [torch.relu(torch.sigmoid(x)) for _ in range(2)], 1),
        ([relu_of_one, relu_of_another], lambda self, x: [torch.relu(f(x)) for f in (torch.sigmoid, torch.tanh)], 2),
        ([clipped], lambda self, x: [F.hardtanh(torch.relu(x), 0.0, top) for top in (1.0, 1.0000001)], 2),
        ([relu_of_itself_less, less_its_relu], lambda self, x: [torch.relu(x) - x, x - torch.relu(x)], 2),
        ([scaled], lambda self, x: [torch.relu(x) * three for three in (3, 3.5)], 1),
        ([scaled], lambda self, x: [torch.relu(x) * x, x * torch.relu(x)], 2),
        ([doubled, scaled], lambda self, x: [torch.relu(x) * two for two in (2, 3)], 2),
    ],
    ids=["equal", "op", "option", "order", "captured_number", "swapped", "number_of_the_pattern"],
)
def test_units_share_a_module_where_their_bodies_are_equal(rules, forward, modules):
    gm = graph(module(forward), X)
    want = [forward(None, X)[i] for i in range(2)]
    assert rewriter(gm).fuse([rule[0] for rule in rules]) == 2
    assert len({unit.target for unit in units(gm)}) == modules
    assert all(torch.equal(a, b) for a, b in zip(run(gm, X), want, strict=True))


def test_units_of_the_same_body_share_one_module():
    model = nn.Sequential(conv_block(), conv_block(), conv_block(stride=2)).eval()
    gm = graph(model, IMAGE)
    rewriter(gm).fuse(FUSIONS.largest_first())
    first, second, third = [n for n in gm.graph.nodes if n.op == "call_module"]
    assert first.target == second.target != third.target
    assert not list(unit_of(gm, first).parameters()) and not list(unit_of(gm, first).buffers())
    assert torch.equal(run(gm, IMAGE), model(IMAGE))


def test_the_metadata_of_a_unit_is_that_of_its_ops():
    gm = graph(nn.Sequential(conv_block()).eval(), IMAGE)
    rewriter(gm).fuse(FUSIONS.largest_first())
    (unit,) = [n for n in gm.graph.nodes if n.op == "call_module"]
    about = info(unit)
    assert (about.origins, about.fused.parts) == (("_0_0", "_0_1"), (("_0_0",), ("_0_1",)))
    assert (about.path, about.shape, about.dtype) == ("0.0", (1, 2, 5, 5), torch.float32)
    assert about.made_by.startswith("the-test: conv2d_relu (patterns/fusions/conv.py:")


# ---- captures


@rewrite
def gated(op, input, weight, bias, gate):
    return op.mul(gate, op.sigmoid(op.linear(input, weight, bias)))


@rewrite
def joined(op, parts):
    return op.relu(op.cat(parts, dim=0))


@rewrite
def of_two(op, x, y):
    return op.relu(op.add(x, y))


@rewrite
def two_ways(op, gate, x):
    shared = op.tanh(x)
    return op.mul(gate, shared), op.sigmoid(shared)


def layer_times(self, x, by):
    return torch.sigmoid(self.fc(x)) * by


FC = nn.Linear(4, 4, bias=False)
CAPTURES = {
    "none_and_a_value": (gated, lambda self, x: layer_times(self, x, x), "input=x weight=fc_weight bias=None gate=x"),
    "a_number": (gated, lambda self, x: layer_times(self, x, 1.5), "input=x weight=fc_weight bias=None gate=1.5"),
    "a_list": (joined, lambda self, x: torch.relu(torch.cat([x, x])), "parts=[x, x]"),
    "one_value_twice": (of_two, lambda self, x: torch.relu(x + x), "x=x y=x"),
    "an_output_of_another": (
        of_two, lambda self, x: torch.relu(torch.relu(x + 1) + torch.relu(x + 2)), "x=add_relu y=add_1_relu"
    ),
    "several_outputs": (
        two_ways, lambda self, x: (lambda t: (t * self.fc.weight[0], torch.sigmoid(t)))(torch.tanh(x)),
        "gate=fc_weight_getitem x=x",
    ),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("rule", "forward", "captures"), CAPTURES.values(), ids=CAPTURES)
def test_a_unit_keeps_what_its_rule_captured(rule, forward, captures):
    """Captures keep the order of the rule in copies, pickles and text, which compute the same values."""
    model = module(forward, fc=FC)
    gm = graph(model, X)
    assert rewriter(gm).fuse([rule[0]]) > 0
    gm.recompile()
    read = {str(n.target) for n in gm.graph.nodes if n.op in ("call_module", "get_attr")}
    held, data = {path: attrgetter(path)(gm) for path in read}, to_data(gm.graph)
    copies = {
        "itself": gm,
        "a copy": copy.deepcopy(gm),
        "a pickle": fx.GraphModule(pickle.loads(pickle.dumps(held)), from_data(pickle.loads(pickle.dumps(data)))),
        "text": fxq.extend.read_graph(fxq.extend.write_graph(gm), fxq.extend.graph_tensors(gm)),
    }
    want = model(X)
    for how, copied in copies.items():
        calls = calls_of(copied, units(copied)[-1])
        text = " ".join(f"{name}={value}" for name, value in calls.captures.items())
        assert (calls.rule, text) == (rule[0].name, captures), how
        assert all(map(torch.equal, run(copied, X), want)), how


def test_the_ops_of_a_unit_read_its_captures():
    gm = graph(module(lambda self, x: layer_times(self, x, 1.5), fc=FC), X)
    rewriter(gm).fuse([gated[0]])
    calls = calls_of(gm, units(gm)[0])
    x, weight = (node for node in gm.graph.nodes if node.name in ("x", "fc_weight"))
    assert [call.tensors for call in calls] == [
        {"x": x, "weight": weight, "bias": None},
        {"x": InnerValue(0)},
        {"x": InnerValue(1), "other": 1.5},
    ]
    assert info(units(gm)[0]).fused.values == (((3, 4), torch.float32),) * 3


def test_a_single_op_has_no_captures():
    gm = graph(module(lambda self, x: torch.relu(x)), X)
    calls = calls_of(gm, next(n for n in gm.graph.nodes if n.name == "relu"))
    assert (len(calls), calls.rule, dict(calls.captures)) == (1, "", {})
