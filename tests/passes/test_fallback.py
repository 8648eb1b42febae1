"""fallback: ops without a kernel run in float, with the least conversion."""

import torch

import fxq
from fxq.passes import Fallback
from tests.support.graphs import drawn, equal, expected, integer_weight, joined, kinds, qdq, run_pass, text
from tests.support.machine import X86, needs_x86

IMAGE = "x: float32[2, 4, 8, 8] = input()\nbias: float32[4] = tensor('bias')"
A, B = integer_weight("a", "4, 4, 1, 1"), integer_weight("b", "4, 4, 1, 1")
INT8 = "plan=Plan(Decision('int8'), reads=TensorSpec())"
PART = "plan=Plan(Decision('int8'), reads=TensorSpec(), kernel_ops=(1,))"
UNIT = """
    def conv2d_silu(x, weight, bias):
        conv2d = conv2d(x, weight, bias)
        silu = silu(conv2d)
        return silu
"""
HEAD = joined(
    UNIT, IMAGE, A, B, qdq("x"), f"a = conv2d_silu(x_qdq, a_dq, bias)  # 'a', origins=('a', 'act'), {PART}", qdq("a"),
    f"b = conv2d(a_qdq, b_dq)  # {INT8}", "return b",
)  # fmt: skip


def test_text_before_and_after():
    """A unit that no kernel runs whole is split: its layer emits float, and one conversion follows the other ops."""
    tensors = drawn(HEAD)
    gm = run_pass(Fallback(), HEAD, tensors)
    assert text(gm) == expected("""
        x = input
        a_dq = int8(a_weight, axis=0)
        b_dq = int8(b_weight, axis=0)
        x_q = quantize(x, A)
        x_qdq = dequantize(x_q, A)
        a = conv2d(x_qdq, a_dq, @bias)
        act = silu(a)
        a_q = quantize(act, A)
        a_qdq = dequantize(a_q, A)
        b = conv2d(a_qdq, b_dq)
        return b
    """)
    x = torch.randn(2, 4, 8, 8)
    assert equal(gm(x), fxq.extend.read_graph(HEAD, tensors)(x))


def test_a_unit_that_a_kernel_runs_whole_stays():
    whole = HEAD.replace(", kernel_ops=(1,)", "")
    assert kinds(run_pass(Fallback(), whole)) == kinds(fxq.extend.read_graph(whole, drawn(whole)))


SIN = "sin = torch.sin(a_qdq)"
LAYER = joined(IMAGE, A, B, qdq("x"), f"a = conv2d(x_qdq, a_dq)  # {INT8}")


def test_float_readers_of_a_float_value_read_it_unconverted():
    gm = run_pass(
        Fallback(),
        joined(LAYER, "y = erf(a)", qdq("y"), f"b = conv2d(y_qdq, b_dq)  # {INT8}", "sin = torch.sin(y_qdq)",
               "cos = torch.cos(x_qdq)", "return (b, sin, cos)"),
    )  # fmt: skip
    assert text(gm).splitlines()[5:] == [
        "a = conv2d(x_qdq, a_dq)",
        "y = erf(a)",
        "y_q = quantize(y, A)",
        "y_qdq = dequantize(y_q, A)",
        "b = conv2d(y_qdq, b_dq)",
        "sin = sin(y)",
        "cos = cos(x)",
        "return (b, sin, cos)",
    ]


def test_float_readers_of_an_integer_value_dequantize_it():
    """The first kernel emits integers for the next layer: one dequantize serves all float readers."""
    written = joined(
        LAYER, qdq("a"), f"b = conv2d(a_qdq, b_dq)  # {INT8}", SIN, "erf = erf(a_qdq)",
        "return (b, sin, erf)",
    )  # fmt: skip
    gm = run_pass(Fallback(), written)
    assert text(gm) == text(fxq.extend.read_graph(written, drawn(written)))


def test_a_layer_that_only_float_ops_read_emits_float():
    gm = run_pass(Fallback(), joined(LAYER, qdq("a"), SIN, "size = a_q.size(0)", "return (sin, size)"))
    assert text(gm).splitlines()[4:] == [
        "a = conv2d(x_qdq, a_dq)",
        "sin = sin(a)",
        "size = .size(a, 0)",
        "return (sin, size)",
    ]


@needs_x86
def test_the_head_of_a_unit_stays_fused():
    """conv + sum + relu whose sum has no integer reader: the kernel runs only the layer."""
    unit = """
        def conv2d_add_relu(x, weight, other):
            conv2d = conv2d(x, weight)
            add = add(conv2d, other)
            relu = relu(add)
            return relu
    """
    written = joined(
        unit, IMAGE, A, qdq("x"),
        f"a = conv2d_add_relu(x_qdq, a_dq, x_qdq)  # 'a', origins=('a', 'add', 'relu'), {PART}", "return a",
    )  # fmt: skip
    assert text(run_pass(Fallback(), written, recipe=X86.with_optimize("coverage"))).splitlines()[4:] == [
        "a = conv2d(x_qdq, a_dq)",
        "add = add(a, x)",
        "relu = relu(add)",
        "return relu",
    ]
