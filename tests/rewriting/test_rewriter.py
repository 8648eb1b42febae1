import inspect

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import FxqError, PassError, PatternError
from fxq.graph.info import info
from fxq.graph.unit import calls_of, unit_of
from fxq.rewriting.pattern import FUSIONS, rewrite
from tests.support.graphs import expected, full_text, graph, node
from tests.support.helpers import REFERENCE, module, restored_fusions, rewriter, run, steps

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-2, 2, 12).reshape(3, 4)
IMAGE = torch.linspace(-1, 1, 50).reshape(1, 2, 5, 5)


@rewrite
def shrink_from_tanh(op, x):
    return op.sub(x, op.tanh(x))


@shrink_from_tanh.becomes
def shrink(op, m):
    return op.tanhshrink(m.x)


# ---- rewriting


def test_a_rule_replaces_what_it_matches():
    def shrunk(self, x):
        return x - torch.tanh(x) + 1

    model = module(shrunk)
    gm = graph(model, X)
    assert rewriter(gm).apply(shrink_from_tanh) == 1
    assert full_text(gm) == expected("""
        x = input
        tanhshrink = tanhshrink(x)
        add = add(tanhshrink, 1)
        return add
    """)
    assert torch.allclose(run(gm, X), model(X), rtol=1e-6, atol=1e-7)
    assert rewriter(gm).apply(shrink_from_tanh) == 0


def test_edits_name_their_rule_and_its_source_line():
    gm = graph(module(lambda self, x: x - torch.tanh(x)), X)
    hand = rewriter(gm)
    hand.apply(shrink_from_tanh)
    (edit,) = hand.edits
    line = inspect.getsourcelines(shrink_from_tanh.function)[1]
    assert (edit.rule, edit.source) == ("shrink_from_tanh", f"rewriting/test_rewriter.py:{line}")
    assert set(edit.before) == {"sub", "tanh"} and edit.after == ("tanhshrink",)
    assert info(node(gm, "tanhshrink")).made_by == f"the-test: shrink_from_tanh (rewriting/test_rewriter.py:{line})"


def test_an_edit_outside_a_rule_counts_for_the_pass():
    gm = graph(module(lambda self, x: torch.relu(x) + 1), X)
    hand = rewriter(gm)
    hand.replace(node(gm, "relu"), node(gm, "x"))
    assert [(e.rule, e.before, e.after) for e in hand.edits] == [
        ("the-test", ("relu",), ("x",)),
        ("the-test", ("relu",), ()),
    ]


@pytest.mark.parametrize("new", ["w", 2.0])
def test_readers_are_rerouted_wherever_they_hold_the_value(new):
    graph = torch.fx.Graph()
    x, y, w = (graph.placeholder(name) for name in "xyw")
    reader = graph.call_function(max, (y, [x, (y, 1)], slice(y, None, x)), {"key": y, "other": {"a": [y], "b": x}})
    graph.output((y, reader))
    hand = rewriter(torch.fx.GraphModule(nn.Module(), graph))
    put = w if new == "w" else new
    hand.reroute(y, put)
    assert reader.args == (put, [x, (put, 1)], slice(put, None, x))
    assert reader.kwargs == {"key": put, "other": {"a": [put], "b": x}}
    assert graph.output_node().args == ((put, reader),)
    assert not y.users and set(w.users) == ({reader, graph.output_node()} if put is w else set())


def test_the_shape_of_a_new_node_is_that_of_its_value():
    @rewrite
    def doubled(op, x):
        return op.relu(x)

    @doubled.becomes
    def with_reshape(op, m):
        return op.reshape(op.tanh(op.reshape(m.x, shape=(12,))), shape=(3, 4))

    gm = graph(module(lambda self, x: torch.relu(x)), X)
    rewriter(gm).apply(doubled)
    assert [info(n).shape for n in gm.graph.nodes if n.op == "call_function"] == [(12,), (12,), (3, 4)]


def test_a_replacement_of_the_same_op_keeps_the_name():
    @rewrite
    def halve_stride(op, x, w, b):
        return op.conv2d(x, w, b, stride=(2, 2))

    @halve_stride.becomes
    def unit_stride(op, m):
        return op.conv2d(m.x, m.w, m.b, stride=(1, 1))

    gm = graph(module(lambda self, x: self.stem(x), stem=nn.Conv2d(2, 3, 3, stride=2)), IMAGE)
    rewriter(gm).apply(halve_stride)
    assert full_text(gm).splitlines()[1] == "stem = conv2d(x, @stem.weight, @stem.bias)"


