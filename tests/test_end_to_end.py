"""Whole networks through the whole pipeline: int8 against its qdq form and against float, on both backends."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxq
from fxq.backends import cpu
from fxq.backends.by_name import NAMES, unavailable
from fxq.backends.table.layer_kernel import LayerKernel
from fxq.common.metrics import sqnr, tensors
from fxq.errors import warn_once
from fxq.graph.info import info
from tests.support.graphs import again, equal, stepwise
from tests.support.helpers import REFERENCE, module
from tests.support.machine import X86, decibels, needs_vnni, needs_x86, portable, quiet
from tests.support.models import NETWORKS, batch, build, call, settled

BACKENDS = ["reference", pytest.param("x86", marks=needs_x86)]


def recurrent():
    """Two LSTM layers and a linear one."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = nn.LSTM(16, 24, 2, batch_first=True), nn.Linear(24, 5)

        def forward(self, x):
            return self.head(self.layers(x)[0])

    torch.manual_seed(0)
    return Net().eval()


def qdq_form(recipe):
    """Recipe for the qdq graph of this recipe: no kernels, equal scales and zero points."""
    return recipe.without_pass("lower").without_pass("verify-lowering")


def smooth(name, n, seed=1):
    """A batch for calibration; the constant part of an input is the same in all batches."""
    inputs = batch(name, n, seed)
    if name == "dict_output":
        inputs["offset"] = torch.linspace(0, 1, 6)
    return inputs


# ---- pass by pass

LOSES = {
    "canonicalize": 110,
    "decompose": 110,
    "fold-batch-norm": 110,
    "insert-qdq": 35,
    "smooth": 20,
    "correct-bias": 20,
    "lower": 50,
}
"""dB that a pass keeps of the output of the one before, activations with 8 bits; the others change no bit of it."""
ONCE = (
    "trace",
    "insert-observers",
    "insert-qdq",
    "smooth",
    "correct-bias",
)  # they give a stage, or fit to what is there
LOOKS = ("annotate", "share-qparams", "choose-grids", "verify-lowering")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_pass_keeps_the_output_and_does_nothing_twice(name, backend):
    model, inputs = build(name), batch(name, 8)
    before = call(model, inputs)
    with quiet():
        for manager, step in stepwise(model, inputs, fxq.Recipe.static(backend=backend)):
            got = call(manager.gm, inputs)
            least = decibels(LOSES.get(step.name, torch.inf), backend)
            assert equal(got, before) or sqnr(before, got) > least, step.name
            assert step.name in ONCE or again(manager, step) == [], step.name
            assert step.name not in LOOKS or manager.history[step.name].edits == ()
            if step.name == "fuse":  # an op belongs to one unit
                owned = [part[0] for n in manager.gm.graph.nodes for part in info(n).fused.parts if part]
                assert len(owned) == len(set(owned))
            before = got


# ---- numbers


