"""Near misses: which rules the history records, and their reasons."""

import copy
import pickle

import torch
from torch import nn

import fxq
from fxq.backends.reference import Reference
from fxq.rewriting.near_miss import NearMiss, Refusal
from fxq.rewriting.pattern import FUSIONS, rewrite
from tests.support.graphs import graph
from tests.support.helpers import REFERENCE, module, rewriter

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@rewrite
def chain_of_three(op, x):
    return op.relu(op.sigmoid(op.tanh(x)))


@rewrite
def chain_of_two(op, x):
    return op.relu(op.sigmoid(x))


@rewrite
def sigmoid_alone(op, x):
    return op.sigmoid(x)


@sigmoid_alone.unless
def it_reads_a_sum(m):
    return m.x.node.name == "add"


@rewrite
def sigmoid_of_tanh(op, x):
    return op.sigmoid(op.tanh(x))


def fused(forward, *rules, refuse=None):
    """Near misses of a fusion with these rules: name, node, how many ops matched, reason."""
    hand = rewriter(graph(module(forward), X))
    hand.fuse([rule[0] for rule in rules], refuse)
    return [(n.rule, n.node, f"{n.matched} of {n.of}", n.reason) for n in hand.near_misses.all()]


# ---- which ones


def test_two_ops_are_near_and_one_is_not():
    assert fused(lambda self, x: torch.relu(torch.sigmoid(torch.erf(x))), chain_of_three) == [
        ("chain_of_three", "relu", "2 of 3", "the pattern expects tanh, but %erf is erf")
    ]
    assert fused(lambda self, x: torch.relu(torch.erf(torch.tanh(x))), chain_of_three) == []


def test_a_reader_outside_is_named():
    def forward(self, x):
        s = torch.sigmoid(x)
        return torch.relu(s), s

    assert fused(forward, chain_of_two) == [("chain_of_two", "relu", "2 of 2", "%sigmoid is also read by %output")]


def test_a_guard_of_one_op_is_named():
    assert fused(lambda self, x: torch.sigmoid(x + x), sigmoid_alone) == [
        ("sigmoid_alone", "sigmoid", "1 of 1", "it_reads_a_sum")
    ]


def test_the_pass_gives_its_reason():
    said = fused(
        lambda self, x: torch.relu(torch.sigmoid(x)), chain_of_two, refuse=lambda m: f"{m.nodes[0].name} is mine"
    )
    assert said == [("chain_of_two", "relu", "2 of 2", "sigmoid is mine")]


def test_what_lost_its_nodes_to_a_larger_rule_is_left_out():
    """A rule that matched is no near miss, even if a larger rule is chosen."""
    assert fused(lambda self, x: torch.relu(torch.sigmoid(torch.tanh(x))), chain_of_three, chain_of_two) == []
    overlapping = fused(lambda self, x: torch.relu(torch.sigmoid(torch.tanh(x))), chain_of_two, sigmoid_of_tanh)
    assert overlapping == []


def test_what_came_near_where_a_larger_rule_matched_is_left_out():
    def forward(self, x):
        t = torch.tanh(x)
        return torch.relu(torch.sigmoid(t)), t

    assert fused(forward, chain_of_two, sigmoid_of_tanh) == []
    assert [said[0] for said in fused(forward, sigmoid_of_tanh)] == ["sigmoid_of_tanh"]


def test_a_larger_rule_that_came_near_stays():
    assert fused(lambda self, x: torch.relu(torch.sigmoid(torch.erf(x))), chain_of_three, chain_of_two) == [
        ("chain_of_three", "relu", "2 of 3", "the pattern expects tanh, but %erf is erf")
    ]


# ---- rules that rewrite


@rewrite
def shrink(op, x):
    return op.sub(x, op.tanh(x))


@shrink.becomes
def shrunk(op, m):
    return op.tanhshrink(m.x)


@rewrite
def relu_of_shrink(op, x):
    return op.relu(op.tanhshrink(op.abs(x)))


