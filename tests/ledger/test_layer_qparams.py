from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxq
from fxq.graph.region import Weight
from fxq.ledger.layer_qparams import LayerQParams, int32_bias, layers_of
from fxq.ops import OPS
from fxq.ops.traits import OpTraits
from fxq.quant.qparams import QParams
from tests.support.graphs import drawn
from tests.support.helpers import REFERENCE, module, plain

MINMAX = plain(fxq.Recipe.static(backend="reference", activation=fxq.TensorSpec(observer="minmax")))


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)).eval()
    data = [torch.randn(4, 3, 6, 6), torch.randn(4, 3, 6, 6)]
    return model, data, fxq.quantize(model, MINMAX, data=data)


def test_weights_are_symmetric_int8_per_channel(case):
    model, _, qmodel = case
    for name, layer in qmodel.qparams().items():
        weight = model.get_submodule(name).weight.detach().double().numpy()
        absmax = np.abs(weight).reshape(len(weight), -1).max(1)
        assert layer.weight_scale.dtype == torch.float32 and layer.weight_scale.shape == (len(weight),)
        np.testing.assert_allclose(layer.weight_scale.numpy(), absmax / 127, rtol=1e-7)
        scale = layer.weight_scale.double().numpy().reshape(-1, *[1] * (weight.ndim - 1))
        exact = weight / scale
        off = np.abs(layer.weight.numpy() - exact)
        assert layer.weight.dtype == torch.int8 and layer.weight.shape == weight.shape
        assert off.max() <= 0.5 + 1e-5  # the nearest integer; float32 division may turn a tie
        assert np.abs(layer.weight.numpy()).reshape(len(weight), -1).max(1).tolist() == [127] * len(weight)
        assert layer.axis == 0 and layer.weight_zero_point.tolist() == [0] * len(weight)


def test_biases_are_int32_on_the_scale_of_the_accumulator(case):
    model, _, qmodel = case
    for name, layer in qmodel.qparams().items():
        bias = model.get_submodule(name).bias.detach().double().numpy()
        scale = np.float64(layer.input_scale) * layer.weight_scale.double().numpy()
        np.testing.assert_allclose(layer.bias_scale.double().numpy(), scale, rtol=1e-6)
        assert layer.bias.dtype == torch.int32
        assert np.abs(layer.bias.numpy() - bias / scale).max() <= 0.5 + np.abs(bias / scale).max() * 1e-6
        np.testing.assert_allclose(layer.bias.numpy() * scale, bias, atol=float(scale.max()))


def test_activations_have_the_scales_of_the_graph_and_of_the_data(case):
    model, data, qmodel = case
    conv, linear = qmodel.qparams()["0"], qmodel.qparams()["3"]
    grids = {n.name: n.kwargs for n in qmodel.graph.nodes if "scale" in n.kwargs}
    assert (conv.input_scale, conv.input_zero_point) == (
        grids["input_1_q"]["scale"],
        grids["input_1_q"]["zero_point"],
    )
    low, high = float(min(x.min() for x in data)), float(max(x.max() for x in data))
    assert conv.input_scale == pytest.approx((high - low) / 255, rel=1e-6)
    assert conv.input_zero_point == round(-low / conv.input_scale)
    top = float(max(model[:2](x).detach().max() for x in data))
    assert (conv.output_scale, conv.output_zero_point) == (pytest.approx(top / 255, rel=1e-6), 0)  # relu: from zero
    assert (linear.input_scale, linear.input_zero_point) == (conv.output_scale, conv.output_zero_point)
    assert (linear.output_scale, linear.output_zero_point) == (None, None)  # the model returns floats


def test_the_integers_alone_compute_the_layer(case):
    """Integer arithmetic of Jacob et al. on what qparams() returns, against the quantized model."""
    _, data, qmodel = case
    conv, linear = qmodel.qparams()["0"], qmodel.qparams()["3"]
    x = np.clip(np.round(data[0].numpy() / np.float32(conv.input_scale)) + conv.input_zero_point, 0, 255)
    x = torch.from_numpy(x.astype(np.int64) - conv.input_zero_point)
    acc = F.conv2d(x.double(), conv.weight.double()) + conv.bias.double().reshape(1, -1, 1, 1)
    real = acc * conv.bias_scale.double().reshape(1, -1, 1, 1)
    hidden = torch.clamp(torch.round(torch.relu(real) / conv.output_scale), 0, 255)
    acc = hidden.flatten(1) @ linear.weight.double().T + linear.bias
    want = acc * linear.bias_scale.double()
    got = qmodel(data[0]).double()
    # a hidden value may round the other way (its bias is an integer here): at most a few steps of 1e-3 of the range
    step = linear.input_scale * float(linear.weight_scale.max()) * 127
    assert (got - want).abs().max() <= 3 * step


