"""propagate: conversions move through ops that only move data, and cancel."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.passes import Propagate
from tests.graphs import again, equal, expected, text, until
from tests.helpers import REFERENCE, lines, program, run_pass
from tests.models import NETWORKS, batch, build, call, settled


def test_text_before_and_after():
    manager = until(build("upscaler"), batch("upscaler"), "propagate", REFERENCE)
    assert text(manager.history["insert-qdq"].graph).splitlines()[10:14] == [
        "up_relu_dq = dequantize(up_relu_q, C)",
        "interpolate = interpolate(up_relu_dq, scale_factor=2)",
        "interpolate_q = quantize(interpolate, C)",
        "interpolate_dq = dequantize(interpolate_q, C)",
    ]
    assert text(manager.gm) == expected("""
        x = input
        x_q = quantize(x, A)
        x_dq = dequantize(x_q, A)
        a_weight_dq = int8(a_weight, axis=0)
        a_relu = conv2d_relu(x_dq, a_weight_dq, @a.bias) {conv2d(padding=(1, 1)); relu}
        a_relu_q = quantize(a_relu, B)
        a_relu_dq = dequantize(a_relu_q, B)
        up_weight_dq = int8(up_weight, axis=1)
        up_relu = conv_transpose2d_relu(a_relu_dq, up_weight_dq, @up.bias) {conv_transpose2d(stride=(2, 2)); relu}
        up_relu_q = quantize(up_relu, C)
        interpolate = interpolate(up_relu_q, scale_factor=2)
        interpolate_dq = dequantize(interpolate, C)
        b_weight_dq = int8(b_weight, axis=0)
        b_relu = conv2d_relu(interpolate_dq, b_weight_dq, @b.bias) {conv2d(padding=(1, 1)); relu}
        b_relu_q = quantize(b_relu, D)
        shuffle = pixel_shuffle(b_relu_q, upscale_factor=2)
        shuffle_dq = dequantize(shuffle, D)
        c_weight_dq = int8(c_weight, axis=0)
        c = conv2d(shuffle_dq, c_weight_dq, @c.bias, padding=(1, 1))
        return c
    """)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_keep_their_output_exactly(name):
    model, inputs = build(name), batch(name)
    before = call(until(model, inputs, "insert-qdq", REFERENCE).gm, inputs)
    manager = until(model, inputs, "propagate", REFERENCE)
    assert equal(call(manager.gm, inputs), before)
    assert again(manager, Propagate()) == []


class Model(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.a, self.b, self.middle = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1), middle

    def forward(self, x):
        return self.b(self.middle(self.a(x)))


def propagated(middle, recipe=REFERENCE):
    model, x = settled(lambda: Model(middle)), torch.randn(2, 3, 8, 8)
    before = call(until(model, x, "insert-qdq", recipe).gm, x)
    manager = until(model, x, "propagate", recipe)
    assert equal(call(manager.gm, x), before)
    assert again(manager, Propagate()) == []
    return text(manager.gm).splitlines()


CHAIN = """
    x: float32[2, 3, 4] = input()
    x_q = quantize(x, scale=0.5, zero_point=3)
    x_dq = dequantize(x_q, scale=0.5, zero_point=3)
    turned = transpose(x_dq, dim0=1, dim1=2)  # plan=Plan(Decision('moves'))
    flat = reshape(turned, shape=(2, 12))  # plan=Plan(Decision('moves'))
    flat_q = quantize(flat, scale=0.5, zero_point=3)
    flat_dq = dequantize(flat_q, scale=0.5, zero_point=3)
    return flat_dq
