"""What a traced graph calls besides the model's own ops: checks that it is run as it was traced, and output objects."""

from __future__ import annotations

import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from functools import reduce
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
"""The ways in which a forward makes a plain value of a traced one."""


def check_same(value: Any, expected: Any, how: str, place: str, text: str) -> None:
    """Raise `InputError` when a value that decided how the graph looks is another one. Graphs call this.

    Args:
        value: a number, a size, or a tensor that sizes alone decide.
        expected: the plain value that it had on the example.
        how: how that was made of it, a key of `HOW`.
        place: `file:line` that asked.
        text: that line.
    """
    got = HOW[how](value)
    if got != expected:
        raise InputError(
            f"{place}: the graph was made for an input for which {how} of a value in `{text}` is {expected!r}, and "
            f"here it is {got!r}. A graph has no branches: quantize the model again with an example like this "
            "(example_inputs), one for each."
        )


TENSOR, NUMBER = "<a tensor>", "<a number>"


def structure(value: Any, dtypes: bool = False, ranks: bool = False, devices: bool = False) -> Any:
    """What a graph may depend on in an argument, as plain data: everything but the values of tensors and numbers.

    Args:
        value: an argument of forward.
        dtypes: whether the dtypes of tensors count.
        ranks: whether their numbers of axes do.
        devices: whether the types of their devices do.

    Example:
        >>> structure({"x": torch.ones(2), "flag": True, "sizes": [1, 2]})
        {'x': '<a tensor>', 'flag': True, 'sizes': ['list', '<a number>', '<a number>']}
    """
    if isinstance(value, Tensor):
        dtype = f" of {value.dtype}".replace("torch.", "") if dtypes else ""
        device = f" on {value.device.type}" if devices else ""
        return TENSOR.replace(">", f"{dtype}{f' with {value.dim()} axes' if ranks else ''}{device}>")
    if isinstance(value, (tuple, list)):
        return ["list" if isinstance(value, list) else "tuple", *(structure(v, dtypes, ranks, devices) for v in value)]
    if isinstance(value, Mapping):
        return {key: structure(v, dtypes, ranks, devices) for key, v in value.items()}
    if isinstance(value, (int, float, complex)) and not isinstance(value, bool):
        return NUMBER
    return value if is_plain(value) else f"<a {type(value).__name__}>"


def is_plain(value: Any) -> bool:
    """Whether a graph can be made for this value of an argument: None, a flag, a string, a dtype."""
    return value is None or isinstance(value, (bool, str, torch.dtype, torch.layout, torch.memory_format))


def check_fixed(given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise `InputError` when an argument that a graph was made for is another one. Graphs call this.

    Args:
        given: arguments by name.
        expected: for each, its `structure`; a number where it is fixed; "any" for a tuple or a list alike.
    """
    for name, value in given.items():
        wrong = _mismatch(name, value, expected[name])
        if wrong is not None:
            raise InputError(
                f"the graph was made for {wrong}. Quantize the model again with {name} in the example "
                "(example_inputs), for each form of it that the model is to be called with."
            )


def _mismatch(path: str, value: Any, expected: Any) -> str | None:
    """`name=wanted, as its example has it, and got ...`; None when the value is as expected."""
    if isinstance(expected, list) and isinstance(value, (tuple, list)):
        kinds = "list" if isinstance(value, list) else "tuple", "any"
        if expected[0] in kinds and len(value) == len(expected) - 1:
            parts = ((f"{path}[{i}]", v, e) for i, (v, e) in enumerate(zip(value, expected[1:], strict=True)))
            return next((wrong for part in parts if (wrong := _mismatch(*part)) is not None), None)
    elif isinstance(expected, Mapping) and isinstance(value, Mapping):
        if set(value) == set(expected):
            parts = ((f"{path}[{k!r}]", value[k], e) for k, e in expected.items())
            return next((wrong for part in parts if (wrong := _mismatch(*part)) is not None), None)
    elif isinstance(expected, str) and expected.startswith("<"):
        if expected == structure(value, " of " in expected, " with " in expected, " on " in expected):
            return None
    elif not isinstance(value, Tensor) and type(value) is type(expected) and value == expected:
        return None
    got = structure(value, True, " with " in str(expected), " on " in str(expected))
    return f"{path}={_shown(expected)}, as its example has it, and got {_shown(got, value)}"


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
    """Raise `InputError` when an input has other sizes than those that a program was exported for. Graphs call this.

    Args:
        value: the input.
        name: its name.
        sizes: for each axis a number, or the least and the most, which may be None.
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
    """A copy of a constant, for the caller, who may change what the model returns. Graphs call this."""
    return value.clone()


class Fields(dict[str, Any]):
    """An output whose class cannot be imported where the graph runs: its fields as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def make_output(kind: str, fields: Mapping[str, Any] | Sequence[Any]) -> Any:
    """Construct an object of a class from its fields or items. Graphs call this.

    Used for outputs that are dataclasses, named tuples, or subclasses of dict, list or tuple. If the class is not
    imported, returns a `Fields`, a list or a tuple.
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
    return cls(fields) if fits and issubclass(cls, Mapping) else Fields(fields)


def _dataclass(cls: Any, values: Mapping[str, Any]) -> Any:
    """Object of a dataclass whose fields have these values, also those that only its `__post_init__` sets."""
    computed = {field.name for field in fields_of(cls) if not field.init}
    made = cls(**{name: value for name, value in values.items() if name not in computed})
    for name, value in values.items():
        if getattr(made, name, None) is not value:
            object.__setattr__(made, name, value)  # frozen dataclasses refuse others
    return made


def is_own_container(value: Any) -> bool:
    """Whether `make_output` constructs such values: dataclasses and containers of user-defined classes."""
    cls = type(value)
    if cls.__module__.partition(".")[0] in ("torch", "builtins"):
        return False
    return isinstance(value, (Mapping, list, tuple)) or is_dataclass(cls)
