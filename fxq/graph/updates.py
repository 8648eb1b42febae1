"""Assignments to parts of tensors as functions of the whole tensor: what graphs call in the place of `x[i] = value`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def updated(x: Tensor, index: Any, value: Any) -> Tensor:
    """A copy of `x` after `x[index] = value`, where the index holds tensors. Graphs call this."""
    result = x.clone()
    result[index] = value
    return result


def updated_view(x: Tensor, value: Tensor, method: str, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
    """A copy of `x` after `x.method(*args, **options).copy_(value)`, where the method gives a view. Graphs call this.

    Example:
        >>> updated_view(torch.ones(2, 2), torch.zeros(2), "diagonal", (), {})
        tensor([[0., 1.],
                [1., 0.]])
    """
    result = x.clone()
    getattr(result, method)(*args, **options).copy_(value)
    return result
