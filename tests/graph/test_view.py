import pytest
import torch
from torch import nn

import fxq
from fxq.display.colours import LOOKS
from fxq.graph.info import set_info
from fxq.graph.view import view
from fxq.picture.graph_picture import picture
from fxq.workflow.steps import manager_for
from tests.support.graphs import expected, full_text, graph, node
from tests.support.helpers import REFERENCE, module, rewriter

X = torch.linspace(-1, 1, 12).reshape(3, 4)
IMAGE = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8)
MINMAX = fxq.Recipe.static(backend="reference", activation=fxq.TensorSpec(observer="minmax"))


def head(self, x):
    y = torch.flatten(torch.max_pool2d(self.conv(x).relu(), 2), 1)
    return {"logits": self.fc(y), "size": y.shape[1]}


def network():
    return module(head, conv=nn.Conv2d(1, 2, 3, stride=2), fc=nn.Linear(2, 3, bias=False))


def test_a_traced_graph_as_text():
    assert full_text(graph(network(), IMAGE, until="trace")) == expected("""
        x = input
        conv = module Conv2d(x)
        relu = .relu(conv)
        max_pool2d = max_pool2d(relu, 2)
        flatten = flatten(max_pool2d, 1)
        fc = module Linear(flatten)
        getattr_1 = getattr(flatten, 'shape')
        getitem = getitem(getattr_1, 1)
        return {'logits': fc, 'size': getitem}
    """)


def test_a_canonical_graph_as_text():
    assert full_text(graph(network(), IMAGE)) == expected("""
        x = input
        conv = conv2d(x, @conv.weight, @conv.bias, stride=(2, 2))
        relu = relu(conv)
        max_pool2d = max_pool2d(relu, kernel_size=(2, 2), stride=(2, 2))
        flatten = flatten(max_pool2d, start_dim=1)
        fc = linear(flatten, @fc.weight)
        getattr_1 = getattr(flatten, 'shape')
        getitem = getitem(getattr_1, 1)
        return {'logits': fc, 'size': getitem}
    """)


def test_a_fused_graph_shows_options_inside_units():
    shown = full_text(graph(network(), IMAGE, until="fuse")).splitlines()
    assert shown[1] == "conv_relu = conv2d_relu(x, @conv.weight, @conv.bias) {conv2d(stride=(2, 2)); relu}"


def test_lists_numbers_and_one_tuples():
    gm = graph(module(lambda self, x: (torch.cat([x, x + 0.1234567891], dim=1),)), X)
    assert full_text(gm) == expected("""
        x = input
        add = add(x, 0.123457)
        cat = cat([x, add], dim=1)
        return (cat,)
    """)


def test_what_a_node_says():
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh()).eval()
    qmodel = fxq.quantize(model, MINMAX, data=[X])
    shown = qmodel.history["insert-qdq"].graph
    q, w, unit = shown["input_1_q"], shown["_0_weight_dq"], shown["_0_tanh"]
    # minmax over [-1, 1] on 0..255: the scale 2/255 is a little larger in float32, so zero lies below 127.5
    assert (q.kind, q.label, q.dtype, q.shape, q.inputs) == ("convert", "quantize", "uint8", (3, 4), ("input_1",))
    assert (q.scale, q.zero_point) == (f"{2 / 255:.4g}", "127")
    low, high = (model[0].weight.abs().amax(1) / 127).aminmax()
    assert (w.kind, w.scale, w.zero_point) == ("convert", f"{low:.3g}..{high:.3g} (axis 0)", "0")
    assert (unit.kind, unit.label, unit.body) == ("int8", "linear_tanh", ("linear", "tanh"))
    assert (unit.path, unit.origins, unit.dtype, unit.shape) == ("0", ("_0", "_1"), "float32", (3, 2))
    fused = qmodel.history["fuse"].graph["_0_tanh"]
    assert fused.made_by.startswith("fuse: linear_tanh (patterns/fusions/linear.py:")
    assert unit.inputs == ("input_1_dq", "_0_weight_dq", "_0_bias")
    observer = qmodel.history["insert-observers"].graph["input_1_observer"]
    assert (observer.kind, observer.label, observer.options) == ("observer", "MinMax", "uint8 affine (minmax)")


def test_what_stays_in_float_says_why():
    recipe = REFERENCE.override("1", fxq.FLOAT)
    qmodel = fxq.quantize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval(), recipe, data=[X])
    shown = qmodel.history["annotate"].graph["_1"]
    assert shown.kind == "float" and "the recipe" in shown.reason


