"""Stand-ins for the iterators of a model, which cannot be set back once they have advanced."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

from fxq.errors import TraceError

_SHALLOW = ("count", "repeat", "list_iterator", "tuple_iterator", "range_iterator", "str_iterator", "dict_keyiterator")


class IteratorStandIn(Iterator[Any]):
    """Iterator that runs instead of one of the user's, on a copy of its state.

    Attributes:
        original: the user's iterator, or a stand-in for it.
        name: its place in the model, for messages.
        steps: how many times it was advanced.
    """

    def __init__(self, original: Iterator[Any], name: str) -> None:
        self.original, self.name, self.steps = original, name, 0
        self._copy = _copied(original)

    def __next__(self) -> Any:
        return next(self._advanced())

    def send(self, value: Any) -> Any:
        """Send a value to a generator."""
        return self._advanced().send(value)

    def _advanced(self) -> Any:
        self.steps += 1
        if self._copy is None:
            raise TraceError(
                f"forward advances {self.name!r}, a {_kind(self.original)}, which cannot be copied or set back: "
                "a graph keeps no state between calls, and a float leaf would share it with the model. Keep the "
                "position in an attribute (self.position += 1) and the module as a float leaf (recipe.leaf)."
            )
        return self._copy

    def __copy__(self) -> Iterator[Any]:
        duplicate = None if self._copy is None else _copied(self._copy)
        if duplicate is None:
            raise TypeError(f"{self.name} cannot be copied")
        return duplicate

    def __deepcopy__(self, memo: Any) -> Iterator[Any]:
        return self.__copy__()


def is_opaque_iterator(value: Any) -> bool:
    """Whether a value is a generator or an iterator of Python itself, or a stand-in for one."""
    kind = type(value)  # no `isinstance` of an abstract class: snapshots ask this about every attribute of a model
    return kind is IteratorStandIn or (hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"))


def stand_in(value: Any, name: str, stand_ins: dict[int, IteratorStandIn]) -> Any:
    """Value with stand-ins for the iterators in it: it is one itself or a tuple that holds some; else the value.

    Args:
        value: any value.
        name: its place, for messages.
        stand_ins: stand-ins by id of their original, which gets new ones.
    """
    if is_opaque_iterator(value):
        return stand_ins.setdefault(id(value), IteratorStandIn(value, name))
    if type(value) is tuple:
        parts = tuple(stand_in(part, f"{name}[{i}]", stand_ins) for i, part in enumerate(value))
        return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    return value


def advanced(now: Any, before: Any) -> bool | None:
    """Whether a stand-in of `before`, or in it, was advanced; None if `now` is neither `before` nor its stand-in."""
    if now is before:
        return False
    if isinstance(now, IteratorStandIn) and now.original is before:
        return now.steps > 0
    if type(now) is tuple and type(before) is tuple and len(now) == len(before):
        parts = [advanced(a, b) for a, b in zip(now, before, strict=True)]
        return None if None in parts else any(parts)
    return None


def _kind(iterator: Iterator[Any]) -> str:
    while isinstance(iterator, IteratorStandIn):
        iterator = iterator.original
    return type(iterator).__name__


def _copied(iterator: Iterator[Any]) -> Any:
    """Copy of an iterator that advances on its own; None if Python cannot copy it, as a generator."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and 3.13: copies of itertools objects
            shallow = type(iterator).__name__ in _SHALLOW or isinstance(iterator, IteratorStandIn)
            duplicate = copy.copy(iterator) if shallow else copy.deepcopy(iterator)
        return None if duplicate is iterator else duplicate
    except Exception:  # whatever the items of the iterator raise when they are copied
        return None
