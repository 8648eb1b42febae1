"""Functions that traced graphs call besides the model's ops: checks of assumptions, and construction of outputs."""

from __future__ import annotations

import operator
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from fxq.errors import InputError

HOW: Mapping[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": int,
    "index": operator.index,
    "float": float,
    "complex": complex,
    "len": len,
    "keys": list,
    "none": lambda value: value is None,
}
"""Conversions of a traced value to a plain one that a forward may use, by name."""


def check_same(value: Any, expected: Any, how: str, place: str, text: str) -> None:
    """Raise `InputError` if a value that determined the traced graph differs from the example's. Graphs call this.

    Args:
        value: a number, a size, or a tensor that follows from sizes alone.
        expected: its plain value for the example.
        how: conversion to a plain value, a key of `HOW`.
        place: `file:line` of the forward that read the value.
        text: source text of that line.
    """
    got = HOW[how](value)
    if got != expected:
        is_size = how in ("int", "index", "len") and _FIXES_A_SIZE.search(text)
        hint = " len(x), int(...) and a loop over x fix a size in the graph; x.shape[0] does not." if is_size else ""
        raise InputError(
            f"{place}: the graph was traced with inputs for which {how} of a value in `{text}` is {expected!r}, but "
            f"here it is {got!r}. A graph has no branches: quantize the model again with an example like this "
            f"(example_inputs), one for each.{hint}"
        )


_FIXES_A_SIZE = re.compile(r"\b(len|int)\(|\bfor\b.*\bin\b")

TENSOR, NUMBER = "<a tensor>", "<a number>"


def structure(value: Any, dtypes: bool = False, ranks: bool = False, devices: bool = False) -> Any:
    """Structure of an argument as plain data: everything that a graph may depend on, without tensors and numbers.

    Args:
        value: an argument of forward.
        dtypes: whether to include the dtypes of tensors.
        ranks: whether to include their numbers of axes.
        devices: whether to include their device types.

    Example:
        >>> structure({"x": torch.ones(2), "flag": True, "sizes": [1, 2]})
        {'x': '<a tensor>', 'flag': True, 'sizes': ['list', '<a number>', '<a number>']}
    """
    if isinstance(value, Tensor):
        return _of_tensor(
            value.dtype if dtypes else None, value.dim() if ranks else None, value.device.type if devices else ""
        )
    if isinstance(value, (tuple, list)):
        return ["list" if isinstance(value, list) else "tuple", *(structure(v, dtypes, ranks, devices) for v in value)]
    if isinstance(value, Mapping):
        return {key: structure(v, dtypes, ranks, devices) for key, v in value.items()}
    if isinstance(value, (int, float, complex)) and not isinstance(value, bool):
        return NUMBER
    return value if is_plain(value) else f"<a {type(value).__name__}>"


@lru_cache
def _of_tensor(dtype: torch.dtype | None, rank: int | None, device: str) -> str:
    """Structure of a tensor with the facts that matter."""
    of = f" of {dtype}".replace("torch.", "") if dtype is not None else ""
    axes = f" with {rank} axes" if rank is not None else ""
    return TENSOR.replace(">", f"{of}{axes}{f' on {device}' if device else ''}>")


def is_plain(value: Any) -> bool:
    """Whether a graph can be traced for this value of an argument: None, a bool, a string or a dtype."""
    return value is None or isinstance(value, (bool, str, torch.dtype, torch.layout, torch.memory_format))