@pytest.mark.slow
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8),
    st.floats(2.0**-20, 1.0, width=32),
)
def test_the_formula_of_the_bias(bias, scale):
    got = int32_bias(torch.tensor(bias), torch.tensor(scale))
    want = np.clip(
        np.round(np.array(bias, dtype=np.float32).astype(np.float64) / np.float64(scale)), -(2**31), 2**31 - 1
    )
    assert got.dtype == torch.int32 and got.tolist() == want.astype(np.int64).tolist()


def test_a_bias_beyond_int32_is_clamped():
    scale = torch.tensor([1e-12])
    assert int32_bias(torch.tensor([1e3]), scale).tolist() == [2**31 - 1]
    assert int32_bias(torch.tensor([-1e3]), scale).tolist() == [-(2**31)]


def test_no_bias():
    qmodel = fxq.quantize(nn.Sequential(nn.Linear(4, 2, bias=False)).eval(), MINMAX, data=[torch.randn(8, 4)])
    assert qmodel.qparams()["0"].bias is None


def test_per_tensor_weights():
    recipe = fxq.Recipe.static(
        backend="reference", weight=fxq.TensorSpec(signed=True, symmetric=True, observer="minmax")
    )
    model = nn.Sequential(nn.Linear(4, 2)).eval()
    layer = fxq.quantize(model, recipe, data=[torch.randn(8, 4)]).qparams()["0"]
    assert layer.axis is None and layer.weight_scale.shape == () == layer.weight_zero_point.shape
    assert float(layer.weight_scale) == pytest.approx(float(model[0].weight.detach().abs().max()) / 127, rel=1e-7)


def test_a_transposed_convolution_has_its_channels_on_the_second_axis():
    model = nn.Sequential(nn.ConvTranspose2d(3, 5, 2)).eval()
    layer = fxq.quantize(model, MINMAX, data=[torch.randn(2, 3, 4, 4)]).qparams()["0"]
    assert layer.axis == 1 and layer.weight.shape == (3, 5, 2, 2)
    want = model[0].weight.detach().abs().amax((0, 2, 3)) / 127
    torch.testing.assert_close(layer.weight_scale, want, rtol=1e-6, atol=0)


def test_a_module_called_twice_has_two_entries():
    model = module(lambda self, x: self.fc(torch.relu(self.fc(x))), fc=nn.Linear(4, 4))
    layers = fxq.quantize(model, MINMAX, data=[torch.randn(8, 4)]).qparams()
    assert list(layers) == ["fc", "fc@2"]
    assert torch.equal(layers["fc"].weight, layers["fc@2"].weight)
    assert layers["fc"].output_scale == layers["fc@2"].input_scale != layers["fc"].input_scale


def test_two_modules_that_share_a_weight():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model = nn.Sequential(first, second).eval()
    layers = fxq.quantize(model, MINMAX, data=[torch.randn(8, 4)]).qparams()
    assert torch.equal(layers["0"].weight, layers["1"].weight)
    assert not torch.equal(layers["0"].bias, layers["1"].bias)


def test_a_functional_call_goes_by_its_node():
    model = module(lambda self, x: F.linear(x, self.w), w=torch.randn(3, 4))
    qmodel = fxq.quantize(model, MINMAX, data=[torch.randn(8, 4)])
    assert list(qmodel.qparams()) == ["linear"]


def test_a_folded_batch_norm_is_in_the_integers():
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(3)
    norm.running_mean.uniform_(-1, 1), norm.running_var.uniform_(0.5, 2)
    nn.init.uniform_(norm.weight, 0.5, 2), nn.init.uniform_(norm.bias, -1, 1)
    model = nn.Sequential(nn.Linear(4, 3), norm).eval()
    layer = fxq.quantize(model, MINMAX, data=[torch.randn(8, 4)]).qparams()["0"]
    gain = norm.weight.double() / torch.sqrt(norm.running_var.double() + norm.eps)
    weight = model[0].weight.double() * gain[:, None]
    bias = (model[0].bias.double() - norm.running_mean.double()) * gain + norm.bias.double()
    step = layer.weight_scale.double()[:, None]
    assert ((layer.weight.double() * step - weight).abs() <= 0.5001 * step).all()
    assert ((layer.bias.double() * layer.bias_scale.double() - bias).abs() <= 0.51 * layer.bias_scale.double()).all()


