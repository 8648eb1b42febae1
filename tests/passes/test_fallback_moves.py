"""fallback and what only moves data, as a reshape: float beside float ops, integers for a layer that reads them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.passes import Fallback
from fxq.pipeline.candidates import UNREAD
from tests.passes.test_fallback_prices import int8
from tests.support.graphs import again, equal, expected, text, until
from tests.support.helpers import plain
from tests.support.machine import X86, needs_x86
from tests.support.models import call, settled

pytestmark = needs_x86


RESHAPES = {
    "view of a size": lambda x: x.view(-1, x.shape[1] * 64),
    "reshape to a length": lambda x: x.reshape(len(x), -1),
    "two sizes": lambda x: x.view(x.size(0), x.shape[1] * x.shape[2], -1).transpose(1, 2).reshape(x.size(0), -1),
    "flatten": lambda x: x.flatten(1),
}


class Flattened(nn.Module):
    """A value without an integer form, reshaped by one of these, and a layer that may pay."""

    def __init__(self, name):
        super().__init__()
        self.name, self.loses = name, nn.Linear(3 * 8 * 8, 6)

    def forward(self, x):
        return self.loses(RESHAPES[self.name](torch.erf(x)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", RESHAPES)
def test_a_reshape_between_float_ops_is_float_whatever_its_sizes_come_from(name, plant):
    plant(lambda key: 9.0 if int8(key) else 1.0)
    model, x = settled(lambda: Flattened(name)), torch.rand(2, 3, 8, 8)
    manager = until(model, x, "fallback", X86)
    assert "quantize" in text(manager.history["propagate"].graph)
    assert "quantize" not in text(manager.gm)
    assert equal(call(manager.gm, x), call(model, x))
    assert again(manager, Fallback()) == []
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        qmodel = fxq.quantize(model, X86, data=[x])
    assert equal(qmodel(x), model(x))
    assert {(e.precision, e.reason) for e in qmodel.ledger if e.op in ("reshape", "flatten", "transpose")} == {
        ("float", UNREAD)
    }


def test_text_of_a_reshape_to_a_size_before_and_after(plant):
    plant(lambda key: 9.0 if int8(key) else 1.0)
    manager = until(settled(lambda: Flattened("view of a size")), torch.rand(2, 3, 8, 8), "fallback", X86)
    assert text(manager.history["propagate"].graph) == expected("""
        x = input
        erf = erf(x)
        erf_q = quantize(erf, A)
        getattr_1 = getattr(erf_q, 'shape')
        getitem = getitem(getattr_1, 1)
        mul = mul(getitem, 64)
        view = reshape(erf_q, shape=(-1, mul))
        view_dq = dequantize(view, A)
        loses_weight_dq = int8(loses_weight, axis=0)
        loses = linear(view_dq, loses_weight_dq, @fxq_data.loses_bias_corrected)
        return loses
    """)
    assert text(manager.gm) == expected("""
        x = input
        erf = erf(x)
        getattr_1 = getattr(erf, 'shape')
        getitem = getitem(getattr_1, 1)
        mul = mul(getitem, 64)
        view = reshape(erf, shape=(-1, mul))
        loses = linear(view, @loses.weight, @loses.bias)
        return loses
    """)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", RESHAPES)
def test_a_reshape_that_an_integer_layer_reads_moves_integers(name, plant):
    plant(lambda key: 0.0 if int8(key) else 1.0)
    model, x = settled(lambda: Flattened(name)), torch.rand(2, 3, 8, 8)
    qmodel = fxq.quantize(model, X86, data=[x])
    assert {e.precision for e in qmodel.ledger if e.op in ("reshape", "flatten", "transpose")} == {"moves"}
    assert sqnr(call(model, x), call(qmodel, x)) > 30


def test_who_reads_only_the_shape_of_a_layer_costs_it_no_rounding(plant):
    """The layer pays, what follows does not: its kernel hands out floats, although a size is read of its value."""

    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.pays, self.loses = nn.Conv2d(3, 8, 3), nn.Linear(36, 6)

        def forward(self, x):
            y = self.pays(x)
            return self.loses(y.view(y.shape[0], 8, -1))

    plant(lambda key: 0.0 if "quantize" in key else 9.0 if int8(key) == ("linear" in key) else 1.0)
    model, x = settled(Sized), torch.rand(2, 3, 8, 8)
    assert text(until(model, x, "fallback", plain(X86)).gm).splitlines()[4:] == [
        "pays = conv2d(x_dq, pays_weight_dq, @pays.bias)",
        "getattr_1 = getattr(pays, 'shape')",
        "getitem = getitem(getattr_1, 0)",
        "view = reshape(pays, shape=(getitem, 8, -1))",
        "loses = linear(view, @loses.weight, @loses.bias)",
        "return loses",
    ]


class Reused(nn.Module):
    """A reshaped value read by a layer that pays and by one that does not."""

    def __init__(self):
        super().__init__()
        self.a, self.pays, self.loses = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 8, 3), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        y = F.pixel_shuffle(self.a(x), 1).view(-1, 4, 6, 12)
        return self.pays(y), self.loses(y)


def test_mixed_readers_of_moved_data(plant):
    """The reshape moves integers for one reader; the other reads their dequantized form."""
    plant(lambda key: 0.5 if "quantize" in key else 9.0 if int8(key) == ("[2, 4, 1, 1]" in key) else 1.0)
    model, x = settled(Reused), torch.rand(2, 3, 8, 8)
    manager = until(model, x, "fallback", X86)
    lines = text(manager.gm).splitlines()
    assert (
        "loses = conv2d(reshape_dq, @loses.weight, @loses.bias)" in lines
        or "loses = conv2d(view_dq, @loses.weight, @loses.bias)" in lines
    )
    assert any(line.startswith("pays = conv2d(") and "pays_weight_dq" in line for line in lines)
    assert sqnr(call(model, x), call(manager.gm, x)) > 30
    assert again(manager, Fallback()) == []