def test_a_rewrite_makes_room_for_the_next():
    """Rules see what other rules made: a chain collapses to its start."""

    @rewrite
    def twice_relu(op, x):
        return op.relu(op.relu(x))

    @twice_relu.becomes
    def once(op, m):
        return op.relu(m.x)

    def forward(self, x):
        for _ in range(20):
            x = torch.relu(x)
        return x

    gm = graph(module(forward), X)
    assert rewriter(gm).apply(twice_relu) == 19
    assert len(rewriter(gm).nodes("relu")) == 1


def test_the_larger_rule_goes_first():
    @rewrite
    def small(op, x):
        return op.sigmoid(x)

    @small.becomes
    def small_result(op, m):
        return op.tanh(m.x)

    gm = graph(module(lambda self, x: torch.sigmoid(torch.relu(x))), X)

    @rewrite
    def large(op, x):
        return op.sigmoid(op.relu(x))

    @large.becomes
    def large_result(op, m):
        return op.silu(m.x)

    rewriter(gm).apply(small, large)
    assert full_text(gm) == expected("""
        x = input
        silu = silu(x)
        return silu
    """)


def test_a_number_or_an_input_may_replace_a_value():
    @rewrite
    def plus(op, x):
        return op.add(x, 5)

    @plus.becomes
    def nothing(op, m):
        return m.x

    gm = graph(module(lambda self, x: torch.relu(x + 5)), X)
    rewriter(gm).apply(plus)
    assert full_text(gm).splitlines()[1] == "relu = relu(x)"


def test_two_outputs_are_replaced_in_order():
    @rewrite
    def pair(op, x):
        return op.relu(x), op.sigmoid(x)

    @pair.becomes
    def swapped(op, m):
        return op.tanh(m.x), op.silu(m.x)

    gm = graph(module(lambda self, x: (torch.sigmoid(x), torch.relu(x))), X)
    rewriter(gm).apply(pair)
    got = run(gm, X)
    assert torch.equal(got[0], nn.functional.silu(X)) and torch.equal(got[1], torch.tanh(X))


def test_an_inner_value_that_others_read_is_left_for_them():
    @rewrite(exclusive=False)
    def sharing(op, x):
        return op.sigmoid(op.relu(x))

    @sharing.becomes
    def joined(op, m):
        return op.silu(m.x)

    def forward(self, x):
        r = torch.relu(x)
        return torch.sigmoid(r), r

    gm = graph(module(forward), X)
    rewriter(gm).apply(sharing)
    assert full_text(gm) == expected("""
        x = input
        relu = relu(x)
        silu = silu(x)
        return (silu, relu)
    """)


# ---- rules that are wrong


@rewrite
def to_tanh(op, x):
    return op.sigmoid(x)


@to_tanh.becomes
def as_tanh(op, m):
    return op.tanh(m.x)


@rewrite
def to_sigmoid(op, x):
    return op.tanh(x)


@to_sigmoid.becomes
def as_sigmoid(op, m):
    return op.sigmoid(m.x)


def test_two_rules_that_undo_each_other_are_both_named():
    gm = graph(module(lambda self, x: torch.relu(torch.sigmoid(x))), X)
    with pytest.raises(PassError) as caught:
        rewriter(gm).apply(to_tanh, to_sigmoid)
    message = str(caught.value)
    assert message.startswith("the-test: the rewrites do not end")
    assert f"'to_tanh' ({to_tanh[0].source})" in message and f"'to_sigmoid' ({to_sigmoid[0].source})" in message
    assert "undo each other" in message


def test_an_innocent_rule_is_not_named():
    gm = graph(module(lambda self, x: torch.sigmoid(x - torch.tanh(x))), X)
    with pytest.raises(PassError) as caught:
        rewriter(gm).apply(shrink_from_tanh, to_tanh, to_sigmoid)
    assert "shrink_from_tanh" not in str(caught.value)


