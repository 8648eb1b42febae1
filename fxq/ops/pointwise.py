"""Rows of the op table: functions of one element. On integers, each is a lookup table."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxq.ops.registry import aten, row, unary_function
from fxq.ops.table import Arguments, spell
from fxq.ops.traits import computes

_POINTWISE = computes("x", pointwise=True)
_AFTER_LINEAR = replace(_POINTWISE, fused_after=("linear",))
_unary = partial(unary_function, __name__, _POINTWISE)
_after_layers = partial(unary_function, __name__, replace(_POINTWISE, fused_after=("conv", "linear", "excite")))
_after_linear = partial(unary_function, __name__, _AFTER_LINEAR)
_gate = partial(unary_function, __name__, replace(_POINTWISE, fused_after=("gate",)))

hardswish = _after_layers(
    "hardswish", "x * relu6(x + 3) / 6.", F.hardswish, nn.Hardswish, aten.hardswish.default, aten.hardswish_.default
)
hardsigmoid = _gate(
    "hardsigmoid", "relu6(x + 3) / 6.", F.hardsigmoid, nn.Hardsigmoid,
    aten.hardsigmoid.default, aten.hardsigmoid_.default,
)  # fmt: skip
silu = _after_layers("silu", "x * sigmoid(x).", F.silu, nn.SiLU, aten.silu.default, aten.silu_.default)
mish = _unary("mish", "x * tanh(softplus(x)).", F.mish, nn.Mish, aten.mish.default, aten.mish_.default)
selu = _unary(
    "selu", "scale * elu(x, alpha), with the constants of Klambauer et al. 2017, section 2.",
    F.selu, nn.SELU, torch.selu, F.selu_, aten.selu.default,
)  # fmt: skip
sigmoid = _gate(
    "sigmoid", "1 / (1 + exp(-x)).", torch.sigmoid, nn.Sigmoid, F.sigmoid, torch.special.expit,
    "sigmoid", "sigmoid_", aten.sigmoid.default, aten.sigmoid_.default,
)  # fmt: skip
tanh = _after_linear(
    "tanh", "Hyperbolic tangent.", torch.tanh, nn.Tanh, F.tanh, "tanh", "tanh_", aten.tanh.default, aten.tanh_.default
)
log_sigmoid = _unary("log_sigmoid", "log(sigmoid(x)).", F.logsigmoid, nn.LogSigmoid, aten.log_sigmoid.default)
softsign = _unary("softsign", "x / (1 + |x|).", F.softsign, nn.Softsign)
tanhshrink = _unary("tanhshrink", "x - tanh(x).", F.tanhshrink, nn.Tanhshrink)
neg = _unary("neg", "-x.", torch.neg, torch.negative, operator.neg, "neg", "neg_", aten.neg.default)


@row(nn.GELU, F.gelu, aten.gelu.default, traits=_AFTER_LINEAR)
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x * Phi(x), or its tanh approximation."""
    return F.gelu(x, approximate=approximate)


@row(nn.Softplus, F.softplus, aten.softplus.default, traits=_POINTWISE)
def softplus(x: Tensor, *, beta: float = 1, threshold: float = 20) -> Tensor:
    """log(1 + exp(beta * x)) / beta; x itself above threshold / beta."""
    return F.softplus(x, beta, threshold)


@row(nn.ELU, spell(F.elu, "x alpha inplace"), F.elu_, spell(aten.elu.default, "x alpha"), traits=_POINTWISE)
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x above zero, alpha * (exp(x) - 1) below."""
    return F.elu(x, alpha)


@row(nn.CELU, spell(F.celu, "x alpha inplace"), torch.celu, F.celu_, aten.celu.default, traits=_POINTWISE)
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x above zero, alpha * (exp(x / alpha) - 1) below."""
    return F.celu(x, alpha)


def _mean_slope(bound: Arguments) -> Arguments | str:
    """Convert rrelu to leaky_relu with the mean of its slopes: outside training, they are equal."""
    if bound.pop("training", False):
        return "draws its slope at random (training=True)"
    slopes = bound.pop("lower", 1 / 8), bound.pop("upper", 1 / 3)
    if any(isinstance(slope, fx.Node) for slope in slopes):
        return "has slopes that are computed at run time"
    return {**bound, "negative_slope": sum(slopes) / 2}


_RRELU = "x lower upper training inplace"


@row(
    nn.LeakyReLU,
    spell(F.leaky_relu, "x negative_slope inplace"),
    spell(F.leaky_relu_, "x negative_slope"),
    aten.leaky_relu.default,
    aten.leaky_relu_.default,
    spell(nn.RReLU, _RRELU, _mean_slope),
    spell(F.rrelu, _RRELU, _mean_slope),
    traits=replace(_POINTWISE, fused_after=("conv", "linear"), slopes="negative_slope"),
)
def leaky_relu(x: Tensor, *, negative_slope: float = 0.01) -> Tensor:
    """max(0, x) + negative_slope * min(0, x)."""
    return F.leaky_relu(x, negative_slope)


@row(nn.PReLU, F.prelu, aten.prelu.default, "prelu", traits=replace(_POINTWISE, slopes="weight"))
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """x (N, C, ...), weight (1,) or (C,): max(0, x) + weight * min(0, x)."""
    return F.prelu(x, weight)


@row(nn.Hardshrink, F.hardshrink, "hardshrink", aten.hardshrink.default, traits=_POINTWISE)
def hardshrink(x: Tensor, *, lambd: float = 0.5) -> Tensor:
    """x outside [-lambd, lambd], 0 inside."""
    return F.hardshrink(x, lambd)


@row(nn.Softshrink, F.softshrink, aten.softshrink.default, traits=_POINTWISE)
def softshrink(x: Tensor, *, lambd: float = 0.5) -> Tensor:
    """x moved towards zero by lambd; 0 within lambd of it."""
    return F.softshrink(x, lambd)


@row(
    nn.Threshold,
    spell(F.threshold, "x threshold value inplace"),
    spell(torch.threshold_, "x threshold value"),
    aten.threshold.default,
    traits=computes("x", pointwise=True, fill_constants=("value",)),
)
def threshold(x: Tensor, *, threshold: float, value: float) -> Tensor:
    """x where it is above the threshold, else `value`."""
    return F.threshold(x, threshold, value)


@row(torch.abs, torch.absolute, "abs", "abs_", aten.abs.default, traits=_POINTWISE, name="abs")
def absolute(x: Tensor) -> Tensor:
    """|x|."""
    return torch.abs(x)
