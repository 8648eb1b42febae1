"""insert-qdq: observers become quantize and dequantize, weights become integers."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.graph.grid import grid_of
from fxq.quant.qparams import QParams
from fxq.rewriting.rewriter import Rewriter
from tests.graphs import MINMAX, equal, expected, text, until
from tests.helpers import REFERENCE
from tests.machine import decibels, portable
from tests.models import NETWORKS, batch, build, call, settled


def test_text_before_and_after():
    manager = until(build("called_twice"), batch("called_twice"), "insert-qdq", REFERENCE)
    assert text(manager.history["insert-observers"].graph) == expected("""
        x = input
        x_observer = module Histogram(x)
        stem_weight_observer = module MinMax(@stem.weight)
        stem = conv2d(x_observer, stem_weight_observer, @stem.bias)
        stem_observer = module Histogram(stem)
        conv_weight_observer = module MinMax(@conv.weight)
        conv_relu = conv2d_relu(stem_observer, conv_weight_observer, @conv.bias) {conv2d(padding=(1, 1)); relu}
        conv_relu_observer = module Histogram(conv_relu)
        mul = mul(conv_relu_observer, 3)
        mul_observer = module Histogram(mul)
        conv_1 = conv2d(mul_observer, conv_weight_observer, @conv.bias, padding=(1, 1))
        return conv_1
    """)
    assert text(manager.gm) == expected("""
        x = input
        x_q = quantize(x, A)
        x_dq = dequantize(x_q, A)
        stem_weight_dq = int8(stem_weight, axis=0)
        stem = conv2d(x_dq, stem_weight_dq, @stem.bias)
        stem_q = quantize(stem, B)
        stem_dq = dequantize(stem_q, B)
        conv_weight_dq = int8(conv_weight, axis=0)
        conv_relu = conv2d_relu(stem_dq, conv_weight_dq, @conv.bias) {conv2d(padding=(1, 1)); relu}
        conv_relu_q = quantize(conv_relu, C)
        conv_relu_dq = dequantize(conv_relu_q, C)
        mul = mul(conv_relu_dq, 3)
        mul_q = quantize(mul, D)
        mul_dq = dequantize(mul_q, D)
        conv_1 = conv2d(mul_dq, conv_weight_dq, @conv.bias, padding=(1, 1))
        return conv_1
    """)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_stay_close(name):
    model, inputs = build(name), batch(name, 8)
    manager = until(model, inputs, "insert-qdq", REFERENCE)
    assert sqnr(call(model, inputs), call(manager.gm, inputs)) > 35


def test_the_grids_are_those_of_the_data_and_the_weight():
    """One linear layer, by hand in float64."""
    model, x = settled(lambda: nn.Sequential(nn.Linear(6, 3))), torch.randn(50, 6)
    recipe = fxq.Recipe.static(backend="reference", activation=MINMAX)
    gm = until(model, x, "insert-qdq", recipe).gm
    low, high = float(x.min()), float(x.max())
    scale = (high - low) / 255
    zero = round(-low / scale)
    weight = model[0].weight.detach().double()
    steps = weight.abs().amax(1, keepdim=True) / 127
    x_int = (torch.round(x.double() / scale) + zero).clamp(0, 255)
    w_int = torch.round(weight / steps)
    wanted = ((x_int - zero) * scale) @ (w_int * steps).T + model[0].bias.detach().double()
    torch.testing.assert_close(call(gm, x).double(), wanted, rtol=1e-5, atol=1e-5)
    quantize = next(n for n in gm.graph.nodes if n.name == "input_1_q")
    assert grid_of(gm, quantize).same_as(QParams.per_tensor(torch.tensor(scale).item(), zero))
    assert torch.equal(gm.fxq_data.get_buffer("0_weight_int8").double(), w_int)


def test_a_shared_weight_is_quantized_once():
    gm = until(build("shared_weight"), batch("shared_weight"), "insert-qdq", REFERENCE).gm
    assert len([n for n in gm.graph.nodes if n.name.endswith("weight_dq")]) <= 2
    gm = until(build("called_twice"), batch("called_twice"), "insert-qdq", REFERENCE).gm
    assert [n.name for n in gm.graph.nodes if n.name.endswith("weight_dq")] == ["stem_weight_dq", "conv_weight_dq"]


def test_weights_per_tensor():
    recipe = fxq.Recipe.static(
        backend="reference", weight=fxq.TensorSpec(signed=True, symmetric=True, observer="minmax")
    )
    gm = until(build("shared_weight"), batch("shared_weight"), "insert-qdq", recipe).gm
    (line,) = [line for line in text(gm).splitlines() if line.startswith("a_weight_dq = ")]
    assert line.startswith("a_weight_dq = dequantize(@fxq_data.a_weight_int8, B, qmin=-127") and "axis" not in line


def test_the_user_s_weights_stay():
    model, x = build("dense"), batch("dense")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    until(model, x, "insert-qdq", REFERENCE)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("coarse", ["a", "b"])
def test_two_specs_of_one_value_are_two_quantizations_of_it(coarse):
    """The finer form is not made from the coarser one, and readers in float read the finer one."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            x = self.stem(x)
            return self.a(x), self.b(x), torch.erf(x)

    config = fxq.QuantConfig(activation=fxq.TensorSpec(bits=3, observer="minmax"))
    model, x = settled(Model), torch.randn(64, 4)
    gm = until(model, x, "insert-qdq", portable().override(coarse, config)).gm
    lines = text(gm).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("stem = "))
    assert lines[start + 1 : start + 5] == [
        "stem_q = quantize(stem, B)",
        "stem_dq = dequantize(stem_q, B)",
        "stem_q_1 = quantize(stem, C, qmax=7)",
        "stem_dq_1 = dequantize(stem_q_1, C, qmax=7)",
    ]
    assert "erf = erf(stem_dq)" in lines
    quantized = call(gm, x)
    losses = dict(zip("ab", map(sqnr, call(model, x), quantized), strict=False))
    assert losses.pop(coarse) < 25
    assert min(losses.values()) > decibels(35)
    on_auto = fxq.quantize(model, fxq.Recipe.static(narrow="activations").override(coarse, config), data=[x])
    assert sqnr(quantized, call(on_auto, x)) > 50


