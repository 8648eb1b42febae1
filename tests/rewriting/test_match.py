import pytest
import torch
from torch import nn

import fxq
from fxq.errors import PatternError
from fxq.graph.info import TracedInfo, set_info
from fxq.rewriting.match import Matcher
from fxq.rewriting.pattern import rewrite
from tests.support.graphs import graph, node
from tests.support.helpers import module, rewriter, run, steps

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def matched(rule, gm, name):
    return Matcher(gm).match(rule[0], node(gm, name))


def why(rule, gm, name):
    """Reason in the text of explain, without the place."""
    return fxq.extend.explain(rule, gm, name).partition(f"%{name}: ")[2]


@rewrite
def relu_of_linear(op, x, w, b):
    return op.relu(op.linear(x, w, b))


def linear_relu(bias=True):
    return module(lambda self, x: torch.relu(self.fc(x)), fc=nn.Linear(4, 2, bias=bias))


# ---- captures


def test_captures_by_name():
    model = linear_relu()
    gm = graph(model, X)
    m = matched(relu_of_linear, gm, "relu")
    assert {name: value.target for name, value in m.captures.items()} == {"x": "x", "w": "fc.weight", "b": "fc.bias"}
    assert m.w.tensor is model.fc.weight and m.x.tensor is None
    assert (m.x.shape, m.w.shape, m.root.shape, m.x.dtype) == ((3, 4), (2, 4), (3, 2), torch.float32)
    assert [n.name for n in m.nodes] == ["fc", "relu"] and m.outputs == [node(gm, "relu")]
    with pytest.raises(AttributeError, match="no capture 'y'; it has x, w, b"):
        _ = m.y


def test_a_capture_binds_an_argument_that_is_not_given():
    m = matched(relu_of_linear, graph(linear_relu(bias=False), X), "relu")
    assert m.b.is_none and not m.w.is_none
    assert (m.b.shape, m.b.dtype, m.b.tensor) == (None, None, None)
    with pytest.raises(PatternError, match="the capture is None, not a node"):
        _ = m.b.node


def test_a_capture_binds_a_number():
    @rewrite
    def shifted(op, x, by):
        return op.add(x, by)

    m = matched(shifted, graph(module(lambda self, x: x + 3), X), "add")
    assert (m.by.value, m.by.shape, m.by.is_none) == (3, (), False)


def test_a_none_in_the_pattern_wants_none_in_the_graph():
    @rewrite
    def without_bias(op, x, w):
        return op.linear(x, w, None)

    assert matched(without_bias, graph(linear_relu(bias=False), X), "fc") is not None
    assert matched(without_bias, graph(linear_relu(), X), "fc") is None
    assert why(without_bias, graph(linear_relu(), X), "fc") == (
        "no match (1 of 1 ops matched): the pattern expects None, but the graph has %fc_bias"
    )


def test_the_same_capture_twice():
    @rewrite
    def square(op, x):
        return op.mul(x, x)

    assert matched(square, graph(module(lambda self, x: x * x), X), "mul") is not None
    gm = graph(module(lambda self, x, y: x * y), (X, X))
    assert matched(square, gm, "mul") is None
    assert "x is used twice in the pattern, but %x is not %y" in why(square, gm, "mul")


def test_the_same_number_twice():
    @rewrite
    def twice(op, x, c):
        return op.add(op.mul(x, c), c)

    assert matched(twice, graph(module(lambda self, x: x * 3 + 3), X), "add") is not None
    assert matched(twice, graph(module(lambda self, x: x * 3 + 4), X), "add") is None


# ---- options


@rewrite
def pooled_by_two(op, x):
    return op.max_pool2d(x, kernel_size=(2, 2), padding=(0, 0))


def test_options_in_the_pattern_must_be_equal_and_others_are_free():
    image = torch.zeros(1, 1, 8, 8)
    for stride in (1, 2):
        model = nn.Sequential(nn.MaxPool2d(2, stride=stride)).eval()
        m = matched(pooled_by_two, graph(model, image), "_0")
        assert m.options("max_pool2d")["stride"] == (stride, stride)
    gm = graph(nn.Sequential(nn.MaxPool2d(3)).eval(), image)
    assert matched(pooled_by_two, gm, "_0") is None
    assert why(pooled_by_two, gm, "_0").endswith(
        "the pattern expects max_pool2d with kernel_size=(2, 2), but %_0 has (3, 3)"
    )


