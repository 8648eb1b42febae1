"""Fusions of a user's own, through the whole pipeline: they make nothing worse."""

import pickle

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support import extensions as own
from tests.support.graphs import equal, expected, graph, text, until
from tests.support.helpers import plain, restored_fusions
from tests.support.machine import BITS, decibels, needs_x86, quiet
from tests.support.models import settled


class Scaled(nn.Module):
    """A layer and a user's factor after it; a second layer reads the product."""

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
    assert reasons == ["x86 has a kernel only for the first 2 of these 3 ops"]
    assert {e.precision for e in alone.ledger} == {e.precision for e in fused.ledger} == {"int8"}
    assert torch.equal(fused(x), alone(x))


@needs_x86
def test_a_fusion_takes_no_layer_along_into_float():
    """The first op has no kernel: in a unit with it, the layer after it would be float as well."""
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)).eval()
    with restored_fusions():

        @fxq.fusion
        def norm_linear(op, x, g, h, w, b):
            return op.linear(op.layer_norm(x, g, h, normalized_shape=(6,), eps=1e-5), w, b)

        ledger = fxq.quantize(model, fxq.Recipe.static(backend="x86"), data=[torch.randn(4, 6)]).ledger
    assert [(e.op, e.precision) for e in ledger] == [("layer_norm", "float"), ("linear", "int8")]


# ---- several outputs


