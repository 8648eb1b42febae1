"""Conversion of dataclasses to plain data for JSON, and back with checks against the annotation of each field."""

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
    """Convert a record to dicts, lists, numbers and strings. Fields with their default value are left out.

    Args:
        value: a dataclass object, named tuple, number, string, dtype or None, or a container of these.

    Raises:
        InputError: it contains an object of another class.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, torch.dtype):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        items = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: to_plain(v) for f, v in items if not _is_default(f, v)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_plain(v) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(v) for v in value]
    raise InputError(f"a file cannot hold {value!r}, a {type(value).__name__}.")


def _is_default(field: Field[Any], value: Any) -> bool:
    return field.default is not MISSING and type(value) is type(field.default) and bool(value == field.default)


def from_plain(kind: Any, data: Any) -> Any:
    """Convert the plain data of `to_plain` back to an object.

    Args:
        kind: class or type annotation of the object.
        data: the plain data.

    Raises:
        InputError: the data does not match; the message says where, and what is expected there.

    Example:
        >>> from fxq.recipe.pins import Pin
        >>> from_plain(tuple[Pin, ...], to_plain((Pin("conv2d", "a"),)))
        (Pin(op='conv2d', path='a', call=0, runs='int8', ops=0),)
    """
    return _reader(kind)(data)


Reader = Callable[[Any], Any]


@cache
def _reader(kind: Any) -> Reader:
    """Return the function that converts plain data to an object of a kind."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _one_of(args)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_reader(args[1]))
    if origin in (tuple, list):
        return _sequence(origin, args)
    if kind is torch.dtype:
        return _dtype
    if kind in (bool, int, float, str, type(None)):
        return _number_or_text(kind)
    if issubclass(kind, enum.Enum):
        return _one_of(tuple(kind), tuple(member.value for member in kind))
    if issubclass(kind, tuple):
        return _sequence(kind, tuple(get_type_hints(kind)[name] for name in kind._fields))
    return _record(kind)


def _number_or_text(kind: type) -> Reader:
    takes = (float, int) if kind is float else (kind,)

    def read(data: Any) -> Any:
        if type(data) not in takes:
            raise InputError(f"expected {_named(kind)}, not {_shown(data)}.")
        return data

    return read


def _one_of(values: tuple[Any, ...], written: tuple[Any, ...] | None = None) -> Reader:
    by_text = dict(zip(written or values, values, strict=True))

    def read(data: Any) -> Any:
        if not isinstance(data, (str, int)) or data not in by_text:
            raise InputError(f"expected one of {', '.join(map(repr, by_text))}, not {_shown(data)}.")
        return by_text[data]

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
        return _read_all(((key, reader, value) for key, value in data.items()))

    return read


def _sequence(kind: Any, args: tuple[Any, ...]) -> Reader:
    """Reader of a list, a tuple of any or fixed length, or a named tuple."""
    fixed = None if kind is list or args[-1:] == (...,) else [_reader(arg) for arg in args]
    item_reader = _reader(args[0]) if fixed is None else None

    def read(data: Any) -> Any:
        if not isinstance(data, list) or (fixed is not None and len(fixed) != len(data)):
            raise InputError(f"expected a list{'' if fixed is None else f' of {len(fixed)}'}, not {_shown(data)}.")
        readers = [item_reader] * len(data) if item_reader is not None else fixed or []
        values = _read_all(zip(range(len(data)), readers, data, strict=True)).values()
        return kind(*values) if hasattr(kind, "_fields") else kind(values)

    return read


def _record(kind: Any) -> Reader:
    init_fields = {f.name: f for f in fields(kind) if f.init}
    readers: dict[str, Reader] = {}
    needed = [f.name for f in init_fields.values() if f.default is MISSING and f.default_factory is MISSING]

    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            raise InputError(f"expected a {kind.__name__}, not {_shown(data)}.")
        if not readers:  # not earlier, since a record may contain records of its own class
            hints = get_type_hints(kind)
            readers.update({name: _reader(hints[name]) for name in init_fields})
        wrong = [name for name in data if name not in readers] or [name for name in needed if name not in data]
        if wrong:
            raise InputError(f"a {kind.__name__} has the fields {', '.join(readers)}: see {wrong[0]!r}.")
        return kind(**_read_all((name, readers[name], value) for name, value in data.items()))

    return read


def _dtype(data: Any) -> torch.dtype:
    dtype = getattr(torch, str(data).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"expected a dtype, not {_shown(data)}.")
    return dtype


def _read_all(parts: Iterable[tuple[Any, Reader, Any]]) -> dict[Any, Any]:
    """Read parts of a record; return values by name or index, which errors mention."""
    values = {}
    for place, reader, data in parts:
        try:
            values[place] = reader(data)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
    return values


def _named(kind: type) -> str:
    return {str: "a string", type(None): "nothing", float: "a number"}.get(kind, f"a {kind.__name__}")


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) < 60 else f"{text[:60]}..."
