"""Writing and reading of values in a graph's text: nodes by name, plain data, records such as `TensorSpec`."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxq.common.parsing import call_parser
from fxq.errors import InputError, unknown
from fxq.graph.info import Cost, Decision, Edge, EngineLayer, Plan
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.qparams import QParams
from fxq.quant.spec import TensorSpec

RECORDS = {cls.__name__: cls for cls in (Plan, Decision, Cost, Edge, EngineLayer, TensorSpec, QParams, DynamicGrid)}
"""Classes whose objects may occur in a text, written as a call of the class with the fields that differ from defaults.
"""

Nodes = Mapping[str, fx.Node]


def type_text(shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> str:
    """Type as text: `float32[1, 3]`, `float32[()]` for a 0-d tensor, `None` for anything but a tensor."""
    return "None" if shape is None else f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape)) or '()'}]"


def value_text(value: Any, exact: bool = True) -> str:
    """Return an argument as text.

    Args:
        value: a node, plain data, a dtype, a device or a record.
        exact: whether the text has to parse back; else it is short: weights as `@conv.weight`, six digits, `float32`.

    Raises:
        InputError: the value is of another type.
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
        return repr(str.__str__(value))  # writes an Enum member as its plain string
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
    if isinstance(value, Tensor) and value.dim() < 2:  # a scale or zero point
        return value_text(value.tolist())
    if type(value) in RECORDS.values():
        entries = [(f.name, getattr(value, f.name), f.default) for f in fields(value)]
        shown = [f"{name}={value_text(v)}" for name, v, default in entries if v is not default]
        return f"{type(value).__name__}({', '.join(shown)})"
    raise InputError(f"holds a {type(value).__name__} ({value!r}), which cannot be written as text.")


# ---- reading


def read_type(annotation: ast.expr) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
    """Read shape and dtype as written by `type_text`; (None, None) for anything but a tensor.

    Raises:
        InputError: it is not a type, or the tensor would be too large for any memory.
    """
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return None, None
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        dtype, sizes = getattr(torch, annotation.value.id, None), read_value(annotation.slice, {})
        shape = sizes if isinstance(sizes, tuple) else (sizes,)
        if isinstance(dtype, torch.dtype) and all(type(size) is int and size >= 0 for size in shape):
            if math.prod(shape) * dtype.itemsize >= MAX_TENSOR_BYTES:
                raise InputError(f"a tensor cannot be as large as `{ast.unparse(annotation)}`.")
            return shape, dtype
    raise InputError(f"expected a type such as `float32[1, 3]`, not `{ast.unparse(annotation)}`.")


MAX_TENSOR_BYTES = 2**63
"""Size that no tensor reaches."""


def read_value(expr: ast.expr, nodes: Nodes) -> Any:
    """Read an expression: a node, plain data, or a record. Nothing is evaluated.

    Raises:
        InputError: the expression is of another form.
    """
    match expr:
        case ast.Constant(value=value) if not isinstance(value, (bytes, complex)):
            return value
        case ast.Name(id=name):
            return _read_name(name, nodes)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) | ast.Name(id="inf") as number):
            return -read_value(number, {})
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            values = [read_value(part, nodes) for part in parts]
            return tuple(values) if isinstance(expr, ast.Tuple) else values
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = [(read_value(k, {}), read_value(v, nodes)) for k, v in zip(keys, values, strict=True) if k]
            if all(_is_key(key) for key, _ in pairs):
                return dict(pairs)
        case ast.Attribute(value=ast.Name(id="torch"), attr=attr):
            constant = getattr(torch, attr, None)
            if isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
                return constant
        case ast.Call():
            return _read_record(expr, nodes)
    raise InputError(f"expected a value, a number, a string or similar, not `{ast.unparse(expr)}`.")


def _read_name(name: str, nodes: Nodes) -> Any:
    """Node of this name, or a float that has no literal in Python."""
    if name not in nodes and name not in ("inf", "nan"):
        raise InputError(f"there is no value {name!r} above this line.")
    return nodes[name] if name in nodes else float(name)


def _is_key(value: Any) -> bool:
    """Whether a value may be a dict key: immutable plain data."""
    return all(map(_is_key, value)) if type(value) is tuple else isinstance(value, (str, int, float, type(None)))


def read_arguments(call: ast.Call, nodes: Nodes) -> tuple[list[Any], dict[str, Any]]:
    """Read the positional and keyword arguments of a call."""
    return [read_value(arg, nodes) for arg in call.args], {key_of(k): read_value(k.value, nodes) for k in call.keywords}


def _read_record(call: ast.Call, nodes: Nodes) -> Any:
    """Construct a record, a slice or a device."""
    constructors: dict[str, Any] = {**RECORDS, "slice": slice, "torch.device": torch.device}
    name, (args, kwargs) = dotted(call.func), read_arguments(call, nodes)
    if name not in constructors:
        raise InputError(unknown("kind of value", name, constructors))
    try:
        record = constructors[name](*args, **kwargs)
        if isinstance(record, QParams):
            scale, zero_point = torch.tensor(record.scale), torch.tensor(record.zero_point)
            zero_point = zero_point if zero_point.is_floating_point() else zero_point.int()
            return replace(record, scale=scale.float(), zero_point=zero_point)
        return record
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"these fields do not fit {name}: {error}") from None


def parsed(line: str) -> tuple[ast.stmt, str]:
    """Parse a line: return its one statement, and the comment after it without `#`."""
    if len(line) > MAX_LINE_TOKENS and sum(map(line.count, _SEPARATORS)) > MAX_LINE_TOKENS:
        raise InputError(f"the line is too long: it has more than {MAX_LINE_TOKENS} separators.")
    try:
        statements = call_parser(ast.parse, line).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"expected a line of Python: {error.args[0] if error.args else error}.") from None
    if len(statements) != 1:
        raise InputError("expected one statement.")
    rest = line.encode()[statements[0].end_col_offset or 0 :].decode().strip()
    return statements[0], rest.removeprefix("#").strip()


_SEPARATORS = " ,.:;=<>()[]{}+-*/%&|^~@!\t\f\"'\\"
MAX_LINE_TOKENS = 1 << 20
"""Limit of the separators in a line, since the parser may use about 100 bytes for each."""


def dotted(expr: ast.expr) -> str:
    """Name of an expression such as `a.b.c`. Raises `InputError` for other expressions."""
    names = []
    while isinstance(expr, ast.Attribute):
        names.append(expr.attr)
        expr = expr.value
    if not isinstance(expr, ast.Name):
        raise InputError(f"expected a name, not `{ast.unparse(expr)}`.")
    return ".".join([expr.id, *reversed(names)])


def key_of(keyword: ast.keyword) -> str:
    """Name of a keyword argument. Raises `InputError` for `**`."""
    if keyword.arg is None:
        raise InputError("expected arguments by name, not `**`.")
    return keyword.arg