def test_a_rule_that_matches_its_own_result_is_named():
    @rewrite
    def forever(op, x):
        return op.relu(x)

    @forever.becomes
    def again(op, m):
        return op.relu(m.x)

    with pytest.raises(
        PassError, match=r"'forever' \(rewriting/test_rewriter.py:\d+\) matches its own result.*\.unless"
    ):
        rewriter(graph(module(lambda self, x: torch.relu(x)), X)).apply(forever)


@pytest.mark.parametrize(("count", "result"), [(2, lambda op, m: (op.tanh(m.x), op.tanh(m.x))), (0, lambda op, m: ())])
def test_a_replacement_of_another_arity(count, result):
    @rewrite
    def single(op, x):
        return op.relu(x)

    single.becomes(result)
    gm = graph(module(lambda self, x: torch.relu(x)), X)
    with pytest.raises(
        PatternError, match=rf"'single' .*the pattern has 1 outputs, but its replacement returned {count}"
    ):
        rewriter(gm).apply(single)


def test_a_rule_without_a_replacement():
    @rewrite
    def half_a_rule(op, x):
        return op.relu(x)

    gm = graph(module(lambda self, x: torch.relu(x)), X)
    with pytest.raises(PatternError, match="has no replacement; add one with @half_a_rule"):
        rewriter(gm).apply(half_a_rule)


def test_a_replacement_with_an_unknown_op():
    @rewrite
    def typo(op, x):
        return op.relu(x)

    @typo.becomes
    def wrong(op, m):
        return op.rellu(m.x)

    with pytest.raises(FxqError, match="unknown op 'rellu'; did you mean 'relu"):
        rewriter(graph(module(lambda self, x: torch.relu(x)), X)).apply(typo)


# ---- the editor


# ---- fusing


def residual(self, x):
    return torch.relu(self.conv(x) + x)


def test_the_largest_fusion_wins_and_a_node_belongs_to_one_unit():
    model = module(residual, conv=nn.Conv2d(2, 2, 3, padding=1))
    gm = graph(model, IMAGE)
    assert rewriter(gm).fuse(FUSIONS.largest_first()) == 1
    assert full_text(gm) == expected("""
        x = input
        conv_add_relu = conv2d_add_relu(x, @conv.weight, @conv.bias, x) {conv2d(padding=(1, 1)); add; relu}
        return conv_add_relu
    """)
    assert torch.equal(run(gm, IMAGE), model(IMAGE))


def test_a_refused_match_leaves_its_nodes_to_smaller_ones():
    gm = graph(module(residual, conv=nn.Conv2d(2, 2, 3, padding=1)), IMAGE)
    rewriter(gm).fuse(FUSIONS.largest_first(), refuse=lambda m: "too large" if len(m.nodes) == 3 else None)
    assert [unit_of(gm, n).kind for n in gm.graph.nodes if n.op == "call_module"] == ["add_relu"]


def test_a_sum_of_two_convolutions_takes_one_of_them():
    def forward(self, x):
        return self.a(x) + self.b(x)

    model = module(forward, a=nn.Conv2d(2, 2, 3), b=nn.Conv2d(2, 2, 3))
    gm = graph(model, IMAGE)
    rewriter(gm).fuse(FUSIONS.largest_first())
    inside = [call.name for n in gm.graph.nodes for call in calls_of(gm, n)]
    assert inside == ["b", "conv2d", "add"]
    assert torch.equal(run(gm, IMAGE), model(IMAGE))


def test_two_fusions_that_want_the_same_node():
    @rewrite
    def front(op, x):
        return op.sigmoid(op.relu(x))

    @rewrite
    def back(op, x):
        return op.tanh(op.sigmoid(x))

    gm = graph(module(lambda self, x: torch.tanh(torch.sigmoid(torch.relu(x)))), X)
    assert rewriter(gm).fuse([front[0], back[0]]) == 1
    assert full_text(gm) == expected("""
        x = input
        relu_sigmoid = front(x)
        tanh = tanh(relu_sigmoid)
        return tanh
    """)


@pytest.fixture
def fusions():
    with restored_fusions() as rules:
        yield rules