@pytest.mark.one_in(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_int8_is_close_to_float(name, backend):
    """On data that calibration has not seen."""
    model = build(name)
    data = [smooth(name, 16, seed) for seed in range(4)]
    quantized = fxq.quantize(model, fxq.Recipe.static(backend=backend), data=data)
    inputs = smooth(name, 8, seed=9)
    wanted, got = call(model, inputs), call(quantized, inputs)
    assert [t.shape for t in tensors(wanted)] == [t.shape for t in tensors(got)]
    assert [t.dtype for t in tensors(wanted)] == [t.dtype for t in tensors(got)]
    assert type(got) is type(wanted)
    assert sqnr(wanted, got) > decibels(32, backend)
    assert quantized.backend == backend
    assert quantized.ledger.count("int8") >= 2


@pytest.mark.one_in(4)
@needs_x86
@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_are_their_qdq_form_at_any_batch_size(name):
    model, data = build(name), [smooth(name, 8)]
    quantized = fxq.quantize(model, X86, data=data)
    qdq = fxq.quantize(model, qdq_form(X86), data=data)
    for n in (1, 3, 8):
        inputs, unbound = smooth(name, n, seed=5), copy.deepcopy(quantized)
        first = call(unbound, inputs)
        assert sqnr(call(qdq, inputs), first) > 50
        for _ in range(2):  # the second call binds the kernels, and the third runs what is bound
            assert equal(call(unbound, inputs), first)


@pytest.mark.one_in(6)
@needs_x86
@pytest.mark.parametrize("name", [n for n in NETWORKS if n not in ("shared_weight", "dict_output", "sequence")])
def test_memory_layout_makes_no_difference(name):
    model, inputs = build(name), smooth(name, 4)
    quantized = fxq.quantize(model, X86, data=[inputs])
    is_tuple = isinstance(inputs, tuple)
    last = [x.contiguous(memory_format=torch.channels_last) for x in (inputs if is_tuple else (inputs,))]
    strided = [torch.stack([x, x], -1)[..., 0] for x in last]
    wanted = call(quantized, inputs)
    for form in (last, strided):
        got = call(quantized, tuple(form) if is_tuple else form[0])
        assert sqnr(wanted, got) > 100  # float ops between kernels may sum in another order


def test_another_image_size_than_the_calibration_s():
    model = build("residual")
    quantized = fxq.quantize(model, data=[batch("residual", 8)])
    for size in (5, 16, 9):
        x = torch.randn(2, 3, size, size)
        assert sqnr(call(model, x), call(quantized, x)) > 30


@pytest.mark.one_in(30)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_user_s_model_and_data_stay(name, backend):
    model, inputs = build(name), batch(name)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    kept = [t.clone() for t in tensors(inputs)]
    before = call(model, inputs)
    quantized = fxq.quantize(model, fxq.Recipe.static(backend=backend), data=[inputs])
    call(quantized, inputs)
    assert equal(list(tensors(inputs)), kept)
    assert equal(dict(model.state_dict()), weights)
    assert equal(call(model, inputs), before)


# ---- CPUs without VNNI


@pytest.mark.one_in(2)
@needs_x86
@pytest.mark.parametrize("role", ["activations", "weights"])
def test_without_vnni_one_role_has_7_bits(monkeypatch, role):
    monkeypatch.setattr(cpu, "has_vnni", lambda: False)
    warn_once.cache_clear()
    model, inputs = build("residual"), batch("residual", 16)
    recipe = replace(X86, reduce_range=role)
    with pytest.warns(fxq.FxqWarning, match="no VNNI.*7 bits for one of them"):
        quantized = fxq.quantize(model, recipe, data=[inputs])
    grids = {module.x.qmax for module in quantized.modules() if isinstance(module, LayerKernel)}
    assert grids == ({127} if role == "activations" else {255})
    largest = {int(layer.weight.abs().max()) for layer in quantized.qparams().values()}
    assert largest == ({127} if role == "activations" else {63})
    assert quantized.ledger.count("int8") >= 10
    qdq = fxq.quantize(model, qdq_form(recipe), data=[inputs])
    assert sqnr(call(qdq, inputs), call(quantized, inputs)) > 50
    assert sqnr(call(model, inputs), call(quantized, inputs)) > 30


@needs_x86
@needs_vnni
def test_with_vnni_they_have_8_bits_and_nothing_is_said():
    with quiet():
        quantized = fxq.quantize(build("residual"), X86, data=[batch("residual")])
    written = str(quantized.history["insert-qdq"].graph).splitlines()
    assert not [line for line in written if "qmax" in line and "axis=" not in line]  # but those of weights


# ---- specs and observers

SPEC = fxq.TensorSpec(observer="minmax")
WEIGHT = fxq.TensorSpec(signed=True, symmetric=True, per="channel", observer="minmax")


@pytest.mark.one_in(15)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {"activation": fxq.TensorSpec(symmetric=True, observer="minmax")},
        {"activation": fxq.TensorSpec(bits=7, observer="minmax")},
        {"weight": fxq.TensorSpec(signed=True, symmetric=True, observer="minmax")},
        {"activation": fxq.TensorSpec(observer="minmax")},
        {"activation": fxq.TensorSpec(observer="moving_average")},
        {"activation": fxq.TensorSpec(observer="percentile")},
    ],
    ids=["symmetric", "7 bits", "per tensor", "minmax", "moving_average", "percentile"],
)
@pytest.mark.parametrize("name", ["residual", "convolutions", "shared_weight"])
def test_specs_and_observers(name, options, backend):
    model, data = build(name), [batch(name, 16, seed) for seed in range(3)]
    recipe = fxq.Recipe.static(backend=backend, reduce_range="weights", **options)
    quantized = fxq.quantize(model, recipe, data=data)
    assert sqnr(call(model, data[0]), call(quantized, data[0])) > decibels(25, backend)
    assert sqnr(call(fxq.quantize(model, qdq_form(recipe), data=data), data[0]), call(quantized, data[0])) > 50
    layer = next(iter(quantized.qparams().values()))
    symmetric = options.get("activation", SPEC).symmetric
    assert ({layer_qparams.input_zero_point for layer_qparams in quantized.qparams().values()} == {128}) is symmetric
    assert layer.axis == (None if "weight" in options else 0)


@pytest.mark.parametrize(
    "activation", [fxq.TensorSpec(signed=True, symmetric=True), fxq.TensorSpec(signed=True, observer="minmax")]
)
def test_signed_activations_on_the_reference_backend(activation):
    model, inputs = build("residual"), batch("residual", 16)
    quantized = fxq.quantize(model, fxq.Recipe.static(backend="reference", activation=activation), data=[inputs])
    assert sqnr(call(model, inputs), call(quantized, inputs)) > 30
    assert "dtype=int8" in str(quantized.history["insert-qdq"].graph)


