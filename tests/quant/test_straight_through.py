"""Gradients of fake quantizers, and what is kept for them."""

import math

import pytest
import torch
from torch.testing import assert_close

import fxq
from fxq.quant import straight_through
from fxq.quant.fake_quantize import FakeQuantizeValue, FakeQuantizeWeight
from fxq.quant.qparams import QParams
from fxq.quant.straight_through import Rounded


def rounded_straight_through(x, scale, zero_point, qmin, qmax):
    """Fake quantize written with autograd's own functions: gradients pass the rounding, and stop at clipped values."""
    steps = x / scale + zero_point
    steps = steps + (steps.round() - steps).detach()
    return (steps.clamp(qmin, qmax) - zero_point) * scale


def test_gradients_pass_inside_of_the_grid():
    x = torch.tensor([-3.0, -0.4, 0.2, 1.1, 200.0, 300.0], requires_grad=True)
    grid = torch.tensor([1.0]), torch.tensor([1], dtype=torch.int32), 0, 255
    upstream = torch.arange(1.0, 7.0)
    (own,) = torch.autograd.grad(Rounded.apply(x, *grid), x, upstream)
    again = x.detach().requires_grad_()
    wanted = rounded_straight_through(again, *grid)
    (reference,) = torch.autograd.grad(wanted, again, upstream)
    assert torch.equal(own, reference)
    assert own.tolist() == [0.0, 2.0, 3.0, 4.0, 5.0, 0.0]


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize("lay_out", [torch.clone, lambda t: t.contiguous(memory_format=torch.channels_last), strided])
@pytest.mark.parametrize("as_upstream", [torch.clone, lambda t: t[:1, :1, :1, :1].expand_as(t)])
@pytest.mark.parametrize("learned", [False, True])
def test_values_of_any_layout(monkeypatch, lay_out, as_upstream, learned):
    """Compared with the form written with autograd; in several pieces, as for large tensors."""
    monkeypatch.setattr(straight_through, "PIECE", 37)
    spec = fxq.TensorSpec(bits=4, range="learned" if learned else "calibrated", observer="minmax")
    quantizer = FakeQuantizeValue(spec, QParams.per_tensor(0.25, 5, 0, 15), "x")
    x, upstream = torch.randn(2, 3, 5, 7) * 3, torch.randn(2, 3, 5, 7) + 0.5
    x[0, 0, 0, :2] = torch.tensor([-math.inf, math.inf])
    x, upstream = lay_out(x), as_upstream(lay_out(upstream))
    quantizer.started = True
    (own,) = torch.autograd.grad(y := quantizer(x.requires_grad_()), x, upstream, retain_graph=True)
    again, scale = x.detach().clone().requires_grad_(), quantizer.scale.clone().requires_grad_()
    wanted = rounded_straight_through(again, scale, 5, 0, 15)
    (reference,) = torch.autograd.grad(wanted.nan_to_num(), again, upstream, retain_graph=True)
    finite = x.isfinite()
    assert torch.equal(y[finite], wanted[finite])
    assert y[0, 0, 0, :2].tolist() == [-1.25, 2.5] and own[0, 0, 0, :2].tolist() == [0, 0]
    if not learned:
        assert torch.equal(own[finite], reference[finite])
        return
    v = (x / 0.25).detach()
    inside = (v > -5) & (v < 10)  # Esser et al. 2020, equations 3 and 5
    by_scale = (upstream * torch.where(inside, v.round() - v, v.clamp(-5, 10))).double().sum()
    assert torch.equal(own, upstream * inside)
    quantizer(x).backward(upstream)
    moved = quantizer.factor.grad.item() * 0.25 * math.sqrt(x[0].numel() * 15)
    assert moved == pytest.approx(by_scale.item(), rel=1e-5, abs=1e-3)  # parts of a step are kept in int16


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_a_learned_scale_has_the_gradient_of_lsq(axis):
    per = "tensor" if axis is None else "channel"
    spec = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per=per, range="learned")
    w = torch.randn(6, 8, dtype=torch.float32)
    scale = torch.full((), 0.2) if axis is None else torch.linspace(0.1, 0.3, w.shape[axis])
    grid = QParams(scale, torch.zeros_like(scale, dtype=torch.int32), -7, 7, torch.int8, axis)
    quantizer = FakeQuantizeWeight(spec, grid, "w")
    own = w.clone().requires_grad_()
    upstream = torch.randn(6, 8)
    quantizer(own).backward(upstream)
    v = w / (scale if axis is None else scale.reshape([-1 if i == axis else 1 for i in range(2)]))
    inside = (v > -7) & (v < 7)  # Esser et al. 2020, equations 3 and 5
    by_scale = torch.where(inside, -v + v.round(), v.clamp(-7, 7))
    expected = (upstream * by_scale).sum() if axis is None else (upstream * by_scale).sum(1 - axis)
    shared = w.numel() / scale.numel() if axis is not None else w[0].numel()
    moved = quantizer.factor.grad.reshape(scale.shape) * scale  # of the scale, by gradient descent
    assert_close(moved, expected / math.sqrt(shared * 7), rtol=1e-5, atol=2e-5)  # parts of a step are kept in int16
    assert torch.equal(own.grad, upstream * inside)


@pytest.mark.parametrize(
    ("kind", "learned", "kept"),
    [
        (FakeQuantizeValue, False, torch.int8),
        (FakeQuantizeValue, True, torch.int16),
        (FakeQuantizeWeight, False, None),
        (FakeQuantizeWeight, True, torch.float32),  # the parameter itself
    ],
)
def test_what_is_kept_for_the_backward(kind, learned, kept):
    spec = fxq.TensorSpec(bits=4, range="learned" if learned else "calibrated", observer="minmax")
    quantizer, x, saved = kind(spec, QParams.per_tensor(0.1, 5, 0, 15), "x"), torch.randn(1000, requires_grad=True), []
    quantizer.started = True
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        quantizer(x)
    saved = [t for t in saved if t.numel() == 1000]
    assert [t.dtype for t in saved] == ([kept] if kept else [])
    assert all(t.data_ptr() == x.data_ptr() for t in saved if t.dtype == torch.float32)


def test_gradients_of_gradients():
    """As penalties of gradients need them; not of learned scales, which say so."""
    x = torch.tensor([-3.0, -0.4, 0.2, 1.1, 200.0, 300.0], requires_grad=True)
    grid = torch.tensor([1.0]), torch.tensor([1], dtype=torch.int32), 0, 255
    (first,) = torch.autograd.grad(Rounded.apply(x, *grid).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert_close(second, torch.tensor([0.0, 0.0, 0.0, 8.0, 1600.0, 0.0]), rtol=0, atol=0)
    factor = torch.ones(1, requires_grad=True)
    learned = straight_through.RoundedByLearnedScale.apply(x, factor, *grid[:2], 0, 255, 1.0, False)
    (first,) = torch.autograd.grad(learned.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