def test_a_unit_of_several_outputs(fusions):
    @fxq.fusion
    def relu_and_sigmoid(op, x):
        shared = op.tanh(x)
        return op.relu(shared), op.sigmoid(shared)

    def forward(self, x):
        t = torch.tanh(x)
        return torch.sigmoid(t) * torch.relu(t)

    model = module(forward)
    gm = graph(model, X)
    rewriter(gm).fuse([relu_and_sigmoid[0]])
    assert full_text(gm) == expected("""
        x = input
        tanh_sigmoid_relu = relu_and_sigmoid(x)
        relu = getitem(tanh_sigmoid_relu, 0)
        sigmoid = getitem(tanh_sigmoid_relu, 1)
        mul = mul(sigmoid, relu)
        return mul
    """)
    assert torch.equal(run(gm, X), model(X))


def test_a_users_fusion_end_to_end(fusions):
    @fxq.fusion
    def conv_gated(op, x, w, b, gate):
        return op.mul(op.relu(op.conv2d(x, w, b)), gate)

    @conv_gated.unless
    def gate_is_a_number(m):
        return m.gate.shape == ()

    torch.manual_seed(0)
    model = module(lambda self, x, y: self.b(y * torch.relu(self.a(x))), a=nn.Conv2d(2, 4, 3), b=nn.Conv2d(4, 2, 1))
    data = [(torch.randn(4, 2, 6, 6), torch.randn(4, 4, 4, 4)) for _ in range(3)]
    qmodel = fxq.quantize(model, REFERENCE, data=data)
    assert "a_relu_mul = conv_gated(x, @a.weight, @a.bias, y)" in str(qmodel.history["fuse"].graph)
    assert {e.op: e.precision for e in qmodel.ledger} == {"conv2d": "int8", "relu": "int8", "mul": "int8"}
    assert fxq.extend.explain("conv_gated", graph(model, data[0]), "mul").endswith("matches %a, %relu, %mul")
    want, got = model(*data[0]), qmodel(*data[0])
    assert 10 * torch.log10((want**2).sum() / ((want - got) ** 2).sum()) > 30  # a few 8-bit roundings: 50 dB at best
    number = graph(module(lambda self, x: torch.relu(self.a(x)) * 3, a=nn.Conv2d(2, 4, 3)), data[0][0])
    assert fxq.extend.explain("conv_gated", number, "mul").endswith("gate_is_a_number")


# ---- time


def chain(count):
    def forward(self, x):
        for _ in range(count):
            x = x - torch.tanh(x)
        return x

    return graph(module(forward), X)


def wide(count):
    return graph(module(lambda self, x: tuple(torch.sigmoid(x * 2) for _ in range(count))), X)


@rewrite
def doubled_sigmoid(op, x):
    return op.sigmoid(op.mul(x, 2))


@doubled_sigmoid.becomes
def tanh_instead(op, m):
    return op.tanh(m.x)


@pytest.mark.parametrize(("rule", "make"), [(shrink_from_tanh, chain), (doubled_sigmoid, wide)], ids=["chain", "wide"])
def test_rewriting_is_linear(rule, make):
    small, large = (rewriter(make(count)) for count in (40, 80))
    cost = steps(lambda: small.apply(rule))
    assert steps(lambda: large.apply(rule)) < 2.3 * cost
    assert len(large.edits) == 80


@pytest.mark.parametrize("make", [chain, wide], ids=["chain", "wide"])
def test_fusing_is_linear(make):
    rules = [shrink_from_tanh[0], doubled_sigmoid[0]]
    small, large = (rewriter(make(count)) for count in (40, 80))
    cost = steps(lambda: small.fuse(rules))
    assert steps(lambda: large.fuse(rules)) < 2.3 * cost
    assert len(large.edits) == 80


class Block(nn.Module):
    def forward(self, x):
        return x - torch.tanh(x)  # the marked line


def test_metadata_survives_a_rewrite():
    gm = graph(nn.Sequential(nn.Linear(4, 4), Block()).eval(), X)
    rewriter(gm).apply(shrink_from_tanh)
    about = info(node(gm, "tanhshrink"))
    first = inspect.getsourcelines(Block)[1]
    assert (about.path, about.source) == ("1", f"rewriting/test_rewriter.py:{first + 2}")
    assert (about.shape, about.dtype) == ((3, 4), torch.float32)
    assert about.origins == ("tanh", "sub")
    assert node(gm, "tanhshrink").meta["nn_module_stack"]