@pytest.mark.parametrize("until", ["trace", "canonicalize", "fuse", "annotate", "insert-observers"])
def test_every_node_has_a_known_kind(until):
    gm = graph(network(), IMAGE, until=until)
    shown = view(gm)
    assert [n.name for n in shown] == [n.name for n in gm.graph.nodes] and len(shown) == len(gm.graph.nodes)
    assert {n.kind for n in shown} <= set(LOOKS)
    assert [n.inputs for n in shown] == [
        tuple(i.name for i in torch.utils._pytree.tree_leaves((n.args, n.kwargs)) if isinstance(i, torch.fx.Node))
        for n in gm.graph.nodes
    ]


def test_views_are_equal_when_their_graphs_are():
    gm = graph(network(), IMAGE)
    assert view(gm, "one") == view(gm, "two")
    changed = graph(network(), IMAGE)
    set_info(node(changed, "relu"), note="something else")
    assert view(changed) != view(gm)


def test_arithmetic_on_sizes_is_no_op():
    """Sizes are neither float nor int8 at any stage, in pictures, in the history and in the ledger."""

    def forward(self, x):
        y = self.conv(x)
        n, half = y.shape[0], y.size(2) * y.size(3) // 2
        return self.fc(y.reshape(n, -1, half)[:, : len(y.shape)])

    model = module(forward, conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(18, 2))
    qmodel = fxq.quantize(model, REFERENCE, data=[torch.randn(2, 3, 8, 8)])
    plain = {"getattr", "getitem", "size", "mul", "floordiv", "len", "check_fixed", "check_same", "check_sizes"}
    for step in qmodel.history:
        assert {n.label for n in step.graph if n.kind == "size"} <= plain
        assert {n.label for n in step.graph if n.kind == "size"} >= {"getattr", "size", "floordiv"}
        assert not any(n.reason for n in step.graph if n.kind == "size")
    assert qmodel.history[-1].count("float") == 0 and not qmodel.ledger.where(precision="float")
    assert "float fallback" not in picture(qmodel.history[-1].graph, "t").header


def test_tensors_in_a_tuple_are_no_sizes():
    gm = graph(module(lambda self, x: torch.svd_lowrank(x, 2)[0]), torch.randn(4, 4))
    assert {n.kind for n in view(gm) if n.label == "svd_lowrank"} == {"op"}


def test_a_view_does_not_follow_later_changes():
    gm = graph(module(lambda self, x: torch.relu(x) + 1), X)
    before = view(gm)
    rewriter(gm).replace(node(gm, "relu"), node(gm, "x"))
    assert str(before).splitlines()[1] == "relu = relu(x)"
    assert full_text(gm).splitlines()[1] == "add = add(x, 1)"


def test_known_views_are_used_and_new_ones_added():
    gm = graph(network(), IMAGE)
    cached = {}
    first = view(gm, cached=cached)
    assert set(cached) == set(gm.graph.nodes)
    assert all(a is b for a, b in zip(view(gm, cached=cached), first, strict=True))


class Rename(fxq.Pass):
    """Pass that edits nodes in every way that the editor supports."""

    name = "rename"

    def run(self, rewriter):
        (relu,) = rewriter.nodes("relu")
        rewriter.rename(relu, "rectified")
        rewriter.update(rewriter.nodes("max_pool2d")[0], kwargs={"kernel_size": (3, 3), "stride": (1, 1)})
        rewriter.describe(rewriter.nodes("linear")[0], note="described")
        (flatten,) = rewriter.nodes("flatten")
        again = rewriter.call("flatten", flatten.args[0], after=flatten, start_dim=1)
        rewriter.reroute(flatten, again, only=lambda u: u.op != "output")


def test_snapshots_are_what_a_fresh_look_would_give():
    """The manager caches views of unchanged nodes; the test would find a stale one."""
    recipe = REFERENCE.insert_pass(Rename(), after="canonicalize")
    manager = manager_for(network(), recipe, IMAGE)
    for step in recipe.pipeline[:7]:
        try:
            manager.run([step])
        except fxq.FxqError:
            break
        assert manager.history[-1].graph == view(manager.gm)
    assert len(manager.history) >= 3
    shown = manager.history["rename"].graph
    assert shown["max_pool2d"].text == "max_pool2d = max_pool2d(rectified, kernel_size=(3, 3), stride=(1, 1))"


def test_all_snapshots_of_a_run_are_fresh():
    manager = manager_for(network(), REFERENCE, IMAGE)
    for step in manager.context.recipe.pipeline:
        if step.name == "choose-grids":
            manager.gm(IMAGE)  # calibration
        manager.run([step])
        assert manager.history[-1].graph == view(manager.gm), step.name
