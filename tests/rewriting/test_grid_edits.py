"""Edits that quantize and dequantize a value."""

import pytest
import torch

import fxq
from fxq.graph.info import info
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.qparams import QParams
from fxq.rewriting.grid_edits import on_grid
from tests.support.graphs import expected, node, program
from tests.support.helpers import rewriter, run

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-2, 3, 12).reshape(3, 4)


def on(grid, name="y"):
    """Graph that returns relu(x), quantized and dequantized."""
    gm = fxq.extend.read_graph("x: float32[3, 4] = input()\ny: float32[3, 4] = relu(x)  # 'act'\nreturn y", {})
    hand, value = rewriter(gm), node(gm, "y")
    _, dq = on_grid(hand, value, value, grid, name)
    hand.reroute(value, dq, only=lambda user: user.op == "output")
    return gm


def test_a_grid_of_numbers():
    gm = on(QParams.per_tensor(0.125, 3))
    assert program(gm) == expected("""
        x: float32[3, 4] = input()
        y: float32[3, 4] = relu(x)
        y_q: uint8[3, 4] = quantize(y, scale=0.125, zero_point=3)
        y_dq: float32[3, 4] = dequantize(y_q, scale=0.125, zero_point=3)
        return y_dq
    """)
    assert info(node(gm, "y_q")).path == "act"
    wanted = (X.relu() / 0.125).round().clamp(-3, 252) * 0.125
    torch.testing.assert_close(run(gm, X), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_dynamic_grid_per_row(symmetric):
    grid = DynamicGrid(0, 255, torch.uint8, -1, symmetric)
    gm = on(grid, "rows")
    assert ("choose_zero_point" in program(gm)) is not symmetric
    assert info(node(gm, "rows_scale")).shape == (3, 1)
    y = X.relu()
    torch.testing.assert_close(run(gm, X), grid.rounded(y), rtol=1e-6, atol=1e-6)
    step = y.amax(1, keepdim=True) / (127 if symmetric else 254)
    assert ((run(gm, X) - y).abs() <= step / 2 + 1e-6).all()