"""


def test_a_chain_of_movements():
    gm = run_pass(Propagate(), CHAIN)
    assert program(gm) == lines("""
        x: float32[2, 3, 4] = input()
        x_q: uint8[2, 3, 4] = quantize(x, scale=0.5, zero_point=3)
        turned: uint8[2, 4, 3] = transpose(x_q, dim0=1, dim1=2)
        flat: uint8[2, 12] = reshape(turned, shape=(2, 12))
        flat_dq: float32[2, 12] = dequantize(flat, scale=0.5, zero_point=3)
        return flat_dq
    """)
    x = torch.randn(2, 3, 4)
    assert torch.equal(gm(x), fxq.read_graph(CHAIN, {})(x))


def test_a_float_reader_keeps_its_dequantize():
    gm = run_pass(Propagate(), CHAIN.replace("return flat_dq", "erf = torch.erf(turned)\n    return (flat_dq, erf)"))
    assert program(gm) == lines("""
        x: float32[2, 3, 4] = input()
        x_q: uint8[2, 3, 4] = quantize(x, scale=0.5, zero_point=3)
        turned: uint8[2, 4, 3] = transpose(x_q, dim0=1, dim1=2)
        turned_dq: float32[2, 4, 3] = dequantize(turned, scale=0.5, zero_point=3)
        flat: uint8[2, 12] = reshape(turned, shape=(2, 12))
        flat_dq: float32[2, 12] = dequantize(flat, scale=0.5, zero_point=3)
        erf = torch.erf(turned_dq)
        return (flat_dq, erf)
    """)


@pytest.mark.parametrize(
    ("middle", "wanted"),
    [
        (  # four times as many values behind it
            lambda x: F.interpolate(torch.erf(x), scale_factor=2),
            ["erf_q = quantize(erf, B)", "interpolate = interpolate(erf_q, scale_factor=2)"],
        ),
        (
            lambda x: F.interpolate(torch.erf(x), scale_factor=0.5),
            ["interpolate = interpolate(erf, scale_factor=0.5)", "interpolate_q = quantize(interpolate, B)"],
        ),
        (
            lambda x: torch.erf(x).transpose(2, 3),
            ["transpose = transpose(erf, dim0=2, dim1=3)", "transpose_q = quantize(transpose, B)"],
        ),
        (  # bilinear interpolation is arithmetic
            lambda x: F.interpolate(torch.erf(x), scale_factor=2, mode="bilinear"),
            [
                "interpolate = interpolate(erf, scale_factor=2, mode='bilinear')",
                "interpolate_q = quantize(interpolate, B)",
            ],
        ),
    ],
)
def test_quantize_moves_up_where_there_are_fewer_values(middle, wanted):
    """Through an op that computes in float, here because the recipe says so."""
    recipe = REFERENCE
    for op in ("interpolate", "transpose"):
        if f"{op}(" in wanted[0] + wanted[1]:
            recipe = recipe.override(fxq.op(op), fxq.FLOAT)
    got = propagated(middle, recipe)
    start = got.index(wanted[0])
    assert got[start : start + 2] == wanted


def test_a_clamp_is_no_mere_movement():
    """relu and max pooling change values in an order that only whole units and kernels can keep."""
    shown = propagated(lambda x: F.relu(F.max_pool2d(x, 2)))
    assert "max_pool2d = max_pool2d(a_dq, kernel_size=(2, 2), stride=(2, 2))" in shown


PAIR = """
    q: uint8[2, 3] = input()
    first = dequantize(q, scale=0.5, zero_point=3)
    second = quantize(first, scale={}, zero_point=3)
    dq = dequantize(second, scale={}, zero_point=3)
    return dq
"""


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [
        (0.5, ["dq: float32[2, 3] = dequantize(q, scale=0.5, zero_point=3)"]),
        (
            0.75,
            [
                "requantize: uint8[2, 3] = requantize(q, from_scale=0.5, from_zero_point=3, scale=0.75, zero_point=3)",
                "dq: float32[2, 3] = dequantize(requantize, scale=0.75, zero_point=3)",
            ],
        ),
    ],
)
def test_pairs_cancel_or_become_one_requantize(scale, wanted):
    """A quantize behind a dequantize: a pair that the pipeline itself does not make with two grids."""
    before = PAIR.format(scale, scale)
    gm = run_pass(Propagate(), before)
    assert program(gm).splitlines() == ["q: uint8[2, 3] = input()", *wanted, "return dq"]
    q = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    assert torch.equal(gm(q), fxq.read_graph(before, {})(q))
