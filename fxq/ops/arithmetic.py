"""Rows of the op table: arithmetic of two tensors, or of a tensor and a number."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxq.ops.registry import aten, row
from fxq.ops.table import Arguments, Shape, shape_of, spell
from fxq.ops.traits import computes, float_only, moves


def _tensor_first(bound: Arguments) -> Arguments:
    """Swap the operands of a commuting op if only the first is a number or a constant: 2 * x becomes x * 2."""
    if _is_constant(bound.get("x")) and not _is_constant(bound.get("other")) and bound.get("alpha", 1) == 1:
        return {**bound, "x": bound["other"], "other": bound["x"]}
    return bound


def _is_constant(value: Any) -> bool:
    return value is not None and (shape_of(value) is None or getattr(value, "op", "") == "get_attr")


def _alpha_one(arguments: Mapping[str, Any]) -> str | None:
    return None if arguments["alpha"] == 1 else "its second operand is scaled (alpha)"


def _commuting(*targets: Any) -> Any:
    return (spell(target, None, _tensor_first) for target in targets)


_BINARY = ("x", "other")


@row(
    *_commuting(torch.add, operator.add, operator.iadd, "add", "add_"),
    *_commuting(aten.add.Tensor, aten.add.Scalar, aten.add_.Tensor),
    traits=computes(*_BINARY, pointwise=True, masks=True, unless=_alpha_one),
    commutes=True,
)
def add(x: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """x + alpha * other, broadcast."""
    return torch.add(x, other, alpha=alpha) if alpha != 1 else x + other


def _swapped(bound: Arguments) -> Arguments:
    return {**bound, "x": bound["other"], "other": bound["x"]}


@row(
    torch.sub,
    torch.subtract,
    operator.sub,
    operator.isub,
    "sub",
    "sub_",
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.sub_.Tensor,
    *(spell(t, None, _swapped) for t in (torch.rsub, aten.rsub.Scalar, aten.rsub.Tensor)),
    traits=computes(*_BINARY, pointwise=True, masks=True, unless=_alpha_one),
)
def sub(x: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """x - alpha * other, broadcast."""
    return torch.sub(x, other, alpha=alpha) if alpha != 1 else x - other


@row(
    *_commuting(torch.mul, torch.multiply, operator.mul, operator.imul, "mul", "multiply", "mul_"),
    *_commuting(aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor),
    traits=computes(*_BINARY, pointwise=True),
    commutes=True,
)
def mul(x: Tensor, other: Tensor) -> Tensor:
    """x * other, broadcast."""
    return x * other


def _by_a_constant(arguments: Mapping[str, Any]) -> str | None:
    divisor = arguments["other"]
    if arguments["rounding_mode"] is not None:
        return f"its quotient is rounded ({arguments['rounding_mode']})"
    if isinstance(divisor, fx.Node) and divisor.op != "get_attr":
        return "it divides by a value that is computed at run time"
    return None


@row(
    torch.div,
    torch.divide,
    torch.true_divide,
    operator.truediv,
    operator.itruediv,
    "div",
    "div_",
    aten.div.Tensor,
    aten.div.Scalar,
    aten.div.Tensor_mode,
    traits=computes(*_BINARY, pointwise=True, unless=_by_a_constant),
)
def div(x: Tensor, other: Tensor, *, rounding_mode: str | None = None) -> Tensor:
    """x / other, broadcast."""
    return torch.div(x, other, rounding_mode=rounding_mode) if rounding_mode is not None else x / other


@row(torch.maximum, "maximum", aten.maximum.default, traits=moves(*_BINARY, layout=True, selects=True), commutes=True)
def maximum(x: Tensor, other: Tensor) -> Tensor:
    """Elementwise maximum of two tensors, broadcast."""
    return torch.maximum(x, other)


@row(torch.minimum, "minimum", aten.minimum.default, traits=moves(*_BINARY, layout=True, selects=True), commutes=True)
def minimum(x: Tensor, other: Tensor) -> Tensor:
    """Elementwise minimum of two tensors, broadcast."""
    return torch.minimum(x, other)


def product_macs(out: Shape, x: Shape, *_: Any) -> int:
    """Multiply-accumulates of a matrix product: values of the output x length of the inner axis, the last axis of x."""
    return math.prod(out) * x[-1]


@row(
    torch.matmul,
    torch.bmm,
    torch.mm,
    operator.matmul,
    "matmul",
    "bmm",
    "mm",
    *(spell(t) for t in (aten.matmul.default, aten.bmm.default, aten.mm.default)),
    traits=computes(*_BINARY, heavy=True),
    macs=product_macs,
)
def matmul(x: Tensor, other: Tensor) -> Tensor:
    """x (..., M, K), other (..., K, N) -> (..., M, N). With a constant `other`, canonicalize makes it a linear."""
    return torch.matmul(x, other)


def _renamed(bound: Arguments) -> Arguments:
    """Arguments of addmm and baddbmm by the names of their rows."""
    names = {"input": "bias", "mat1": "x", "mat2": "other", "batch1": "x", "batch2": "other"}
    return {names.get(name, name): value for name, value in bound.items()}


def _added_macs(out: Shape, bias: Shape, *factors: Shape) -> int:
    return product_macs(out, *factors)


@row(
    *(spell(t, "input mat1 mat2", _renamed) for t in (torch.addmm, "addmm", aten.addmm.default)),
    traits=float_only(*_BINARY),
    macs=_added_macs,
)
def addmm(bias: Tensor, x: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * bias + alpha * x @ other. With a constant `other`, canonicalize makes it a linear."""
    return torch.addmm(bias, x, other, beta=beta, alpha=alpha)


@row(
    *(spell(t, "input batch1 batch2", _renamed) for t in (torch.baddbmm, "baddbmm", aten.baddbmm.default)),
    traits=float_only(*_BINARY),
    macs=_added_macs,
)
def baddbmm(bias: Tensor, x: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * bias + alpha * x @ other, with three axes each."""
    return torch.baddbmm(bias, x, other, beta=beta, alpha=alpha)
