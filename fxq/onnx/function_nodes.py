"""ONNX form of functions that are not ops of fxq: comparisons, logic, argmax, filled tensors, indexing, outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any

import torch

from fxq.graph.guards import make_output, own_copy
from fxq.onnx.pointwise_nodes import both, cast
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Operand, Value, Writer, refuse
from fxq.ops.selection import index_parts

CALL_WRITERS: dict[Any, Callable[..., Any]] = {}
"""Function that writes each call, by the called function or method name. It takes the writer and the arguments."""


def writes_calls(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function to write calls of these; a name stands for the method and the torch function."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            CALL_WRITERS[target] = function
            if isinstance(target, str) and hasattr(torch, target):
                CALL_WRITERS[getattr(torch, target)] = function
        return function

    return register


def _comparison(op_type: str, negated: bool = False) -> Callable[..., Value]:
    def compare(w: Writer, x: Any, other: Any) -> Value:
        a, b, _ = both(w, x, other)
        result = w.emit(op_type, a, b)
        return Value(w.emit("Not", result) if negated else result, torch.eq(_like(x), _like(other)))

    return compare


for _name, _kind in {"gt": "Greater", "lt": "Less", "ge": "GreaterOrEqual", "le": "LessOrEqual", "eq": "Equal"}.items():
    writes_calls(_name, getattr(operator, _name))(_comparison(_kind))
writes_calls("ne", operator.ne)(_comparison("Equal", negated=True))


def _logic(op_type: str) -> Callable[..., Value]:
    def combine(w: Writer, x: Any, other: Any) -> Value:
        truths = [isinstance(v, bool) or (isinstance(v, Value) and v.dtype is torch.bool) for v in (x, other)]
        refuse(not all(truths), "it is a bitwise operation on integers")
        a, b, _ = both(w, x, other)
        return Value(w.emit(op_type, a, b), torch.logical_and(_like(x), _like(other)))

    return combine


for _name, _kind, _sign in (("and", "And", operator.and_), ("or", "Or", operator.or_), ("xor", "Xor", operator.xor)):
    writes_calls(f"logical_{_name}", f"bitwise_{_name}", _sign)(_logic(_kind))


@writes_calls("logical_not", "bitwise_not", operator.invert)
def _logical_not(w: Writer, x: Value) -> Value:
    refuse(x.dtype is not torch.bool, "it is a bitwise operation on integers")
    return Value(w.emit("Not", x), x.like)


def _unary(op_type: str) -> Callable[..., Value]:
    def compute(w: Writer, x: Value) -> Value:
        return Value(w.emit(op_type, x), x.like)

    return compute


for _kind in (
    *("Sign", "Ceil", "Floor", "Round", "Reciprocal", "Tan", "Asin", "Acos", "Atan"),
    *("Sinh", "Cosh", "Asinh", "Acosh", "Atanh"),
):
    writes_calls(_kind.lower())(_unary(_kind))


@writes_calls("log1p")
def _log1p(w: Writer, x: Value) -> Value:
    return Value(w.emit("Log", w.emit("Add", x, w.number(1, x))), x.like)


@writes_calls("expm1")
def _expm1(w: Writer, x: Value) -> Value:
    return Value(w.emit("Sub", w.emit("Exp", x), w.number(1, x)), x.like)


@writes_calls("trunc")
def _trunc(w: Writer, x: Value) -> Value:
    return Value(w.emit("Mul", w.emit("Sign", x), w.emit("Floor", w.emit("Abs", x))), x.like)


@writes_calls("isnan")
def _isnan(w: Writer, x: Value) -> Value:
    return Value(w.emit("IsNaN", x), torch.empty_like(x.like, dtype=torch.bool))


@writes_calls("isinf")
def _isinf(w: Writer, x: Value) -> Value:
    return Value(w.emit("IsInf", x), torch.empty_like(x.like, dtype=torch.bool))


@writes_calls("nan_to_num")
def _nan_to_num(w: Writer, x: Value, nan: float | None = 0.0, posinf: Any = None, neginf: Any = None) -> Value:
    refuse(posinf is not None or neginf is not None, "it replaces infinity by a given number")
    limit = torch.finfo(x.dtype).max
    bounded = w.emit("Clip", x, w.number(-limit, x), w.number(limit, x))
    return Value(w.emit("Where", w.emit("IsNaN", x), w.number(nan or 0.0, x), bounded), x.like)


@writes_calls("addcmul")
def _addcmul(w: Writer, x: Value, a: Value, b: Value, *, value: float = 1) -> Value:
    product = w.emit("Mul", w.emit("Mul", a, b), w.number(value, x))
    return Value(w.emit("Add", x, product), torch.addcmul(x.like, a.like, b.like))


@writes_calls("lerp")
def _lerp(w: Writer, x: Value, end: Value, weight: Any) -> Value:
    share = weight if isinstance(weight, Value) else w.number(weight, x)
    result = w.emit("Add", x, w.emit("Mul", share, w.emit("Sub", end, x)))
    return Value(result, torch.lerp(x.like, end.like, _like(weight)))


@writes_calls(torch.nn.functional.glu)
def _glu(w: Writer, x: Value, dim: int = -1) -> Value:
    value, gate = w.emit_several("Split", [x], 2, axis=dim, num_outputs=2)
    return Value(w.emit("Mul", value, w.emit("Sigmoid", gate)), torch.nn.functional.glu(x.like, dim))


def _triangular(upper: int) -> Callable[..., Value]:
    def cut(w: Writer, x: Value, diagonal: int = 0) -> Value:
        return Value(w.emit("Trilu", x, torch.tensor(diagonal), upper=upper), x.like)

    return cut


writes_calls("tril")(_triangular(0))
writes_calls("triu")(_triangular(1))


@writes_calls("unbind")
def _unbind(w: Writer, x: Value, dim: int = 0) -> tuple[Value, ...]:
    refuse(varies(x.shape[dim]), "the number of its results is dynamic")
    return tuple(
        Value(w.emit("Gather", x, torch.tensor(i), axis=dim), x.like.select(dim, i)) for i in range(int(x.shape[dim]))
    )


@writes_calls("stack")
def _stack(w: Writer, parts: Sequence[Value], dim: int = 0) -> Value:
    like = torch.stack([part.like for part in parts], dim)
    apart: list[Operand] = [w.emit("Unsqueeze", part, w.ints([dim % like.dim()])) for part in parts]
    return Value(w.joined(apart, dim), like)


@writes_calls("cat")
def _cat(w: Writer, parts: Sequence[Value], dim: int = 0) -> Value:
    return Value(w.joined(parts, dim), torch.cat([part.like for part in parts], dim))


@writes_calls("scatter")
def _scatter(
    w: Writer, x: Value, dim: int, index: Value, src: Any = None, *, value: Any = None, **options: Any
) -> Value:
    refuse(bool(options), "it reduces the scattered values")
    new = value if src is None else src
    if not isinstance(new, Value):
        new = w.emit("Expand", w.number(new, x), w.emit("Shape", index))
    else:
        refuse(new.shape != index.shape, "its source is larger than its index")
    return Value(w.emit("ScatterElements", x, index, new, axis=dim), x.like)


@writes_calls("pow", operator.pow)
def _pow(w: Writer, x: Any, exponent: Any) -> Value:
    a, b, _ = both(w, x, exponent)
    return Value(w.emit("Pow", a, b), torch.pow(_like(x), _like(exponent)))


def _arg_reduction(op_type: str) -> Callable[..., Value]:
    def find(w: Writer, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        refuse(dim is None, "it reduces all axes")
        return Value(w.emit(op_type, x, axis=dim, keepdims=int(keepdim)), torch.argmax(x.like, dim, keepdim))

    return find


writes_calls("argmax")(_arg_reduction("ArgMax"))
writes_calls("argmin")(_arg_reduction("ArgMin"))


def _full_reduction(op_type: str) -> Callable[..., Value]:
    def reduce(w: Writer, x: Value, *arguments: Any, **options: Any) -> Value:
        refuse(bool(arguments or options), "it changes the dtype, or has options")
        if op_type == "ReduceSum" and not x.dtype.is_floating_point:
            x = Value(w.cast(x, torch.int64), torch.empty_like(x.like, dtype=torch.int64))
        refuse(x.dtype is torch.bool, "its input is bool")
        return Value(w.emit(op_type, x, keepdims=0), torch.empty((), dtype=x.dtype, device="meta"))

    return reduce


for _name in ("mean", "sum", "max", "min"):
    writes_calls(_name)(_full_reduction(f"Reduce{_name.capitalize()}"))
writes_calls("amax")(_full_reduction("ReduceMax"))
writes_calls("amin")(_full_reduction("ReduceMin"))


@writes_calls("gather")
def _gather(w: Writer, x: Value, dim: int, index: Value) -> Value:
    result = w.emit("GatherElements", x, index, axis=dim)
    return Value(result, torch.empty_like(index.like, dtype=x.dtype))


@writes_calls(operator.getitem)
def _getitem(w: Writer, x: Value, index: Any) -> Value:
    indices = index_parts(index)
    if all(isinstance(i, slice) for i in indices):
        return _slices(w, x, indices)
    lists = [i for i in indices if isinstance(i, list)]
    if len(lists) == 1 and all(isinstance(i, (list, slice, EllipsisType)) for i in indices):
        return _rows(w, x, indices)
    are_integers = all(isinstance(i, Value) and i.dtype in (torch.int32, torch.int64) for i in indices)
    refuse(not are_integers, "its index holds more than integer tensors for the first axes")
    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    parts = [w.reshaped(Value(w.emit("Expand", i, w.ints(shape)), i.like), (*shape, 1)) for i in indices]
    positions = w.cast(w.joined(parts, len(shape)), torch.int64)
    return Value(w.emit("GatherND", x, positions), w.empty((*shape, *x.shape[len(indices) :]), x.dtype))


def _rows(w: Writer, x: Value, indices: Sequence[Any]) -> Value:
    """Select positions of one axis by a list of numbers; other axes are whole or sliced."""
    before = next((i for i, index in enumerate(indices) if index is Ellipsis), len(indices))
    after = indices[before + 1 :]
    indices = [*indices[:before], *[slice(None)] * (x.rank - before - len(after)), *after]
    axis = next(i for i, index in enumerate(indices) if isinstance(index, list))
    x = _slices(w, x, [index if isinstance(index, slice) else slice(None) for index in indices])
    positions = torch.tensor(indices[axis])
    refuse(positions.dim() != 1 or positions.dtype is not torch.int64, "its index holds a list of more than numbers")
    return Value(w.emit("Gather", x, positions, axis=axis), x.like.index_select(axis, positions.to(x.like.device)))


def _slices(w: Writer, x: Value, slices: Sequence[slice]) -> Value:
    """Slice the first axes; bounds may be numbers or constants of the model."""
    for axis, part in enumerate(slices):
        start, stop, step = (_slice_bound(w, bound) for bound in (part.start, part.stop, part.step))
        if (start, stop, step) == (None, None, None):
            continue
        end = torch.iinfo(torch.int64).max if stop is None else stop
        like = x.like[(*[slice(None)] * axis, slice(start, stop, step))]
        x = Value(w.cut(x, axis, start or 0, end, step or 1), like)
    return x


def _slice_bound(w: Writer, value: Any) -> int | None:
    """Value of a slice bound: a number or a one-element constant."""
    if not isinstance(value, Value):
        return value if value is None else int(value)
    content = w.constant_of(value.name)
    refuse(content is None, "a bound of its slice is computed")
    return None if content is None else int(content)


@writes_calls("detach", own_copy)
def _unchanged(w: Writer, x: Value) -> Value:
    return x


@writes_calls("to")
def _to(w: Writer, x: Value, *arguments: Any, **options: Any) -> Value:
    first = next((value for value in arguments if isinstance(value, (Value, torch.dtype))), None)
    dtype = options.get("dtype") or (first.dtype if isinstance(first, Value) else first) or x.dtype
    return x if dtype == x.dtype else Value(cast(w, x, dtype=dtype), torch.empty_like(x.like, dtype=dtype))


@writes_calls("cumsum")
def _cumsum(w: Writer, x: Value, dim: int, *, dtype: torch.dtype | None = None) -> Value:
    converted = _to(w, x, dtype or (x.dtype if x.dtype.is_floating_point else torch.int64))
    return Value(w.emit("CumSum", converted, torch.tensor(dim, device="cpu")), converted.like)


def _full(fill: float | None) -> Callable[..., Value]:
    def make(w: Writer, sizes: Any, *arguments: Any, dtype: torch.dtype | None = None, **options: Any) -> Value:
        *more, value = arguments if fill is None else (*arguments, fill)
        if isinstance(sizes, Value):
            shape, dtype = sizes.shape, dtype or sizes.dtype
        else:
            shape = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes, *more)
        number = torch.tensor(
            value, dtype=dtype or (torch.get_default_dtype() if fill is not None else None), device="cpu"
        )
        return Value(w.emit("Expand", number, w.ints(shape)), w.empty(shape, number.dtype))

    return make


def _new_full(fill: float | None) -> Callable[..., Value]:
    def make(w: Writer, x: Value, *arguments: Any, dtype: torch.dtype | None = None, **options: Any) -> Value:
        return _full(fill)(w, *arguments, dtype=dtype or x.dtype)

    return make


for _name, _fill in {"zeros": 0.0, "ones": 1.0, "full": None}.items():
    writes_calls(f"new_{_name}")(_new_full(_fill))
for _name, _fill in {"zeros": 0.0, "ones": 1.0, "full": None}.items():
    writes_calls(getattr(torch, _name), getattr(torch, f"{_name}_like"))(_full(_fill))


@writes_calls(torch.arange)
def _arange(w: Writer, *ends: Any, dtype: torch.dtype | None = None, **options: Any) -> Value:
    refuse(any(isinstance(end, float) for end in ends), "its bounds are floats")
    start, stop, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    numbers = w.emit("Range", *(w.reshaped(w.ints([end]), ()) for end in (start, stop, step)))
    count = -((start - stop) // step)
    return _to(w, Value(numbers, w.empty([count], torch.int64)), dtype=dtype)


@writes_calls(torch.tensor)
def _tensor(w: Writer, data: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Value:
    if varies(data):
        return _to(w, Value(w.reshaped(w.ints([data]), ()), w.empty([], torch.int64)), dtype=dtype)
    constant = torch.tensor(data, dtype=dtype, device="cpu")
    return Value(w.constant(constant), torch.empty_like(constant, device="meta"))


CREATION_FUNCTIONS = frozenset({torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor})
"""Functions that create tensors from numbers."""


@writes_calls(make_output)
def _output(w: Writer, kind: str, fields: Mapping[str, Any] | Sequence[Any]) -> Any:
    return dict(fields) if isinstance(fields, Mapping) else list(fields)


def _like(value: Any) -> Any:
    return value.like if isinstance(value, Value) else value