def test_a_default_counts_as_written():
    @rewrite
    def plain_sum(op, x, y):
        return op.add(x, y, alpha=1)

    assert matched(plain_sum, graph(module(lambda self, x, y: x + y), (X, X)), "add") is not None
    gm = graph(module(lambda self, x, y: torch.add(x, y, alpha=2)), (X, X))
    assert matched(plain_sum, gm, "add") is None


def test_options_of_an_op_that_the_rule_does_not_have():
    m = matched(relu_of_linear, graph(linear_relu(), X), "relu")
    with pytest.raises(PatternError, match="'relu_of_linear' has no op 'conv2d'"):
        m.options("conv2d")


# ---- inputs that commute


@rewrite
def relu_plus(op, x, y):
    return op.add(op.relu(x), y)


@pytest.mark.parametrize(
    "forward", [lambda self, x, y: torch.relu(x) + y, lambda self, x, y: y + torch.relu(x)], ids=["left", "right"]
)
def test_an_op_that_commutes_matches_in_both_orders(forward):
    gm = graph(module(forward), (X, X))
    m = matched(relu_plus, gm, "add")
    assert (m.x.node.name, m.y.node.name) == ("x", "y")


def test_an_op_that_does_not_commute_matches_as_written():
    @rewrite
    def prelu_of_relu(op, x, slope):
        return op.prelu(op.relu(x), slope)

    forward = lambda self, x: nn.functional.prelu(x, torch.relu(self.slope))  # noqa: E731
    assert matched(prelu_of_relu, graph(module(forward, slope=torch.ones(1)), X), "prelu") is None


def test_both_operands_fit_and_a_guard_refuses_the_first():
    @rewrite
    def tall(op, x, y):
        return op.add(op.relu(x), y)

    @tall.unless
    def x_is_called_a(m):
        return m.x.node.name == "a"

    gm = graph(module(lambda self, a, b: torch.relu(a) + torch.relu(b)), (X, X))
    m = matched(tall, gm, "add")
    assert (m.x.node.name, m.y.node.name) == ("b", "relu")


def test_a_wrong_first_choice_deep_inside_is_taken_back():
    @rewrite
    def nested(op, x, y, z):
        return op.mul(op.add(x, op.tanh(y)), op.add(x, op.sigmoid(z)))

    forward = lambda self, x, y, z: (torch.sigmoid(z) + x) * (torch.tanh(y) + x)  # noqa: E731
    m = matched(nested, graph(module(forward), (X, X, X)), "mul")
    assert {k: v.name for k, v in m.captures.items()} == {"x": "x", "y": "y", "z": "z"}


def test_one_node_is_not_two_nodes_of_a_pattern():
    @rewrite
    def two_relus(op, x, y):
        return op.add(op.relu(x), op.relu(y))

    def once(self, x):
        r = torch.relu(x)
        return r + r

    gm = graph(module(once), X)
    assert matched(two_relus, gm, "add") is None
    assert "%relu would be matched twice" in why(two_relus, gm, "add")


# ---- lists


def test_lists_match_element_by_element():
    @rewrite
    def joined(op, x, y):
        return op.cat([op.relu(x), y], dim=1)

    gm = graph(module(lambda self, x, y: torch.cat([torch.relu(x), y], 1)), (X, X))
    assert matched(joined, gm, "cat").y.node.name == "y"
    gm = graph(module(lambda self, x, y: torch.cat([torch.relu(x), y, y], 1)), (X, X))
    assert matched(joined, gm, "cat") is None
    assert why(joined, gm, "cat") == (
        "no match (1 of 2 ops matched): the pattern expects [relu(x), y], but the graph has [relu, y, y]"
    )


# ---- inner values


@rewrite
def relu_sigmoid(op, x):
    return op.sigmoid(op.relu(x))


def read_twice(self, x):
    r = torch.relu(x)
    return torch.sigmoid(r), r + 1