def check_fixed(arguments: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise `InputError` if an argument differs in structure from the one that the graph was traced for.

    Graphs call this.

    Args:
        arguments: the arguments by name.
        expected: `structure` of each argument; a number if it is fixed; "any" if it may be a tuple or a list.
    """
    for name, value in arguments.items():
        mismatch = _mismatch(name, value, expected[name])
        if mismatch is not None:
            raise InputError(
                f"the graph was traced for {mismatch}. Quantize the model again with {name} in the example "
                "(example_inputs), for each form of it that the model is to be called with."
            )


def _mismatch(path: str, value: Any, expected: Any) -> str | None:
    """`name=expected, as in the example, but got ...`; None if the value is as expected."""
    if isinstance(expected, list) and isinstance(value, (tuple, list)):
        kinds = "list" if isinstance(value, list) else "tuple", "any"
        if expected[0] in kinds and len(value) == len(expected) - 1:
            entries = ((f"{path}[{i}]", v, e) for i, (v, e) in enumerate(zip(value, expected[1:], strict=True)))
            return next((mismatch for entry in entries if (mismatch := _mismatch(*entry)) is not None), None)
    elif isinstance(expected, Mapping) and isinstance(value, Mapping):
        if set(value) == set(expected):
            entries = ((f"{path}[{k!r}]", value[k], e) for k, e in expected.items())
            return next((mismatch for entry in entries if (mismatch := _mismatch(*entry)) is not None), None)
    elif isinstance(expected, str) and expected.startswith("<"):
        if expected == structure(value, " of " in expected, " with " in expected, " on " in expected):
            return None
    elif not isinstance(value, Tensor) and type(value) is type(expected) and value == expected:
        return None
    got = structure(value, True, " with " in str(expected), " on " in str(expected))
    return f"{path}={_shown(expected)}, as in the example, but got {_shown(got, value)}"


def _shown(expected: Any, value: Any = None) -> str:
    """A `structure` as text."""
    if isinstance(expected, str) and expected.startswith("<"):
        number = isinstance(value, (int, float, complex))
        return f"{type(value).__name__} {value!r}" if number else expected.strip("<>")
    if isinstance(expected, list):
        inner = ", ".join(_shown(e) for e in expected[1:])
        return f"[{inner}]" if expected[0] == "list" else f"({inner})"
    if isinstance(expected, Mapping):
        return "{" + ", ".join(f"{k!r}: {_shown(e)}" for k, e in expected.items()) + "}"
    return repr(expected) if value is None else f"{type(value).__name__} {value!r}"


def check_sizes(value: Tensor, name: str, sizes: Sequence[Any]) -> None:
    """Raise `InputError` if the sizes of an input do not fit the exported program. Graphs call this.

    Args:
        value: the input.
        name: its name.
        sizes: for each axis a size, or (smallest, largest); largest is None if there is no limit.
    """
    fits = len(sizes) == value.dim() and all(
        s == n if isinstance(s, int) else s[0] <= n and (s[1] is None or n <= s[1])
        for s, n in zip(sizes, value.shape, strict=False)
    )
    if not fits:
        wanted = ", ".join(str(s) if isinstance(s, int) else f"{s[0]}..{'' if s[1] is None else s[1]}" for s in sizes)
        raise InputError(
            f"{name} has the shape {list(value.shape)}, but the program was exported for [{wanted}]. Export it with "
            "dynamic_shapes for the sizes that vary."
        )


def own_copy(value: Tensor) -> Tensor:
    """Copy of a constant that the model returns, since the caller may change it. Graphs call this."""
    return value.clone()


class OutputFields(dict[str, Any]):
    """Fields of an output whose class cannot be imported, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def make_output(kind: str, fields: Mapping[str, Any] | Sequence[Any]) -> Any:
    """Construct an object of a class from its fields or items. Graphs call this.

    Used for outputs that are dataclasses, named tuples, or subclasses of dict, list or tuple. If the class is not
    imported, returns a `OutputFields`, a list or a tuple.
    """
    module, _, name = kind.partition(":")
    cls: Any = reduce(lambda outer, part: getattr(outer, part, None), name.split("."), sys.modules.get(module))
    fits = isinstance(cls, type)
    if not isinstance(fields, Mapping):
        return cls(fields) if fits and issubclass(cls, (list, tuple)) else fields
    if fits and is_dataclass(cls):
        return _dataclass(cls, fields)
    if fits and hasattr(cls, "_fields"):
        return cls(**fields)
    if fits and issubclass(cls, defaultdict):
        return cls(None, fields)
    return cls(fields) if fits and issubclass(cls, Mapping) else OutputFields(fields)


def _dataclass(cls: Any, values: Mapping[str, Any]) -> Any:
    """Object of a dataclass with these field values, including fields that only its `__post_init__` sets."""
    computed = {field.name for field in fields_of(cls) if not field.init}
    result = cls(**{name: value for name, value in values.items() if name not in computed})
    for name, value in values.items():
        if getattr(result, name, None) is not value:
            object.__setattr__(result, name, value)  # works for frozen dataclasses, too
    return result


def is_own_container(value: Any) -> bool:
    """Whether `make_output` constructs values of this class: user-defined dataclasses and containers."""
    cls = type(value)
    if cls.__module__.partition(".")[0] in ("torch", "builtins"):
        return False
    return isinstance(value, (Mapping, list, tuple)) or is_dataclass(cls)
