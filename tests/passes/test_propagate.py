"""propagate: conversions move through ops that only move data, and cancel."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.passes import Propagate
from tests.graphs import REFERENCE, again, equal, expected, text, until
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


def test_a_chain_of_movements():
    lines = propagated(lambda x: x.transpose(2, 3).reshape(2, 4, 64, 1).permute(0, 1, 3, 2))
    start = lines.index("a_q = quantize(a, B)")
    assert lines[start + 1 : start + 5] == [
        "transpose = transpose(a_q, dim0=2, dim1=3)",
        "reshape = reshape(transpose, shape=(2, 4, 64, 1))",
        "permute = permute(reshape, dims=(0, 1, 3, 2))",
        "permute_dq = dequantize(permute, B)",
    ]


def test_a_float_reader_keeps_its_dequantize():
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)

        def forward(self, x):
            y = self.a(x).transpose(2, 3)
            return self.b(y), torch.erf(y)

    model, x = settled(Read), torch.randn(2, 3, 8, 8)
    lines = text(until(model, x, "propagate", REFERENCE).gm).splitlines()
    start = lines.index("a_q = quantize(a, B)")
    assert lines[start + 1 : start + 3] == [
        "transpose = transpose(a_q, dim0=2, dim1=3)",
        "transpose_dq = dequantize(transpose, B)",
    ]
    assert "erf = erf(transpose_dq)" in lines


@pytest.mark.parametrize(
    ("middle", "lines"),
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
def test_quantize_moves_up_where_there_are_fewer_values(middle, lines):
    """Through an op that computes in float, here because the recipe says so."""
    recipe = REFERENCE
    for op in ("interpolate", "transpose"):
        if f"{op}(" in lines[0] + lines[1]:
            recipe = recipe.override(fxq.op(op), fxq.FLOAT)
    got = propagated(middle, recipe)
    start = got.index(lines[0])
    assert got[start : start + 2] == lines


def test_a_clamp_is_no_mere_movement():
    """relu and max pooling change values in an order that only whole units and kernels can keep."""
    lines = propagated(lambda x: F.relu(F.max_pool2d(x, 2)))
    assert "max_pool2d = max_pool2d(a_dq, kernel_size=(2, 2), stride=(2, 2))" in lines


class Twice(fxq.Pass):
    """A quantize behind a dequantize: the pair that the pipeline itself does not make with two grids."""

    name = "requantize-twice"
    needs = gives = fxq.Stage.QDQ

    def __init__(self, factor):
        object.__setattr__(self, "factor", factor)

    def run(self, rewriter):
        dq = next(n for n in rewriter.nodes("dequantize") if n.name == "a_dq")
        scale = torch.tensor(dq.kwargs["scale"] * self.factor, dtype=torch.float32).item()
        grid = {**dq.kwargs, "scale": scale}
        q = rewriter.call("quantize", dq, after=dq, name="second_q", **grid)
        second = rewriter.call("dequantize", q, after=q, name="second_dq", **grid)
        rewriter.reroute(dq, second, only=lambda user: user not in (q, second))


@pytest.mark.parametrize(
    ("factor", "lines"),
    [
        (1.0, ["a_q = quantize(a, B)", "second_dq = dequantize(a_q, B)"]),
        (
            1.5,
            [
                "a_q = quantize(a, B)",
                "requantize = requantize(a_q, C)",
                "second_dq = dequantize(requantize, C)",
            ],
        ),
    ],
)
def test_pairs_cancel_or_become_one_requantize(factor, lines):
    model, x = settled(lambda: Model(nn.Identity())), torch.randn(2, 3, 8, 8)
    recipe = REFERENCE.insert_pass(Twice(factor), after="insert-qdq")
    manager = until(model, x, "propagate", recipe)
    before = call(until(model, x, "requantize-twice", recipe).gm, x)
    got = text(manager.gm).splitlines()
    start = got.index("a_q = quantize(a, B)")
    assert got[start : start + len(lines)] == lines
    assert equal(call(manager.gm, x), before)
    assert again(manager, Propagate()) == []