def test_fewer_bits_lose_about_six_decibels_each():
    """Activations and weights of 4 and 6 bits on the reference backend."""
    model, inputs = settled(lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))), torch.randn(256, 16)
    losses = {}
    for bits in (4, 6, 8):
        spec = fxq.TensorSpec(bits=bits)
        weight = fxq.TensorSpec(bits=bits, signed=True, symmetric=True, per="channel", observer="minmax")
        recipe = fxq.Recipe.static(backend="reference", activation=spec, weight=weight)
        quantized = fxq.quantize(model, recipe, data=[inputs])
        losses[bits] = sqnr(call(model, inputs), call(quantized, inputs))
        limit = 2 ** (bits - 1) - 1
        assert all(int(p.weight.abs().max()) == limit for p in quantized.qparams().values())
    assert 9 < losses[6] - losses[4] < 15
    assert 9 < losses[8] - losses[6] < 15


@pytest.mark.parametrize("coarse", ["a", "b"])
def test_two_specs_of_one_value(coarse):
    """The coarse layer loses what it must, the fine one nothing; kernels read both forms."""
    layers = {"stem": nn.Linear(4, 8), "a": nn.Linear(8, 4), "b": nn.Linear(8, 4)}
    model = module(lambda self, x: (self.a(y := self.stem(x)), self.b(y), torch.erf(y)), **layers)
    x, config = torch.randn(64, 4), fxq.QuantConfig(activation=fxq.TensorSpec(bits=3, observer="minmax"))
    quantized = call(fxq.quantize(model, portable().override(coarse, config), data=[x]), x)
    losses = dict(zip("ab", map(sqnr, call(model, x), quantized), strict=False))
    assert losses.pop(coarse) < 25
    assert min(losses.values()) > decibels(35)
    on_auto = fxq.quantize(model, fxq.Recipe.static(reduce_range="activations").override(coarse, config), data=[x])
    assert sqnr(quantized, call(on_auto, x)) > 50


# ---- special data


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_input_that_is_always_zero(backend):
    model = build("several_inputs")
    inputs = (torch.randn(8, 3, 8, 8), torch.zeros(8, 2, 8, 8))
    quantized = fxq.quantize(model, fxq.Recipe.static(backend=backend), data=[inputs])
    assert "only zeros: its grid is that of values up to 1" in quantized.history["insert-qdq"].graph["y"].note
    assert quantized.qparams()["right"].input_scale in (pytest.approx(1 / 255), pytest.approx(1 / 127))
    assert sqnr(call(model, inputs), call(quantized, inputs)) > 30


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_of_zeros(backend):
    model = build("residual")
    with torch.no_grad():
        model.conv3.weight.zero_()
        model.conv3.bias.zero_()
    inputs = batch("residual", 16)
    quantized = fxq.quantize(model, fxq.Recipe.static(backend=backend), data=[inputs])
    assert sqnr(call(model, inputs), call(quantized, inputs)) > 30


def test_a_default_argument_may_be_given():
    model, inputs = build("several_inputs"), batch("several_inputs")
    quantized = fxq.quantize(model, REFERENCE, data=[inputs])
    for more in ((), (2.0,)):
        assert sqnr(call(model, (*inputs, *more)), call(quantized, (*inputs, *more))) > 30


# ---- more of it


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_int8_is_close_to_float_for_other_weights(name, backend, seed):
    model = settled(NETWORKS[name].make, seed=10 + seed)
    recipe = fxq.Recipe.static(backend=backend)
    # Rows of a few features need many samples until calibration has seen their range.
    data = [smooth(name, 256 if name in ("dict_output", "shared_weight") else 16, seed) for seed in range(4)]
    quantized, qdq = (fxq.quantize(model, r, data=data) for r in (recipe, qdq_form(recipe)))
    inputs = smooth(name, 8, seed=99)
    assert sqnr(call(model, inputs), call(quantized, inputs)) > 28
    least = 50 if quantized.ledger.reduced_range is None else 44  # a step of 7 bits is twice as large
    assert sqnr(call(qdq, inputs), call(quantized, inputs)) > least


@pytest.mark.slow
@pytest.mark.parametrize("backend", [name for name in NAMES if name not in ("auto", "fastest")])
@pytest.mark.parametrize("name", ["residual", "lstm"])
def test_ten_thousand_calls_from_eight_threads(name, backend):
    """Of one model, whose inputs change in size from call to call."""
    if why := unavailable(backend):
        pytest.skip(why)
    recipe = fxq.Recipe.static if name == "residual" else fxq.Recipe.dynamic
    model = recurrent() if name == "lstm" else build(name)
    shape = (12, 16) if name == "lstm" else tuple(batch(name).shape[1:])
    xs = [torch.randn(1 + i % 3, *shape) for i in range(8)]
    qmodel = fxq.quantize(model, recipe(backend=backend).with_min_sqnr(None), data=xs)
    want = [qmodel(x) for x in xs]
    with ThreadPoolExecutor(8) as pool:
        right = sum(pool.map(lambda i: equal(qmodel(xs[i % 8]), want[i % 8]), range(10_000)))
    assert right == 10_000
