"""ONNX of functions that graphs call beside ops: comparisons, logic, indices of extremes, filled tensors, outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxq.graph.guards import make_output, own_copy
from fxq.onnx.pointwise_nodes import both, cast
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Operand, Value, Writer, refuse

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


for _kind in (
    *("Sign", "Ceil", "Floor", "Round", "Reciprocal", "Tan", "Asin", "Acos", "Atan"),
    *("Sinh", "Cosh", "Asinh", "Acosh", "Atanh"),
):
    calls(_kind.lower())(_each(_kind))


@calls("log1p")
def _log_of_more(w: Writer, x: Value) -> Value:
    return Value(w.emit("Log", w.emit("Add", x, w.number(1, x))), x.like)


@calls("expm1")
def _exponential_less(w: Writer, x: Value) -> Value:
    return Value(w.emit("Sub", w.emit("Exp", x), w.number(1, x)), x.like)


@calls("trunc")
def _towards_zero(w: Writer, x: Value) -> Value:
    return Value(w.emit("Mul", w.emit("Sign", x), w.emit("Floor", w.emit("Abs", x))), x.like)


@calls("isnan")
def _is_nan(w: Writer, x: Value) -> Value:
    return Value(w.emit("IsNaN", x), torch.empty_like(x.like, dtype=torch.bool))


@calls("isinf")
def _is_infinite(w: Writer, x: Value) -> Value:
    return Value(w.emit("IsInf", x), torch.empty_like(x.like, dtype=torch.bool))


@calls("nan_to_num")
def _finite(w: Writer, x: Value, nan: float | None = 0.0, posinf: Any = None, neginf: Any = None) -> Value:
    refuse(posinf is not None or neginf is not None, "it has a number of its own for infinity")
    limit = torch.finfo(x.dtype).max
    bounded = w.emit("Clip", x, w.number(-limit, x), w.number(limit, x))
    return Value(w.emit("Where", w.emit("IsNaN", x), w.number(nan or 0.0, x), bounded), x.like)


@calls("addcmul")
def _plus_product(w: Writer, x: Value, a: Value, b: Value, *, value: float = 1) -> Value:
    product = w.emit("Mul", w.emit("Mul", a, b), w.number(value, x))
    return Value(w.emit("Add", x, product), torch.addcmul(x.like, a.like, b.like))


@calls("lerp")
def _between(w: Writer, x: Value, end: Value, weight: Any) -> Value:
    share = weight if isinstance(weight, Value) else w.number(weight, x)
    made = w.emit("Add", x, w.emit("Mul", share, w.emit("Sub", end, x)))
    return Value(made, torch.lerp(x.like, end.like, _like(weight)))


@calls(torch.nn.functional.glu)
def _gated(w: Writer, x: Value, dim: int = -1) -> Value:
    value, gate = w.emit_several("Split", [x], 2, axis=dim, num_outputs=2)
    return Value(w.emit("Mul", value, w.emit("Sigmoid", gate)), torch.nn.functional.glu(x.like, dim))


def _triangle(upper: int) -> Callable[..., Value]:
    def cut(w: Writer, x: Value, diagonal: int = 0) -> Value:
        return Value(w.emit("Trilu", x, torch.tensor(diagonal), upper=upper), x.like)

    return cut


calls("tril")(_triangle(0))
calls("triu")(_triangle(1))


@calls("unbind")
def _parts(w: Writer, x: Value, dim: int = 0) -> tuple[Value, ...]:
    refuse(varies(x.shape[dim]), "how many parts there are varies")
    return tuple(
        Value(w.emit("Gather", x, torch.tensor(i), axis=dim), x.like.select(dim, i)) for i in range(int(x.shape[dim]))
    )


@calls("stack")
def _stacked(w: Writer, parts: Sequence[Value], dim: int = 0) -> Value:
    like = torch.stack([part.like for part in parts], dim)
    apart: list[Operand] = [w.emit("Unsqueeze", part, w.ints([dim % like.dim()])) for part in parts]
    return Value(w.joined(apart, dim), like)


@calls("cat")
def _joined(w: Writer, parts: Sequence[Value], dim: int = 0) -> Value:
    return Value(w.joined(parts, dim), torch.cat([part.like for part in parts], dim))


@calls("scatter")
def _put(w: Writer, x: Value, dim: int, index: Value, src: Any = None, *, value: Any = None, **options: Any) -> Value:
    refuse(bool(options), "it sums what it puts")
    new = value if src is None else src
    if not isinstance(new, Value):
        new = w.emit("Expand", w.number(new, x), w.emit("Shape", index))
    else:
        refuse(new.shape != index.shape, "it is given more than its index has places")
    return Value(w.emit("ScatterElements", x, index, new, axis=dim), x.like)


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
        refuse(bool(given or options), "it changes dtypes, or has options")
        if kind == "ReduceSum" and not x.dtype.is_floating_point:
            x = Value(w.cast(x, torch.int64), torch.empty_like(x.like, dtype=torch.int64))
        refuse(x.dtype is torch.bool, "it compares truths")
        return Value(w.emit(kind, x, keepdims=0), torch.empty((), dtype=x.dtype, device="meta"))

    return reduce


for _name in ("mean", "sum", "max", "min"):
    calls(_name)(_of_all(f"Reduce{_name.capitalize()}"))
calls("amax")(_of_all("ReduceMax"))
calls("amin")(_of_all("ReduceMin"))


@calls("gather")
def _taken(w: Writer, x: Value, dim: int, index: Value) -> Value:
    made = w.emit("GatherElements", x, index, axis=dim)
    return Value(made, torch.empty_like(index.like, dtype=x.dtype))


@calls(operator.getitem)
def _entries(w: Writer, x: Value, index: Any) -> Value:
    places = tuple(index) if isinstance(index, (tuple, list)) else (index,)
    if all(isinstance(place, slice) for place in places):
        return _parts_of_axes(w, x, places)
    whole = all(isinstance(place, Value) and place.dtype in (torch.int32, torch.int64) for place in places)
    refuse(not whole, "it is indexed by more than tensors of integers for its first axes")
    shape = torch.broadcast_shapes(*(place.shape for place in places))
    parts = [w.reshaped(Value(w.emit("Expand", place, w.ints(shape)), place.like), (*shape, 1)) for place in places]
    at = w.cast(w.joined(parts, len(shape)), torch.int64)
    return Value(w.emit("GatherND", x, at), w.empty((*shape, *x.shape[len(places) :]), x.dtype))


def _parts_of_axes(w: Writer, x: Value, places: Sequence[slice]) -> Value:
    """Slice the first axes; bounds may be numbers or constants of the model."""
    for axis, place in enumerate(places):
        start, stop, step = (_number_of(w, end) for end in (place.start, place.stop, place.step))
        if (start, stop, step) == (None, None, None):
            continue
        end = torch.iinfo(torch.int64).max if stop is None else stop
        like = x.like[(*[slice(None)] * axis, slice(start, stop, step))]
        x = Value(w.cut(x, axis, start or 0, end, step or 1), like)
    return x


def _number_of(w: Writer, value: Any) -> int | None:
    """A number, or the value of a one-element constant."""
    if not isinstance(value, Value):
        return value if value is None else int(value)
    content = w.value_of(value.name)
    refuse(content is None, "it is sliced at a computed position")
    return None if content is None else int(content)


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
def _output(w: Writer, kind: str, fields: Mapping[str, Any] | Sequence[Any]) -> Any:
    return dict(fields) if isinstance(fields, Mapping) else list(fields)


def _like(value: Any) -> Any:
    return value.like if isinstance(value, Value) else value
