"""Sums, differences and products of two uint8 tensors against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.backends.kernel import PostOp
from fxq.backends.plain import binary as arithmetic
from fxq.backends.x86 import onednn_binary as x86_elementwise
from fxq.common.metrics import sqnr
from fxq.errors import BackendError
from fxq.quant.qparams import QParams
from tests.support.helpers import module
from tests.support.kernels import BYTE, OUTS, RESIDUAL, agree, bytes_, copies, real
from tests.support.machine import needs_x86, no_warnings

pytestmark = needs_x86
POSTS = {None: lambda y: y, PostOp("relu"): F.relu, PostOp("hardtanh", (-0.4, 3.1)): lambda y: y.clamp(-0.4, 3.1)}
ADDS = arithmetic.Add, x86_elementwise.OnednnAdd
MULS = arithmetic.Mul, x86_elementwise.OnednnMul
# Products have scales of their own; no multiple of theirs is a tie on these grids.
PRODUCTS = [QParams.per_tensor(0.0287, 101), QParams.per_tensor(0.0511, 33, 7, 127)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Lower the limits so that tensors of tests count as large."""
    for kernels in (arithmetic, x86_elementwise):
        monkeypatch.setattr(kernels, "MAX_UNCHUNKED_ELEMENTS", 32)
    for limit in ("_MIN_SUM_ELEMENTS", "_MIN_INPLACE_SUM_ELEMENTS", "_MIN_GATED_ELEMENTS"):
        monkeypatch.setattr(x86_elementwise, limit, 64)


def shapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes that broadcast: equal shapes, a value per channel, or any others."""
    shape = [draw(st.integers(0, 3)), *(draw(st.integers(1, 9)) for _ in range(draw(st.integers(1, 4))))]
    kind = draw(st.sampled_from(["same", "gate", "any"]))
    if kind == "same":
        return shape, shape
    if kind == "gate" and len(shape) > 2:
        return shape, [draw(st.sampled_from([1, shape[0]])), shape[1], *[1] * (len(shape) - 2)]
    other_shape = [n if draw(st.booleans()) else 1 for n in shape]
    return shape, other_shape[draw(st.integers(0, len(other_shape) - 1)) :]


def tensor(draw: st.DrawFn, shape: list[int]) -> torch.Tensor:
    x = bytes_(*shape)
    layout = draw(st.sampled_from(["contiguous", "channels_last", "gaps", "transposed"]))
    if layout == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "gaps":
        return bytes_(*shape[:-1], 2 * shape[-1])[..., ::2]
    return x.transpose(0, -1).contiguous().transpose(0, -1) if layout == "transposed" else x


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_shapes(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    shape_a, shape_b = shapes(data.draw)
    a, b = tensor(data.draw, shape_a), tensor(data.draw, shape_b)
    if data.draw(st.booleans()):
        a, b = b, a
    kept = a.clone(), b.clone()
    post = data.draw(st.sampled_from(list(POSTS)))
    p, q = real(a, BYTE), real(b, RESIDUAL)
    for add in ADDS:
        for sign in (1, -1):
            out = data.draw(st.sampled_from(OUTS))
            agree(add(BYTE, RESIDUAL, out, post, sign=sign)(a, b), POSTS[post](p + sign * q), out)
    for mul in MULS:
        out = data.draw(st.sampled_from(PRODUCTS))
        agree(mul(BYTE, RESIDUAL, out, post)(a, b), POSTS[post](p * q), out)
    assert torch.equal(a, kept[0]) and torch.equal(b, kept[1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(1, 40, 70, 61), (3, 5, 7, 4001), (2, 70001), (300_001,)], ids=str)
def test_large(shape, monkeypatch):
    monkeypatch.undo()
    a, b = bytes_(*shape), bytes_(*shape)
    p, q = real(a, BYTE), real(b, RESIDUAL)
    for add, mul in zip(ADDS, MULS, strict=True):
        agree(add(BYTE, RESIDUAL, OUTS[0], sign=-1)(a, b), p - q, OUTS[0])
        agree(mul(BYTE, RESIDUAL, PRODUCTS[0])(a, b), p * q, PRODUCTS[0])
        if len(shape) == 4:
            gate = b[:, :, :1, :1]
            for x in (a, a.contiguous(memory_format=torch.channels_last)):
                agree(mul(RESIDUAL, BYTE, PRODUCTS[0])(gate, x), p * q[:, :, :1, :1], PRODUCTS[0])


def test_one_tensor_twice_and_overwritten():
    a, b = bytes_(2, 8, 9, 7), bytes_(2, 8, 9, 7)
    agree(x86_elementwise.OnednnAdd(BYTE, BYTE, OUTS[0])(a, a), 2 * real(a, BYTE), OUTS[0])
    agree(x86_elementwise.OnednnMul(BYTE, BYTE, PRODUCTS[0])(a, a), real(a, BYTE) ** 2, PRODUCTS[0])
    for sign in (1, -1):
        y = real(a, BYTE) + sign * real(b, RESIDUAL)
        kernel = x86_elementwise.OnednnAdd(BYTE, RESIDUAL, OUTS[0], sign=sign, inplace=True)
        agree(kernel(a.clone(), b.clone()), y, OUTS[0])


def test_copies():
    a, b = bytes_(1, 8, 9, 7), bytes_(1, 8, 1, 1)
    for cls in (*ADDS, *MULS):
        kernel = cls(BYTE, RESIDUAL, OUTS[0], PostOp("relu"), *([-1] if cls in ADDS else []))
        for second in (b, a):
            y = kernel(a, second)
            for copied in copies(kernel):
                assert not copied._derived and torch.equal(copied(a, second), y)


def test_refusals():
    signed = QParams.per_tensor(0.1, 0, -128, 127, torch.int8)
    for cls in (*ADDS, *MULS):
        with pytest.raises(BackendError, match="silu is not a clamp"):
            cls(BYTE, BYTE, BYTE, PostOp("silu"))
        with pytest.raises(BackendError, match="the second input is int8"):
            cls(BYTE, signed, OUTS[0])


def squeeze(m, x):
    y = torch.relu(m.first(x))
    return m.last(y * m.gate(y.mean((2, 3), keepdim=True)))


def squared(m, x):
    y = m.first(x)
    return m.last(y * y + y)


@pytest.mark.one_in(2)
@no_warnings
@pytest.mark.parametrize("forward", [squeeze, squared], ids=lambda f: f.__name__)
def test_through_the_pipeline(forward):
    layers = {"first": nn.Conv2d(3, 8, 3), "gate": nn.Conv2d(8, 8, 1), "last": nn.Conv2d(8, 4, 3)}
    model, x = module(forward, **layers), torch.randn(2, 3, 20, 20)
    quantized = fxq.quantize(model, fxq.Recipe.static(backend="x86").with_optimize("coverage"), data=[x])
    assert any(isinstance(m, x86_elementwise.OnednnMul) for m in quantized.modules())
    assert sqnr(model(x), quantized(x)) > 25
