"""fallback: ops without a kernel run in float, with the least conversion."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.passes import Fallback
from tests.graphs import again, equal, expected, text, until
from tests.helpers import REFERENCE
from tests.machine import X86, needs_x86
from tests.models import NETWORKS, batch, build, call, settled


@needs_x86
def test_text_before_and_after():
    manager = until(build("prelu_chain"), batch("prelu_chain"), "fallback", X86)
    assert text(manager.history["propagate"].graph).splitlines()[4:8] == [
        "extract_prelu = conv2d_prelu(x_dq, extract_weight_dq, @extract.bias, @act1.weight) "
        "{conv2d(padding=(2, 2)); prelu}",
        "extract_prelu_q = quantize(extract_prelu, B)",
        "extract_prelu_dq = dequantize(extract_prelu_q, B)",
        "shrink_weight_dq = int8(shrink_weight, axis=0)",
    ]
    assert text(manager.gm) == expected("""
        x = input
        x_q = quantize(x, A)
        x_dq = dequantize(x_q, A)
        extract_weight_dq = int8(extract_weight, axis=0)
        extract = conv2d(x_dq, extract_weight_dq, @extract.bias, padding=(2, 2))
        act1 = prelu(extract, @act1.weight)
        extract_prelu_q = quantize(act1, B)
        extract_prelu_dq = dequantize(extract_prelu_q, B)
        shrink_weight_dq = int8(shrink_weight, axis=0)
        shrink = conv2d(extract_prelu_dq, shrink_weight_dq, @shrink.bias)
        act2 = prelu(shrink, @act2.weight)
        shrink_prelu_q = quantize(act2, C)
        shrink_prelu_dq = dequantize(shrink_prelu_q, C)
        map_weight_dq = int8(map_weight, axis=0)
        map_1 = conv2d(shrink_prelu_dq, map_weight_dq, @map.bias, padding=(1, 1))
        act3 = prelu(map_1, @act3.weight)
        map_1_prelu_q = quantize(act3, D)
        map_1_prelu_dq = dequantize(map_1_prelu_q, D)
        expand_weight_dq = int8(expand_weight, axis=0)
        expand = conv2d(map_1_prelu_dq, expand_weight_dq, @expand.bias)
        act4 = prelu(expand, @act4.weight)
        expand_prelu_q = quantize(act4, E)
        expand_prelu_dq = dequantize(expand_prelu_q, E)
        up_weight_dq = int8(up_weight, axis=1)
        up = conv_transpose2d(expand_prelu_dq, up_weight_dq, @up.bias, stride=(2, 2), padding=(4, 4), \
output_padding=(1, 1))
        return up
    """)
    assert again(manager, Fallback()) == []


@pytest.mark.parametrize("backend", ["reference", pytest.param("x86", marks=needs_x86)])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_lose_nothing(name, backend):
    """Not a bit, where nothing is float but what stands behind a kernel in a unit."""
    model, inputs = build(name), batch(name)
    recipe = fxq.Recipe.static(backend=backend)
    before = call(until(model, inputs, "propagate", recipe).gm, inputs)
    manager = until(model, inputs, "fallback", recipe)
    assert equal(call(manager.gm, inputs), before)
    assert again(manager, Fallback()) == []


def test_the_reference_backend_opens_nothing():
    manager = until(build("prelu_chain"), batch("prelu_chain"), "fallback", REFERENCE)
    assert manager.history["fallback"].edits == ()


class FloatReaders(nn.Module):
    """A float value read by a layer and by two ops without an integer form."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = torch.erf(self.a(x))
        return self.b(y) * torch.sin(y), torch.cos(x)


def test_float_readers_of_a_float_value_read_it_unconverted():
    model, x = settled(FloatReaders), torch.randn(2, 3, 8, 8)
    manager = until(model, x, "fallback", REFERENCE.override(fxq.op("mul"), fxq.FLOAT))
    assert "sin = sin(erf_dq)" in text(manager.history["propagate"].graph)
    lines = text(manager.gm).splitlines()
    assert "sin = sin(erf)" in lines
    assert "cos = cos(x)" in lines
    assert "b = conv2d(erf_dq, b_weight_dq, @b.bias)" in lines
    assert equal(call(manager.gm, x)[1], torch.cos(x))
    assert again(manager, Fallback()) == []


def test_float_readers_of_an_integer_value_dequantize_it():
    """The kernel in front emits integers for the layer behind: one dequantize serves all float readers."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            y = F.relu(self.a(x))
            return self.b(y), torch.sin(y), torch.erf(y)

    model, x = settled(Model), torch.randn(2, 3, 8, 8)
    lines = text(until(model, x, "fallback", REFERENCE).gm).splitlines()
    assert [line for line in lines if "(a_relu" in line] == [
        "a_relu_q = quantize(a_relu, B)",
        "a_relu_dq = dequantize(a_relu_q, B)",
    ] + [line for line in lines if "(a_relu_dq" in line]
    assert {"sin = sin(a_relu_dq)", "erf = erf(a_relu_dq)"} <= set(lines)


@needs_x86
def test_the_head_of_a_unit_stays_fused():
    """linear + sum + relu where nobody reads the sum as integers: the kernel takes the layer alone."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

        def forward(self, x):
            return self.norm(torch.relu(self.a(x) + x))

    model, x = settled(Model), torch.randn(4, 6)
    manager = until(model, x, "fallback", X86)
    assert "a_add_relu = linear_add_relu(" in text(manager.history["propagate"].graph)
    assert text(manager.gm).splitlines()[4:7] == [
        "a = linear(x_dq, a_weight_dq, @a.bias)",
        "add = add(a, x)",
        "relu = relu(add)",
    ]
    assert sqnr(call(model, x), call(fxq.quantize(model, X86, data=[x]), x)) > 30
