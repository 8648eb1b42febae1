"""Edits of units: make, open, split."""

import pytest
import torch
from torch import nn

from fxq.errors import PassError
from fxq.graph.info import Decision, Plan, info
from fxq.graph.query import op_of
from fxq.graph.unit import calls_of, unit_of
from fxq.rewriting.pattern import FUSIONS, rewrite
from fxq.rewriting.unit_edits import make_unit, open_unit, split_unit
from tests.support.graphs import expected, full_text, graph, node
from tests.support.helpers import module, rewriter, run
from tests.support.models import conv_block

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-2, 2, 12).reshape(3, 4)
IMAGE = torch.linspace(-1, 1, 50).reshape(1, 2, 5, 5)


@rewrite
def gated(op, x, weight, bias, gate, residual):
    return op.add(op.mul(gate, op.sigmoid(op.linear(x, weight, bias))), residual)


def forward(self, x, gate):
    return torch.sigmoid(self.fc(x)) * gate + x


def fused(bias=True):
    model = module(forward, fc=nn.Linear(4, 4, bias=bias))
    gm = graph(model, (X, X + 1))
    hand = rewriter(gm)
    unit = make_unit(hand, hand.matcher.match(gated[0], node(gm, "add")))
    return hand, unit, model(X, X + 1)


def test_a_match_becomes_a_unit():
    hand, unit, want = fused(bias=False)
    assert full_text(hand.gm) == expected("""
        x = input
        gate = input
        fc_sigmoid_mul_add = gated(x, @fc.weight, None, gate, x)
        return fc_sigmoid_mul_add
    """)
    assert [str(n) for n in unit_of(hand.gm, unit).graph.nodes][:5] == ["x", "weight", "bias", "gate", "residual"]
    assert torch.equal(run(hand.gm, X, X + 1), want)


@rewrite
def resized(op, x):
    return op.relu(op.reshape(x))


def test_an_option_that_the_graph_gives_is_an_input_of_the_unit():
    gm = graph(module(lambda self, x, n: torch.relu(x.reshape(n, 2))), (X, 6))
    hand = rewriter(gm)
    unit = make_unit(hand, hand.matcher.match(resized[0], node(gm, "relu")))
    assert unit.args == (node(gm, "x"), node(gm, "n"))
    assert torch.equal(run(gm, X, 6), torch.relu(X.reshape(6, 2)))


@rewrite
def both(op, x, weight, bias):
    y = op.linear(x, weight, bias)
    return op.relu(y), y


def test_opening_a_unit_of_several_outputs_undoes_fusing():
    model = module(lambda self, x: (torch.tanh(torch.relu(y := self.fc(x))), y), fc=nn.Linear(4, 4))
    gm = graph(model, X)
    before, hand = full_text(gm), rewriter(gm)
    unit = make_unit(hand, hand.matcher.match(both[0], node(gm, "relu")))
    assert full_text(gm) == expected("""
        x = input
        fc_relu = both(x, @fc.weight, @fc.bias)
        relu = getitem(fc_relu, 0)
        fc = getitem(fc_relu, 1)
        tanh = tanh(relu)
        return (tanh, fc)
    """)
    assert torch.equal(run(gm, X)[1], model(X)[1])
    assert [op_of(n).name for n in open_unit(hand, unit)] == ["linear", "relu"]
    assert full_text(gm) == before


def test_a_unit_whose_values_are_read_as_one_tuple_is_opened():
    gm = graph(module(lambda self, x: torch.relu(self.fc(x)), fc=nn.Linear(4, 4)), X)
    want, hand = run(gm, X), rewriter(gm)
    gm.graph.output_node().args = ((node(gm, "fc"), node(gm, "relu")),)
    unit = make_unit(hand, hand.matcher.match(both[0], node(gm, "relu")))
    gm.graph.output_node().args = (unit,)
    open_unit(hand, unit)
    assert full_text(gm).splitlines()[-1] == "return (relu, fc)" and torch.equal(run(gm, X)[0], want)


@rewrite
def chain(op, x, weight, bias):
    y = op.linear(x, weight, bias)
    z = op.relu(y)
    return op.tanh(z), y


