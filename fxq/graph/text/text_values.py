"""The values in the text of a graph, written and read: nodes by name, plain data, records such as a `TensorSpec`."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxq.errors import InputError, unknown
from fxq.graph.info import Cost, Decision, Edge, EngineLayer, Plan
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.qparams import QParams
from fxq.quant.spec import TensorSpec

RECORDS = {cls.__name__: cls for cls in (Plan, Decision, Cost, Edge, EngineLayer, TensorSpec, QParams, DynamicGrid)}
"""The classes whose objects may stand in a text, written as a call of the class with the fields that matter."""

Nodes = Mapping[str, fx.Node]


def type_text(shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> str:
    """`float32[1, 3]`; `float32[()]` for a tensor of no axes, `None` for what is no tensor."""
    return "None" if shape is None else f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape)) or '()'}]"


def value_text(value: Any, exact: bool = True) -> str:
    """An argument as text.

    Args:
        value: a node, plain data, or a dtype and the like.
        exact: so that it parses back; else short, for people: weights as `@conv.weight`, six digits, `float32`.

    Raises:
        InputError: it is something else.
    """
    if isinstance(value, fx.Node):
        return f"@{value.target}" if value.op == "get_attr" and not exact else value.name
    if isinstance(value, float):
        return float.__repr__(value) if exact else f"{value:.6g}"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value) if exact else str(value).removeprefix("torch.")
    if isinstance(value, EngineLayer):
        return f"EngineLayer{value_text(tuple(value), exact)}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(value_text(v, exact) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{value_text(k, exact)}: {value_text(v, exact)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        return repr(str.__str__(value))  # an Enum member as its plain string
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)
    if not exact or value is None or isinstance(value, bool):
        return repr(value)
    return _exact_text(value)


def _exact_text(value: Any) -> str:
    if value is ...:
        return "..."
    if isinstance(value, slice):
        return f"slice({value_text(value.start)}, {value_text(value.stop)}, {value_text(value.step)})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, Tensor) and value.dim() < 2:  # of a grid
        return value_text(value.tolist())
    if type(value) in RECORDS.values():
        given = [(f.name, getattr(value, f.name), f.default) for f in fields(value)]
        shown = [f"{name}={value_text(v)}" for name, v, default in given if v is not default]
        return f"{type(value).__name__}({', '.join(shown)})"
    raise InputError(f"holds a {type(value).__name__} ({value!r}), which no text can name.")


# ---- reading


def read_type(annotation: ast.expr) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
    """The shape and the dtype that `type_text` wrote; of no tensor None twice.

    Raises:
        InputError: it is no type, or one of a tensor that no memory holds.
    """
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return None, None
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        dtype, sizes = getattr(torch, annotation.value.id, None), read_value(annotation.slice, {})
        shape = sizes if isinstance(sizes, tuple) else (sizes,)
        if isinstance(dtype, torch.dtype) and all(type(size) is int and size >= 0 for size in shape):
            if math.prod(shape) * dtype.itemsize >= _LARGEST:
                raise InputError(f"no tensor is as large as `{ast.unparse(annotation)}`.")
            return shape, dtype
    raise InputError(f"expected a type as `float32[1, 3]`, not `{ast.unparse(annotation)}`.")


_LARGEST = 2**63
"""Bytes that no tensor has."""


def read_value(expr: ast.expr, nodes: Nodes) -> Any:
    """What an expression says: one of the nodes, plain data, or a record. Nothing is evaluated.

    Raises:
        InputError: it is something else.
    """
    match expr:
        case ast.Constant(value=value) if not isinstance(value, (bytes, complex)):
            return value
        case ast.Name(id=name) if name in nodes:
            return nodes[name]
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.Name(id=name):
            raise InputError(f"there is no value {name!r} above this line.")
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return -float("inf")
        case ast.Tuple(elts=parts):
            return tuple(read_value(part, nodes) for part in parts)
        case ast.List(elts=parts):
            return [read_value(part, nodes) for part in parts]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = [(read_value(k, {}), read_value(v, nodes)) for k, v in zip(keys, values, strict=True) if k]
            if all(_is_key(key) for key, _ in pairs):
                return dict(pairs)
        case ast.Attribute(value=ast.Name(id="torch"), attr=attr):
            constant = getattr(torch, attr, None)
            if isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
                return constant
        case ast.Call():
            return _made(expr, nodes)
    raise InputError(f"expected a value, a number, a string or the like, not `{ast.unparse(expr)}`.")


def _is_key(value: Any) -> bool:
    """Whether a value may be a dict key: immutable plain data."""
    return all(map(_is_key, value)) if type(value) is tuple else isinstance(value, (str, int, float, type(None)))


def read_arguments(call: ast.Call, nodes: Nodes) -> tuple[list[Any], dict[str, Any]]:
    """The positional and keyword arguments of a call."""
    return [read_value(arg, nodes) for arg in call.args], {key_of(k): read_value(k.value, nodes) for k in call.keywords}


def _made(call: ast.Call, nodes: Nodes) -> Any:
    """A record, a slice or a device."""
    makers: dict[str, Any] = {**RECORDS, "slice": slice, "torch.device": torch.device}
    name, (args, kwargs) = dotted(call.func), read_arguments(call, nodes)
    if name not in makers:
        raise InputError(unknown("kind of value", name, makers))
    try:
        made = makers[name](*args, **kwargs)
        if isinstance(made, QParams):
            scale, zero_point = torch.tensor(made.scale), torch.tensor(made.zero_point, dtype=torch.int32)
            return replace(made, scale=scale.float(), zero_point=zero_point)
        return made
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"no {name} can be made of this: {error}") from None


def parsed(line: str) -> tuple[ast.stmt, str]:
    """The one statement of a line, and what stands behind `#`."""
    if len(line) > _MOST_MARKS and sum(map(line.count, _MARKS)) > _MOST_MARKS:  # each may become some 100 bytes
        raise InputError(f"the line is too long: it has more than {_MOST_MARKS} marks.")
    try:
        found = ast.parse(line).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"expected a line of Python: {error.args[0] if error.args else error}.") from None
    if len(found) != 1:
        raise InputError("expected one statement.")
    rest = line.encode()[found[0].end_col_offset or 0 :].decode().strip()
    return found[0], rest.removeprefix("#").strip()


_MARKS, _MOST_MARKS = " ,.:;=<>()[]{}+-*/%&|^~@!\t\f\"'\\", 1 << 20


def dotted(expr: ast.expr) -> str:
    """`a.b.c` as text."""
    parts = []
    while isinstance(expr, ast.Attribute):
        parts.append(expr.attr)
        expr = expr.value
    if not isinstance(expr, ast.Name):
        raise InputError(f"expected a name, not `{ast.unparse(expr)}`.")
    return ".".join([expr.id, *reversed(parts)])


def key_of(given: ast.keyword) -> str:
    """The name of an argument that is given by name."""
    if given.arg is None:
        raise InputError("expected arguments by name, not `**`.")
    return given.arg
