"""Rows of the op table: activation functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.ops.table import aten, row
from fxq.optable import Arguments, float_only, moves, spell


def _numbers(bound: Arguments) -> Arguments | str:
    low, high = bound.pop("min", None), bound.pop("max", None)
    if not all(v is None or isinstance(v, (int, float)) for v in (low, high)):
        return "clamps between tensors"
    high = float("inf") if high is None else high
    low = -float("inf") if low is None else min(low, high)  # torch.clamp gives max where min is larger
    return {**bound, "min_val": low, "max_val": high}


_INPLACE = "x inplace"


@row(
    nn.ReLU,
    spell(F.relu, _INPLACE),
    torch.relu,
    torch.relu_,
    "relu",
    "relu_",
    aten.relu.default,
    aten.relu_.default,
    quant=moves("x", narrows=True),
)
def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return F.relu(x)


@row(nn.ReLU6, spell(F.relu6, _INPLACE), aten.relu6.default, quant=moves("x", narrows=True))
def relu6(x: Tensor) -> Tensor:
    """min(max(x, 0), 6)."""
    return F.relu6(x)


_CLAMP = "x min max"


def _leaves_out_zero(options: Mapping[str, Any]) -> bool:
    return not options["min_val"] <= 0 <= options["max_val"]


@row(
    nn.Hardtanh,
    spell(F.hardtanh, "x min_val max_val inplace"),
    spell(F.hardtanh_, "x min_val max_val"),
    aten.hardtanh.default,
    aten.hardtanh_.default,
    spell(torch.clamp, _CLAMP, _numbers),
    spell(torch.clip, _CLAMP, _numbers),
    spell("clamp", _CLAMP, _numbers),
    spell("clamp_", _CLAMP, _numbers),
    spell("clip", _CLAMP, _numbers),
    spell(aten.clamp.default, _CLAMP, _numbers),
    quant=moves("x", narrows=True, extends=_leaves_out_zero),
)
def hardtanh(x: Tensor, *, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """min(max(x, min_val), max_val); either bound may be infinite."""
    return torch.clamp(x, min_val, max_val)


@row(nn.Hardswish, spell(F.hardswish, _INPLACE), aten.hardswish.default, aten.hardswish_.default, quant=float_only("x"))
def hardswish(x: Tensor) -> Tensor:
    """x * relu6(x + 3) / 6."""
    return F.hardswish(x)


@row(
    nn.Hardsigmoid,
    spell(F.hardsigmoid, _INPLACE),
    aten.hardsigmoid.default,
    quant=float_only("x", output_range=(0.0, 1.0)),
)
def hardsigmoid(x: Tensor) -> Tensor:
    """relu6(x + 3) / 6."""
    return F.hardsigmoid(x)


@row(nn.SiLU, spell(F.silu, _INPLACE), aten.silu.default, aten.silu_.default, quant=float_only("x"))
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return F.silu(x)


@row(nn.GELU, F.gelu, aten.gelu.default, quant=float_only("x"))
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x * Phi(x), or its tanh approximation."""
    return F.gelu(x, approximate=approximate)


@row(
    nn.LeakyReLU,
    spell(F.leaky_relu, "x negative_slope inplace"),
    spell(F.leaky_relu_, "x negative_slope"),
    aten.leaky_relu.default,
    aten.leaky_relu_.default,
    quant=float_only("x"),
)
def leaky_relu(x: Tensor, *, negative_slope: float = 0.01) -> Tensor:
    """max(0, x) + negative_slope * min(0, x)."""
    return F.leaky_relu(x, negative_slope)


@row(
    nn.Sigmoid,
    F.sigmoid,
    torch.sigmoid,
    "sigmoid",
    "sigmoid_",
    aten.sigmoid.default,
    quant=float_only("x", output_range=(0.0, 1.0)),
)
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return torch.sigmoid(x)


@row(nn.Tanh, F.tanh, torch.tanh, "tanh", "tanh_", aten.tanh.default, quant=float_only("x", output_range=(-1.0, 1.0)))
def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return torch.tanh(x)
