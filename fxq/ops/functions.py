"""Rows of the op table: functions that run in float only. Their rows give them names in reports."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.ops.registry import aten, row, unary_function
from fxq.ops.table import Arguments, spell
from fxq.ops.traits import float_only

_FLOAT_TRAITS = float_only("x")
_unary = partial(unary_function, __name__, _FLOAT_TRAITS)

exp = _unary("exp", "e ** x.", torch.exp, "exp", aten.exp.default)
log = _unary("log", "Natural logarithm.", torch.log, "log", aten.log.default)
sqrt = _unary("sqrt", "Square root.", torch.sqrt, "sqrt", aten.sqrt.default)
rsqrt = _unary("rsqrt", "1 / sqrt(x).", torch.rsqrt, "rsqrt", aten.rsqrt.default)
erf = _unary("erf", "Error function.", torch.erf, torch.special.erf, "erf", aten.erf.default)
sin = _unary("sin", "Sine.", torch.sin, "sin", aten.sin.default)
cos = _unary("cos", "Cosine.", torch.cos, "cos", aten.cos.default)


def _axis(bound: Arguments) -> Arguments | str:
    bound.pop("_stacklevel", None)
    bound.pop("half_to_float", None)
    if bound.pop("dtype", None) not in (None, torch.float32):
        return "changes the dtype"
    return bound if isinstance(bound.get("dim"), int) else "leaves its axis open (dim=None)"


_SOFT = "x dim _stacklevel dtype"


@row(
    *(spell(t, _SOFT, _axis) for t in (nn.Softmax, F.softmax)),
    *(spell(t, "x dim dtype", _axis) for t in (torch.softmax, "softmax", aten.softmax.int)),
    spell(aten._softmax.default, "x dim half_to_float", _axis),
    traits=_FLOAT_TRAITS,
)
def softmax(x: Tensor, *, dim: int) -> Tensor:
    """exp(x) / sum(exp(x)) along an axis."""
    return F.softmax(x, dim)


@row(
    *(spell(t, _SOFT, _axis) for t in (nn.LogSoftmax, F.log_softmax)),
    *(spell(t, "x dim dtype", _axis) for t in (torch.log_softmax, "log_softmax", aten.log_softmax.int)),
    spell(aten._log_softmax.default, "x dim half_to_float", _axis),
    traits=_FLOAT_TRAITS,
)
def log_softmax(x: Tensor, *, dim: int) -> Tensor:
    """log(softmax(x))."""
    return F.log_softmax(x, dim)


@row(*(spell(t, _SOFT, _axis) for t in (nn.Softmin, F.softmin)), traits=_FLOAT_TRAITS)
def softmin(x: Tensor, *, dim: int) -> Tensor:
    """softmax(-x)."""
    return F.softmin(x, dim)


def _exponent(bound: Arguments) -> Arguments:
    return {**bound, "exponent": bound.get("exponent", 2)}


@row(
    *(spell(t, "x exponent") for t in (torch.pow, operator.pow, "pow", aten.pow.Tensor_Scalar)),
    *(spell(t, "x", _exponent) for t in (torch.square, "square")),
    traits=_FLOAT_TRAITS,
    name="pow",
)
def power(x: Tensor, *, exponent: Any) -> Tensor:
    """x ** exponent."""
    return torch.pow(x, exponent)


@row(*(spell(t, "x dim") for t in (torch.cumsum, "cumsum", aten.cumsum.default)), traits=_FLOAT_TRAITS)
def cumsum(x: Tensor, *, dim: int) -> Tensor:
    """Cumulative sum along an axis."""
    return torch.cumsum(x, dim)


@row(spell(F.normalize, "x p dim eps"), traits=_FLOAT_TRAITS)
def normalize(x: Tensor, *, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Tensor:
    """x divided by its p-norm along `dim`."""
    return F.normalize(x, p, dim, eps)


@row(
    spell(nn.CosineSimilarity, "x other dim eps"),
    spell(F.cosine_similarity, "x other dim eps"),
    traits=float_only("x", "other"),
)
def cosine_similarity(x: Tensor, other: Tensor, *, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Cosine of the angle between x and other along `dim`."""
    return F.cosine_similarity(x, other, dim, eps)


_WHERE = "condition x other"


@row(
    *(spell(t, _WHERE) for t in (torch.where, aten.where.self)),
    spell("where", "x condition other"),
    traits=float_only("x", "other", fill_constants=("x", "other"), masks=True),
)
def where(condition: Tensor, x: Tensor, other: Tensor) -> Tensor:
    """x where the condition holds, else other."""
    return torch.where(condition, x, other)


@row(
    *(spell(t, "x mask value") for t in (torch.masked_fill, "masked_fill", "masked_fill_")),
    *(spell(t, "x mask value") for t in (aten.masked_fill.Scalar, aten.masked_fill.Tensor)),
    traits=float_only("x", fill_constants=("value",), masks=True),
)
def masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    """x, with `value` where the mask holds."""
    return x.masked_fill(mask, value)


@row(spell(torch.einsum, "equation *xs"), traits=float_only("xs"))
def einsum(xs: Any, *, equation: str) -> Tensor:
    """Sums of products, as the equation says."""
    return torch.einsum(equation, *xs)
