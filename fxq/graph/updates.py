"""Functional forms of assignments such as `x[i] = value`, which graphs call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def updated(x: Tensor, index: Any, value: Any) -> Tensor:
    """Copy of `x` after `x[index] = value`, for an index that holds tensors. Graphs call this."""
    result = x.clone()
    result[index] = value
    return result


def updated_view(x: Tensor, value: Tensor, method: str, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
    """Copy of `x` after `x.method(*args, **options).copy_(value)`, for a method that returns a view. Graphs call this.

    Example:
        >>> updated_view(torch.ones(2, 2), torch.zeros(2), "diagonal", (), {})
        tensor([[0., 1.],
                [1., 0.]])
    """
    result = x.clone()
    getattr(result, method)(*args, **options).copy_(value)
    return result
