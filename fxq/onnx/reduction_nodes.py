"""ONNX form of functions that reduce or sort: norms, variance, prod, any and all, topk, sort, one_hot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fxq.onnx.function_nodes import writes_calls
from fxq.onnx.pointwise_nodes import cast
from fxq.onnx.writer import Value, Writer, refuse


def _axes(x: Value, dim: Any) -> list[int]:
    """Axes of a `dim` argument; all axes if it is None."""
    named: Iterable[int] = range(x.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    return [axis % x.rank for axis in named]


def _reduced(w: Writer, op_type: str, x: Value, dim: Any, keepdim: bool) -> Value:
    reduced = w.emit(op_type, x, w.ints(_axes(x, dim)), keepdims=int(keepdim))
    return Value(reduced, torch.amax(x.like, _axes(x, dim), keepdim))


def _refuse_options(options: dict[str, Any]) -> None:
    refuse(any(value is not None for value in options.values()), "it changes the dtype, or has options")


@writes_calls("norm")
def _norm(w: Writer, x: Value, p: Any = "fro", dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    refuse(p not in ("fro", 1, 2), f"its order is {p}, neither 1 nor 2")
    _refuse_options(options)
    return _reduced(w, "ReduceL1" if p == 1 else "ReduceL2", x, dim, keepdim)


@writes_calls(torch.linalg.vector_norm)
def _vector_norm(w: Writer, x: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    return _norm(w, x, ord, dim, keepdim, **options)


@writes_calls(torch.linalg.norm)
def _linalg_norm(w: Writer, x: Value, ord: Any = None, dim: Any = None, keepdim: bool = False, **options: Any) -> Value:
    refuse(len(_axes(x, dim)) == 2 and ord not in (None, "fro"), f"it is a matrix norm of order {ord}")
    return _norm(w, x, "fro" if ord is None else ord, dim, keepdim, **options)


def _var_mean(
    w: Writer, x: Value, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None
) -> tuple[Value, Value]:
    """Write variance and mean, as `torch.var_mean`."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    mean = _reduced(w, "ReduceMean", x, dim, keepdim=True)
    total = _reduced(w, "ReduceSumSquare", Value(w.emit("Sub", x, mean), x.like), dim, keepdim)
    count = math.prod(x.shape[axis] for axis in _axes(x, dim)) - (int(unbiased) if correction is None else correction)
    variance = w.emit("Div", total, w.cast(w.reshaped(w.ints([count]), ()), x.dtype))
    shape = total.shape
    return Value(variance, total.like), mean if keepdim else Value(w.reshaped(mean, shape), total.like)


def _std_mean(w: Writer, *arguments: Any, **options: Any) -> tuple[Value, Value]:
    variance, mean = _var_mean(w, *arguments, **options)
    return Value(w.emit("Sqrt", variance), variance.like), mean


def _first_of(both: Callable[..., tuple[Value, Value]]) -> Callable[..., Value]:
    return lambda w, *arguments, **options: both(w, *arguments, **options)[0]


writes_calls("var")(_first_of(_var_mean))
writes_calls("var_mean")(_var_mean)
writes_calls("std")(_first_of(_std_mean))
writes_calls("std_mean")(_std_mean)


@writes_calls("prod")
def _prod(w: Writer, x: Value, dim: int | None = None, keepdim: bool = False, **options: Any) -> Value:
    _refuse_options(options)
    refuse(not x.dtype.is_floating_point, "its input is integer")
    return _reduced(w, "ReduceProd", x, dim, keepdim)


@writes_calls("logsumexp")
def _logsumexp(w: Writer, x: Value, dim: Any, keepdim: bool = False) -> Value:
    return _reduced(w, "ReduceLogSumExp", x, dim, keepdim)


def _bool_reduction(op_type: str, dtype: torch.dtype) -> Callable[..., Value]:
    def reduce(w: Writer, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        true = x if x.dtype is torch.bool else Value(cast(w, x, dtype=torch.bool), _empty_as(x.like, torch.bool))
        number = Value(w.cast(true, torch.int64), _empty_as(x.like, torch.int64))
        reduced = _reduced(w, op_type, number, dim, keepdim)
        return Value(w.cast(reduced, dtype), _empty_as(reduced.like, dtype))

    return reduce


def _empty_as(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(like, dtype=dtype)


writes_calls("any")(_bool_reduction("ReduceMax", torch.bool))
writes_calls("all")(_bool_reduction("ReduceMin", torch.bool))
writes_calls("count_nonzero")(_bool_reduction("ReduceSum", torch.int64))


@writes_calls("topk")
def _topk(w: Writer, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Value, Value]:
    outputs = w.emit_several("TopK", [x, w.ints([k])], 2, axis=dim, largest=int(largest), sorted=int(sorted))
    shape = list(x.shape)
    shape[dim] = k
    values, places = outputs
    return Value(values, w.empty(shape, x.dtype)), Value(places, w.empty(shape, torch.int64))


@writes_calls("sort")
def _sort(w: Writer, x: Value, dim: int = -1, descending: bool = False, **options: Any) -> tuple[Value, Value]:
    return _topk(w, x, x.shape[dim], dim, descending)


@writes_calls("argsort")
def _argsort(w: Writer, *arguments: Any, **options: Any) -> Value:
    return _sort(w, *arguments, **options)[1]


@writes_calls(torch.nn.functional.one_hot)
def _one_hot(w: Writer, x: Value, num_classes: int = -1) -> Value:
    refuse(num_classes < 0, "num_classes is not given")
    encoded = w.emit("OneHot", x, torch.tensor([num_classes]), torch.tensor([0, 1]), axis=-1)
    return Value(encoded, w.empty([*x.shape, num_classes], torch.int64))
