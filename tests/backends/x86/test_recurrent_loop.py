"""Recurrent layers on integers against float64, and the same layers through the whole pipeline."""

from __future__ import annotations

import re
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.backends import cpu
from fxq.backends.loops.code import compiler
from fxq.backends.plain.time_steps import GATES
from fxq.backends.table import recurrent_kernel
from fxq.backends.x86 import recurrent_loop
from fxq.backends.x86.recurrent_loop import RecurrentLoop
from fxq.common.metrics import sqnr
from fxq.errors import BackendError, InputError
from fxq.quant.qparams import QParams
from fxq.quant.spec import DYNAMIC_STATE
from tests.support.kernels import activations, agree, copies
from tests.support.machine import decibels, needs_vnni, needs_x86, told
from tests.support.models import call, settled
from tests.support.recurrent import OUT, STATE, UNIT, X, exact
from tests.support.recurrent import kernel as kernel_of

pytestmark = needs_x86


def kernel(*sizes, **options):
    """An x86 kernel with random weights, and the weights in float64."""
    return kernel_of(RecurrentLoop, *sizes, **options)


SIZE = st.sampled_from([1, 2, 3, 7, 16, 17, 33])
FLAG = st.booleans()


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("loops")
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    op=st.sampled_from(sorted(GATES)),
    sizes=st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 3, 4, 70]), SIZE, SIZE),
    flags=st.tuples(*[FLAG] * 10),
    state=st.sampled_from([None, 1 / STATE, 0.5 / STATE]),
    width=st.sampled_from([None, None, 1, 3]),
    nonlinearity=st.sampled_from(["tanh", "relu"]),
    seed=st.integers(0, 9),
)
def test_float64(op, sizes, flags, state, width, nonlinearity, seed):
    torch.manual_seed(seed)
    steps, samples, inputs, hidden = sizes
    bias, reverse, cell, dynamic, shifted, initial, emits, quick, matmul, scripted = flags
    options = {"reverse": reverse, "dynamic": dynamic, "x": UNIT if dynamic else X, "state_scale": state}
    shifted = shifted and dynamic
    if shifted:
        options["x"] = replace(UNIT, zero_point=torch.zeros_like(UNIT.zero_point))
    if op == "lstm":
        options["cell"] = cell
    if op == "rnn":
        options["nonlinearity"] = nonlinearity
    names = ("h", "c") if op == "lstm" else ("h",)
    width = width if op == "lstm" and width is not None and width < hidden else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "has_int_mm", lambda: quick)
        patch.setattr(cpu, "has_integer_matmul", lambda: matmul)
        if not scripted:
            patch.setattr(recurrent_loop, "scripted", lambda steps: steps)
        layer, real = kernel(op, inputs, hidden, width, bias, state_inputs=names if initial else (), **options)
        h, c = torch.randn(width or hidden, samples).t(), torch.randn(samples, hidden)
        q, scale = activations(steps, samples, inputs), torch.rand(steps, samples, 1) / 20
        zero_point = torch.randint(0, 100, scale.shape).float()
        x = (q.double() - (zero_point.double() if shifted else layer.x.z)) * (scale.double() if dynamic else layer.x.s)
        states = (h, c) if initial else (torch.zeros_like(h), torch.zeros_like(c))
        wanted = exact(layer, real, x, *(s.double() for s in states))
        inputs_of_call = [
            q,
            *([scale] if dynamic else []),
            *([zero_point] if shifted else []),
            *(states[: len(names)] if initial else []),
        ]
        got = layer(*inputs_of_call)
        if compiler.loops("step_loops") is None:
            agree(got, wanted, None)
        off = (got.double() - wanted).abs() / (1 + wanted.abs())
        # A state near a half may be rounded to the other side in float32, which moves what follows by less than a step.
        assert got.shape == wanted.shape and (off > 1e-4).sum() <= 0.01 * off.numel() and off.amax() < 1e-2
        if emits:
            rounding = type(layer).from_config({**layer.config(), "out": OUT}, dict(layer.named_buffers()))
            agree(rounding(*inputs_of_call), wanted, OUT)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("op", GATES)
