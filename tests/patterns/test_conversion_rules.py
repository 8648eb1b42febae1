"""Rules that move conversions across ops that only copy or compare values, and explanations where they do not match."""

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import PatternError
from fxq.graph.info import info
from fxq.passes import Fallback, Propagate
from fxq.patterns.conversion_rules import push_dequantize
from tests.support.graphs import drawn, expected, node, program, run_pass
from tests.support.helpers import REFERENCE, module, rewriter

pytestmark = pytest.mark.any_cpu

QDQ = """
    x: float32[2, 4] = input()
    a: uint8[2, 4] = input()
    x_q = quantize(x, scale=0.5, zero_point=3)
    x_dq = dequantize(x_q, scale=0.5, zero_point=3)
    a_dq = dequantize(a, scale=0.25, zero_point=3)
    cat = cat([x_dq, a_dq])  # plan=Plan(Decision('moves'))
    flat = flatten(x_dq)  # plan=Plan(Decision('moves'))
    real = flatten(x_dq)  # plan=Plan(Decision('float'))
    both = cat([x_dq, x])  # plan=Plan(Decision('moves'))
    grown = interpolate(x_dq, scale_factor=2, mode='bilinear')
    act = relu(x_dq)
    moved = flatten(x_q)  # plan=Plan(Decision('moves'))
    moved_dq = dequantize(moved, scale=0.5, zero_point=3)
    flat_q = quantize(flat, scale=0.5, zero_point=3)
    return (cat, flat_q, real, both, grown, act, moved_dq)
"""
EXPECTED = {
    ("push_dequantize", "flat"): "matches %x_dq, %flat",
    ("push_dequantize", "cat"): "no match (2 of 2 ops matched): inputs_have_no_common_grid",
    ("push_dequantize", "real"): "no match (2 of 2 ops matched): op_is_planned_to_move_floats",
    ("push_dequantize", "both"): "no match (1 of 2 ops matched): the pattern expects dequantize, but %x is placeholder",
    ("push_dequantize", "act"): (
        "no match (0 of 2 ops matched): the pattern expects an op with layout=True, but %act is relu"
    ),
    ("pull_quantize", "flat_q"): "no match (2 of 2 ops matched): op_does_not_enlarge_its_input",
    ("cancel_pair", "flat_q"): "no match (1 of 2 ops matched): the pattern expects dequantize, but %flat is flatten",
    ("move_in_float", "moved"): "matches %moved",
    ("move_in_float", "flat"): "no match (1 of 1 ops matched): op_moves_no_integers",
    ("move_unrounded", "flat"): "no match (3 of 3 ops matched): integers_have_another_reader",
    ("read_float", "x_q"): "matches %x_q",
    ("read_float", "flat_q"): "no match (1 of 1 ops matched): value_has_no_float_reader",
}


@pytest.mark.parametrize(("rule", "name"), EXPECTED)
def test_rules_explain_themselves(rule, name):
    gm = fxq.extend.read_graph(QDQ, drawn(QDQ))
    assert fxq.extend.explain(rule, gm, name).partition(f" at %{name}: ")[2] == EXPECTED[rule, name]


def test_a_call_that_is_no_movement_is_an_exception_of_its_op():
    gm = fxq.extend.read_graph(QDQ, drawn(QDQ))
    reason = "the pattern expects an op with layout=True, but %grown is an exception of interpolate: "
    assert reason in fxq.extend.explain("push_dequantize", gm, "grown")


def moving():
    """Network whose transpose is between two layers."""
    return module(lambda self, x: self.b(self.a(x).transpose(1, 2)), a=nn.Linear(4, 4), b=nn.Linear(3, 2))


def test_a_rule_is_explained_on_the_qdq_graph_of_a_model():
    model, x = moving(), torch.randn(2, 3, 4)
    before = fxq.extend.run_passes(model, REFERENCE, example_inputs=x, data=[x], until="correct-bias")
    assert fxq.extend.explain("push_dequantize", before, "transpose").endswith(": matches %a_dq, %transpose")
    after = fxq.extend.run_passes(model, REFERENCE, example_inputs=x, data=[x], until="propagate")
    assert fxq.extend.explain("move_in_float", after, "transpose").endswith(": matches %transpose")
    assert fxq.extend.explain("push_dequantize", after, "transpose").endswith(
        ": no match (1 of 2 ops matched): the pattern expects dequantize, but %a_q is quantize"
    )
    with pytest.raises(PatternError, match="unknown rule 'push_dequantise'; did you mean 'push_dequantize'"):
        fxq.extend.explain("push_dequantise", after, "transpose")