def test_float_layers_have_no_entry():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    qmodel = fxq.quantize(model, MINMAX.override("2", fxq.FLOAT), data=[torch.randn(8, 4)])
    assert list(qmodel.qparams()) == ["0"]


def test_every_backend_reports_the_same_integers(case):
    model, data, qmodel = case
    recipe = plain(fxq.Recipe.static(activation=MINMAX.config.activation, reduce_range="activations"))
    second = fxq.quantize(model, recipe, data=data)
    if second.history["insert-qdq"].graph["input_1_q"].scale != qmodel.history["insert-qdq"].graph["input_1_q"].scale:
        pytest.skip("this machine's backend takes fewer bits")
    for name, layer in qmodel.qparams().items():
        assert torch.equal(second.qparams()[name].weight, layer.weight)
        assert torch.equal(second.qparams()[name].bias, layer.bias)
        assert second.qparams()[name].input_scale == layer.input_scale


def test_weights_on_another_device_than_the_scales():
    """Scales come from observers, on the CPU. A fake device refuses to mix as a real one does."""
    with FakeTensorMode():
        bias, scale = torch.empty(4, device="cuda"), torch.empty(4)
        with pytest.raises(RuntimeError, match="device"):
            bias / scale
        assert int32_bias(bias, scale).device.type == "cpu"


# ---- layers whose accumulator has no scale known beforehand, as graphs


WEIGHT = """
        w: int8[3, 4] = tensor("w")
        scale: float32[3] = tensor("scale")
        zero: int32[3] = tensor("zero")
        b: float32[3] = tensor("b")
        w_dq = dequantize(w, scale=scale, zero_point=zero, qmin=-127, qmax=127, axis=0)
"""
GIVEN = {
    "w": torch.arange(-6, 6, dtype=torch.int8).reshape(3, 4),
    "scale": torch.tensor([0.5, 0.25, 2.0]),
    "zero": torch.zeros(3, dtype=torch.int32),
    "b": torch.tensor([1.0, -1.0, 0.5]),
}


def only_layer(program: str, **tensors: torch.Tensor) -> LayerQParams:
    """The layer of a graph that has one."""
    (layer,) = layers_of(fxq.extend.read_graph(program, {**drawn(program), **GIVEN, **tensors})).values()
    return layer


def test_weights_alone_are_a_layer_with_a_float_bias():
    layer = only_layer(f"""
        x: float32[2, 4] = input()
        {WEIGHT}
        y = linear(x, w_dq, b)  # 'head.fc', 'net.py:1'
        return y
    """)
    assert torch.equal(layer.weight, GIVEN["w"]) and torch.equal(layer.weight_scale, GIVEN["scale"])
    assert (layer.axis, layer.block, layer.reads) == (0, None, "float")
    assert layer.bias.dtype == torch.float32 and torch.equal(layer.bias, GIVEN["b"])
    assert (layer.bias_scale, layer.input_scale, layer.output_scale) == (None, None, None)
    assert layer.float_bias_reason == "its input is float"
    assert repr(layer) == "<LayerQParams of y: weight (3, 4), reads float>"


def test_a_float_weight_makes_no_layer():
    program = """
        x: float32[2, 4] = input()
        w: float32[3, 4] = tensor("w")
        y = linear(x, w)
        return y
    """
    assert layers_of(fxq.extend.read_graph(program, {"w": torch.randn(3, 4)})) == {}


def test_a_dynamic_scale_leaves_the_bias_in_float():
    layer = only_layer(f"""
        x: float32[2, 4] = input()
        s: float32[()] = input()
        {WEIGHT}
        x_q = quantize(x, scale=s, zero_point=128)
        x_dq = dequantize(x_q, scale=s, zero_point=128)
        y = linear(x_dq, w_dq, b)
        return y
    """)
    assert (layer.reads, layer.input_scale, layer.input_zero_point) == ("dynamic", None, 128)
    assert layer.bias_scale is None and torch.equal(layer.bias, GIVEN["b"])
    assert layer.float_bias_reason == "the scale of its input is computed at run time"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_dynamic_model(backend):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5)).eval()
    recipe = fxq.Recipe.dynamic(backend=backend, optimize="coverage")
    layers = fxq.quantize(model, recipe, example_inputs=torch.randn(4, 16)).qparams()
    assert list(layers) == ["0", "2"]
    for name, layer in layers.items():
        weight = model[int(name)].weight.detach()
        assert (
            (layer.weight * layer.weight_scale[:, None] - weight).abs() <= layer.weight_scale[:, None] * 0.501
        ).all()
        assert layer.reads == "dynamic" and torch.equal(layer.bias, model[int(name)].bias)
        assert layer.float_bias_reason == "the scale of its input is computed at run time"