class Forked(nn.Module):
    """Two functions of one layer; the second is also an output of the model."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        y = self.a(x)
        z = torch.tanh(y)
        return self.b(torch.relu(y)), self.c(z), z


@pytest.fixture
def forked():
    return settled(Forked), torch.randn(2, 3, 8, 8)


def recipe_of(backend):
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage").with_min_sqnr(None)
    return recipe.with_fusions(own.conv_relu_and_tanh).with_extensions(own.make_conv_relu_and_tanh)


def with_fork(backend, optimize="coverage"):
    recipe = fxq.Recipe.static(backend=backend, optimize=optimize).with_min_sqnr(None)
    return recipe.with_fusions(own.conv_relu_and_tanh).with_extensions(own.make_conv_relu_and_tanh)


def quantized(forked, recipe):
    with quiet():
        return fxq.quantize(forked[0], recipe, data=[forked[1]])


AGREE = 40 if BITS == 8 else 25
"""dB between the x86 backend and the reference, which has 8 bits everywhere."""
ENGINES = ["reference", own.Engine, pytest.param("x86", marks=needs_x86)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ENGINES)
def test_a_fusion_of_several_outputs_runs_on_integers(forked, backend):
    """Each output has a grid of its own; one is also read in float, by who calls the model."""
    qmodel, (model, x) = quantized(forked, plain(with_fork(backend))), forked
    assert text(qmodel.history["propagate"].graph).splitlines()[4:11] == [
        "a_tanh_relu = conv_relu_and_tanh(x_dq, a_weight_dq, @a.bias)",
        *("relu = getitem(a_tanh_relu, 0)", "relu_q = quantize(relu, B)", "relu_dq = dequantize(relu_q, B)"),
        *("tanh = getitem(a_tanh_relu, 1)", "tanh_q = quantize(tanh, C)", "tanh_dq = dequantize(tanh_q, C)"),
    ]
    assert [e.precision for e in qmodel.ledger] == ["int8"] * 5 and not qmodel.history["verify-lowering"].edits
    right = quantized(forked, with_fork("reference"))(x)
    for _ in range(3):  # as it stands, then bound to the kind of its inputs
        assert all(sqnr(want, got) > AGREE for want, got in zip(right, qmodel(x), strict=True))
    again = pickle.loads(pickle.dumps(qmodel))
    assert equal(again(x), qmodel(x)) and equal(again(x[:1]), qmodel(x[:1]))
    again.load_state_dict(qmodel.state_dict())
    assert equal(again(x), qmodel(x))
    assert min(row.sqnr for row in fxq.compare(model, qmodel, [x])) > decibels(30)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("stage", ["fuse", "insert-observers", "propagate", "lower"])
def test_a_graph_with_a_unit_of_several_outputs_has_a_text(forked, backend, stage):
    model, x = forked
    gm = until(model, x, stage, with_fork(backend)).gm
    again = fxq.extend.read_graph(fxq.extend.write_graph(gm), fxq.extend.graph_tensors(gm))
    assert fxq.extend.write_graph(again) == fxq.extend.write_graph(gm)
    assert equal(again(x), gm(x))


@needs_x86
def test_the_kernel_of_a_unit_of_several_outputs(forked):
    """It emits both forms; only float where no op reads integers. The ledger has every op with its own value."""
    qmodel = quantized(forked, with_fork("x86"))
    assert text(qmodel) == expected("""
        x = input
        x_q = module cpu.quantize(x)
        a_tanh_relu = tests.conv_relu_and_tanh(x_q)
        relu_q = getitem(a_tanh_relu, 0)
        tanh_q = getitem(a_tanh_relu, 1)
        tanh_dq = module cpu.dequantize(tanh_q)
        b = x86.conv(relu_q)
        c = x86.conv(tanh_q)
        return (b, c, tanh_dq)
    """)
    into = {e.name: e.into for e in qmodel.ledger}
    assert into == {"a": "a_tanh_relu", "tanh": "tanh_q", "relu": "relu_q", "b": "b", "c": "c"}
    assert min(e.sqnr for e in qmodel.ledger if e.name in ("relu", "tanh")) > 30
    alone = with_fork("x86").override("b", fxq.FLOAT).override("c", fxq.FLOAT)
    kernel = next(m for m in quantized(forked, alone).modules() if isinstance(m, own.ConvReluAndTanh))
    assert (kernel.relu, kernel.tanh) == (None, None)


@needs_x86
@pytest.mark.parametrize("dear", ["kernel", "float"])
def test_a_unit_of_several_outputs_has_a_price(forked, plant, dear):
    plant(lambda key: 1.0 if "quantize" in key or key.startswith("float") != (dear == "float") else 9.0)
    if dear == "kernel":
        with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
            qmodel = fxq.quantize(forked[0], with_fork("x86", "speed"), data=[forked[1]])
        assert {e.precision for e in qmodel.ledger} == {"float"} and equal(qmodel(forked[1]), forked[0](forked[1]))
    else:
        qmodel = quantized(forked, with_fork("x86", "speed"))
        assert {e.precision for e in qmodel.ledger} == {"int8"}
    entry = qmodel.ledger[0]
    assert (entry.name, entry.float_us, entry.int8_us) == ("a", *((1.0, 9.0) if dear == "kernel" else (9.0, 1.0)))


@needs_x86
@pytest.mark.parametrize("output", [0, 1])
def test_a_wrong_output_is_put_back(forked, monkeypatch, output):
    forward = own.ConvReluAndTanh.forward

    def wrong(self, x):
        return tuple(value // 2 if i == output else value for i, value in enumerate(forward(self, x)))

    monkeypatch.setattr(own.ConvReluAndTanh, "forward", wrong)
    name = ("relu_q", "tanh_q")[output]
    with pytest.warns(fxq.FxqWarning, match=f"kernel is wrong on this machine: %{name}, its output {output}: off by"):
        qmodel = fxq.quantize(forked[0], with_fork("x86"), data=[forked[1]])
    right = quantized(forked, with_fork("reference"))(forked[1])
    assert all(sqnr(want, got) > AGREE for want, got in zip(right, qmodel(forked[1]), strict=True))
    assert [e.kind for e in qmodel.ledger][:3] == ["unverified"] * 3


@needs_x86
def test_a_fusion_of_several_outputs_without_a_kernel_makes_nothing_worse(forked):
    """No kernel of x86 hands out two values: the ops are what they are without the pattern."""
    plain = fxq.Recipe.static(backend="x86", optimize="coverage")
    with restored_fusions():

        @fxq.fusion
        def relu_and_before(op, x, w, b):
            y = op.conv2d(x, w, b)
            return op.tanh(y), y

        qmodel = quantized(forked, plain)
    reasons = [near.reason for near in qmodel.history["fuse"].near if near.rule == "relu_and_before"]
    assert reasons == ["x86 has a kernel only for the first 1 of these 2 ops"]
    assert equal(qmodel(forked[1]), quantized(forked, plain)(forked[1]))
