"""cleanup: nothing in the model that its graph does not use."""

import re

import pytest
import torch
from torch import nn

import fxq
from fxq.passes import Cleanup
from fxq.quant.observer_base import Observer
from tests.graphs import again, equal, expected, program, run_pass, text, until
from tests.helpers import REFERENCE
from tests.machine import needs_x86
from tests.models import NETWORKS, batch, build, call


@pytest.mark.parametrize("backend", ["reference", pytest.param("x86", marks=needs_x86)])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_keep_their_output_exactly(name, backend):
    model, inputs = build(name), batch(name)
    recipe = fxq.Recipe.static(backend=backend)
    before = call(until(model, inputs, "verify-lowering", recipe).gm, inputs)
    manager = until(model, inputs, "cleanup", recipe)
    behind, ahead = (text(manager.history[name].graph) for name in ("cleanup", "verify-lowering"))
    assert near(behind) == near(ahead)
    assert equal(call(manager.gm, inputs), before)
    assert again(manager, Cleanup()) == []


def near(written):
    """The text of a graph with every weight written as one that was brought near."""
    return re.sub(r"@[\w.]+", lambda m: "@" + m[0][1:].removeprefix("fxq_data.").replace(".", "_"), written)


def test_weights_deep_in_the_model_are_brought_near():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1)), nn.Conv2d(4, 4, 1))

        def forward(self, x):
            return self.block(x)

    model, x = Outer().eval(), torch.randn(2, 3, 4, 4)
    recipe = REFERENCE.override("block.*", fxq.FLOAT)
    gm = until(model, x, "cleanup", recipe).gm
    assert "return getattr" not in gm.code and "getattr(" not in gm.code
    assert {name for name, _ in gm.named_buffers()} == {
        f"fxq_data.block_{part}_{kind}" for part in ("0_0", "1") for kind in ("weight", "bias")
    }
    assert equal(call(gm, x), call(model, x))


@needs_x86
def test_what_no_node_uses_is_gone():
    manager = until(build("residual"), batch("residual"), "verify-lowering", fxq.Recipe.static(backend="x86"))
    held = dict(manager.gm.named_modules())
    assert {"conv1", "bn1", "fxq_units"} <= held.keys()
    assert any(isinstance(m, Observer) for m in held.values())
    gm = until(build("residual"), batch("residual"), "cleanup", fxq.Recipe.static(backend="x86")).gm
    assert {name.partition(".")[0] for name, _ in gm.named_children()} == {"fxq_kernels"}
    assert not any(isinstance(m, Observer) for m in gm.modules())
    assert list(gm.parameters()) == []  # no float weight is left
    assert {t.dtype for name, t in gm.named_buffers() if name.endswith(".weight")} == {torch.int8}


def test_dead_nodes_go_unless_they_do_something():
    kept = """
        x: float32[2, 4] = input()
        x_q: uint8[2, 4] = quantize(x, scale=0.5, zero_point=3)
        check = torch._assert(True, 'kept')
        y: float32[2, 4] = dequantize(x_q, scale=0.5, zero_point=3)
        return y
    """
    dead = "check = torch._assert(True, 'kept')\n        dead = dequantize(x_q, scale=0.5, zero_point=3)"
    gm = run_pass(Cleanup(), kept.replace("check = torch._assert(True, 'kept')", dead))
    assert program(gm) == expected(kept)


def test_a_weight_is_brought_near_and_copied_where_it_is_returned():
    """What is brought near is a constant of the graph like those that folding has made: the caller gets a copy."""
    gm = run_pass(
        Cleanup(),
        """
        deep: float32[3] = tensor('a.b.weight')
        made: float32[3] = tensor('fxq_data.made')
        return (deep, made)
        """,
        {"a.b.weight": torch.ones(3), "fxq_data.made": torch.zeros(3)},
    )
    assert program(gm) == expected("""
        a_b_weight: float32[3] = tensor('fxq_data.a_b_weight')
        made: float32[3] = tensor('fxq_data.made')
        own_copy: float32[3] = own_copy(a_b_weight)
        own_copy_1: float32[3] = own_copy(made)
        return (own_copy, own_copy_1)
    """)


def test_a_leaf_module_stays():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)

        def forward(self, x):
            return self.norm(self.conv(x))

    model = Model().eval()
    gm = fxq.quantize(model, REFERENCE.leaf("norm"), data=[torch.randn(2, 3, 4, 4)])
    assert isinstance(gm.norm, nn.GroupNorm)
    assert gm.norm.weight is not model.norm.weight and torch.equal(gm.norm.weight, model.norm.weight)


@pytest.mark.parametrize("backend", ["reference", pytest.param("x86", marks=needs_x86)])
def test_who_changes_an_output_does_not_change_the_model(backend):
    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scale = nn.Linear(8, 4), nn.Parameter(torch.ones(3))

        def forward(self, x):
            zeros = torch.zeros(3)
            moved = {"view": torch.ones(3).to(x.device).view(1, 3), "wide": (self.scale * 3).expand(x.shape[0], 3)}
            return self.fc(x), zeros, zeros, self.scale * 2, moved

    model, x = Constants().eval(), torch.randn(2, 8)
    qmodel = fxq.quantize(model, fxq.Recipe.static(backend=backend, optimize="coverage"), data=[x])
    want = qmodel.ledger.output_sqnr, model(x)[1:]
    for _ in range(3):  # the third call is bound to the kind of its inputs
        _, *constants = qmodel(x)
        assert equal(constants, want[1])
        for value in (*constants[:3], *constants[3].values()):
            value.fill_(7.0)
    assert equal(qmodel(x)[1:], want[1]) and fxq.compare(model, qmodel, [x]).output_sqnr == pytest.approx(want[0])
