"""Conversions beside ops that only move values, and the layers that OpenVINO then runs on integers."""

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.engines.moves import convert_before_moves
from tests.support.graphs import equal, expected, text

pytestmark = pytest.mark.any_cpu


def changed(lines, x):
    """The graph of these lines, with the conversions moved; its value for x is the same."""
    gm = fxq.extend.read_graph(lines, {})
    before = gm(x)
    convert_before_moves(gm)
    gm.graph.lint()
    gm.recompile()
    assert equal(gm(x), before)
    return text(gm)


def test_integers_become_floats_before_they_are_moved():
    assert changed(
        """
        x: float32[2, 3, 4] = input()
        q: uint8[2, 3, 4] = quantize(x, scale=0.1, zero_point=9)
        t: uint8[2, 4, 3] = permute(q, dims=(0, 2, 1))
        r: uint8[2, 12] = reshape(t, shape=(2, 12))
        dq: float32[2, 12] = dequantize(r, scale=0.1, zero_point=9)
        y: float32[2, 12] = tanh(dq)
        return y
        """,
        torch.randn(2, 3, 4),
    ) == expected("""
        x = input
        q = quantize(x, A)
        dq = dequantize(q, A)
        t = permute(dq, dims=(0, 2, 1))
        r = reshape(t, shape=(2, 12))
        y = tanh(r)
        return y
    """)


def test_the_result_of_attention_is_rounded_after_the_moves():
    assert changed(
        """
        x: float32[1, 2, 4, 8] = input()
        a: float32[1, 2, 4, 8] = scaled_dot_product_attention(x, x, x)
        q: uint8[1, 2, 4, 8] = quantize(a, scale=0.02, zero_point=128)
        t: uint8[1, 4, 2, 8] = transpose(q, dim0=1, dim1=2)
        dq: float32[1, 4, 2, 8] = dequantize(t, scale=0.02, zero_point=128)
        return dq
        """,
        torch.randn(1, 2, 4, 8),
    ) == expected("""
        x = input
        a = scaled_dot_product_attention(x, x, x)
        t = transpose(a, dim0=1, dim1=2)
        q = quantize(t, A)
        dq = dequantize(q, A)
        return dq
    """)


def test_moved_integers_that_something_else_reads_stay():
    lines = """
        x: float32[2, 3] = input()
        q: uint8[2, 3] = quantize(x, scale=0.1, zero_point=9)
        t: uint8[3, 2] = transpose(q, dim0=0, dim1=1)
        dq: float32[3, 2] = dequantize(t, scale=0.1, zero_point=9)
        return (dq, t)
    """
    assert changed(lines, torch.randn(2, 3)) == text(fxq.extend.read_graph(lines, {}))


class Tokens(nn.Module):
    """A linear layer reads what a convolution gives, channels last."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 16, 3), nn.Linear(16, 8)

    def forward(self, x):
        return self.linear(torch.relu(self.conv(x)).flatten(2).transpose(1, 2))


def test_openvino_runs_a_layer_after_moved_integers_on_integers():
    pytest.importorskip("openvino")
    x = torch.randn(1, 3, 10, 10)
    qmodel = fxq.quantize(Tokens().eval(), fxq.Recipe.static(backend="openvino", optimize="coverage"), data=[x])
    assert {row.kind for row in qmodel.profile(example_inputs=x) if "linear" in row.layer} == {"int8"}
