"""ONNX of functions that look at many values at once: norms, deviations, products, order, whether any is true."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fxq.onnx.function_nodes import calls
from fxq.onnx.pointwise_nodes import cast
from fxq.onnx.writer import Value, Writer, refuse


def _axes(x: Value, dim: Any) -> list[int]:
    """The axes that a function names; all of them, if it names none."""
    named: Iterable[int] = range(x.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    return [axis % x.rank for axis in named]


def _reduced(w: Writer, kind: str, x: Value, dim: Any, keepdim: bool) -> Value:
    made = w.emit(kind, x, w.ints(_axes(x, dim)), keepdims=int(keepdim))
    return Value(made, torch.amax(x.like, _axes(x, dim), keepdim))


def _unchanged(options: dict[str, Any]) -> None:
    refuse(any(value is not None for value in options.values()), "it changes dtypes, or has options")


@calls("norm")
def _norm(w: Writer, x: Value, p: Any = "fro", dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    refuse(p not in ("fro", 1, 2), f"its order is {p}, neither 1 nor 2")
    _unchanged(options)
    return _reduced(w, "ReduceL1" if p == 1 else "ReduceL2", x, dim, keepdim)


@calls(torch.linalg.vector_norm)
def _vector_norm(w: Writer, x: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    return _norm(w, x, ord, dim, keepdim, **options)


@calls(torch.linalg.norm)
def _any_norm(w: Writer, x: Value, ord: Any = None, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    refuse(len(_axes(x, dim)) == 2 and ord not in (None, "fro"), f"it is the norm of matrices, of order {ord}")
    return _norm(w, x, "fro" if ord is None else ord, dim, keepdim, **options)


def _moments(
    w: Writer, x: Value, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None
) -> tuple[Value, Value]:
    """The variance and the mean."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    mean = _reduced(w, "ReduceMean", x, dim, keepdim=True)
    total = _reduced(w, "ReduceSumSquare", Value(w.emit("Sub", x, mean), x.like), dim, keepdim)
    count = math.prod(x.shape[axis] for axis in _axes(x, dim)) - (int(unbiased) if correction is None else correction)
    variance = w.emit("Div", total, w.cast(w.reshaped(w.ints([count]), ()), x.dtype))
    shape = total.shape
    return Value(variance, total.like), mean if keepdim else Value(w.reshaped(mean, shape), total.like)


def _deviation(w: Writer, *given: Any, **options: Any) -> tuple[Value, Value]:
    variance, mean = _moments(w, *given, **options)
    return Value(w.emit("Sqrt", variance), variance.like), mean


def _first(both: Callable[..., tuple[Value, Value]]) -> Callable[..., Value]:
    return lambda w, *given, **options: both(w, *given, **options)[0]


calls("var")(_first(_moments))
calls("var_mean")(_moments)
calls("std")(_first(_deviation))
calls("std_mean")(_deviation)


@calls("prod")
def _product(w: Writer, x: Value, dim: int | None = None, keepdim: bool = False, **options: Any) -> Value:
    _unchanged(options)
    refuse(not x.dtype.is_floating_point, "it is of integers")
    return _reduced(w, "ReduceProd", x, dim, keepdim)


@calls("logsumexp")
def _log_of_sum(w: Writer, x: Value, dim: Any, keepdim: bool = False) -> Value:
    return _reduced(w, "ReduceLogSumExp", x, dim, keepdim)


def _truth(kind: str, dtype: torch.dtype) -> Callable[..., Value]:
    def reduce(w: Writer, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        true = x if x.dtype is torch.bool else Value(cast(w, x, dtype=torch.bool), _of_type(x.like, torch.bool))
        number = Value(w.cast(true, torch.int64), _of_type(x.like, torch.int64))
        made = _reduced(w, kind, number, dim, keepdim)
        return Value(w.cast(made, dtype), _of_type(made.like, dtype))

    return reduce


def _of_type(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(like, dtype=dtype)


calls("any")(_truth("ReduceMax", torch.bool))
calls("all")(_truth("ReduceMin", torch.bool))
calls("count_nonzero")(_truth("ReduceSum", torch.int64))


@calls("topk")
def _largest(
    w: Writer, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    made = w.emit_several("TopK", [x, w.ints([k])], 2, axis=dim, largest=int(largest), sorted=int(sorted))
    shape = list(x.shape)
    shape[dim] = k
    values, places = made
    return Value(values, w.empty(shape, x.dtype)), Value(places, w.empty(shape, torch.int64))


@calls("sort")
def _ordered(w: Writer, x: Value, dim: int = -1, descending: bool = False, **options: Any) -> tuple[Value, Value]:
    return _largest(w, x, x.shape[dim], dim, descending)


@calls("argsort")
def _order(w: Writer, *given: Any, **options: Any) -> Value:
    return _ordered(w, *given, **options)[1]


@calls(torch.nn.functional.one_hot)
def _one_hot(w: Writer, x: Value, num_classes: int = -1) -> Value:
    refuse(num_classes < 0, "how many classes there are is not given")
    made = w.emit("OneHot", x, torch.tensor([num_classes]), torch.tensor([0, 1]), axis=-1)
    return Value(made, w.empty([*x.shape, num_classes], torch.int64))
