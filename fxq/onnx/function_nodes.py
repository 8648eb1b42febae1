"""ONNX of functions that graphs call beside ops: comparisons, logic, indices of extremes, filled tensors, outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxq.graph.guards import make_output, own_copy
from fxq.onnx.pointwise_nodes import both, cast
from fxq.onnx.varying_sizes import varies
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


def _each(kind: str) -> Callable[..., Value]:
    def compute(w: Writer, x: Value) -> Value:
        return Value(w.emit(kind, x), x.like)

    return compute


for _kind in ("Sign", "Ceil", "Floor", "Round", "Reciprocal"):
    calls(_kind.lower())(_each(_kind))


@calls("pow", operator.pow)
def _power(w: Writer, x: Any, exponent: Any) -> Value:
    a, b, _ = both(w, x, exponent)
    return Value(w.emit("Pow", a, b), torch.pow(_like(x), _like(exponent)))


def _place_of(kind: str) -> Callable[..., Value]:
    def find(w: Writer, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        refuse(dim is None, "it looks for one entry among all")
        return Value(w.emit(kind, x, axis=dim, keepdims=int(keepdim)), torch.argmax(x.like, dim, keepdim))

    return find


calls("argmax")(_place_of("ArgMax"))
calls("argmin")(_place_of("ArgMin"))


def _of_all(kind: str) -> Callable[..., Value]:
    def reduce(w: Writer, x: Value, *given: Any, **options: Any) -> Value:
        refuse(bool(given or options) or not x.dtype.is_floating_point, "it changes dtypes, or has options")
        return Value(w.emit(kind, x, keepdims=0), torch.empty((), dtype=x.dtype, device="meta"))

    return reduce


for _name in ("mean", "sum", "max", "min"):
    calls(_name)(_of_all(f"Reduce{_name.capitalize()}"))
calls("amax")(_of_all("ReduceMax"))
calls("amin")(_of_all("ReduceMin"))


@calls("norm")
def _size(w: Writer, x: Value, p: Any = "fro", dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    refuse(p not in ("fro", 1, 2), f"its order is {p}, neither 1 nor 2")
    refuse(any(value is not None for value in options.values()), "it changes dtypes, or has options")
    axes = None if dim is None else w.ints([dim] if isinstance(dim, int) else dim)
    made = w.emit("ReduceL1" if p == 1 else "ReduceL2", x, axes, keepdims=int(keepdim))
    return Value(made, torch.norm(x.like, 2, dim, keepdim))


@calls(torch.linalg.vector_norm)
def _size_of_vector(w: Writer, x: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    return _size(w, x, ord, dim, keepdim, **options)


@calls(torch.linalg.norm)
def _size_of_any(w: Writer, x: Value, ord: Any = None, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    of_matrix = x.rank == 2 if dim is None else not isinstance(dim, int) and len(dim) == 2
    refuse(of_matrix and ord not in (None, "fro"), f"it is the norm of matrices, of order {ord}")
    return _size(w, x, "fro" if ord is None else ord, dim, keepdim, **options)


@calls("gather")
def _taken(w: Writer, x: Value, dim: int, index: Value) -> Value:
    made = w.emit("GatherElements", x, index, axis=dim)
    return Value(made, torch.empty_like(index.like, dtype=x.dtype))


@calls(operator.getitem)
def _entries(w: Writer, x: Value, index: Any) -> Value:
    places = index if isinstance(index, tuple) else (index,)
    whole = all(isinstance(place, Value) and place.dtype in (torch.int32, torch.int64) for place in places)
    refuse(not whole, "it is indexed by more than tensors of integers for its first axes")
    shape = torch.broadcast_shapes(*(place.shape for place in places))
    parts = [w.reshaped(Value(w.emit("Expand", place, w.ints(shape)), place.like), (*shape, 1)) for place in places]
    at = w.cast(w.joined(parts, len(shape)), torch.int64)
    return Value(w.emit("GatherND", x, at), w.empty((*shape, *x.shape[len(places) :]), x.dtype))


@calls("detach", own_copy)
def _as_it_is(w: Writer, x: Value) -> Value:
    return x


@calls("to")
def _converted(w: Writer, x: Value, *given: Any, **options: Any) -> Value:
    first = next((value for value in given if isinstance(value, (Value, torch.dtype))), None)
    dtype = options.get("dtype") or (first.dtype if isinstance(first, Value) else first) or x.dtype
    return x if dtype == x.dtype else Value(cast(w, x, dtype=dtype), torch.empty_like(x.like, dtype=dtype))


@calls("cumsum")
def _sums(w: Writer, x: Value, dim: int, *, dtype: torch.dtype | None = None) -> Value:
    made = _converted(w, x, dtype or (x.dtype if x.dtype.is_floating_point else torch.int64))
    return Value(w.emit("CumSum", made, torch.tensor(dim, device="cpu")), made.like)


def _filled(fill: float | None) -> Callable[..., Value]:
    def make(w: Writer, sizes: Any, *given: Any, dtype: torch.dtype | None = None, **options: Any) -> Value:
        *more, value = given if fill is None else (*given, fill)
        if isinstance(sizes, Value):
            shape, dtype = sizes.shape, dtype or sizes.dtype
        else:
            shape = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes, *more)
        one = torch.tensor(
            value, dtype=dtype or (torch.get_default_dtype() if fill is not None else None), device="cpu"
        )
        return Value(w.emit("Expand", one, w.ints(shape)), w.empty(shape, one.dtype))

    return make


def _filled_as(fill: float | None) -> Callable[..., Value]:
    def make(w: Writer, x: Value, *given: Any, dtype: torch.dtype | None = None, **options: Any) -> Value:
        return _filled(fill)(w, *given, dtype=dtype or x.dtype)

    return make


for _name, _fill in {"zeros": 0.0, "ones": 1.0, "full": None}.items():
    calls(f"new_{_name}")(_filled_as(_fill))
for _name, _fill in {"zeros": 0.0, "ones": 1.0, "full": None}.items():
    calls(getattr(torch, _name), getattr(torch, f"{_name}_like"))(_filled(_fill))


@calls(torch.arange)
def _numbers(w: Writer, *ends: Any, dtype: torch.dtype | None = None, **options: Any) -> Value:
    refuse(any(isinstance(end, float) for end in ends), "it counts in fractions")
    start, stop, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    made = w.emit("Range", *(w.reshaped(w.ints([end]), ()) for end in (start, stop, step)))
    count = -((start - stop) // step)
    return _converted(w, Value(made, w.empty([count], torch.int64)), dtype=dtype)


@calls(torch.tensor)
def _constant(w: Writer, data: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Value:
    if varies(data):
        return _converted(w, Value(w.reshaped(w.ints([data]), ()), w.empty([], torch.int64)), dtype=dtype)
    made = torch.tensor(data, dtype=dtype, device="cpu")
    return Value(w.constant(made), torch.empty_like(made, device="meta"))


MAKERS = frozenset({torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor})
"""Those that make tensors of numbers alone."""


@calls(make_output)
def _output(w: Writer, kind: str, fields: Mapping[str, Any]) -> Any:
    return dict(fields)


def _like(value: Any) -> Any:
    return value.like if isinstance(value, Value) else value
