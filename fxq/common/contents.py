"""Contents of values that change in place (tensors, arrays, random generators, caches): copied, compared, restored."""

from __future__ import annotations

import array
import copy
import functools
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BYTES = (bytearray, array.array)
"""Types of arrays of the standard library."""


class TensorContent:
    """Storage and version counter of a tensor, and optionally a copy of its values."""

    def __init__(self, tensor: Tensor, copies: bool) -> None:
        self.alias, self.version = tensor.detach(), tensor._version
        self.at = self._place(tensor)
        self.copy = self.alias.clone() if copies and not tensor.is_meta else None

    @staticmethod
    def _place(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.data_ptr() if not tensor.is_meta else 0, tensor.shape, tensor.stride(), tensor.dtype

    def is_as_before(self, tensor: Tensor) -> bool:
        """Whether a tensor still has this storage and these values."""
        if self._place(tensor) != self.at:
            return False
        if self.copy is None:
            return tensor._version == self.version
        now = tensor.detach()
        return torch.equal(now, self.copy) or bool(((now == self.copy) | (now.isnan() & self.copy.isnan())).all())

    def counts(self, tensor: Tensor) -> bool:
        """Whether the tensor's version counter or storage changed."""
        return tensor._version != self.version or self._place(tensor) != self.at

    def put_back(self, tensor: Tensor) -> None:
        """Restore a tensor's storage and values."""
        with torch.no_grad():
            if self._place(tensor) != self.at:
                tensor.data = self.alias
            if self.copy is not None:
                tensor.copy_(self.copy)


def of_numpy(value: Any) -> bool:
    """Whether a value is a NumPy array or random generator. Does not import NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.random.Generator, numpy.random.RandomState))


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array."""
    return of_numpy(value) and hasattr(value, "nbytes")


@dataclass(frozen=True)
class ScriptAttribute:
    """Attribute of a script module, which stores it in C++."""

    script: torch.jit.ScriptModule
    name: str

    def read(self) -> Any:
        return self.script._c.getattr(self.name)


def content_of(value: Any) -> Any:
    """Copy of the values of an array, or of the state of a random generator or a cache."""
    if isinstance(value, ScriptAttribute):
        with torch.no_grad():
            return copy.deepcopy(_detached(value.read()))
    if isinstance(value, BYTES):
        return value[:]
    if isinstance(value, functools._lru_cache_wrapper):
        return value.cache_info().misses
    if is_array(value):
        return value.copy()
    if hasattr(value, "bit_generator"):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    return value.get_state(legacy=False) if of_numpy(value) else value.get_state()


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value
    return {key: _detached(part) for key, part in value.items()} if isinstance(value, dict) else value


def has_content(value: Any, content: Any) -> bool:
    """Whether a value still has a content, as `content_of` or `TensorContent` copied it."""
    if isinstance(content, TensorContent):
        return content.is_as_before(value)
    return same(content_of(value), content)


def same(a: Any, b: Any) -> bool:
    """Whether two results of `content_of` are equal."""
    if is_array(a):
        return a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(key in b and same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def put_content(value: Any, content: Any) -> None:
    """Restore a content of a value."""
    if isinstance(content, TensorContent):
        content.put_back(value)
    elif isinstance(value, ScriptAttribute):
        value.script._c.setattr(value.name, content)
    elif isinstance(value, BYTES):
        value[:] = content
    elif isinstance(value, functools._lru_cache_wrapper):
        value.cache_clear()
    elif is_array(value):
        value[...] = content
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = content
    elif isinstance(value, random.Random):
        value.setstate(content)
    else:
        value.set_state(content)
