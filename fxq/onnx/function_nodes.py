"""ONNX of functions that graphs call beside ops: comparisons, logic, indices of extremes, filled tensors, outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxq.graph.guards import make_output, own_copy
from fxq.onnx.pointwise_nodes import both
from fxq.onnx.writer import Value, Writer, refuse

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""How each function is written, by itself, or by its name as a method: takes the writer, and its arguments."""


def calls(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function below writes calls of these, and of torch's functions and tensors' methods of a name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            FUNCTIONS[target] = function
            if isinstance(target, str) and hasattr(torch, target):
                FUNCTIONS[getattr(torch, target)] = function
        return function

    return register


def _comparison(kind: str, negated: bool = False) -> Callable[..., Value]:
    def compare(w: Writer, x: Any, other: Any) -> Value:
        a, b, _ = both(w, x, other)
        made = w.emit(kind, a, b)
        return Value(w.emit("Not", made) if negated else made, torch.eq(_like(x), _like(other)))

    return compare


for _name, _kind in {"gt": "Greater", "lt": "Less", "ge": "GreaterOrEqual", "le": "LessOrEqual", "eq": "Equal"}.items():
    calls(_name, getattr(operator, _name))(_comparison(_kind))
calls("ne", operator.ne)(_comparison("Equal", negated=True))


def _logic(kind: str) -> Callable[..., Value]:
    def combine(w: Writer, x: Any, other: Any) -> Value:
        truths = [isinstance(v, bool) or (isinstance(v, Value) and v.dtype is torch.bool) for v in (x, other)]
        refuse(not all(truths), "it combines the bits of integers")
        a, b, _ = both(w, x, other)
        return Value(w.emit(kind, a, b), torch.logical_and(_like(x), _like(other)))

    return combine


for _name, _kind, _sign in (("and", "And", operator.and_), ("or", "Or", operator.or_), ("xor", "Xor", operator.xor)):
    calls(f"logical_{_name}", f"bitwise_{_name}", _sign)(_logic(_kind))


@calls("logical_not", "bitwise_not", operator.invert)
def _opposite(w: Writer, x: Value) -> Value:
    refuse(x.dtype is not torch.bool, "it combines the bits of integers")
    return Value(w.emit("Not", x), x.like)


def _place_of(kind: str) -> Callable[..., Value]:
    def find(w: Writer, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        refuse(dim is None, "it looks for one entry among all")
        return Value(w.emit(kind, x, axis=dim, keepdims=int(keepdim)), torch.argmax(x.like, dim, keepdim))

    return find


calls("argmax")(_place_of("ArgMax"))
calls("argmin")(_place_of("ArgMin"))


@calls("detach", own_copy)
def _as_it_is(w: Writer, x: Value) -> Value:
    return x


def _filled(fill: float | None) -> Callable[..., Value]:
    def make(w: Writer, x: Value, *given: Any, **options: Any) -> Value:
        *_, value = given if fill is None else (fill,)
        like = torch.empty_like(x.like, dtype=options.get("dtype") or x.dtype)
        return Value(w.emit("Expand", torch.tensor(value, dtype=like.dtype, device="cpu"), w.ints(x.shape)), like)

    return make


calls(torch.zeros_like)(_filled(0.0))
calls(torch.ones_like)(_filled(1.0))
calls(torch.full_like)(_filled(None))


@calls(make_output)
def _output(w: Writer, kind: str, fields: Mapping[str, Any]) -> Any:
    return dict(fields)


def _like(value: Any) -> Any:
    return value.like if isinstance(value, Value) else value
