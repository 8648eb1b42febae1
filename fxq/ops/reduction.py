"""Rows of the op table: reductions over axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxq.ops.registry import aten, pick_values, row
from fxq.ops.table import Arguments, Redirect, shape_of, spell
from fxq.ops.traits import computes, moves


def _reduce(bound: Arguments) -> Arguments | str:
    if bound.pop("dtype", None) is not None:
        return "changes the dtype"
    dim = bound["dim"] = bound.pop("axis", bound.get("dim"))
    return bound if dim is not None and dim != () and dim != [] else "reduces over all axes"


_DIM = "x dim keepdim"


@row(
    *(spell(t, _DIM, _reduce) for t in (torch.mean, "mean", aten.mean.dim)),
    traits=computes("x"),
)
def mean(x: Tensor, *, dim: Any, keepdim: bool = False) -> Tensor:
    """Mean over the axes `dim`."""
    return torch.mean(x, dim, keepdim)


@row(
    *(spell(t, _DIM, _reduce) for t in (torch.sum, "sum", aten.sum.dim_IntList)),
    traits=computes("x"),
    name="sum",
)
def sum_over(x: Tensor, *, dim: Any, keepdim: bool = False) -> Tensor:
    """Sum over the axes `dim`."""
    return torch.sum(x, dim, keepdim)


def _or_of_two(op: str) -> Any:
    """Adapter for max and min: max(x, dim) is a reduction; max(x, other) redirects to `op`, which compares tensors."""

    def adapt(bound: Arguments) -> Arguments | Redirect | str:
        second = bound.get("other", bound.get("dim"))
        if shape_of(second) is not None:
            return Redirect(op, {"x": bound["x"], "other": second})
        return _reduce(bound)

    return adapt


@row(
    *(spell(t, _DIM, _reduce) for t in (torch.amax, "amax", aten.amax.default)),
    *(spell(t, _DIM, _or_of_two("maximum"), pick_values) for t in (torch.max, "max")),
    spell(aten.max.dim, _DIM, pick=pick_values),
    traits=moves("x", layout=True, selects=True),
)
def amax(x: Tensor, *, dim: Any, keepdim: bool = False) -> Tensor:
    """Largest value over the axes `dim`."""
    return torch.amax(x, dim, keepdim)


@row(
    *(spell(t, _DIM, _reduce) for t in (torch.amin, "amin", aten.amin.default)),
    *(spell(t, _DIM, _or_of_two("minimum"), pick_values) for t in (torch.min, "min")),
    spell(aten.min.dim, _DIM, pick=pick_values),
    traits=moves("x", layout=True, selects=True),
)
def amin(x: Tensor, *, dim: Any, keepdim: bool = False) -> Tensor:
    """Smallest value over the axes `dim`."""
    return torch.amin(x, dim, keepdim)