def test_an_inner_value_belongs_to_the_match_alone():
    gm = graph(module(read_twice), X)
    assert matched(relu_sigmoid, gm, "sigmoid") is None
    assert why(relu_sigmoid, gm, "sigmoid") == "no match (2 of 2 ops matched): %relu is also read by %add"


def test_a_rule_may_leave_inner_values_to_others():
    @rewrite(exclusive=False)
    def sharing(op, x):
        return op.sigmoid(op.relu(x))

    assert matched(sharing, graph(module(read_twice), X), "sigmoid") is not None


def test_an_inner_value_that_the_model_returns_is_read_outside():
    def forward(self, x):
        r = torch.relu(x)
        return torch.sigmoid(r), r

    assert "%relu is also read by %output" in why(relu_sigmoid, graph(module(forward), X), "sigmoid")


# ---- several outputs


@rewrite
def siblings(op, x):
    return op.relu(x), op.sigmoid(x)


@rewrite
def cousins(op, x):
    shared = op.tanh(x)
    return op.relu(shared), op.mul(op.sigmoid(shared), 2)


def test_outputs_that_share_an_input():
    gm = graph(module(lambda self, x: (torch.relu(x), torch.sigmoid(x))), X)
    m = matched(siblings, gm, "relu")
    assert [n.name for n in m.outputs] == ["relu", "sigmoid"]


def test_outputs_that_share_a_value_further_up():
    def forward(self, x):
        t = torch.tanh(x)
        return torch.relu(t), torch.sigmoid(t) * 2, torch.sigmoid(x)

    gm = graph(module(forward), X)
    assert [n.name for n in matched(cousins, gm, "relu").nodes] == ["tanh", "relu", "sigmoid", "mul"]


def test_an_output_that_is_missing():
    gm = graph(module(lambda self, x: (torch.relu(x), torch.sigmoid(x + 1))), X)
    assert matched(siblings, gm, "relu") is None
    assert why(siblings, gm, "relu") == (
        "no match (1 of 2 ops matched): no sigmoid that shares a value with the first output"
    )


def test_an_outside_reader_between_two_outputs():
    def forward(self, x):
        a = torch.relu(x)
        early = a + 1
        return torch.sigmoid(x) * early

    gm = graph(module(forward), X)
    assert matched(siblings, gm, "relu") is None
    assert why(siblings, gm, "relu").endswith("%add reads %relu before %sigmoid is computed")


def test_an_outside_reader_after_both_outputs():
    def forward(self, x):
        a, b = torch.relu(x), torch.sigmoid(x)
        return (a + 1) * b

    assert matched(siblings, graph(module(forward), X), "relu") is not None


# ---- guards


def test_guards_refuse_by_name_in_order():
    @rewrite
    def guarded(op, x):
        return op.relu(x)

    @guarded.unless
    def never(m):
        return False

    @guarded.unless
    def it_is_a_matrix(m):
        return len(m.x.shape) == 2

    @guarded.unless
    def not_reached(m):
        raise AssertionError("an earlier guard refused")

    gm = graph(module(lambda self, x: torch.relu(x)), X)
    assert matched(guarded, gm, "relu") is None
    assert why(guarded, gm, "relu") == "no match (1 of 1 ops matched): it_is_a_matrix"


# ---- inputs that change


def overwritten(gm):
    """Graph with a node at its end that overwrites %mul, as an inserted leaf may."""
    changed = node(gm, "mul")
    with gm.graph.inserting_before(gm.graph.output_node()):
        writer = gm.graph.call_method("zero_", (changed,))
    set_info(changed, traced=TracedInfo((7,)))
    set_info(writer, traced=TracedInfo((7,), changes=(7,)))
    return gm


def test_an_input_that_is_changed_in_place_is_refused():
    def forward(self, x):
        y = x * 2
        return torch.sigmoid(torch.relu(y)), y

    assert matched(relu_sigmoid, graph(module(forward), X), "sigmoid") is not None
    gm = overwritten(graph(module(forward), X))
    assert matched(relu_sigmoid, gm, "sigmoid") is None
    assert why(relu_sigmoid, gm, "sigmoid").endswith("%mul is changed in place by %zero_")