def test_a_value_that_is_always_zero():
    model, x = build("several_inputs"), (torch.randn(4, 3, 8, 8), torch.zeros(4, 2, 8, 8))
    manager = until(model, x, "insert-qdq", REFERENCE)
    graph = manager.history["insert-qdq"].graph
    assert "y_q = quantize(y, scale=1, zero_point=0)" in str(graph)
    assert graph["y"].note == "calibration saw nothing but zeros: scale 1"
    assert sqnr(call(model, x), call(manager.gm, x)) > 30


def test_readers_of_the_shape_read_the_integers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Linear(4 * 16, 3)

        def forward(self, x):
            x = self.a(x)
            return self.b(x.view(x.size(0), x.shape[1] * 16))

    model, x = settled(Model), torch.randn(4, 3, 4, 4)
    lines = text(until(model, x, "insert-qdq", REFERENCE).gm)
    assert "size = .size(a_q, 0)" in lines
    assert "getattr_1 = getattr(a_q, 'shape')" in lines


class Concatenated(nn.Module):
    """Two tensors of very different size that share a grid."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.b.weight.mul_(100)
            self.head.weight[:, :4] *= 0.01

    def forward(self, x):
        return self.head(torch.cat([self.a(x), self.b(x)], 1))


def test_a_group_covers_all_its_tensors():
    """Averaged ranges would cut off the larger tensor."""
    model, data = settled(Concatenated), [torch.randn(4, 3, 8, 8) for _ in range(4)]

    def quantized(observer):
        spec = fxq.TensorSpec(observer=observer)
        return fxq.quantize(model, fxq.Recipe.static(backend="reference", activation=spec), data=data)

    wanted = call(model, data[0])
    assert sqnr(wanted, call(quantized("moving_average"), data[0])) > 30
    assert sqnr(wanted, call(quantized("minmax"), data[0])) > 30


def test_conversion_without_data_can_be_made_up_for():
    """The error comes before the first edit."""
    model, x = settled(Concatenated), torch.randn(4, 3, 8, 8)
    observed = fxq.prepare(model, REFERENCE, x)
    with pytest.raises(fxq.CalibrationError, match="has seen no data"):
        fxq.convert(observed)
    fxq.calibrate(observed, [x])
    assert equal(call(fxq.convert(observed), x), call(fxq.quantize(model, REFERENCE, data=[x]), x))


class WithoutObservers(fxq.Pass):
    """A bad pass: takes the observers out."""

    name = "no-observers"
    needs = gives = fxq.Stage.FUSED

    def run(self, rewriter):
        for node in rewriter.nodes():
            if node.name.endswith("_observer"):
                rewriter.replace(node, node.args[0])


def test_what_a_bad_pass_left_out_is_named():
    observed = fxq.prepare(settled(Concatenated), REFERENCE, torch.randn(4, 3, 8, 8))
    observed(torch.randn(4, 3, 8, 8))
    WithoutObservers().run(Rewriter(observed.manager.gm, observed.manager.context))
    with pytest.raises(fxq.PassError, match=r"%x \(placeholder.*no observer watches"):
        fxq.convert(observed)
