"""Typed records as the plain data of JSON, and back: what is read is checked against the annotation of each field."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from fxq.errors import InputError


def to_plain(value: Any) -> Any:
    """A record as dicts, lists, numbers and strings. Fields that have their default are left out.

    Args:
        value: an object of a dataclass or a named tuple, a container of such, a number, a string, a dtype, None.

    Raises:
        InputError: there is something else inside.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, torch.dtype):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        given = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: to_plain(v) for f, v in given if not _is_default(f, v)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_plain(v) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(v) for v in value]
    raise InputError(f"a file cannot hold {value!r}, a {type(value).__name__}.")


def _is_default(field: Field[Any], value: Any) -> bool:
    return field.default is not MISSING and type(value) is type(field.default) and bool(value == field.default)


def from_plain(kind: Any, data: Any) -> Any:
    """Inverse of `to_plain`.

    Args:
        kind: what it is to be: a class, or what stands in an annotation.
        data: the plain data.

    Raises:
        InputError: it is no such record; the message says where in it, and what was expected there.

    Example:
        >>> from fxq.recipe.pins import Pin
        >>> from_plain(tuple[Pin, ...], to_plain((Pin("conv2d", "a"),)))
        (Pin(op='conv2d', path='a', call=0, runs='int8', ops=0),)
    """
    return _reader(kind)(data)


Reader = Callable[[Any], Any]


@cache
def _reader(kind: Any) -> Reader:
    """What makes an object of a kind."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _one_of(args)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_reader(args[1]))
    if origin in (tuple, list):
        return _several(origin, args)
    if kind is torch.dtype:
        return _dtype
    if kind in (bool, int, float, str, type(None)):
        return _number_or_text(kind)
    if issubclass(kind, enum.Enum):
        return _one_of(tuple(kind), tuple(each.value for each in kind))
    if issubclass(kind, tuple):
        return _several(kind, tuple(get_type_hints(kind)[name] for name in kind._fields))
    return _record(kind)


def _number_or_text(kind: type) -> Reader:
    takes = (float, int) if kind is float else (kind,)

    def read(data: Any) -> Any:
        if type(data) not in takes:
            raise InputError(f"expected {_named(kind)}, not {_shown(data)}.")
        return data

    return read


def _one_of(values: tuple[Any, ...], written: tuple[Any, ...] | None = None) -> Reader:
    known = dict(zip(written or values, values, strict=True))

    def read(data: Any) -> Any:
        if not isinstance(data, (str, int)) or data not in known:
            raise InputError(f"expected one of {', '.join(map(repr, known))}, not {_shown(data)}.")
        return known[data]

    return read


def _union(kinds: tuple[Any, ...]) -> Reader:
    readers = [_reader(kind) for kind in sorted(kinds, key=lambda kind: kind is not type(None))]

    def read(data: Any) -> Any:
        for reader in readers[:-1]:
            try:
                return reader(data)
            except InputError:
                continue
        return readers[-1](data)

    return read


def _mapping(reader: Reader) -> Reader:
    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            raise InputError(f"expected a table, not {_shown(data)}.")
        return _each(((key, reader, value) for key, value in data.items()))

    return read


def _several(kind: Any, args: tuple[Any, ...]) -> Reader:
    """A list, a tuple of any or of a fixed length, or a named tuple."""
    fixed = None if kind is list or args[-1:] == (...,) else [_reader(arg) for arg in args]
    each = _reader(args[0]) if fixed is None else None

    def read(data: Any) -> Any:
        if not isinstance(data, list) or (fixed is not None and len(fixed) != len(data)):
            raise InputError(f"expected a list{'' if fixed is None else f' of {len(fixed)}'}, not {_shown(data)}.")
        readers = [each] * len(data) if each is not None else fixed or []
        values = _each(zip(range(len(data)), readers, data, strict=True)).values()
        return kind(*values) if hasattr(kind, "_fields") else kind(values)

    return read


def _record(kind: Any) -> Reader:
    about = {f.name: f for f in fields(kind) if f.init}
    readers: dict[str, Reader] = {}
    needed = [f.name for f in about.values() if f.default is MISSING and f.default_factory is MISSING]

    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            raise InputError(f"expected a {kind.__name__}, not {_shown(data)}.")
        if not readers:  # not before, as a record may have others of its kind inside
            hints = get_type_hints(kind)
            readers.update({name: _reader(hints[name]) for name in about})
        wrong = [name for name in data if name not in readers] or [name for name in needed if name not in data]
        if wrong:
            raise InputError(f"a {kind.__name__} has the fields {', '.join(readers)}: see {wrong[0]!r}.")
        return kind(**_each((name, readers[name], value) for name, value in data.items()))

    return read


def _dtype(data: Any) -> torch.dtype:
    found = getattr(torch, str(data).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"expected a dtype, not {_shown(data)}.")
    return found


def _each(parts: Iterable[tuple[Any, Reader, Any]]) -> dict[Any, Any]:
    """The values of several parts, by name or number, which an error names."""
    made = {}
    for place, reader, data in parts:
        try:
            made[place] = reader(data)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
    return made


def _named(kind: type) -> str:
    return {str: "a string", type(None): "nothing", float: "a number"}.get(kind, f"a {kind.__name__}")


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) < 60 else f"{text[:60]}..."
