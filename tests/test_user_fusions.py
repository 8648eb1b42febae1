"""Fusions of a user's own, through the whole pipeline: they make nothing worse."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from tests.graphs import expected, graph, text
from tests.helpers import REFERENCE, restored_fusions
from tests.machine import needs_x86
from tests.models import settled


class Scaled(nn.Module):
    """A layer and a user's factor behind it; a second layer reads them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 1)
        self.s = nn.Parameter(torch.rand(3, 1, 1))

    def forward(self, x):
        return self.b(self.s * torch.relu(self.a(x)))


def scaled_act(op, x, w, b, s):
    return op.mul(op.relu(op.conv2d(x, w, b)), s)


@needs_x86
@pytest.mark.parametrize("optimize", ["speed", "coverage"])
def test_a_fusion_makes_no_network_worse(optimize):
    """No kernel of x86 runs all three ops: they are what they are without the pattern, and it says why."""
    recipe = fxq.Recipe.static(backend="x86", optimize=optimize)
    model, x = settled(Scaled), torch.randn(4, 3, 5, 5)
    alone = fxq.quantize(model, recipe, data=[x])
    with restored_fusions():
        fxq.fusion(scaled_act)
        gm = graph(model, x, "fuse", recipe)
        fused = fxq.quantize(model, recipe, data=[x])
    assert text(gm) == expected("""
        x = input
        a_relu = conv2d_relu(x, @a.weight, @a.bias)
        mul = mul(a_relu, @s)
        b = conv2d(mul, @b.weight, @b.bias)
        return b
    """)
    reasons = [near.reason for near in fused.history["fuse"].near if near.rule == "scaled_act"]
    assert reasons == ["x86 has a kernel for the first 2 of these 3 ops alone"]
    assert {e.fate for e in alone.ledger} == {e.fate for e in fused.ledger} == {"int8"}
    assert torch.equal(fused(x), alone(x))


@needs_x86
def test_a_fusion_takes_no_layer_along_into_float():
    """What has no kernel comes first: in a unit, the layer behind it would be float as well."""
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)).eval()
    with restored_fusions():

        @fxq.fusion
        def norm_linear(op, x, g, h, w, b):
            return op.linear(op.layer_norm(x, g, h, normalized_shape=(6,), eps=1e-5), w, b)

        ledger = fxq.quantize(model, fxq.Recipe.static(backend="x86"), data=[torch.randn(4, 6)]).ledger
    assert [(e.op, e.fate) for e in ledger] == [("layer_norm", "float"), ("linear", "int8")]


def test_a_fusion_with_several_outputs_goes_through_in_float():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, x):
            y = self.a(x)
            return self.b(F.relu(y)), y

    model, x = settled(Twice), torch.randn(2, 3, 8, 8)
    with restored_fusions():

        @fxq.fusion
        def relu_and_before(op, x, w, b):
            y = op.conv2d(x, w, b)
            return op.relu(y), y

        quantized = fxq.quantize(model, REFERENCE, data=[x])
    assert str(quantized.history["fuse"].graph).splitlines()[1:4] == [
        "a_relu = relu_and_before(x, @a.weight, @a.bias)",
        "getitem = getitem(a_relu, 0)",
        "getitem_1 = getitem(a_relu, 1)",
    ]
    assert [(e.op, e.fate) for e in quantized.ledger] == [("conv2d", "float"), ("relu", "float"), ("conv2d", "int8")]
    assert "several outputs" in quantized.ledger[0].reason
    want, got = model(x), quantized(x)
    assert torch.equal(got[1], want[1])
    assert (got[0] - want[0]).abs().max() < 0.05 * want[0].abs().max()  # a few steps of 1/255
