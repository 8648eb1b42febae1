"""Functions over nested containers: tuples, lists, mappings, slices and dataclasses.

`torch.utils._pytree` treats dataclasses, slices and mappings of unknown classes as leaves, which inputs and outputs of
models may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

_LEAF_TYPES = frozenset(
    (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Tensor, torch.nn.Parameter)
)
"""Types of most leaves, which are not asked whether they are containers of some kind."""


def leaves(value: Any, is_leaf: Callable[[Any], bool] = lambda value: False) -> Iterator[Any]:
    """Yield the leaves of nested containers, in order. A container for which `is_leaf` is true counts as a leaf.

    Example:
        >>> list(leaves({"x": (1, [2]), "y": slice(3)}))
        [1, 2, None, 3, None]
    """
    if type(value) in _LEAF_TYPES or is_leaf(value):
        yield value
        return
    if isinstance(value, (tuple, list)):
        parts: Any = value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, slice):
        parts = value.start, value.stop, value.step
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    else:
        yield value
        return
    for part in parts:
        if type(part) in _LEAF_TYPES:
            yield part
        else:
            yield from leaves(part, is_leaf)


def mapped(value: Any, by: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = lambda value: False) -> Any:
    """Return a copy of nested containers with `by(leaf)` instead of every leaf.

    Tuples keep their class; lists and mappings become plain lists and dicts. Dataclasses are leaves.

    Example:
        >>> mapped({"x": (1, [2]), "y": 3}, lambda number: number + 1)
        {'x': (2, [3]), 'y': 4}
    """
    if type(value) in _LEAF_TYPES or is_leaf(value):
        return by(value)
    if isinstance(value, tuple):
        parts = [mapped(part, by, is_leaf) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list):
        return [mapped(part, by, is_leaf) for part in value]
    if isinstance(value, Mapping):
        return {key: mapped(part, by, is_leaf) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(part, by, is_leaf) for part in (value.start, value.stop, value.step)))
    return by(value)
