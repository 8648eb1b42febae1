"""Weight-only recurrent layers: results equal those of the op on the dequantized weights."""

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.backends.loops.code.compiler import loops
from fxq.backends.plain import weight_only_recurrent
from fxq.backends.plain.float_steps import MAX_SAMPLES, FloatSteps, faster_steps
from fxq.backends.plain.weight_only_recurrent import WeightOnlyRecurrent
from fxq.common.metrics import nbytes
from fxq.errors import InputError
from fxq.ops import OPS
from fxq.quant.qparams import dequantize
from tests.support.models import call, settled

RECIPES = {
    "int8": fxq.Recipe.weight_only(),
    "per tensor": fxq.Recipe.weight_only(per="tensor"),
    "int4": fxq.Recipe.weight_only(bits=4),
    "int4 per channel": fxq.Recipe.weight_only(bits=4, per="channel"),
    "int8 blocks": fxq.Recipe.weight_only(per=3),
    "float16": fxq.Recipe.weight_only(dtype=torch.float16),
}
ALL = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


class Net(nn.Module):
    """Recurrent module, which is called with initial states if given."""

    def __init__(self, kind, *sizes, **options):
        super().__init__()
        self.rnn = getattr(nn, kind)(*sizes, **options)

    def forward(self, x, *states):
        return self.rnn(x, (states if len(states) > 1 else states[0]) if states else None)


def quantized(model, recipe, *inputs):
    qmodel = fxq.quantize(model, recipe, example_inputs=inputs)
    assert {e.precision for e in qmodel.ledger.where(op=["lstm", "gru", "rnn"])} == {"weight-only"}
    assert not qmodel.ledger.where(kind="unverified") and qmodel.ledger.weight_coverage == 1.0
    assert {type(kernel) for kernel in qmodel.fxq_kernels.children()} == {WeightOnlyRecurrent}
    return qmodel


def rounded(model, qmodel):
    """Copy of the float model with the dequantized weights."""
    wanted = copy.deepcopy(model)
    for path, layer in qmodel.qparams().items():
        number = path.split(".")[-1]
        for name, weight in layer.weights.items():
            is_float16 = weight.stored.dtype == torch.float16
            real = weight.values.float() if is_float16 else dequantize(weight.values, weight.qparams)
            parameter = getattr(wanted.rnn, f"{name}_{number}")
            assert not torch.equal(parameter.data, real)
            parameter.data = real
    return wanted


def same(first, second):
    for a, b in zip(flat(first), flat(second), strict=True):
        assert torch.equal(a, b)


def flat(value):
    return [value] if isinstance(value, torch.Tensor) else [tensor for part in value for tensor in flat(part)]


@pytest.mark.one_in(18)
@ALL
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_is_the_float_layer_on_the_weights_that_the_integers_stand_for(kind, recipe):
    model, x = settled(lambda: Net(kind, 13, 21, 2, bidirectional=True)), torch.randn(6, 3, 13)
    qmodel = quantized(model, recipe, x)
    wanted = call(rounded(model, qmodel), x)
    for _ in range(2):  # the second call is bound
        for result, expected in zip(flat(call(qmodel, x)), flat(wanted), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(["LSTM", "GRU", "RNN"]), sizes=st.tuples(*[st.integers(1, 5)] * 4), bias=st.booleans(),
    states=st.booleans(), proj=st.integers(0, 3), recipe=st.sampled_from(sorted(RECIPES)),
)  # fmt: skip
def test_odd_shapes(kind, sizes, bias, states, proj, recipe):
    steps, samples, inputs, hidden = sizes
    proj = proj if kind == "LSTM" and proj < hidden else 0
    model = settled(lambda: Net(kind, inputs, hidden, bias=bias, **({"proj_size": proj} if proj else {})))
    first = [torch.randn(1, samples, proj or hidden), torch.randn(1, samples, hidden)] if states else []
    arguments = (torch.randn(steps, samples, inputs), *(first if kind == "LSTM" else first[:1]))
    qmodel = fxq.quantize(model, RECIPES[recipe], example_inputs=arguments)
    layer = qmodel.qparams()["rnn.l0"]
    stand_for = {
        f"{name}_l0": w.values.float() if recipe == "float16" else dequantize(w.values, w.qparams)
        for name, w in layer.weights.items()
    }
    wanted = copy.deepcopy(model)
    for name, real in stand_for.items():
        getattr(wanted.rnn, name).data = real
    for result, expected in zip(flat(call(qmodel, arguments)), flat(call(wanted, arguments)), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "bits", "most"), [("LSTM", 8, 0.27), ("LSTM", 4, 0.16), ("GRU", 4, 0.16)])
