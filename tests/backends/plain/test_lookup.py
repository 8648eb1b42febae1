"""Lookup tables: all 256 integers, any grid, any layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.backends.plain.lookup import Lookup
from fxq.common.metrics import sqnr
from fxq.errors import BackendError
from fxq.quant.qparams import QParams
from tests.support.helpers import module
from tests.support.kernels import BYTE, OUTS, bytes_, copies
from tests.support.machine import needs_x86, no_warnings

RECIPE = fxq.Recipe.static(backend="x86").with_optimize("coverage")
FUNCTIONS = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "gelu": F.gelu, "silu": F.silu, "mish": F.mish, "elu": F.elu,
    "selu": F.selu, "softplus": F.softplus, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu, "reciprocal": lambda x: 1 / x,
}  # fmt: skip


def grid(draw: st.DrawFn) -> QParams:
    low = draw(st.integers(0, 200))
    high = draw(st.integers(low + 1, 255))
    return QParams.per_tensor(draw(st.floats(1e-4, 10)), draw(st.integers(low, high)), low, high)


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"first": nn.Conv2d(3, 8, 3), "other": nn.Conv2d(3, 8, 3), "last": nn.Conv2d(8, 4, 3)}


def by_definition(function, q, x: QParams, out: QParams | None):
    """quantize(function(dequantize(q))) in float32, as an independent reference."""
    y = function((q.float() - x.z) * x.scale)
    return y if out is None else (torch.round(y / out.scale) + out.z).clamp(out.qmin, out.qmax).to(torch.uint8)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_all_integers_on_any_grid(data):
    name = data.draw(st.sampled_from(sorted(FUNCTIONS)))
    x, out = grid(data.draw), data.draw(st.sampled_from([None, "grid"])) and grid(data.draw)
    table = Lookup.of(FUNCTIONS[name], name, x, out)
    q = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(table(q), by_definition(FUNCTIONS[name], q, x, out))


@pytest.mark.parametrize("size", [0, 1, 7, 1000, 32768, 40001, 300_003])
def test_any_size(size):
    table, q = Lookup.of(torch.sigmoid, "sigmoid", BYTE, OUTS[0]), bytes_(size + 3)
    for start in (0, 1, 3):  # a table over pairs reads from even places only
        part = q[start : start + size]
        assert torch.equal(table(part), by_definition(torch.sigmoid, part, BYTE, OUTS[0]))
    real = Lookup.of(torch.sigmoid, "sigmoid", BYTE, None)
    # PyTorch's sigmoid differs in the last bit between the vector and the rest of a tensor.
    torch.testing.assert_close(real(q), torch.sigmoid((q.float() - BYTE.z) * BYTE.scale), rtol=1e-6, atol=0)


def test_layouts():
    table, slope = Lookup.of(F.gelu, "gelu", BYTE, OUTS[1]), torch.rand(6) * 3 - 1
    per_channel = Lookup.of(lambda x: F.prelu(x, slope), "prelu", BYTE, OUTS[1], channels=6)
    for n in (0, 1, 3):
        q = bytes_(n, 6, 9, 7)
        views = [q, q.contiguous(memory_format=torch.channels_last), bytes_(n, 12, 9, 7)[:, ::2], q[..., 0, 0]]
        views += [q[:1].expand(4 if n else 0, 6, 9, 7), bytes_(n, 6, 7, 9).transpose(2, 3), q[..., 0]]
        for view in [*views, bytes_(n, 6, 90, 90)]:
            kept = view.clone()
            assert torch.equal(table(view), by_definition(F.gelu, view, BYTE, OUTS[1]))
            y = by_definition(lambda x: F.prelu(x, slope), view, BYTE, OUTS[1])
            assert torch.equal(per_channel(view), y)
            assert torch.equal(view, kept)
    for kernel in (table, per_channel):
        for copied in copies(kernel):
            assert not copied._derived and torch.equal(copied(q), kernel(q))


def test_refusals():
    signed = QParams.per_tensor(0.1, 0, -128, 127, torch.int8)
    with pytest.raises(BackendError, match="the input is int8"):
        Lookup.of(torch.neg, "neg", signed, OUTS[0])
    with pytest.raises(BackendError, match="the output is int8"):
        Lookup.of(torch.neg, "neg", BYTE, signed)
    with pytest.raises(BackendError, match="NaN"):
        Lookup.of(torch.log, "log", BYTE, OUTS[0])
    zero_to = QParams.per_tensor(0.1, 0, 0, 127)
    assert Lookup.of(torch.sqrt, "sqrt", QParams.per_tensor(0.1, 20, 20, 255), zero_to)(bytes_(9)).shape == (9,)
    with pytest.raises(BackendError, match="turns"):
        Lookup.of(lambda x: x.sum(), "sum", BYTE, OUTS[0])
    with pytest.raises(BackendError, match="a table must be"):
        Lookup(torch.zeros(256), "sigmoid", BYTE, OUTS[0])
    per_channel = Lookup.of(lambda x: x, "identity", BYTE, BYTE, channels=3)
    with pytest.raises(BackendError, match="3 channels"):
        per_channel(bytes_(1, 4, 2, 2))


MIDDLES = {
    **FUNCTIONS,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.2])),
    "log_sigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "plus": lambda x: x + 1.5,
    "minus": lambda x: 2 - x,
    "times": lambda x: x * -0.7,
    "over": lambda x: x / 3,
    "negative": lambda x: -x,
}
del MIDDLES["reciprocal"]


@pytest.mark.one_in(6)
@no_warnings
@needs_x86
@pytest.mark.parametrize("name", sorted(MIDDLES))
def test_functions_between_layers(name):
    model = module(lambda m, x: m.last(MIDDLES[name](m.first(x) + m.other(x))), **layers())
    x = torch.randn(2, 3, 10, 10)
    quantized = fxq.quantize(model, RECIPE, data=[x])
    assert [m.function for m in quantized.modules() if isinstance(m, Lookup)] != []
    assert sqnr(model(x), quantized(x)) > 22


@pytest.mark.one_in(10)
@no_warnings
@needs_x86
@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1, 1)], ids=str)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "prelu"])
def test_constants_per_channel(op, shape):
    function = getattr(torch, op)
    constant = torch.rand(8) + 0.2

    def forward(m, x):
        y = m.first(x) + m.other(x)
        return m.last(function(y, m.constant if op == "prelu" else m.constant.view(shape)))

    model, x = module(forward, constant=constant, **layers()), torch.randn(2, 3, 10, 10)
    quantized = fxq.quantize(model, RECIPE, data=[x])
    assert [tuple(m.table.shape) for m in quantized.modules() if isinstance(m, Lookup)] == [(8, 256)]
    assert sqnr(model(x), quantized(x)) > 22


@needs_x86
def test_constants_along_other_axes_stay_in_float():
    model = module(lambda m, x: m.last((m.first(x) + m.other(x)) * m.row), row=torch.rand(8) + 0.2, **layers())
    quantized = fxq.quantize(model, RECIPE, data=[torch.randn(2, 3, 10, 10)])
    assert not any(isinstance(m, Lookup) for m in quantized.modules())