def test_an_input_in_a_list_that_is_changed_in_place_is_refused():
    @rewrite
    def joined(op, xs):
        return op.relu(op.cat(xs))

    def forward(self, x):
        y = x * 2
        return torch.relu(torch.cat([x, y])), y

    assert "%mul is changed in place by %zero_" in why(joined, overwritten(graph(module(forward), X)), "relu")


# ---- trait wildcards


@rewrite(exclusive=False)
def moved_relu(op, x):
    return op.any_op(layout=True)(op.relu(x))


@rewrite(exclusive=False)
def moved_relus(op, x):
    return op.any_op(layout=True, kind="moves")(op.each(op.relu(x)))


@rewrite
def two_moved(op, x, y):
    return op.any_op(layout=True)(op.relu(x), y)


@rewrite
def joined_relus(op, x):
    return op.cat(op.each(op.relu(x)))


def test_a_wildcard_matches_every_op_with_its_traits():
    def forward(self, x):
        r = torch.relu(x)
        return r.reshape(-1), torch.index_select(r, 0, torch.tensor([1, 0])), torch.cat([r]), torch.tanh(r), r + r

    gm = graph(module(forward), X)
    ends = gm.graph.output_node().args[0]
    assert [Matcher(gm).match(moved_relu[0], end) is not None for end in ends] == [True, True, True, False, False]
    match = Matcher(gm).match(moved_relu[0], ends[0])
    assert [n.name for n in match.nodes] == ["relu", ends[0].name] and match.x.node.name == "x"
    assert why(moved_relu, gm, "tanh").endswith(
        "no match (0 of 2 ops matched): the pattern expects an op with layout=True, but %tanh is tanh"
    )


def test_a_wildcard_takes_as_many_activations_as_it_has_arguments():
    gm = graph(module(lambda self, x: torch.cat([torch.relu(x), x])), X)
    assert matched(two_moved, gm, "cat").y.node.name == "x"
    assert why(moved_relu, gm, "cat").endswith(
        "the pattern expects an op with layout=True and 1 activation, but %cat has 2"
    )
    gm = graph(module(lambda self, x: torch.cat([x, torch.relu(x)])), X)  # the order counts
    assert why(two_moved, gm, "cat").endswith("(1 of 2 ops matched): the pattern expects relu, but %x is placeholder")


@pytest.mark.parametrize("rule", [moved_relus, joined_relus])
def test_each_activation_fits_the_pattern_apart_from_the_others(rule):
    def forward(self, x):
        a, b = torch.relu(x), torch.relu(torch.abs(x))
        return torch.cat([a, b, a])

    match = matched(rule, graph(module(forward), X), "cat")
    assert [n.name for n in match.x.value] == ["x", "abs_1"]  # each value once
    assert [n.name for n in match.nodes] == ["relu", "relu_1", "cat"] and match.options("relu") == {}
    gm = graph(module(lambda self, x: torch.cat([torch.relu(x), torch.tanh(x)])), X)
    assert why(rule, gm, "cat") == "no match (1 of 2 ops matched): the pattern expects relu, but %tanh is tanh"


def test_each_of_one_value_that_is_no_list():
    @rewrite
    def added(op, x):
        return op.add(op.each(op.relu(x)), x)

    gm = graph(module(lambda self, x: torch.relu(x) + x), X)
    assert "the pattern expects relu(x), but the graph has %" in why(added, gm, "add")


def test_a_rewrite_with_a_wildcard_ends_and_keeps_the_values():
    @rewrite("relu_after")
    def after(op, x):
        return op.any_op(layout=True)(op.relu(x))

    @after.becomes
    def moved_before(op, m):
        mover, (relu,) = m.root.node, m.root.node.all_input_nodes
        op.rewriter.update(mover, args=(m.x.node, *mover.args[1:]))
        return op.rewriter.call("relu", mover, after=mover, name=f"{relu.name}_after")

    model = module(lambda self, x: torch.relu(x * 2).t().reshape(2, 6).flip(0))
    gm = graph(model, X)
    hand = rewriter(gm)
    assert hand.apply(after) == 3
    gm.graph.lint()
    assert [n.name for n in gm.graph.nodes][-2:] == ["relu_after_after_after", "output"]
    assert torch.equal(run(gm, X), model(X))
    assert {edit.rule for edit in hand.edits} == {"relu_after"}


# ---- explain


