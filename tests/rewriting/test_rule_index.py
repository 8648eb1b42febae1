"""Index of rules by node. Fusing node by node chooses the same units as fusing rule by rule."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.graph.info import info
from fxq.graph.query import merge_origins, op_of
from fxq.graph.unit import unit_of
from fxq.rewriting.match import Matcher
from fxq.rewriting.pattern import FUSIONS, rewrite
from fxq.rewriting.rule_index import Dispatch
from tests.support.graphs import graph, node
from tests.support.helpers import module, rewriter

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@rewrite
def relu_of_three(op, x):
    return op.relu(op.sigmoid(op.tanh(x)))


@rewrite
def sum_of_two(op, x, y):
    return op.add(op.relu(x), op.sigmoid(y))


@rewrite
def pair(op, x):
    shared = op.tanh(x)
    return op.relu(shared), op.sigmoid(shared)


@rewrite
def relu_plus(op, x, y):
    return op.add(op.relu(x), y)


@rewrite
def product(op, x, y):
    return op.mul(x, op.sigmoid(y))


@rewrite
def siblings(op, x):
    return op.tanh(x), op.relu(x)


@rewrite
def squared(op, x):
    return op.mul(x, x)


@relu_plus.unless
def it_adds_the_input(m):
    return m.y.node.name == "x"


RULES = sorted(
    (f[0] for f in (relu_plus, relu_of_three, sum_of_two, pair, product, siblings, squared)), key=lambda r: -r.size
)


# ---- what is tried


def names(rules):
    return [rule.name for rule in rules]


def test_a_rule_is_tried_where_its_root_and_one_of_its_inputs_fit():
    forward = lambda self, x, y: torch.tanh(torch.relu(x) + y) * torch.sigmoid(y)  # noqa: E731
    gm = graph(module(forward), (X, X))
    table = Dispatch(RULES)
    tried = {n.name: names(table.at(n)) for n in gm.graph.nodes}
    assert tried == {
        "x": [],
        "y": [],
        "relu": [],
        "add": ["sum_of_two", "relu_plus"],
        "tanh": ["siblings"],
        "sigmoid": [],
        "mul": ["product", "squared"],
        "output": [],
    }


def test_nothing_is_tried_at_a_leaf():
    gm = graph(module(lambda self, x: torch.sinc(torch.relu(x))), X)
    assert Dispatch(RULES).at(node(gm, "sinc")) == ()


def test_the_input_may_stand_in_a_list():
    @rewrite
    def joined(op, x, y):
        return op.cat([op.relu(x), y], dim=1)

    gm = graph(module(lambda self, x, y: torch.cat([torch.relu(x), torch.cat([x, y], 1)], 1)), (X, X))
    table = Dispatch([joined[0]])
    assert [names(table.at(node(gm, n))) for n in ("cat", "cat_1")] == [[], ["joined"]]


def test_a_wildcard_is_tried_at_every_op_with_its_traits_in_the_order_of_the_rules():
    @rewrite
    def any_mover(op, x):
        return op.any_op(layout=True)(x)

    @rewrite
    def moved_sigmoid(op, x):
        return op.any_op(layout=True)(op.sigmoid(x))

    @rewrite
    def reshaped(op, x):
        return op.reshape(x)

    @rewrite
    def sum_of_any(op, x, y):
        return op.add(op.any_op(layout=True)(x), y)

    gm = graph(module(lambda self, x: torch.sigmoid(x).reshape(2, 6) + x.flatten().reshape(2, 6).tanh()), X)
    table = Dispatch([rule[0] for rule in (any_mover, reshaped, moved_sigmoid, sum_of_any)])
    assert {n.name: names(table.at(n)) for n in gm.graph.nodes if table.at(n)} == {
        "reshape": ["any_mover", "reshaped", "moved_sigmoid"],
        "flatten": ["any_mover"],
        "reshape_1": ["any_mover", "reshaped"],
        "add": ["sum_of_any"],
    }


# ---- what is chosen


def rule_by_rule(gm, rules, refuse):
    """Units from trying every rule at every node of the graph, one rule after the other."""
    matcher, units = Matcher(gm), []
    for rule in rules:
        for n in gm.graph.nodes:
            match = matcher.match(rule, n) if op_of(n) is rule.root.op else None
            if match is not None and refuse(match) is None:
                matcher.taken.update(match.nodes)
                units.append((match.root.node, rule.name, merge_origins(match.nodes)))
    return [(name, origins) for _, name, origins in sorted(units)]


def fused(gm, rules, refuse):
    rewriter(gm).fuse(rules, refuse)
    return [(unit.kind, info(n).origins) for n in gm.graph.nodes if (unit := unit_of(gm, n)) is not None]


def test_another_way_is_found_where_the_first_one_is_taken():
    """The larger rule ends in the relu that `relu_plus` would take first; the other operand is a relu, too."""

    def forward(self, x, y):
        return torch.relu(torch.sigmoid(torch.tanh(x))) + torch.relu(y)

    gm = graph(module(forward), (X, X))
    assert [n.name for n in Matcher(gm).match(relu_plus[0], node(gm, "add")).nodes] == ["relu", "add"]
    assert fused(gm, RULES, lambda match: None) == [
        ("relu_of_three", ("tanh", "sigmoid", "relu")),
        ("relu_plus", ("relu_1", "add")),
    ]


def test_what_is_taken_makes_room_among_many_readers():
    """Further outputs are found among the first free users of a value. Nodes of larger matches are not free."""

    @rewrite
    def gated(op, x):
        return op.mul(op.sigmoid(op.relu(x)), 2)

    @rewrite
    def the_last_one(op, x):
        return op.tanh(x), op.relu(x)

    @the_last_one.unless
    def its_relu_is_read(m):
        return len(m.outputs[1].users) != 1 or next(iter(m.outputs[1].users)).op != "output"

    def forward(self, x):
        gates = [torch.sigmoid(torch.relu(x)) * 2 for _ in range(20)]
        return torch.tanh(x), torch.relu(x), gates

    gm = graph(module(forward), X)
    rules = [gated[0], the_last_one[0]]
    assert Matcher(gm).match(the_last_one[0], node(gm, "tanh")) is None  # after the first 16
    wanted = rule_by_rule(gm, rules, lambda match: None)
    assert ("the_last_one", ("tanh", "relu_20")) in wanted
    assert sorted(fused(gm, rules, lambda match: None)) == sorted(wanted)


FUNCTIONS = (torch.relu, torch.sigmoid, torch.tanh, torch.add, torch.mul)
STEP = st.tuples(st.sampled_from(FUNCTIONS), st.integers(0, 5), st.integers(0, 5))


class Program(torch.nn.Module):
    """Functions of values that are a few steps back."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def forward(self, x, y):
        values = [x, y]
        for function, *back in self.steps:
            count = 2 if function in (torch.add, torch.mul) else 1
            values.append(function(*(values[-1 - min(b, len(values) - 1)] for b in back[:count])))
        return tuple(values[-3:])


@settings(max_examples=15, deadline=None)
@given(st.lists(STEP, min_size=3, max_size=25), st.sampled_from([None, 2, 3]))
def test_fusing_chooses_what_the_rules_choose_one_by_one(steps, refused):
    gm = graph(Program(steps).eval(), (X, X))

    def refuse(match):
        """Some of the matches, by the name of their first node."""
        return "by its name" if refused and len(match.nodes[0].name) % refused == 0 else None

    wanted = rule_by_rule(gm, RULES, refuse)
    assert sorted(fused(gm, RULES, refuse)) == sorted(wanted)


def test_every_registered_fusion_is_tried_where_it_matches():
    def forward(self, x):
        y = torch.relu(self.a(x))
        return torch.tanh(self.b(y)) + torch.relu(self.c(y) + y)

    gm = graph(module(forward, **{n: torch.nn.Linear(4, 4) for n in "abc"}), X)
    rules = FUSIONS.largest_first()
    wanted = rule_by_rule(gm, rules, lambda match: None)
    assert len(wanted) == 3 and sorted(fused(gm, rules, lambda match: None)) == sorted(wanted)