def test_there_is_no_reason_where_there_is_no_bias():
    layer = only_layer(f"""
        x: float32[2, 4] = input()
        {WEIGHT}
        y = linear(x, w_dq)
        return y
    """)
    assert (layer.bias, layer.float_bias_reason, layer.reads) == (None, "", "float")


def test_a_known_scale_gives_the_int32_bias():
    layer = only_layer(f"""
        x: float32[2, 4] = input()
        {WEIGHT}
        x_q = quantize(x, scale=0.125, zero_point=3)
        x_dq = dequantize(x_q, scale=0.125, zero_point=3)
        y = linear(x_dq, w_dq, b)
        return y
    """)
    assert layer.bias_scale.tolist() == [0.0625, 0.03125, 0.25]
    assert layer.bias.dtype == torch.int32 and layer.bias.tolist() == [16, -32, 2]
    assert (layer.float_bias_reason, layer.reads, layer.input_zero_point) == ("", "integers", 3)


def test_a_bias_that_int32_does_not_hold_is_float_and_says_why():
    model = nn.Linear(4, 4)
    model.weight.data[1] *= 1e-12
    model.bias.data.fill_(0.5)
    (layer,) = fxq.quantize(model, REFERENCE, data=[torch.randn(8, 4)]).qparams().values()
    assert torch.equal(layer.bias, model.bias) and layer.bias_scale is None
    assert layer.float_bias_reason == "its integers, on steps of input_scale * weight_scale, exceed int32"


def test_a_weight_in_blocks_of_4_bits():
    block = dict(scale=torch.rand(3, 2) + 0.1, zero=torch.zeros(3, 2, dtype=torch.int32))
    layer = only_layer(
        """
        x: float32[2, 4] = input()
        w: int8[3, 4] = tensor("w")
        scale: float32[3, 2] = tensor("scale")
        zero: int32[3, 2] = tensor("zero")
        b: float32[3] = tensor("b")
        w_dq = dequantize(w, scale=scale, zero_point=zero, qmin=-7, qmax=7, axis=1, block=2)
        x_q = quantize(x, scale=0.125, zero_point=3)
        x_dq = dequantize(x_q, scale=0.125, zero_point=3)
        y = linear(x_dq, w_dq, b)
        return y
        """,
        **block,
    )
    assert (layer.axis, layer.block, layer.weights["weight"].qparams.bits) == (1, 2, 4)
    assert torch.equal(layer.weight_scale, block["scale"])
    assert (layer.reads, layer.input_scale) == ("integers", 0.125)
    assert layer.bias.dtype == torch.float32
    assert layer.float_bias_reason == "the weights of one output channel have several scales"


def test_an_input_with_a_scale_for_each_channel():
    layer = only_layer(
        f"""
        x: int8[2, 4] = input()
        {WEIGHT}
        s: float32[4] = tensor("s")
        z: int32[4] = tensor("z")
        x_dq = dequantize(x, scale=s, zero_point=z, qmin=-128, qmax=127, axis=1)
        y = linear(x_dq, w_dq, b)
        return y
        """,
        s=torch.rand(4),
        z=torch.zeros(4, dtype=torch.int32),
    )
    assert (layer.reads, layer.float_bias_reason) == ("integers", "its input has several scales")


# ---- layers with several weights


@pytest.fixture
def recurrent():
    recurrence = replace(OPS["gru"].traits.recurrence, gates=("i", "f"))
    named = {"weight": "weight_ih", "more_weights": ("weight_hh",), "bias": "bias"}
    quant = OpTraits("computes", **named, axis=0, recurrence=recurrence)

    @OPS.row(traits=quant, name="toy_recurrent")
    def toy_recurrent(x, weight_ih, weight_hh, bias):
        return F.linear(x, weight_ih, bias) + F.linear(x, weight_hh)

    yield "toy_recurrent"
    OPS.discard("toy_recurrent")


