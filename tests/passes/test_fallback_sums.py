"""Layers whose integer sums could leave int32: in float on every backend, and in every file; others stay int8."""

import warnings
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import fxq
from fxq.backends import cpu
from fxq.backends.by_name import unavailable
from tests.support.graphs import MINMAX
from tests.support.machine import needs_vnni

NAMES = ("reference", "auto", "x86", "jit", "openvino", "onnxruntime", "fbgemm", "qnnpack")
BACKENDS = [name for name in NAMES if name == "auto" or unavailable(name) is None]
MEASURING = [name for name in BACKENDS if name in ("reference", "auto", "x86", "onnxruntime")]
FITS = (2**31 - 1) // (127 * 255)
"""66,311 products of the largest integers are within int32."""


def linear(depth, outputs=4):
    """A layer that takes the mean, and a sample of which one value is 1."""
    layer = nn.Linear(depth, outputs)
    with torch.no_grad():
        layer.weight.fill_(1 / depth)
        layer.bias.zero_()
    data = torch.rand(2, depth, generator=torch.Generator().manual_seed(0)) * 0.3
    data[0, 0] = 1.0
    return nn.Sequential(layer).eval(), data


def conv():
    model, data = linear(2040 * 7 * 7)
    layer = nn.Conv2d(2040, 4, 7)
    layer.load_state_dict({"weight": model[0].weight.view(4, 2040, 7, 7), "bias": model[0].bias})
    return nn.Sequential(layer).eval(), data.view(2, 2040, 7, 7)


def signs(depth, outputs=4):
    """A layer whose weights have alternating signs, and an input that has their signs: its result is 1."""
    model, _ = linear(depth, outputs)
    sign = 1 - 2 * (torch.arange(depth) % 2.0)
    with torch.no_grad():
        model[0].weight.mul_(sign)
    return model, sign.expand(2, -1).contiguous()


def static(model, data, backend, *later):
    """With the ranges of some batches, of which kernels are verified on the first."""
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage", activation=MINMAX)
    return quantized(model, recipe, data=[data, *later])


def quantized(model, recipe, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="nothing runs on integers", category=fxq.FxqWarning)
        return fxq.quantize(model, recipe.with_min_sqnr(None), **options)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [lambda: linear(150_000), conv], ids=["linear", "conv2d"])
def test_static(case, backend):
    model, data = case()
    x = torch.full_like(data, 0.98)
    q = static(model, data, backend, x)
    # In float, to its own rounding in 100,000 sums; where activations have 7 bits the convolution fits, to two steps.
    near = 2e-3 if q.ledger[0].precision == "float" else 0.02
    torch.testing.assert_close(q(x), torch.full_like(model(x), 0.98), rtol=0, atol=near)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", MEASURING)
def test_measured(backend):
    model, x = signs(150_000)
    q = quantized(model, fxq.Recipe.dynamic(backend=backend, optimize="coverage"), example_inputs=x)
    torch.testing.assert_close(q(x), torch.ones(2, 4), rtol=0, atol=2e-3)
    if cpu.has_vnni():  # else activations of some backends have 7 bits, and it fits
        assert (q.ledger[0].precision, q.ledger[0].reason) == (
            "float",
            "its sums can reach 2.4e+09, beyond int32 (2.1e+09)",
        )


@pytest.mark.one_in(8)
@needs_vnni
@pytest.mark.parametrize("backend", BACKENDS)
def test_at_the_bound(backend):
    """The largest integers everywhere: as many as int32 holds stay on integers, and are right; one more is float."""
    for depth, precision in ((FITS, "int8"), (FITS + 1, "float")):
        model, data = linear(depth, 2)
        q = static(model, torch.cat([data, torch.ones(1, depth)]), backend)
        assert q.ledger[0].precision == precision
        torch.testing.assert_close(q(torch.ones(2, depth)), torch.ones(2, 2), rtol=0, atol=0.004)  # a step of uint8
    assert q.ledger[0].reason == "its sums can reach 2.1e+09, beyond int32 (2.1e+09)"


