"""Readers of ONNX ops that reduce or order values along axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxq.onnx.reading.movement_readers import axes_of, rank_of
from fxq.onnx.reading.pointwise_readers import cast_to
from fxq.onnx.reading.reader import Reader, reads
from fxq.onnx.writer import refuse


def _reduced(op_type: str, reduce: Callable[[Reader, Any, tuple[int, ...], bool], Any]) -> None:
    def read(
        r: Reader, x: Any, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0, **attributes: Any
    ) -> Any:
        rank = rank_of(r, x)
        where = axes_of(r, axes, attributes, rank)
        if not where:
            where = [] if noop_with_empty_axes else list(range(rank))
        dtype = r.like(x).dtype
        if not where and op_type in ("ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd", "ReduceSum"):
            return x
        result = reduce(r, x, tuple(where), bool(keepdims))
        return result if r.like(result).dtype == dtype else cast_to(r, result, dtype)

    reads(op_type)(read)


def _product(r: Reader, x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    for axis in sorted(axes, reverse=True):
        x = r.call(torch.prod, x, axis, keep)
    return x


def _logs(r: Reader, x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    return r.call(torch.logsumexp, x if r.like(x).is_floating_point() else cast_to(r, x, torch.float32), axes, keep)


def _total(r: Reader, x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    return r.call(torch.sum, x, axes, keep) if axes else x


def _mean(r: Reader, x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    return (
        r.call(torch.mean, x, axes, keep)
        if r.like(x).is_floating_point()
        else r.call(torch.div, r.call(torch.sum, x, axes, keep), _count(r, x, axes), rounding_mode="trunc")
    )


def _count(r: Reader, x: Any, axes: tuple[int, ...]) -> Any:
    shape, count = r.shape_of(x), 1
    for axis in axes:
        count = count * shape[axis]
    return count


def _root(r: Reader, x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    total = _total(r, r.call(torch.mul, x, x), axes, keep)
    return r.call(torch.sqrt, total if r.like(total).is_floating_point() else cast_to(r, total, torch.float32))


_reduced("ReduceMean", _mean)
_reduced("ReduceSum", _total)
_reduced("ReduceMax", lambda r, x, axes, keep: r.call(torch.amax, x, axes, keep))
_reduced("ReduceMin", lambda r, x, axes, keep: r.call(torch.amin, x, axes, keep))
_reduced("ReduceProd", _product)
_reduced("ReduceL1", lambda r, x, axes, keep: _total(r, r.call(torch.abs, x), axes, keep))
_reduced("ReduceL2", _root)
_reduced("ReduceSumSquare", lambda r, x, axes, keep: _total(r, r.call(torch.mul, x, x), axes, keep))
_reduced("ReduceLogSum", lambda r, x, axes, keep: r.call(torch.log, _total(r, x, axes, keep)))
_reduced("ReduceLogSumExp", _logs)


def _extreme(function: Any) -> Callable[..., Any]:
    def read(r: Reader, x: Any, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Any:
        if not select_last_index:
            return r.call(function, x, axis, bool(keepdims))
        size = r.shape_of(x)[axis]
        last = r.call(function, r.call(torch.flip, x, (axis,)), axis, bool(keepdims))
        return r.call(torch.rsub, last, size - 1)

    return read


reads("ArgMax")(_extreme(torch.argmax))
reads("ArgMin")(_extreme(torch.argmin))


@reads("TopK")
def top_k(r: Reader, x: Any, k: Any = None, *, axis: int = -1, largest: int = 1, sorted: int = 1, **old: Any) -> Any:
    count = old["k"] if k is None else r.ints(k)[0]
    # A stable order: of equal values ONNX takes that of the lowest index, torch.topk any.
    values, places = r.call(torch.sort, x, stable=True, dim=axis, descending=bool(largest))
    return r.call(torch.narrow, values, axis, 0, count), r.call(torch.narrow, places, axis, 0, count)


@reads("CumSum")
def cum_sum(r: Reader, x: Any, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Any:
    dim = int(r.number(axis))
    turned = r.call(torch.flip, x, (dim,)) if reverse else x
    result = cast_to(r, r.call(torch.cumsum, turned, dim), r.like(x).dtype)
    if exclusive:
        result = r.call(torch.sub, result, turned)
    return r.call(torch.flip, result, (dim,)) if reverse else result


def _softmax(function: Any) -> Callable[..., Any]:
    def read(r: Reader, x: Any, *, axis: int | None = None) -> Any:
        if r.opset >= 13:
            return r.call(function, x, -1 if axis is None else axis)
        rank = rank_of(r, x)
        start = (1 if axis is None else axis) % max(rank, 1)
        if start == rank - 1:
            return r.call(function, x, -1)
        flat = r.call(function, r.call(torch.flatten, x, start), -1)
        return r.call(torch.reshape, flat, r.shape_of(x))

    return read


reads("Softmax")(_softmax(torch.softmax))
reads("LogSoftmax")(_softmax(torch.log_softmax))


@reads("Hardmax")
def hardmax(r: Reader, x: Any, *, axis: int = -1) -> Any:
    refuse(r.opset < 13, "before opset 13, it flattens its input")
    size = r.shape_of(x)[axis]
    best = r.call(torch.argmax, x, axis, True)
    shape = [1] * rank_of(r, x)
    shape[axis] = size
    places = r.call(torch.reshape, r.call(torch.arange, size), tuple(shape))
    return cast_to(r, r.call(torch.eq, places, best), r.like(x).dtype)


@reads("NonZero")
def non_zero(r: Reader, x: Any) -> Any:
    places = r.call_of_data(torch.nonzero, x, like=lambda count: (count, rank_of(r, x)), dtype=torch.int64)
    return r.call(torch.transpose, places, 0, 1)