def test_gates_by_name(recurrent):
    program = f"""
        x: float32[2, 4] = input()
        w: int8[4, 4] = tensor("w")
        scale: float32[4] = tensor("scale")
        zero: int32[4] = tensor("zero")
        b: float32[4] = tensor("b")
        v: int8[4, 4] = tensor("v")
        v_scale: float32[4, 2] = tensor("v_scale")
        v_zero: int32[4, 2] = tensor("v_zero")
        w_dq = dequantize(w, scale=scale, zero_point=zero, qmin=-127, qmax=127, axis=0)
        v_dq = dequantize(v, scale=v_scale, zero_point=v_zero, qmin=-7, qmax=7, axis=1, block=2)
        x_q = quantize(x, scale=0.125, zero_point=3)
        x_dq = dequantize(x_q, scale=0.125, zero_point=3)
        y = {recurrent}(x_dq, w_dq, v_dq, b)
        return y
    """
    inputs = {
        "w": torch.arange(16, dtype=torch.int8).reshape(4, 4),
        "scale": torch.rand(4),
        "zero": torch.zeros(4, dtype=torch.int32),
        "b": torch.rand(4),
        "v": torch.arange(-8, 8, dtype=torch.int8).reshape(4, 4),
        "v_scale": torch.rand(4, 2),
        "v_zero": torch.zeros(4, 2, dtype=torch.int32),
    }
    layer = only_layer(program, **inputs)
    assert list(layer.weights) == ["weight_ih", "weight_hh"]
    assert torch.equal(layer.weight, inputs["w"]) and torch.equal(layer.weights["weight_hh"].values, inputs["v"])
    assert layer.gates == {"i": slice(0, 2), "f": slice(2, 4)}
    assert torch.equal(layer.bias[layer.gates["f"]], inputs["b"][2:])
    assert layer.float_bias_reason == "the products of its weights have different scales"
    forget, hidden = layer.gate("f"), layer.gate("f", "weight_hh")
    assert torch.equal(forget.values, inputs["w"][2:]) and torch.equal(forget.qparams.scale, inputs["scale"][2:])
    assert torch.equal(hidden.values, inputs["v"][2:]) and torch.equal(hidden.qparams.scale, inputs["v_scale"][2:])
    with pytest.raises(fxq.InputError, match=r"unknown gate 'o'.* Known: f, i"):
        layer.gate("o")
    with pytest.raises(fxq.InputError, match="unknown weight with gates 'weight_hr'"):
        layer.gate("f", "weight_hr")
    data = layer.to_dict()
    assert data["gates"] == {"i": [0, 1], "f": [2, 3]}
    assert (data["weight_hh_bits"], data["weight_hh_block"], data["weight_hh_axis"]) == (4, 2, 1)


def test_a_gate_of_a_weight_with_one_scale_has_that_scale():
    grid = QParams.per_tensor(0.5, 0, -127, 127, torch.int8)
    weight = Weight(torch.arange(4, dtype=torch.int8).reshape(2, 2), grid)
    gates = {"r": slice(0, 1), "z": slice(1, 2)}
    layer = LayerQParams({"weight_ih": weight}, gates, {}, None, "", "float", None, None, None, None, "gru")
    assert layer.gate("z").values.tolist() == [[2, 3]] and layer.gate("z").qparams.s == 0.5


def test_an_lstm_has_both_biases_and_its_gates():
    model = module(lambda m, x: m.rnn(x)[0], rnn=torch.nn.LSTM(3, 4))
    recipe = fxq.Recipe.dynamic(backend="reference", optimize="coverage")
    layer = fxq.quantize(model, recipe, example_inputs=torch.randn(2, 1, 3)).qparams()["rnn.l0"]
    assert list(layer.biases) == ["bias_ih", "bias_hh"] and layer.bias is layer.biases["bias_ih"]
    assert torch.equal(layer.biases["bias_hh"][layer.gates["f"]], model.rnn.bias_hh_l0.detach()[4:8])
    assert layer.float_bias_reason and set(layer.to_dict()) >= {"bias_ih", "bias_hh", "weight_hh_scale"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ["reference", "x86", "fbgemm"])
def test_a_smoothed_layer_says_what_its_input_is_multiplied_by(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8)).eval()
    with torch.no_grad():
        model[0].weight[5] *= 30  # one channel is much larger than the others
    data = torch.randn(64, 16, 32)
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage").without_pass("correct-bias")
    qmodel = fxq.quantize(model, recipe.without_pass("keep-small-values"), data=[data])
    first, layer = (qmodel.qparams()[name] for name in "01")
    assert first.input_factors is None and layer.input_factors.shape == (32,)
    factors = layer.input_factors.double()
    real = (layer.weight.double() - layer.weight_zero_point.view(-1, 1)) * layer.weight_scale.double().view(-1, 1)
    wanted, step = model[1].weight.detach().double() / factors, layer.weight_scale.double().view(-1, 1)
    assert ((real - wanted).abs() <= 0.5001 * step).all()
    x = model[0](data).double() * factors
    integers = torch.round(x / layer.input_scale) + layer.input_zero_point
    assert 60 < integers.max() - integers.min() <= 255  # the grid is made for the products