@pytest.mark.one_in(4)
@needs_vnni
@pytest.mark.parametrize("backend", MEASURING)
def test_at_the_bound_of_dynamic_ranges(backend):
    """Half of the weights have either sign: twice as many fit."""
    for depth, precision in ((2 * FITS, "int8"), (2 * FITS + 2, "float")):
        model, x = signs(depth, 2)
        q = quantized(model, fxq.Recipe.dynamic(backend=backend, optimize="coverage"), example_inputs=x)
        assert q.ledger[0].precision == precision
        for y in (x, x.abs(), x[:1], x.relu()):
            torch.testing.assert_close(q(y), model(y), rtol=0, atol=0.005)


class FirstStates(nn.Module):
    """The hidden states of an LSTM whose products with the input are all of the largest integers."""

    def __init__(self, depth):
        super().__init__()
        self.lstm = nn.LSTM(depth, 2)
        with torch.no_grad():
            self.lstm.weight_ih_l0.fill_(1 / depth)

    def forward(self, x):
        return self.lstm(x)[0]


@needs_vnni
@pytest.mark.one_in(4)
@pytest.mark.parametrize("backend", MEASURING)
def test_at_the_bound_of_recurrent_layers(backend):
    for depth, precision in ((FITS, "int8"), (FITS + 1, "float")):
        model, x = FirstStates(depth).eval(), torch.ones(2, 1, depth)
        q = quantized(model, fxq.Recipe.dynamic(backend=backend, optimize="coverage"), example_inputs=0.5 * x)
        assert q.ledger[0].precision == precision
        with torch.no_grad():
            torch.testing.assert_close(q(x), model(x), rtol=0, atol=0.005)


@needs_vnni
@pytest.mark.parametrize("preset", ["static", "dynamic"])
def test_the_ledger_names_the_bits_that_fit(preset):
    model, data = linear(80_000) if preset == "static" else signs(2 * FITS + 2, 2)
    inputs = {"data": [data]} if preset == "static" else {"example_inputs": data}
    recipe = getattr(fxq.Recipe, preset)(backend="x86", optimize="coverage")
    fix = quantized(model, recipe, **inputs).ledger[0].fix
    measured = ', per="row", range="dynamic"' if preset == "dynamic" else ""
    assert fix == f"recipe.override('0', fxq.QuantConfig(activation=fxq.TensorSpec(bits=7{measured})))"
    mended = quantized(model, eval(fix, {"recipe": recipe, "fxq": fxq}), **inputs)
    assert mended.ledger[0].precision == "int8"
    torch.testing.assert_close(mended(data), model(data), rtol=0, atol=0.01)  # a step of 7 bits


@pytest.mark.one_in(7)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "auto"])
def test_without_the_pass(backend):
    """Lowering asks, too: the layer stays in qdq form, and its neighbour runs on integers where it did before."""
    model, data = linear(150_000, 8)
    model.append(nn.Linear(8, 3))
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage", activation=MINMAX).without_pass("fallback")
    x = torch.full_like(data, 0.98)
    q = quantized(model.eval(), recipe, data=[torch.cat([data, x])])
    torch.testing.assert_close(q(x), model(x), rtol=0, atol=0.02)
    assert q.ledger[0].precision == ("int8" if backend == "reference" else "float")
    assert q.ledger[1].precision == "int8"


@cache
def runners():
    """Readers of files by suffix and runtime: each returns the first output for an input."""
    runs = {(".pt2", "torch"): lambda path, x: torch.export.load(path).module()(x)}
    if find_spec("onnxruntime") is not None:
        import onnxruntime

        def run(path, x):
            session = onnxruntime.InferenceSession(path)
            return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])

        runs[".onnx", "onnxruntime"] = run
    if "openvino" in BACKENDS:
        import openvino

        def infer(path, x):
            compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
            return torch.from_numpy(compiled([x.numpy()])[0].copy())

        runs |= {(suffix, "openvino"): infer for suffix in (".onnx", ".xml")}
    return runs


