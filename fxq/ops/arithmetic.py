"""Rows of the op table: arithmetic of several tensors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxq.ops.table import aten, row
from fxq.optable import computes, moves, spell


def _alpha_one(options: Mapping[str, Any]) -> str | None:
    return None if options["alpha"] == 1 else "add scales its second operand (alpha)"


@row(
    torch.add,
    operator.add,
    operator.iadd,
    "add",
    "add_",
    aten.add.Tensor,
    aten.add_.Tensor,
    quant=computes("x", "other", unless=_alpha_one),
    commutes=True,
)
def add(x: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """x + alpha * other, broadcast."""
    return torch.add(x, other, alpha=alpha) if alpha != 1 else x + other


@row(
    torch.mul,
    operator.mul,
    operator.imul,
    "mul",
    "mul_",
    aten.mul.Tensor,
    aten.mul_.Tensor,
    quant=computes("x", "other"),
    commutes=True,
)
def mul(x: Tensor, other: Tensor) -> Tensor:
    """x * other, broadcast."""
    return x * other


@row(
    spell(torch.cat, "xs dim"),
    spell(torch.concat, "xs dim"),
    spell(torch.concatenate, "xs dim"),
    spell(aten.cat.default, "xs dim"),
    quant=moves("xs", layout=True),
)
def cat(xs: Sequence[Tensor], *, dim: int = 0) -> Tensor:
    """Concatenate along `dim`."""
    return torch.cat(list(xs), dim)