def test_size_and_what_the_ledger_says(kind, bits, most):
    model, x = settled(lambda: Net(kind, 128, 256, 2)), torch.randn(3, 1, 128)
    qmodel = quantized(model, fxq.Recipe.weight_only(bits=bits), x)
    call(qmodel, x)  # nothing is kept of a call
    assert nbytes(qmodel) <= most * nbytes(model)
    assert sum(tensor.nbytes for tensor in qmodel.state_dict().values()) <= most * nbytes(model)
    assert len(pickle.dumps(qmodel)) <= (most + 0.04) * nbytes(model)
    assert sum(e.saved_bytes for e in qmodel.ledger) == pytest.approx(nbytes(model) - nbytes(qmodel), rel=0.01)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", [RECIPES[name] for name in ("int8", "int4", "float16")])
def test_copies_and_files_give_the_same(recipe):
    model, x = settled(lambda: Net("LSTM", 9, 14, proj_size=5)), torch.randn(4, 2, 9)
    qmodel = quantized(model, recipe, x)
    wanted = call(qmodel, x)
    for copied in (copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
        same(call(copied, x), wanted)
    fresh = quantized(Net("LSTM", 9, 14, proj_size=5).eval(), recipe, x)
    fresh.load_state_dict(qmodel.state_dict(), strict=True)
    same(call(fresh, x), wanted)


def kernel():
    tensors = {"weight_ih": torch.randint(-9, 9, (9, 4), dtype=torch.int8), "weight_ih_scale": torch.rand(9)}
    tensors |= {"weight_hh": torch.randint(-9, 9, (9, 3), dtype=torch.int8), "weight_hh_scale": torch.rand(9)}
    tensors["h"] = torch.randn(2, 3)
    return WeightOnlyRecurrent(**tensors, op="gru", settings={"reverse": True}, axis=0)


def test_a_kernel_of_its_config():
    original, x = kernel(), torch.randn(5, 2, 4)
    real = {name: w.values * w.scale[:, None] for name, w in original.stored.items()}
    wanted = OPS["gru"].target(x, **real, h=original.h, reverse=True)
    assert torch.equal(original(x), wanted)
    again = WeightOnlyRecurrent.from_config(original.config(), dict(original.named_buffers()))
    assert torch.equal(again(x), wanted)
    original.weight_hh_scale.mul_(2)
    assert not torch.equal(original(x), wanted)


def test_a_kernel_takes_float32_and_hands_on_no_gradient():
    with pytest.raises(InputError, match="is float64"):
        kernel()(torch.ones(1, 2, 4, dtype=torch.float64))
    assert not kernel()(torch.ones(1, 2, 4, requires_grad=True)).requires_grad


def test_the_ledger_says_what_they_take(plant):
    plant(lambda key: 30.0 if key.startswith("float") else 20.0)
    qmodel = quantized(settled(lambda: Net("GRU", 12, 16)), RECIPES["int8"], torch.randn(3, 1, 12))
    (entry,) = qmodel.ledger.where(precision="weight-only")
    assert entry.op == "gru" and (entry.float_us, entry.int8_us) == pytest.approx((30.0, 20.0))


needs_numba = pytest.mark.skipif(loops("step_loops") is None, reason="needs Numba")


@needs_numba
@pytest.mark.one_in(6)
@pytest.mark.parametrize("recipe", [RECIPES[name] for name in ("int8", "per tensor", "int4", "int4 per channel")])
@pytest.mark.parametrize(
    ("kind", "hidden", "options"),
    [
        ("LSTM", 64, {"bidirectional": True}),
        ("LSTM", 128, {"proj_size": 64, "bias": False}),
        ("GRU", 75, {"bidirectional": True}),
        ("RNN", 64, {"num_layers": 2}),
        ("RNN", 64, {"nonlinearity": "relu"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("states", [False, True])
def test_time_steps_that_read_the_stored_weights(kind, hidden, options, recipe, states, monkeypatch):
    """Sizes of whole vectors and others, with and without first states; last states are compared, too."""
    if hidden == 75 and recipe in (RECIPES["int4"], RECIPES["int4 per channel"]):
        pytest.skip("the loop takes no such rows of 4 bits")
    monkeypatch.setattr(weight_only_recurrent, "faster_steps", lambda *sizes: True)
    ran = []
    run = FloatSteps.run
    monkeypatch.setattr(FloatSteps, "run", lambda *arguments: ran.append(arguments) or run(*arguments))
    model, samples = settled(lambda: Net(kind, 70, hidden, **options)), 3
    layers = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    sizes = (options.get("proj_size", hidden), hidden) if states else ()
    first = [torch.randn(layers, samples, size) for size in sizes]
    inputs = (torch.randn(5, samples, 70), *(first if kind == "LSTM" else first[:1]))
    qmodel = quantized(model, recipe, *inputs)
    ran.clear()
    results = [flat(call(qmodel, inputs)) for _ in range(2)]
    assert len(ran) == 2 * layers
    same(*results)
    for result, expected in zip(results[0], flat(call(rounded(model, qmodel), inputs)), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@needs_numba
def test_weights_that_change_are_read_again(monkeypatch):
    monkeypatch.setattr(weight_only_recurrent, "faster_steps", lambda *sizes: True)
    model, x = settled(lambda: Net("LSTM", 64, 64)), torch.randn(3, 1, 64)
    qmodel = quantized(model, RECIPES["int8"], x)
    before = flat(call(qmodel, x))[0]
    (kernel,) = qmodel.fxq_kernels.children()
    kernel.weight_hh_scale.mul_(2)
    after = flat(call(qmodel, x))[0]
    assert torch.equal(before[0], after[0]) and not torch.allclose(before[1:], after[1:])  # the first state is zeros


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((1, 1, 2**14, 2**17), True),  # one step: fewer values are converted than read
        ((1, 1, 2**14, 2**15), False),  # of a small layer: calls take longer
        ((50, 1, 2**18, 2**19), False),  # many steps that the cache holds
        ((50, 1, 2**20, 2**21), True),
        ((50, MAX_SAMPLES + 1, 2**20, 2**21), False),
        ((0, 1, 2**20, 2**21), False),
    ],
)
def test_which_layers_run_in_steps(sizes, wanted):
    assert faster_steps(*sizes) is wanted


@needs_numba
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize(
    ("samples", "width"), [(1, 64), (2, 63), (3, 64), (2, 65)], ids=["one sample", "narrow", "more samples", "wide"]
)
def test_first_states_of_another_shape_are_refused_as_in_float(kind, samples, width, monkeypatch):
    """The loops read them by address."""
    monkeypatch.setattr(weight_only_recurrent, "faster_steps", lambda *sizes: True)
    model, x = settled(lambda: Net(kind, 64, 64)), torch.randn(3, 2, 64)
    states = [torch.randn(1, 2, 64)] * (2 if kind == "LSTM" else 1)
    qmodel = quantized(model, RECIPES["int8"], x, *states)
    for i in range(len(states)):
        wrong = [torch.randn(1, samples, width) if j == i else state for j, state in enumerate(states)]
        for _ in range(2):  # the second call may be bound
            with pytest.raises((InputError, RuntimeError)):
                call(qmodel, (x, *wrong))
