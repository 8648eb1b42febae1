"""smooth, with dynamic ranges: tokens whose outliers are in other channels each time are rotated."""

import math

import pytest
import torch
from scipy.linalg import block_diag
from scipy.linalg import hadamard as scipy_hadamard
from torch import nn

import fxq
from fxq.backends.by_name import unavailable
from fxq.common.metrics import sqnr
from fxq.graph.query import is_op
from fxq.passes import Smooth
from tests.support.graphs import expected, program, run_pass
from tests.support.helpers import module

LAYER = """
    x: float32[64, 256] = input()
    w: float32[512, 256] = tensor('w')
    w_int8: int8[512, 256] = tensor('w_int8')
    scale: float32[512] = tensor('scale')
    x_scale: float32[64, 1] = choose_scale(x, steps=127, axis=-1)
    x_q = quantize(x, scale=x_scale, zero_point=128)
    x_dq = dequantize(x_q, scale=x_scale, zero_point=128)
    w_dq = dequantize(w_int8, scale=scale, zero_point=0, qmin=-127, qmax=127, axis=0)  # 'fc', stands_for='w'
    y = linear(x_dq, w_dq)  # 'fc', plan=Plan(Decision('int8'), \
reads=TensorSpec(symmetric=True, per='row', range='dynamic'), \
weight=TensorSpec(signed=True, symmetric=True, per='channel', observer='minmax'))
    return y
"""


