"""fuse: units. Which patterns there are is in tests/patterns; here is what holds for all of them."""

import pytest
import torch

import fxq
from fxq.graph.info import info
from fxq.passes import Fuse
from tests.support.graphs import equal, expected, kinds, node, program, run_pass
from tests.support.helpers import REFERENCE, restored_fusions
from tests.support.machine import X86, needs_x86

BLOCKS = """
    x: float32[1, 3, 5, 5] = input()
    v: float32[3, 3, 1, 1] = tensor('a.weight')
    w: float32[3, 3, 1, 1] = tensor('b.weight')
    a = conv2d(x, v)  # 'a', 'net.py:3'
    relu = relu(a)  # 'act', 'net.py:4'
    b = conv2d(relu, w)  # 'b', 'net.py:5'
    add = add(relu, b)  # '', 'net.py:6'
    relu_1 = relu(add)  # 'act', 'net.py:7'
    return relu_1
"""


def test_text_before_and_after():
    """Equal bodies would share one module; a unit says which ops it stands for, and where they came from."""
    gm = run_pass(Fuse(), BLOCKS)
    assert fxq.extend.write_graph(gm) == expected("""
        def conv2d_relu(x, weight, bias):
            conv2d = conv2d(x, weight, bias)
            relu = relu(conv2d)
            return relu

        def conv2d_add_relu(x, weight, bias, residual):
            conv2d = conv2d(x, weight, bias)
            add = add(residual, conv2d)
            relu = relu(add)
            return relu

        x: float32[1, 3, 5, 5] = input()
        v: float32[3, 3, 1, 1] = tensor('a.weight')
        w: float32[3, 3, 1, 1] = tensor('b.weight')
        a_relu: float32[1, 3, 5, 5] = conv2d_relu(x, v, None)  # 'a', 'net.py:3', \
origins=('a', 'relu'), paths=('a', 'act')
        b_add_relu: float32[1, 3, 5, 5] = conv2d_add_relu(a_relu, w, None, a_relu)  # 'b', 'net.py:5', \
origins=('b', 'add', 'relu_1'), paths=('b', '', 'act')
        return b_add_relu
    """)
    assert info(node(gm, "a_relu")).made_by.startswith("fuse: conv2d_relu (patterns/fusions/conv.py:")
    x = torch.randn(1, 3, 5, 5)
    assert equal(gm(x), fxq.extend.read_graph(BLOCKS, fxq.extend.graph_tensors(gm))(x))


def test_the_largest_pattern_wins():
    """conv + add + relu, not conv + add with a relu of its own, nor conv alone with add + relu."""
    assert kinds(run_pass(Fuse(), BLOCKS)) == ["conv2d_relu", "conv2d_add_relu"]


def test_equal_bodies_share_one_module():
    same = BLOCKS.replace("add = add(relu, b)", "add = relu(b)")
    gm = run_pass(Fuse(), same)
    assert kinds(gm) == ["conv2d_relu", "conv2d_relu", "relu"]


@pytest.mark.parametrize("selector", ["act", "a", fxq.by_op("relu")])
def test_ops_that_the_recipe_configures_differently_stay_apart(selector):
    assert "a_relu" in program(run_pass(Fuse(), BLOCKS))
    gm = run_pass(Fuse(), BLOCKS, recipe=REFERENCE.override(selector, fxq.FLOAT))
    assert kinds(gm)[:2] == ["conv2d", "relu"]


def test_another_spec_for_the_layer_alone_keeps_the_unit():
    """An activation function has no spec of its own; a sum has."""
    four_bits = fxq.QuantConfig(activation=fxq.TensorSpec(bits=4))
    assert kinds(run_pass(Fuse(), BLOCKS, recipe=REFERENCE.override("a", four_bits)))[0] == "conv2d_relu"
    apart = run_pass(Fuse(), BLOCKS, recipe=REFERENCE.override("b", four_bits))
    assert kinds(apart) == ["conv2d_relu", "conv2d", "add_relu"]


def test_a_value_read_elsewhere_stays():
    same = expected("""
        x: float32[1, 3, 5, 5] = input()
        w: float32[3, 3, 1, 1] = tensor('a.weight')
        a: float32[1, 3, 5, 5] = conv2d(x, w)
        relu: float32[1, 3, 5, 5] = relu(a)
        mul: float32[1, 3, 5, 5] = mul(relu, a)
        return mul
    """)
    gm = run_pass(Fuse(), same)
    assert program(gm) == same
    assert "%a is also read by %mul" in fxq.extend.explain("conv2d_relu", gm, "relu")


SCALED = """
    x: float32[4, 3, 5, 5] = input()
    w: float32[3, 3, 1, 1] = tensor('a.weight')
    s: float32[3, 1, 1] = tensor('s')
    a = conv2d(x, w)
    relu = relu(a)
    mul = mul(relu, s)
    return mul
"""


def test_a_user_s_pattern_comes_first():
    with restored_fusions():

        @fxq.fusion
        def scaled_act(op, x, w, s):
            return op.mul(op.relu(op.conv2d(x, w)), s)

        assert kinds(run_pass(Fuse(), SCALED)) == ["scaled_act"]
    assert kinds(run_pass(Fuse(), SCALED)) == ["conv2d_relu", "mul"]


@needs_x86
def test_what_a_kernel_runs_in_part_stays_apart():
    """No kernel of x86 runs all three ops: they are what they are without the pattern."""
    with restored_fusions():

        @fxq.fusion
        def scaled_act(op, x, w, s):
            return op.mul(op.relu(op.conv2d(x, w)), s)

        assert kinds(run_pass(Fuse(), SCALED, recipe=X86)) == ["conv2d_relu", "mul"]