CASES = {"linear": (lambda: linear(150_000), 0.98), "conv2d": (conv, 0.98), "measured": (lambda: signs(150_000), 1.0)}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("case", "value"), CASES.values(), ids=CASES)
def test_files(case, value, tmp_path):
    model, data = case()
    if value == 1.0:
        q, x = quantized(model, fxq.Recipe.dynamic(backend="reference"), example_inputs=data), data
    else:
        q, x = static(model, data, "reference"), torch.full_like(data, value)
    for (suffix, runtime), run in runners().items():
        got = run(q.export(tmp_path / f"m{suffix}"), x)
        torch.testing.assert_close(got, torch.full_like(got, value), rtol=0, atol=2e-3, msg=f"{suffix} in {runtime}")


@pytest.mark.one_in(6)
@needs_vnni
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ("auto", "reference")])
def test_kernels_of_edited_weights(backend, tmp_path):
    """They refuse, and so do those of a file; there the form runs."""
    q, x = grown(backend)
    with pytest.raises(fxq.errors.BackendError, match=r"its sums can reach 3.2e\+09, beyond int32"):
        q(x)
    with pytest.warns(
        fxq.FxqWarning, match=r"its sums can reach 3.2e\+09, beyond int32.*Quantize the float model again"
    ):
        got = fxq.load(q.save(tmp_path / "m.fxq"))(x)
    largest = 0.98 * 127 * float(q.qparams()["0"].weight_scale[0]) * 100_000
    torch.testing.assert_close(got, torch.full((2, 4), largest), rtol=0.005, atol=0)  # half a step


def grown(backend):
    """A model of integers that fit, whose weights have grown since; and an input."""
    model, data = linear(100_000)
    with torch.no_grad():
        model[0].weight[:, 1:].mul_(0.5)  # integers of 64, but one
    x = torch.full_like(data, 0.98)
    q = static(model, data, backend, 2 * x)
    assert q.ledger[0].precision == "int8"
    next(tensor for _, tensor in q.named_buffers() if tensor.dtype == torch.int8).fill_(127)
    return q, x


@pytest.mark.slow
def test_files_of_edited_weights(tmp_path):
    """Weights that have grown since: the file has the layer in float, and says so."""
    q, x = grown("reference")
    for (suffix, runtime), run in runners().items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            path = q.export(tmp_path / f"m{suffix}")
        told = [str(w.message) for w in caught if "beyond int32" in str(w.message)]
        assert bool(told) is (suffix != ".pt2")
        assert all("0 is in float in the file: its sums can reach 3.2e+09" in text for text in told)
        torch.testing.assert_close(run(path, x), q(x), rtol=1e-3, atol=0, msg=f"{suffix} in {runtime}")


class Correlates(nn.Module):
    """Product of two activations, along an axis of `steps`."""

    def forward(self, x, y):
        return (x.relu() @ y.relu().transpose(1, 2)) / x.shape[-1]


@pytest.mark.slow
def test_files_of_products_of_activations_without_fallback(tmp_path):
    """They have no stored weights: the file multiplied integers beyond int32, and nothing said so."""
    x, y = torch.full((1, 2, 40_000), 0.98), torch.full((1, 3, 40_000), 0.98)
    recipe = fxq.Recipe.static(backend="reference", optimize="coverage", activation=MINMAX).without_pass("fallback")
    q = quantized(Correlates().eval(), recipe, data=[(x, y)])
    told = r"matmul is in float in the file: its sums can reach 2.6e\+09, beyond int32"
    with pytest.warns(fxq.FxqWarning, match=told):
        path = q.export(tmp_path / "m.onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path)
    names = [graph_input.name for graph_input in session.get_inputs()]
    got = torch.from_numpy(session.run(None, dict(zip(names, (x.numpy(), y.numpy()), strict=True)))[0])
    torch.testing.assert_close(got, torch.full((1, 2, 3), 0.98**2), rtol=0.01, atol=0)