def peaked(*shape):
    """Tokens with two large values, a positive and a negative one, in other channels for each token."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=draw)
    for value in (100.0, -100.0):
        x = x.scatter(-1, torch.randint(shape[-1], (*shape[:-1], 1), generator=draw), value)
    return x


def rotation(channels):
    """Matrix that rotates 32 values at a time, by SciPy."""
    size = 32
    return torch.from_numpy(block_diag(*[scipy_hadamard(size)] * (channels // size)) / size**0.5).float()


def layer_tensors():
    w = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    scale = w.abs().amax(1) / 127
    return {"w": w, "scale": scale, "w_int8": (w / scale[:, None]).round().to(torch.int8)}


def test_text_before_and_after():
    x, tensors = peaked(64, 256), layer_tensors()
    gm = run_pass(Smooth(least=64), LAYER, tensors, data=(x,))
    grid = "scale=x_rotated_scale, zero_point=128"
    assert program(gm) == expected(f"""
        x: float32[64, 256] = input()
        x_rotated: float32[64, 256] = rotate_rows(x, size=32)
        x_rotated_scale: float32[64, 1] = choose_scale(x_rotated, steps=127, axis=-1)
        x_rotated_q: uint8[64, 256] = quantize(x_rotated, {grid})
        x_rotated_dq: float32[64, 256] = dequantize(x_rotated_q, {grid})
        w_rotated_int8: int8[512, 256] = tensor('fxq_data.w_rotated_int8')
        w_rotated_scale: float32[512] = tensor('fxq_data.w_rotated_scale')
        w_dq: float32[512, 256] = dequantize(w_rotated_int8, scale=w_rotated_scale, zero_point=0, \
qmin=-127, qmax=127, axis=0)
        y: float32[64, 512] = linear(x_rotated_dq, w_dq)
        return y
    """)
    turned = tensors["w"] @ rotation(256)
    scale = turned.abs().amax(1)[:, None] / 127
    steps = gm.fxq_data.w_rotated_int8.float()
    torch.testing.assert_close(steps * gm.fxq_data.w_rotated_scale[:, None], turned, atol=float(scale.max()), rtol=0)


@pytest.mark.parametrize("step", [Smooth(rotation_gain=math.inf, least=64), Smooth(dynamic_enough=-10.0, least=64)])
def test_what_it_leaves_alone(step):
    gm = run_pass(step, LAYER, layer_tensors(), data=(peaked(64, 256),))
    assert not any(is_op(node, "rotate_rows") for node in gm.graph.nodes)


@pytest.mark.parametrize(("channels", "outputs"), [(30, 512), (240, 512), (256, 511)])
def test_channels_that_are_no_multiple_of_32_and_small_layers_are_not_rotated(channels, outputs):
    qmodel = fxq.quantize(layer(channels, outputs), DYNAMIC, data=[peaked(64, 16, channels)])
    assert "rotate_rows" not in str(qmodel.history["smooth"])


def layer(channels=256, outputs=512):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(channels, outputs, bias=False)).eval()


BACKENDS = ["reference", "auto", "x86", "jit", "openvino", "onnxruntime"]
DYNAMIC = fxq.Recipe.dynamic(backend="reference", optimize="coverage")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_is_more_exact(backend, tmp_path):
    if why := unavailable(backend):
        pytest.skip(why)
    model, data, fresh = layer(), [peaked(64, 16, 256)], peaked(99, 256)
    recipe = DYNAMIC.with_backend(backend)
    plain, turned = (fxq.quantize(model, r, data=data) for r in (recipe.without_pass("smooth"), recipe))
    with torch.no_grad():
        assert sqnr(model(fresh), turned(fresh)) > sqnr(model(fresh), plain(fresh)) + 5  # dB
    reference = fxq.quantize(model, DYNAMIC, data=data)
    assert sqnr(reference(fresh), turned(fresh)) > 33  # dB; without VNNI, weights of x86 have 7 bits
    turned.save(tmp_path / "m.fxq")
    assert torch.equal(fxq.load(tmp_path / "m.fxq")(fresh), turned(fresh))


def scaled(*shape):
    """As `peaked`, and channels 0, 32, ... are 20 times as large."""
    sizes = torch.ones(shape[-1])
    sizes[::32] = 20.0
    return peaked(*shape).clamp(-20, 20) * sizes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("draw", [peaked, scaled])
def test_parameters_of_a_rotated_layer_compute_its_output(draw, backend, tmp_path):
    if why := unavailable(backend):
        pytest.skip(why)
    model, fresh = layer(), draw(99, 256)
    qmodel = fxq.quantize(model, DYNAMIC.with_backend(backend), data=[draw(64, 16, 256)])
    about = qmodel.qparams()["0"]
    assert about.input_rotation == 32 and (about.input_factors is None) == (draw is peaked)
    assert "rotated" in qmodel.ledger.where(path="0")[0].reason
    x = fresh if about.input_factors is None else fresh * about.input_factors
    with torch.no_grad():
        exact = x @ rotation(256) @ (about.weight * about.weight_scale[:, None]).T
        assert sqnr(exact, qmodel(fresh)) > 38  # dB; the rounding of the input alone
        assert sqnr(model(fresh), exact) > 36  # dB; that of the weight alone, of 7 bits without VNNI


@pytest.mark.parametrize("backend", BACKENDS)
def test_factors_alone_are_parameters_of_a_layer_with_dynamic_ranges(backend):
    if why := unavailable(backend):
        pytest.skip(why)
    sizes = torch.ones(64)
    sizes[::16] = 50.0
    model, x = layer(64, 24), torch.randn(64, 16, 64) * sizes
    qmodel = fxq.quantize(model, DYNAMIC.with_backend(backend), data=[x])
    about = qmodel.qparams()["0"]
    assert about.input_rotation is None
    with torch.no_grad():
        exact = (x * about.input_factors) @ (about.weight * about.weight_scale[:, None]).T
        assert sqnr(model(x), exact) > 35  # dB; the rounding of the weight alone


def test_two_layers_that_read_one_input():
    model = module(lambda self, x: (self.a(x), self.b(x)), a=nn.Linear(256, 300), b=nn.Linear(256, 300))
    qmodel, fresh = fxq.quantize(model, DYNAMIC, data=[peaked(64, 16, 256)]), peaked(99, 256)
    assert str(qmodel.history["smooth"]).count("rotate_rows") == 1
    assert {about.input_rotation for about in qmodel.qparams().values()} == {32}
    with torch.no_grad():
        for wanted, y in zip(model(fresh), qmodel(fresh), strict=True):
            assert sqnr(wanted, y) > 36  # dB


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_files_of_other_runtimes(tmp_path, suffix):
    if suffix == ".onnx":
        pytest.importorskip("onnxruntime")
    fresh = peaked(99, 256)
    qmodel = fxq.quantize(layer(), DYNAMIC, data=[peaked(64, 16, 256)])
    qmodel.export(path := tmp_path / f"m{suffix}", example_inputs=fresh)
    if suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        (y,) = map(torch.from_numpy, session.run(None, {session.get_inputs()[0].name: fresh.numpy()}))
    else:
        y = torch.export.load(path).module()(fresh)
    torch.testing.assert_close(y, qmodel(fresh), atol=0.05, rtol=0)  # a tie can be rounded the other way: one step