def test_the_first_ops_of_a_unit_may_have_several_outputs():
    """The second is an output of the whole unit, the first is read after them."""
    model = module(lambda self, x: (torch.tanh(torch.relu(y := self.fc(x))), y), fc=nn.Linear(4, 4))
    gm = graph(model, X)
    hand = rewriter(gm)
    unit = make_unit(hand, hand.matcher.match(chain[0], node(gm, "tanh")))
    hand.describe(unit, plan=Plan(Decision("int8"), kernel_ops=(2,)))
    split_unit(hand, unit, 2)
    assert full_text(gm) == expected("""
        x = input
        fc_relu = linear_relu(x, @fc.weight, @fc.bias)
        fc = getitem(fc_relu, 0)
        relu = getitem(fc_relu, 1)
        tanh = tanh(relu)
        return (tanh, fc)
    """)
    precisions = {n.name: info(n).plan.precision for n in gm.graph.nodes if info(n).plan is not None}
    assert precisions == {"fc_relu": "int8", "tanh": "float"}
    assert all(map(torch.equal, run(gm, X), model(X)))


def test_opening_a_unit_undoes_fusing():
    model = nn.Sequential(conv_block(), conv_block(stride=2), nn.Conv2d(2, 2, 1, bias=False), nn.ReLU()).eval()
    gm = graph(model, IMAGE)
    before = full_text(gm)
    origins = {n.name: info(n).origins for n in gm.graph.nodes}
    hand = rewriter(gm)
    hand.fuse(FUSIONS.largest_first())
    assert full_text(gm) != before
    for unit in [n for n in gm.graph.nodes if unit_of(gm, n) is not None]:
        opened = open_unit(hand, unit)
        assert [op_of(n).name for n in opened] == ["conv2d", "relu"]
    assert full_text(gm) == before
    assert {n.name: info(n).origins for n in gm.graph.nodes} == origins
    assert torch.equal(run(gm, IMAGE), model(IMAGE))


def test_opening_what_is_no_unit():
    gm = graph(module(lambda self, x: torch.relu(x)), X)
    with pytest.raises(PassError, match="the-test: %relu is not a unit"):
        open_unit(rewriter(gm), node(gm, "relu"))


INT8 = Plan(Decision("int8", "unsupported", "no kernel takes the rest along"), kernel_ops=(2,))


@pytest.mark.parametrize(
    ("ops", "after", "captures"),
    [
        (1, ["fc = linear(x, @fc.weight, @fc.bias)", "sigmoid = sigmoid(fc)", "mul = mul(sigmoid, gate)"], []),
        (2, ["fc_sigmoid = linear_sigmoid(x, @fc.weight, @fc.bias)", "mul = mul(fc_sigmoid, gate)"], ["x", "weight"]),
        (3, ["fc_sigmoid_mul = linear_sigmoid_mul(x, @fc.weight, @fc.bias, gate)"], ["x", "weight", "gate"]),
    ],
)
def test_a_shorter_unit_keeps_the_captures_that_it_reads(ops, after, captures):
    hand, unit, want = fused()
    hand.describe(unit, plan=INT8)
    split_unit(hand, unit, ops)
    last = after[-1].partition(" = ")[0]
    assert full_text(hand.gm).splitlines()[2:] == [*after, f"add = add({last}, x)", "return add"]
    first = next(n for n in hand.gm.graph.nodes if info(n).plan is not None and info(n).plan.precision == "int8")
    values = calls_of(hand.gm, first).captures
    assert [name for name in values if name != "bias"] == captures
    assert all(values[name].name in (name, f"fc_{name}") for name in values)
    assert info(first).plan == Plan(Decision("int8"))
    assert info(node(hand.gm, "add")).plan == Plan(Decision("float", INT8.decision.kind, INT8.decision.text))
    assert torch.equal(run(hand.gm, X, X + 1), want)


def test_a_unit_whose_kernel_runs_all_of_it_is_settled_as_it_is():
    hand, unit, _ = fused()
    hand.describe(unit, plan=INT8)
    split_unit(hand, unit, None)
    assert len(calls_of(hand.gm, unit)) == 4 and info(unit).plan == Plan(Decision("int8"))


def test_a_unit_without_a_decision_is_not_split():
    hand, unit, _ = fused()
    with pytest.raises(PassError, match="the unit %fc_sigmoid_mul_add has no plan"):
        split_unit(hand, unit, 1)
