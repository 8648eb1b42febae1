"""cleanup: nothing in the model that its graph does not use."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

import fxq
from fxq.passes import Cleanup
from fxq.quant.observer_base import Observer
from tests.support.graphs import equal, expected, program, run_pass
from tests.support.helpers import REFERENCE
from tests.support.machine import X86, needs_x86
from tests.support.models import batch, build


@needs_x86
def test_what_no_node_uses_is_gone():
    gm = fxq.quantize(build("residual"), X86, data=[batch("residual")])
    assert {name.partition(".")[0] for name, _ in gm.named_children()} == {"fxq_kernels"}
    assert not any(isinstance(m, Observer) for m in gm.modules())
    assert not any(p.numel() for p in gm.parameters())  # no float weight is left
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
    dead += "\n        places: int64[2] = torch.arange(2)"
    gm = run_pass(Cleanup(), kept.replace("check = torch._assert(True, 'kept')", dead))
    assert program(gm) == expected(kept)


def test_a_weight_is_brought_near_and_copied_where_it_is_returned():
    """A weight with a flat path is a constant of the graph like the results of folding: the caller gets a copy.

    What the nodes do not name is not in the module.
    """
    gm = run_pass(
        Cleanup(),
        """
        deep: float32[3] = tensor('a.b.weight')
        unused: float32[3] = tensor('a.b.bias')
        made: float32[3] = tensor('fxq_data.made')
        return (deep, made)
        """,
    )
    assert {name for name, _ in gm.named_buffers()} == {"fxq_data.a_b_weight", "fxq_data.made"}
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


class Pair(NamedTuple):
    """Two tensors that a model returns."""

    first: torch.Tensor
    second: torch.Tensor


class ReturnsConstants(nn.Module):
    """Returns a tensor that it makes anew in every call, in a named tuple."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.layer, self.alone = nn.Linear(8, 8), alone

    def forward(self, x):
        ones = torch.ones(4, 8)
        return Pair(ones if self.alone else self.layer(x), ones)


@pytest.mark.parametrize("alone", [False, True])
def test_constants_in_a_named_tuple_are_copied(alone):
    """The caller may change what a model returns: the next call gives ones again."""
    x = torch.randn(4, 8)
    qmodel = fxq.quantize(ReturnsConstants(alone).eval(), REFERENCE, data=[x])
    qmodel(x).second.add_(1)
    assert torch.equal(qmodel(x).second, torch.ones(4, 8))
