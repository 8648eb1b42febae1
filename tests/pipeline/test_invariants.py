import pytest
import torch
from torch import fx, nn

import fxq
from fxq.errors import PassError
from fxq.graph.info import Decision, Edge, TracedInfo, set_info
from fxq.ops import OPS
from fxq.pipeline.invariants import check
from fxq.quant.spec import TensorSpec
from fxq.recipe.pass_base import Stage
from tests.support.graphs import graph, node
from tests.support.helpers import REFERENCE, module

X = torch.linspace(-1, 1, 12).reshape(3, 4)
AFTER = "after my-pass: "


def model():
    return module(lambda self, x: torch.relu(self.fc(x)), fc=nn.Linear(4, 4))


def at(stage):
    """A graph that fulfils the invariants of a stage."""
    if stage < Stage.QDQ:
        until = {Stage.TRACED: "trace", Stage.CANONICAL: "canonicalize", Stage.FUSED: "fuse"}
        return graph(model(), X, until=until.get(stage, "insert-observers"))
    return fxq.quantize(model(), REFERENCE, data=[X])


def add(gm, op, target, *args, before="output", **kwargs):
    """Add a node that no pass inserts."""
    with gm.graph.inserting_before(node(gm, before)):
        added = gm.graph.create_node(op, target, args, kwargs)
    set_info(added, shape=(3, 4), dtype=torch.float32)
    return added


def broken(gm, stage):
    """The message of the check."""
    with pytest.raises(PassError) as caught:
        check(gm, stage, "my-pass")
    return str(caught.value)


STAGES = [Stage.TRACED, Stage.CANONICAL, Stage.FUSED, Stage.OBSERVED, Stage.QDQ, Stage.LOWERED]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_a_graph_of_its_stage_is_right(stage):
    check(at(stage), stage, "my-pass")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_lint_at_every_stage(stage):
    gm = at(stage)
    first = next(n for n in gm.graph.nodes if n.op == "placeholder")
    last = gm.graph.output_node().args[0]
    late = add(gm, "call_function", torch.neg, last)
    first.next.prepend(late)  # reads what is computed later
    assert broken(gm, stage).startswith(AFTER + "the graph is invalid: ")
    assert late.name in broken(gm, stage)
    assert f"%{late.name} (call_function" in broken(gm, stage)  # the reader's place
    assert "\n" not in broken(gm, stage)  # not the whole graph


def test_a_graph_without_its_output():
    gm = at(Stage.FUSED)
    gm.graph.erase_node(gm.graph.output_node())
    assert broken(gm, Stage.FUSED) == "after my-pass: the graph has no output node: it returns nothing."


@pytest.mark.parametrize("stage", [Stage.CANONICAL, Stage.FUSED, Stage.OBSERVED, Stage.QDQ], ids=str)
def test_a_spelling_that_is_not_canonical(stage):
    gm = at(stage)
    source = next(n for n in gm.graph.nodes if n.op == "placeholder")
    extra = add(gm, "call_function", torch.relu, source)
    message = broken(gm, stage)
    said = "is a spelling of relu; a pass writes rewriter.call('relu', ...)"
    assert message == f"{AFTER}%{extra.name} (call_function): {said}"
    set_info(extra, traced=TracedInfo(kept=Decision("float", "unsupported", "stays as it is: a reason")))
    check(gm, stage, "my-pass")


def test_a_method_that_is_not_canonical():
    gm = at(Stage.CANONICAL)
    add(gm, "call_method", "view", node(gm, "x"), 12)
    assert "is a spelling of reshape" in broken(gm, Stage.CANONICAL)


def test_a_traced_graph_may_be_spelled_as_it_likes():
    gm = at(Stage.TRACED)
    add(gm, "call_function", torch.relu, node(gm, "x"))
    check(gm, Stage.TRACED, "my-pass")


def test_an_option_that_the_op_does_not_have():
    gm = at(Stage.CANONICAL)
    add(gm, "call_function", OPS["relu"].target, node(gm, "x"), slope=1)
    assert broken(gm, Stage.CANONICAL).endswith("relu has no option 'slope'")


def test_too_many_tensors():
    gm = at(Stage.CANONICAL)
    add(gm, "call_function", OPS["relu"].target, node(gm, "x"), node(gm, "x"))
    assert broken(gm, Stage.CANONICAL).endswith("relu takes 1 tensors, not 2")


@pytest.mark.parametrize("stage", [Stage.FUSED, Stage.OBSERVED, Stage.QDQ, Stage.LOWERED], ids=str)
def test_a_unit_called_with_too_few_inputs(stage):
    gm = at(stage)
    (unit,) = [n for n in gm.graph.nodes if n.op == "call_module" and "units" in str(n.target)]
    unit.args = unit.args[:2]
    assert "the unit takes 3 inputs, the call gives 2" in broken(gm, stage)
    assert '(linear_relu, layer "fc"' in broken(gm, stage)


def test_an_edge_without_an_observer():
    gm = at(Stage.OBSERVED)
    observer = node(gm, "x_observer")
    observer.replace_all_uses_with(node(gm, "x"))
    gm.graph.erase_node(observer)
    assert broken(gm, Stage.OBSERVED) == (
        f"{AFTER}%x (placeholder): its value is to be quantized (uint8 affine (histogram)) but no observer watches it"
    )


def test_an_edge_that_is_only_moved_needs_no_observer():
    gm = at(Stage.OBSERVED)
    set_info(node(gm, "fc_relu"), edges=(Edge(TensorSpec(), 0, source=False),))
    check(gm, Stage.OBSERVED, "my-pass")


@pytest.mark.parametrize("stage", [Stage.QDQ, Stage.LOWERED], ids=str)
def test_an_observer_that_is_left(stage):
    gm = at(Stage.OBSERVED)
    assert broken(gm, stage).endswith("an observer is left; run calibration and insert-qdq")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_no_scale(scale):
    gm = at(Stage.QDQ)
    node(gm, "x_q").kwargs = {**node(gm, "x_q").kwargs, "scale": scale}
    assert broken(gm, Stage.QDQ).endswith("its scale is not a positive finite number")


def test_no_scale():
    gm = at(Stage.QDQ)
    node(gm, "x_q").kwargs = {k: v for k, v in node(gm, "x_q").kwargs.items() if k != "scale"}
    assert broken(gm, Stage.QDQ).endswith("has no scale. Run calibration first, or set the layer to float")


def test_one_bad_scale_of_a_channel():
    gm = at(Stage.QDQ)
    dq = node(gm, "fc_weight_dq")
    fx.graph_module._assign_attr(torch.tensor([0.1, 0.0, 0.1, 0.1]), gm, str(dq.kwargs["scale"].target))
    assert broken(gm, Stage.QDQ).endswith("its scale is not a positive finite number")


def test_quantizing_what_is_quantized():
    gm = at(Stage.QDQ)
    q = node(gm, "x_q")
    again = add(gm, "call_function", q.target, q, before=q.next.name, **q.kwargs)
    assert broken(gm, Stage.QDQ) == f"{AFTER}%{again.name} (quantize): quantizes %x_q, which is torch.uint8 already"


def test_dequantizing_floats():
    gm = at(Stage.QDQ)
    dq = node(gm, "x_dq")
    dq.args = (node(gm, "x"),)
    assert broken(gm, Stage.QDQ).endswith("dequantizes %x, which is torch.float32")