def test_copies_and_threads(op):
    layer, _ = kernel(op, 5, 6)
    x = activations(7, 2, 5)
    wanted = layer(x)
    assert wanted.requires_grad is False and not wanted.is_inference()
    for copy in copies(layer):
        assert torch.equal(copy(x), wanted)
    results = []
    threads = [threading.Thread(target=lambda: results.append(layer(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(y, wanted) for y in results)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("matmul", [True, False])
@pytest.mark.parametrize("op", GATES)
def test_neither_the_default_device_nor_the_default_type_counts(op, matmul, monkeypatch):
    monkeypatch.setattr(cpu, "has_int_mm", lambda: False)
    monkeypatch.setattr(cpu, "has_integer_matmul", lambda: matmul)
    monkeypatch.setattr(recurrent_loop, "scripted", lambda steps: steps)
    layer, _ = kernel(op, 5, 6)
    x = activations(7, 2, 5)
    wanted, copy = layer(x), type(layer).from_config(layer.config(), dict(layer.named_buffers()))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            y = copy(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert y.dtype == torch.float32 and torch.equal(y, wanted)


@pytest.mark.usefixtures("loops")
def test_an_edited_weight_counts():
    layer, _ = kernel("gru", 5, 6)
    x = activations(7, 2, 5)
    before = layer(x)
    layer.weight_hh.mul_(-1)
    assert not torch.equal(layer(x), before)
    layer.weight_hh.mul_(-1)
    assert torch.equal(layer(x), before)


def test_no_samples():
    layer, _ = kernel("lstm", 5, 6, cell=True)
    assert layer(activations(7, 0, 5)).shape == (8, 0, 6)


def test_refuses():
    layer, _ = kernel("lstm", 5, 6)
    with pytest.raises(InputError, match=r"the layer takes \(T, N, 5\)"):
        layer(activations(7, 2, 6))
    with pytest.raises(BackendError, match="hidden state has no grid"):
        kernel("lstm", 5, 6, state_qmax=0)


@pytest.mark.parametrize("op", GATES)
def test_initial_states_that_do_not_fit(op):
    layer, _ = kernel(op, 5, 6, state_inputs=("h",))
    x, h = activations(7, 3, 5), torch.randn(3, 6)
    for wrong in (h[:1], h[:, :1], h[:2], h[None]):
        with pytest.raises(InputError, match=r"initial state has shape .*; for this input the layer takes \(3, 6\)"):
            layer(x, wrong)
    with pytest.raises(InputError, match="is float64"):
        layer(x, h.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x, h.bfloat16()), layer(x, h.bfloat16().float()))


@needs_vnni
def test_refuses_what_overflows(monkeypatch):
    monkeypatch.setattr(cpu, "has_vnni", lambda: False)
    with pytest.raises(BackendError, match="overflow; use 7 bits"):
        kernel("lstm", 5, 40)
    kernel("lstm", 5, 40, state_qmax=63, x=QParams.per_tensor(0.1, 64, 0, 127))


# ---- through the pipeline


class Net(nn.Module):
    """A recurrent module between layers; both of its results are used."""

    def __init__(self, kind, **options):
        super().__init__()
        self.before, self.rnn = nn.Linear(8, 12), getattr(nn, kind)(12, 20, 2, **options)
        self.after = nn.Linear(20, 4)

    def forward(self, x):
        y, state = self.rnn(self.before(x))
        h = state[0] + state[1] if isinstance(state, tuple) else state
        return self.after(y), h


def data():
    return torch.randn(9, 4, 8, generator=torch.Generator().manual_seed(0))


def quantized(model, preset, x, **options):
    recipe = getattr(fxq.Recipe, preset)(backend="x86", optimize="coverage", **options)
    with pytest.warns() as caught:
        qmodel = fxq.quantize(model, recipe, **({"data": [x]} if preset == "static" else {"example_inputs": x}))
        fxq.errors.warn("so that there is one")
    return qmodel, [text for text in told(caught) if "verif" in text or "wrong" in text]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("preset", ["static", "dynamic"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_runs_on_integers(kind, preset):
    model, x = settled(lambda: Net(kind)), data()
    qmodel, wrong = quantized(model, preset, x)
    layers = [e for e in qmodel.ledger if e.path.startswith("rnn.l")]
    assert [(e.path, e.precision) for e in layers] == [("rnn.l0", "int8"), ("rnn.l1", "int8")] and not wrong
    for wanted, got in zip(call(model, x), call(qmodel, x), strict=True):
        assert sqnr(wanted, got) > decibels(30)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_fixed_range_of_the_state(kind):
    state = fxq.TensorSpec(symmetric=True, range="fixed")
    config = fxq.QuantConfig(fxq.Recipe.dynamic().config.activation, state=state)
    model, x = settled(lambda: Net(kind)), data()
    qmodel = fxq.quantize(model, fxq.Recipe.dynamic(backend="x86").override("**", config), example_inputs=x)
    written = [line for line in str(qmodel.history["insert-qdq"].graph).splitlines() if f"= {kind.lower()}(" in line]
    assert len(written) == 2 and all("state_scale=0.0" in line for line in written)
    assert sqnr(call(model, x)[0], call(qmodel, x)[0]) > decibels(30)


class Outputs(nn.Module):
    """Outputs of all steps of a recurrent module, with optional initial states."""

    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = getattr(nn, kind)(8, 20, **options)

    def forward(self, x, *states):
        return self.rnn(x, (states if len(states) > 1 else states[0]) if states else None)[0]


def scales(qmodel):
    """Static scales of the states in the graph."""
    written = str(qmodel.history["insert-qdq"].graph)
    return [float(scale) for scale in re.findall(r"state_scale=([0-9.e-]+)", written)]


def reasons_of(qmodel):
    """Reasons of the integer recurrent layers in the ledger."""
    return {e.reason for e in qmodel.ledger.where(precision="int8") if e.op in GATES}


DYNAMIC_BECAUSE = "its state has a dynamic range, computed in each step: "
CALIBRATED = {
    "lstm": ("LSTM", {"num_layers": 2}, ()),
    "both directions": ("LSTM", {"bidirectional": True}, ()),
    "gru": ("GRU", {}, ()),
    "gru from a state": ("GRU", {}, (20,)),
    "rnn": ("RNN", {"nonlinearity": "relu"}, ()),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("kind", "options", "states"), CALIBRATED.values(), ids=CALIBRATED)
def test_a_calibrated_range_of_the_state_is_as_good_as_a_dynamic_one(kind, options, states):
    """On data that calibration has not seen; it is the default of static."""
    model = settled(lambda: Outputs(kind, **options))
    seen, unseen = ((torch.randn(9, n, 8), *(torch.rand(1, n, size) - 0.5 for size in states)) for n in (32, 16))
    recipe = fxq.Recipe.static(backend="x86", optimize="coverage")
    dynamic = replace(recipe, config=replace(recipe.config, state=DYNAMIC_STATE))
    ours, theirs = (fxq.quantize(model, asked, data=[seen]) for asked in (recipe, dynamic))
    assert {e.precision for e in ours.ledger.where(op=kind.lower())} == {"int8"}
    assert reasons_of(ours) == reasons_of(theirs) == {""}
    assert len(scales(ours)) == len(ours.ledger.where(op=kind.lower())) and not scales(theirs)
    wanted = call(model, unseen)
    assert sqnr(wanted, call(ours, unseen)) > sqnr(wanted, call(theirs, unseen)) - 1


def test_a_calibrated_range_holds_a_state_that_is_given():
    """If it is far larger than all other states, the range is dynamic instead."""
    model = settled(lambda: Outputs("RNN", nonlinearity="relu"))
    config = fxq.QuantConfig(state=fxq.TensorSpec(symmetric=True, observer="minmax"))
    recipe = replace(fxq.Recipe.static(backend="x86", optimize="coverage"), config=config)
    own = float(call(model, data()).abs().max())
    for h in (0.0, -1.1 * own, -9 * own):
        inputs = (data(), torch.full((1, 4, 20), h))
        largest = float(call(model, inputs).abs().max())
        qmodel = fxq.quantize(model, recipe, data=[inputs])
        steps = re.search(r"state_qmax=([0-9]+)", str(qmodel.history["insert-qdq"].graph))
        reach = [scale * int(steps[1]) for scale in scales(qmodel)]
        assert reach == ([pytest.approx(max(largest, -h), rel=1e-4)] if -h <= 1.25 * largest else [])
        why = "" if reach else f"{DYNAMIC_BECAUSE}the first one is far larger than those that follow"
        assert reasons_of(qmodel) == {why}
    assert reach == []


def test_the_state_of_a_projection_has_a_dynamic_range():
    recipe = fxq.Recipe.static(backend="x86", optimize="coverage")
    qmodel = fxq.quantize(settled(lambda: Outputs("LSTM", proj_size=7)), recipe, data=[data()])
    assert scales(qmodel) == []
    assert reasons_of(qmodel) == {f"{DYNAMIC_BECAUSE}its output shows another range than its state"}


def test_a_fixed_range_that_the_state_leaves_becomes_dynamic():
    config = fxq.QuantConfig(state=fxq.TensorSpec(symmetric=True, range="fixed"))
    recipe = replace(fxq.Recipe.static(backend="x86", optimize="coverage"), config=config)
    for nonlinearity, why in (
        ("tanh", ""),
        ("relu", f"{DYNAMIC_BECAUSE}a fixed one reaches from -1 to 1, and the state may be larger"),
    ):
        qmodel = fxq.quantize(
            settled(lambda kind=nonlinearity: Outputs("RNN", nonlinearity=kind)), recipe, data=[data()]
        )
        assert reasons_of(qmodel) == {why}


def test_a_state_whose_cell_is_read_too_has_a_dynamic_range():
    qmodel = fxq.quantize(settled(lambda: Net("LSTM")), fxq.Recipe.static(backend="x86"), data=[data()])
    assert scales(qmodel) == [] and len(qmodel.ledger.where(op="lstm", precision="int8")) == 2


def test_a_state_in_float_is_refused():
    recipe = fxq.Recipe.static(backend="x86").override(nn.GRU, fxq.QuantConfig(state=None))
    ledger = fxq.quantize(settled(lambda: Net("GRU")), recipe, data=[data()]).ledger
    assert {e.reason for e in ledger if e.op == "gru"} == {
        "x86 kernels take an integer hidden state; set state= in the config"
    }


def test_a_wrong_kernel_is_put_back(monkeypatch):
    """A kernel whose products with the state are ten percent too large is replaced by its q/dq form."""
    right, steps = recurrent_loop.state_product, recurrent_kernel.TimeSteps

    def wrong_product(*args):
        product = right(*args)
        return product._replace(**{name: 1.1 * getattr(product, name) for name in ("scale", "shift", "bias")})

    def wrong_steps(loops, kind, weight, scale, *others):
        return steps(loops, kind, weight, 1.1 * scale, *others)

    monkeypatch.setattr(recurrent_loop, "state_product", wrong_product)
    monkeypatch.setattr(recurrent_kernel, "TimeSteps", wrong_steps)
    _, wrong = quantized(settled(lambda: Net("LSTM")), "static", data())
    assert len(wrong) == 2 and "x86.recurrent kernel is wrong" in wrong[0]
