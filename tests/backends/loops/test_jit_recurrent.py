"""Recurrent layers of the jit backend against float64, and through the whole pipeline."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxq
from fxq.backends.loops import jit_units
from fxq.backends.loops.jit_units import JitRecurrent
from fxq.backends.plain.time_steps import GATES
from fxq.common.metrics import sqnr
from fxq.common.timed_calls import threads_set_to
from fxq.errors import BackendError
from fxq.graph.query import is_op
from tests.support.kernels import activations
from tests.support.models import call, settled
from tests.support.recurrent import OUT, UNIT, X, exact
from tests.support.recurrent import kernel as kernel_of

pytestmark = pytest.mark.any_cpu
pytest.importorskip("numba")
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("samples", "inputs", "hidden"), [(1, 5, 17), (3, 40, 33), (9, 64, 16)])
@pytest.mark.parametrize("op", GATES)
def test_float64(op, samples, inputs, hidden, dynamic):
    torch.manual_seed(0)
    names, steps = ("h", "c") if op == "lstm" else ("h",), 6
    options = {"x": UNIT if dynamic else X, "dynamic": dynamic, "state_inputs": names, "reverse": hidden == 33}
    layer, real = kernel_of(JitRecurrent, op, inputs, hidden, **options)
    q, scale, states = activations(steps, samples, inputs), torch.rand(steps, samples, 1) / 20, []
    for _ in names:
        states.append(torch.randn(samples, hidden))
    x = (q.double() - layer.x.z) * (scale.double() if dynamic else layer.x.s)
    wanted = exact(layer, real, x, *(s.double() for s in (*states, torch.zeros_like(states[0]))[:2]))
    got = layer(q, *([scale] if dynamic else []), *states)
    off = (got.double() - wanted).abs() / (1 + wanted.abs())
    assert got.shape == wanted.shape and (off > 1e-4).sum() <= 0.02 * off.numel() and off.amax() < 1e-2


@pytest.mark.parametrize("dynamic", [False, True])
def test_another_default_dtype(dynamic):
    layer, _ = kernel_of(JitRecurrent, "lstm", 8, 20, x=UNIT if dynamic else X, dynamic=dynamic)
    inputs = activations(9, 3, 8), *([torch.rand(9, 3, 1) / 20] if dynamic else [])
    want, copied = layer(*inputs), copy.deepcopy(layer)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(copied(*inputs), want)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("hidden", [20, 32])
@pytest.mark.parametrize("op", GATES)
def test_bound_to_its_inputs(op, hidden, dynamic):
    torch.manual_seed(0)
    names = ("h", "c") if op == "lstm" else ("h",)
    cell = {"cell": True} if op == "lstm" else {}
    options = {"x": UNIT if dynamic else X, "dynamic": dynamic, "state_inputs": names, "reverse": hidden == 20}
    layer, _ = kernel_of(JitRecurrent, op, 24, hidden, **options, **cell)
    inputs = [
        (activations(7, 3, 24), *([torch.rand(7, 3, 1) / 20] if dynamic else []), *torch.randn(len(names), 3, hidden))
        for _ in range(3)
    ]
    run = layer.callable_for(*inputs[0])
    assert run != layer.forward
    for values in inputs:
        copies = [x.clone() for x in values]
        first, second = run(*values), run(*values)
        assert torch.equal(first, layer(*values)) and torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr() and all(map(torch.equal, values, copies))
    assert layer.callable_for(inputs[0][0], *inputs[0][1:-1], torch.randn(2, hidden)) == layer.forward


def test_the_float_input_is_rounded_by_a_kernel():
    q = quantized(settled(lambda: nn.GRU(12, 20)), "static", torch.randn(5, 2, 12))
    assert kernels(q) and not [node for node in q.graph.nodes if is_op(node, "quantize")]


def test_refuses_a_projection():
    with pytest.raises(BackendError, match="its hidden state is projected"):
        kernel_of(JitRecurrent, "lstm", 5, 16, 8)


def test_results_on_integers():
    layer, _ = kernel_of(JitRecurrent, "lstm", 5, 6)
    x = activations(7, 2, 5)
    rounding = JitRecurrent.from_config({**layer.config(), "out": OUT}, dict(layer.named_buffers()))
    assert ((rounding(x).float() - OUT.z) * OUT.s - layer(x)).abs().max() <= 0.51 * OUT.s


class Net(nn.Module):
    """A recurrent module whose outputs and last state are used."""

    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = KINDS[kind](12, 20, 2, **options)

    def forward(self, x, *states):
        y, state = self.rnn(x, states if len(states) > 1 else states[0] if states else None)
        return y, state[0] + state[1] if isinstance(state, tuple) else state


def quantized(model, preset, *inputs):
    recipe = getattr(fxq.Recipe, preset)(backend="jit", optimize="coverage")
    example = {"data": [inputs]} if preset == "static" else {"example_inputs": inputs}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fxq.quantize(model, recipe, progress=False, **example)


def kernels(q):
    return [module for module in q.modules() if isinstance(module, JitRecurrent)]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("preset", ["static", "dynamic"])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "batch_first": True}], ids=["plain", "both ways"])
@pytest.mark.parametrize("kind", KINDS)
def test_through_the_pipeline(kind, options, preset):
    model, x = settled(lambda: Net(kind, **options)), torch.randn(9, 3, 12)
    q = quantized(model, preset, x)
    layers = [entry for entry in q.ledger if entry.path.startswith("rnn.")]
    assert {entry.precision for entry in layers} == {"int8"} and len(kernels(q)) == len(layers) == 2 + 2 * bool(options)
    for wanted, got in zip(call(model, x), call(q, x), strict=True):
        assert sqnr(wanted, got) > 25
    for copied in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert all(torch.equal(*pair) for pair in zip(call(copied, x), call(q, x), strict=True))


def test_initial_states_and_other_sizes():
    model, x = settled(lambda: Net("LSTM")), torch.randn(9, 3, 12)
    states = torch.randn(2, 3, 20) / 2, torch.randn(2, 3, 20)
    q = quantized(model, "dynamic", x, *states)
    for steps, samples in ((9, 3), (4, 3), (1, 1), (9, 2)):
        inputs = x[:steps, :samples], *(state[:, :samples] for state in states)
        for wanted, got in zip(call(model, inputs), call(q, inputs), strict=True):
            assert sqnr(wanted, got) > 25


def test_saved(tmp_path):
    model, x = settled(lambda: Net("GRU")), torch.randn(9, 3, 12)
    q = quantized(model, "dynamic", x)
    q.save(tmp_path / "m.fxq")
    loaded = fxq.load(tmp_path / "m.fxq")
    assert len(kernels(loaded)) == 2
    assert all(torch.equal(*pair) for pair in zip(call(loaded, x), call(q, x), strict=True))


def test_threads_compute_the_same():
    model, x = settled(lambda: nn.LSTM(64, 300)), torch.randn(5, 1, 64)
    q = quantized(model, "dynamic", x)
    results = []
    for threads in (1, 2):
        with threads_set_to(threads):
            results.append(call(q, x)[0])
    assert torch.equal(*results)


class Watching(TorchDispatchMode):
    """Sees every op of PyTorch, so the kernel may not read memory by address."""

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_the_qdq_form_runs_where_memory_cannot_be_read(monkeypatch):
    model, x = settled(lambda: Net("LSTM")), torch.randn(9, 3, 12)
    q = quantized(model, "dynamic", x)
    wanted = call(q, x)
    with Watching():
        watched = call(q, x)
    monkeypatch.setattr(jit_units, "loops_for", lambda *args: None)
    for results in (watched, call(q, x)):
        for y, got in zip(wanted, results, strict=True):
            assert sqnr(y, got) > 30


def test_a_kernel_without_a_form_says_what_is_missing(monkeypatch):
    layer, _ = kernel_of(JitRecurrent, "lstm", 5, 6)
    monkeypatch.setattr(jit_units, "loops_for", lambda *args: None)
    monkeypatch.setattr(jit_units, "missing", lambda name: "No module named 'numba'")
    with pytest.raises(BackendError, match=r"no loops are compiled: No module named 'numba' \(pip install"):
        layer(activations(7, 2, 5))


def test_beside_programs():
    """A static model with layers before and after runs these as programs."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.rnn, self.after = nn.Linear(8, 12), nn.LSTM(12, 20), nn.Linear(20, 4)

        def forward(self, x):
            return self.after(self.rnn(self.before(x).relu())[0])

    model, x = settled(Mixed), torch.randn(9, 4, 8)
    q = quantized(model, "static", x)
    assert {entry.precision for entry in q.ledger if entry.op in ("linear", "lstm")} == {"int8"}
    assert len(kernels(q)) == 1 and sqnr(call(model, x), call(q, x)) > 25