def test_explain_a_match():
    gm = graph(linear_relu(), X)
    source = relu_of_linear[0].source
    assert fxq.extend.explain(relu_of_linear, gm, "relu") == f"relu_of_linear ({source}) at %relu: matches %fc, %relu"
    assert fxq.extend.explain("linear_relu", gm, node(gm, "relu")).endswith("at %relu: matches %fc, %relu")


def test_explain_finds_a_fusion_that_only_some_recipes_use():
    @fxq.fusion("only_on_request", everywhere=False)
    def tanh_of_linear(op, x, w, b):
        return op.tanh(op.linear(x, w, b))

    gm = graph(linear_relu(), X)
    assert why("only_on_request", gm, "relu").endswith("the pattern expects tanh, but %relu is relu")
    with pytest.raises(fxq.PatternError, match="only_on_request"):
        fxq.extend.explain("only_on_requests", gm, "relu")


def test_explain_finds_a_rewrite_by_its_name():
    gm = graph(linear_relu(), X)
    assert fxq.extend.explain("relu_of_linear", gm, "relu") == fxq.extend.explain(relu_of_linear, gm, "relu")


def test_explain_says_how_far_it_got():
    gm = graph(module(lambda self, x: torch.relu(torch.tanh(x))), X)
    assert why(relu_of_linear, gm, "relu") == (
        "no match (1 of 2 ops matched): the pattern expects linear, but %tanh is tanh"
    )
    assert why(relu_of_linear, gm, "tanh") == (
        "no match (0 of 2 ops matched): the pattern expects relu, but %tanh is tanh"
    )
    assert why(relu_of_linear, gm, "x").endswith("the pattern expects relu, but %x is placeholder")


def test_explain_names_what_is_no_op():
    gm = graph(module(lambda self, x: torch.relu(torch.sinc(x))), X)
    assert why(relu_of_linear, gm, "relu").endswith("the pattern expects linear, but %sinc is sinc")


def test_explain_a_number_where_an_op_is_wanted():
    gm = graph(module(lambda self, x: x + 1), X)
    assert why(relu_plus, gm, "add").endswith("the pattern expects relu, but %x is placeholder")  # the order as written

    @rewrite
    def relu_minus(op, x, y):
        return op.sub(op.relu(x), y)

    assert why(relu_minus, graph(module(lambda self, x: 1 - x), X), "sub").endswith("relu, but the graph has 1")


def test_explain_the_furthest_of_two_orders():
    @rewrite
    def deep(op, x, w):
        return op.add(op.relu(op.tanh(x)), op.sigmoid(w))

    gm = graph(module(lambda self, x, y: torch.sigmoid(y) + torch.relu(x * x)), (X, X))
    assert why(deep, gm, "add") == "no match (2 of 4 ops matched): the pattern expects tanh, but %mul is mul"


def test_explain_unknown_names():
    gm = graph(linear_relu(), X)
    with pytest.raises(PatternError, match="unknown node 'rel'; did you mean 'relu'"):
        fxq.extend.explain(relu_of_linear, gm, "rel")
    with pytest.raises(PatternError, match="unknown rule 'linear_rel'; did you mean 'linear_relu'"):
        fxq.extend.explain("linear_rel", gm, "relu")


# ---- time


def pairs(count):
    """relu and sigmoid of one shared input, many times."""

    def forward(self, x):
        return tuple(f(x) for _ in range(count) for f in (torch.relu, torch.sigmoid))

    return graph(module(forward), X)


def chain(count):
    def forward(self, x):
        for _ in range(count):
            x = torch.sigmoid(torch.relu(x))
        return x

    return graph(module(forward), X)


@pytest.mark.parametrize(
    ("rule", "make"), [(siblings, pairs), (relu_sigmoid, chain), (relu_sigmoid, pairs)], ids=["wide", "chain", "none"]
)
def test_matching_is_linear(rule, make):
    def tried(gm, matched):
        matcher = Matcher(gm)
        return steps(lambda: matched.extend(n for n in gm.graph.nodes if matcher.match(rule[0], n) is not None))

    few, many = [], []
    cost = tried(make(50), few)
    assert tried(make(100), many) < 2.3 * cost
    assert len(many) == 2 * len(few)