def test_passes_after_calibration_need_data():
    with pytest.raises(fxq.FxqError):
        fxq.extend.run_passes(moving(), REFERENCE, example_inputs=torch.randn(2, 3, 4), until="choose-grids")


def test_edits_nodes_and_near_misses_name_the_rule():
    q = fxq.quantize(moving(), REFERENCE, data=[torch.randn(2, 3, 4)])
    step = q.history["propagate"]
    assert {edit.rule for edit in step.edits} >= {"push_dequantize", "cancel_pair"}
    (transpose,) = [n for n in step.graph if n.name == "transpose"]
    assert transpose.made_by.startswith("propagate: push_dequantize (patterns/conversion_rules.py:")
    assert q.history["propagate"].near == q.history["fallback"].near == ()


def test_two_grids_are_a_near_miss():
    gm = fxq.extend.read_graph(QDQ, drawn(QDQ))
    hand = rewriter(gm)
    assert hand.apply(push_dequantize) == 1
    near = {miss.node: miss.reason for miss in hand.near_misses.all()}
    assert near == {"cat": "inputs_have_no_common_grid", "real": "op_is_planned_to_move_floats"}


def test_a_quantize_moves_before_several_ops():
    before = """
        x: float32[1, 2, 2, 2] = input()
        up = interpolate(x, scale_factor=2)
        more = interpolate(up, scale_factor=2)
        y = quantize(more, scale=0.5, zero_point=3)
        return y
    """
    gm = run_pass(Propagate(), before)
    assert program(gm) == expected("""
        x: float32[1, 2, 2, 2] = input()
        x_q: uint8[1, 2, 2, 2] = quantize(x, scale=0.5, zero_point=3)
        up: uint8[1, 2, 4, 4] = interpolate(x_q, scale_factor=2)
        more: uint8[1, 2, 8, 8] = interpolate(up, scale_factor=2)
        return more
    """)
    assert info(node(gm, "up")).made_by.startswith("propagate: pull_quantize (patterns/conversion_rules.py:")
    x = torch.randn(1, 2, 2, 2)
    assert torch.equal(gm(x), fxq.extend.read_graph(before, {})(x))


def test_an_op_that_reads_one_dequantize_twice():
    before = """
        a: uint8[2, 3] = input()
        a_dq: float32[2, 3] = dequantize(a, scale=0.5, zero_point=3)
        cat: float32[4, 3] = cat([a_dq, a_dq])  # plan=Plan(Decision('moves'))
        return cat
    """
    gm = run_pass(Propagate(), before)
    assert "cat: uint8[4, 3] = cat([a, a])" in program(gm)
    a = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    assert torch.equal(gm(a), fxq.extend.read_graph(before, {})(a))


def test_a_value_that_is_changed_in_place_is_not_read_instead_of_its_integers():
    before = """
        x: float32[2, 3] = input()
        y: float32[2, 3] = tanh(x)  # memory=(1,)
        y_q = quantize(y, scale=0.5, zero_point=3)
        y_dq = dequantize(y_q, scale=0.5, zero_point=3)
        n: float32[2, 3] = y.zero_()  # memory=(1,), changes=(1,)
        s = sigmoid(y_dq)  # plan=Plan(Decision('float'))
        return (s, n)
    """
    gm = run_pass(Fallback(), before)
    assert "s: float32[2, 3] = sigmoid(y_dq)" in program(gm)
    assert fxq.extend.explain("read_float", gm, "y_q").endswith(": %y is changed in place by %n")
    x = torch.tensor([[0.1, 0.7, -3.0], [2.0, 1.0, 0.0]])
    steps = (torch.tanh(x) / 0.5).round() * 0.5
    torch.testing.assert_close(gm(x)[0], torch.sigmoid(steps), rtol=0, atol=1e-6)
    change = "        n: float32[2, 3] = y.zero_()  # memory=(1,), changes=(1,)\n"
    unchanged = run_pass(Fallback(), before.replace(change, "").replace("(s, n)", "s"))
    assert "s: float32[2, 3] = sigmoid(y)" in program(unchanged)
