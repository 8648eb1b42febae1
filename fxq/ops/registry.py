"""The op table itself, and what its rows share."""

from __future__ import annotations

from typing import Any

import torch

from fxq.ops.table import Arguments, OpTable

OPS = OpTable()
row = OPS.row
aten = torch.ops.aten


def as_tuple(value: Any, n: int) -> tuple[Any, ...]:
    """An option of an n-dimensional op as an n-tuple."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * n if len(values) == 1 else values


def pick_values(bound: Arguments, index: Any) -> Arguments | str:
    """Of a spelling that returns (values, ...): the op makes the values."""
    return bound if index in (0, "values") else "returns indices or statistics that are read"