@relu_of_shrink.becomes
def nothing(op, m):
    return m.x


def rewritten(forward, *rules):
    hand = rewriter(graph(module(forward), (X, X)))
    hand.apply(*rules)
    return [(n.rule, n.node, f"{n.matched} of {n.of}", n.reason) for n in hand.near_misses.all()]


def test_a_rewrite_that_came_near():
    assert rewritten(lambda self, x, y: x - torch.tanh(y), shrink) == [
        ("shrink", "sub", "2 of 2", "x is used twice in the pattern, but %x is not %y")
    ]


def test_only_the_last_try_counts():
    """The relu is tried before its input is a tanhshrink, and again after it."""
    forward = lambda self, x, y: torch.relu(y - torch.tanh(y))  # noqa: E731
    assert rewritten(forward, shrink, relu_of_shrink) == [
        ("relu_of_shrink", "relu", "2 of 3", "the pattern expects abs, but %y is placeholder")
    ]
    forward = lambda self, x, y: torch.relu(torch.abs(y) - torch.tanh(torch.abs(y)))  # noqa: E731
    (once,) = rewritten(forward, shrink, relu_of_shrink)
    assert once[:2] == ("shrink", "sub")  # two calls of abs are two values


def test_what_matches_in_the_end_was_no_near_miss():
    def forward(self, x, y):
        a = torch.abs(y)
        return torch.relu(a - torch.tanh(a))

    assert rewritten(forward, shrink, relu_of_shrink) == []


# ---- in the history


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.conv(x)
        return self.other(torch.relu(y)) * y


def test_the_snapshot_of_a_pass_has_its_near_misses():
    image = torch.randn(2, 3, 5, 5)
    qmodel = fxq.quantize(Net().eval(), REFERENCE, data=[image])
    (near,) = qmodel.history["fuse"].near
    source = FUSIONS["conv2d_relu"].source
    assert near == NearMiss("conv2d_relu", source, "relu", 2, 2, "%conv is also read by %mul")
    assert str(near) == f"conv2d_relu ({source}) at %relu: 2 of 2 ops matched: %conv is also read by %mul"
    assert fxq.extend.explain("conv2d_relu", graph(Net().eval(), image), "relu").endswith(near.reason)
    assert qmodel.history["annotate"].near == ()
    for copied in (copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
        assert copied.history["fuse"].near == (near,)


def test_the_recipe_and_the_backend_say_why_they_refuse(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval()
    image = torch.randn(2, 3, 5, 5)
    recipe = REFERENCE.override("1", fxq.FLOAT)
    (near,) = fxq.prepare(model, recipe, example_inputs=image).history["fuse"].near
    assert (near.node, near.reason) == ("_1", "the recipe configures these ops differently")
    monkeypatch.setattr(Reference, "fuses", lambda self, ops: False)
    (near,) = fxq.prepare(model, REFERENCE, example_inputs=image).history["fuse"].near
    assert (near.node, near.reason) == ("_1", "the backend reference does not fuse these ops")


def test_a_batch_norm_that_stays_says_why():
    class Stays(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.conv(x)
            return self.norm(y) + y

    history = fxq.prepare(Stays().eval(), REFERENCE, example_inputs=torch.randn(2, 3, 5, 5)).history
    near = {n.rule: n.reason for n in history["fold-batch-norm"].near}
    assert near == {"fold_batch_norm_conv2d": "%conv is also read by %add"}


# ---- what it costs


def test_a_reason_is_worded_only_when_it_is_read():
    worded = []

    def why(name):
        worded.append(name)
        return f"because of {name}"

    refusal = Refusal()
    assert refusal.reason == "not tried"
    refusal.record(1, why, "a")
    refusal.record(1, why, "b")
    refusal.record(3, why, "c")
    refusal.record(2, why, "d")
    assert worded == []
    assert (refusal.matched, refusal.reason, worded) == (3, "because of c", ["c"])
