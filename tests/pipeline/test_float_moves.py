"""Ops that move data, before a value that is quantized again."""

import pytest
import torch

from fxq.graph.info import precision_of
from fxq.graph.query import argument, is_op
from fxq.passes import Smooth
from tests.passes.test_smooth import GIVEN, LAYER
from tests.support.graphs import node, program, run_pass

MOVED = LAYER.replace("x: float32[64, 4] = input()", "v: float32[8, 8, 4] = input()").replace(
    "    x_q = ",
    """    v_q = quantize(v, scale=3.0, zero_point=128)
    n = getattr(v_q, 'shape')
    v_dq = dequantize(v_q, scale=3.0, zero_point=128)
    u = transpose(v_dq, dim0=0, dim1=1)  # plan=Plan(Decision('moves'), reads=TensorSpec())
    u_q = quantize(u, scale=3.0, zero_point=128)
    u_dq = dequantize(u_q, scale=3.0, zero_point=128)
    x = reshape(u_dq, shape=(64, 4))  # plan=Plan(Decision('moves'), reads=TensorSpec())
    x_q = """,
)
READS_V, READS_U = "return y, n", "return y, n, u_dq"


@pytest.mark.parametrize(("end", "moved"), [(READS_V, "v"), (READS_U, "u_dq")], ids=["alone", "read by another"])
def test_moves_before_a_float_op_move_floats(end, moved):
    """Nothing is rounded twice, unless the integers have another reader."""
    torch.manual_seed(0)
    v = torch.randn(8, 8, 4)
    v[::4] *= 100
    gm = run_pass(Smooth(least=64), MOVED.replace("return y", end), GIVEN, data=(v,))
    text = program(gm)
    assert ("v_q" in text) is ("u_q" in text) is (moved != "v")
    source = argument(node(gm, "x"), "x")
    assert source.name == ("u" if moved == "v" else "u_dq")
    assert {precision_of(node(gm, name)) for name in "xu"} == ({"float"} if moved == "v" else {"moves"})
    assert {argument(n, "x").name for n in gm.graph.nodes if is_op(n, "choose_scale")} == {"x"}


def test_a_kernel_that_emits_nothing_but_integers_has_its_grid():
    """The kernel of the first value emits only integers: they are moved as integers."""
    torch.manual_seed(0)
    plan = "plan=Plan(Decision('int8'), reads=TensorSpec(), emits=TensorSpec())"
    text = MOVED.replace("    v_q = ", f"    w_ = sigmoid(v)  # {plan}\n    v_q = ").replace(
        "quantize(v, ", "quantize(w_, "
    )
    v = torch.randn(8, 8, 4)
    v[::4] *= 100
    gm = run_pass(Smooth(least=64, measure_gain=0.0, enough=100.0), text.replace("return y", READS_V), GIVEN, data=(v,))
    assert {precision_of(node(gm, name)) for name in "xu"} == {"moves"}
    assert any(is_op(n, "choose_scale") for n in gm.graph.nodes)
