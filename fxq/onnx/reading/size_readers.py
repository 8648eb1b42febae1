"""Readers of ONNX ops on sizes: arithmetic of shapes, which gives numbers and symbols instead of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxq.onnx.reading.graph_builder import Sizes, Traced
from fxq.onnx.reading.onnx_file import dtype_of_number
from fxq.onnx.reading.reader import SIZE_READERS, Reader, reads
from fxq.onnx.varying_sizes import decided, varies
from fxq.onnx.writer import refuse


def _array(values: Any, shape: Any) -> np.ndarray:
    """Array of objects of a shape; NumPy would look inside of symbols."""
    array = np.empty(shape, dtype=object)
    flat = array.reshape(-1)
    for i, value in enumerate(values):
        flat[i] = value
    return flat.reshape(shape)


@reads("Shape")
def shape(r: Reader, x: Any, *, start: int = 0, end: int | None = None) -> Any:
    sizes = r.shape_of(x)[start:end]
    return _sized(sizes)


def _sized(sizes: Any) -> Any:
    if any(map(varies, sizes)):
        return Sizes(_array(sizes, (len(sizes),)))
    return torch.tensor([int(size) for size in sizes], dtype=torch.int64)


@reads("Size")
def size(r: Reader, x: Any) -> Any:
    count = reduce(lambda a, b: a * b, r.shape_of(x), 1)
    return Sizes(_array([count], ())) if varies(count) else torch.tensor(int(count))


def on_sizes(*op_types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function to compute nodes of these op types on sizes."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        SIZE_READERS.update(dict.fromkeys(op_types, function))
        return function

    return register


def _quotient(x: Any, divisor: Any) -> Any:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if any(isinstance(v, (float, torch.SymFloat)) for v in (x, divisor)):
        return x / divisor
    if decided(divisor < 0):
        x, divisor = -x, -divisor
    if statically_known_true(x >= 0):
        return x // divisor
    return _larger(x, 0) // divisor - _larger(-x, 0) // divisor  # a difference of sizes is rounded towards zero


def _larger(x: Any, other: Any) -> Any:
    return torch.sym_max(x, other)


def _smaller(x: Any, other: Any) -> Any:
    return torch.sym_min(x, other)


def _elementwise(function: Callable[..., Any], dtype: torch.dtype | None = None) -> Callable[..., Any]:
    def compute(*xs: Sizes, **attributes: Any) -> Sizes | None:
        arrays = np.broadcast_arrays(*(x.array for x in xs))
        values = [function(*entries) for entries in zip(*(a.flat for a in arrays), strict=True)]
        if any(value is None for value in values):  # the model compares when it runs
            return None
        return Sizes(_array(values, arrays[0].shape), dtype or xs[-1].dtype)

    return compute


for _names, _function, _dtype in (
    (("Add",), lambda x, other: x + other, None),
    (("Sub",), lambda x, other: x - other, None),
    (("Mul",), lambda x, other: x * other, None),
    (("Div",), _quotient, None),
    (("Max",), lambda *xs: reduce(_larger, xs), None),
    (("Min",), lambda *xs: reduce(_smaller, xs), None),
    (("Neg",), lambda x: -x, None),
    (("Floor",), lambda x: math.floor(x) if isinstance(x, float) else x.__floor__(), None),
    (("Ceil",), lambda x: math.ceil(x) if isinstance(x, float) else x.__ceil__(), None),
    (("Equal",), lambda x, other: decided(x == other), torch.bool),
    (("Greater",), lambda x, other: decided(x > other), torch.bool),
    (("GreaterOrEqual",), lambda x, other: decided(x >= other), torch.bool),
    (("Less",), lambda x, other: decided(x < other), torch.bool),
    (("LessOrEqual",), lambda x, other: decided(x <= other), torch.bool),
    (("Not",), lambda x: not x, torch.bool),
    (("And",), lambda x, other: bool(x) and bool(other), torch.bool),
    (("Or",), lambda x, other: bool(x) or bool(other), torch.bool),
    (("Where",), lambda condition, x, other: x if condition else other, None),
    (("Identity",), lambda x: x, None),
):
    on_sizes(*_names)(_elementwise(_function, _dtype))


@on_sizes("Mod")
def mod(x: Sizes, other: Sizes, *, fmod: int = 0) -> Sizes | None:
    remainder = (lambda a, b: a - _quotient(a, b) * b) if fmod else (lambda a, b: a % b)
    return _elementwise(remainder)(x, other)


@on_sizes("Cast")
def cast(x: Sizes, *, to: int, **attributes: Any) -> Sizes | None:
    dtype = dtype_of_number(to)
    values: list[Any]
    if dtype.is_floating_point:
        values = [float(v) if isinstance(v, (int, float)) else torch.sym_float(v) for v in x.array.flat]
    elif dtype is torch.bool:
        values = [decided(v != 0) for v in x.array.flat]
        if None in values:
            return None
    else:
        values = [int(v) if isinstance(v, (int, float)) else torch.sym_int(v) for v in x.array.flat]
    return Sizes(_array(values, x.array.shape), dtype)


@on_sizes("Gather")
def gather(x: Sizes, index: Sizes, *, axis: int = 0) -> Sizes:
    entries = index.array.astype(np.int64)
    result = np.take(x.array, entries, axis)
    return Sizes(result if isinstance(result, np.ndarray) else _array([result], ()), x.dtype)


@on_sizes("Concat")
def concat(*xs: Sizes, axis: int) -> Sizes:
    return Sizes(np.concatenate([x.array for x in xs], axis), xs[0].dtype)


@on_sizes("Slice")
def slice_(x: Sizes, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None, **old: Any) -> Any:
    rank = x.array.ndim
    firsts, lasts = (old[k] if k in old else list(v.array.flat) for k, v in (("starts", starts), ("ends", ends)))
    which = old.get("axes") or (list(axes.array.flat) if axes is not None else range(len(firsts)))
    strides = list(steps.array.flat) if steps is not None else [1] * len(firsts)
    index = [slice(None)] * rank
    for axis, first, last, stride in zip(which, firsts, lasts, strides, strict=True):
        if varies(first) or varies(last):
            return None
        index[axis] = slice(first, None if stride < 0 and last < -rank - 2**31 else last, stride)
    return Sizes(x.array[tuple(index)], x.dtype)


@on_sizes("Unsqueeze")
def unsqueeze(x: Sizes, axes: Any) -> Sizes:
    return Sizes(np.expand_dims(x.array, tuple(_whole(axes))), x.dtype)


def _whole(axes: Any) -> list[int]:
    """Axes from an input, or from an attribute as before opset 13."""
    return [int(axis) for axis in (axes.array.flat if isinstance(axes, Sizes) else axes)]


@on_sizes("Squeeze")
def squeeze(x: Sizes, axes: Any = None) -> Sizes:
    shape = x.array.shape
    where = [i for i, size in enumerate(shape) if size == 1] if axes is None else _whole(axes)
    kept = [size for i, size in enumerate(shape) if i not in where and i - len(shape) not in where]
    return Sizes(x.array.reshape(kept), x.dtype)


@on_sizes("Reshape")
def reshape(x: Sizes, new_shape: Sizes, **attributes: Any) -> Sizes:
    return Sizes(x.array.reshape([int(size) for size in new_shape.array.flat]), x.dtype)


@on_sizes("Transpose")
def transpose(x: Sizes, *, perm: Any = None) -> Sizes:
    return Sizes(np.transpose(x.array, perm), x.dtype)


@on_sizes("Expand")
def expand(x: Sizes, new_shape: Sizes) -> Any:
    if any(varies(size) for size in new_shape.array.flat) or x.array.size * math.prod(new_shape.array.flat) > 1024:
        return None
    target = np.broadcast_shapes(x.array.shape, tuple(int(size) for size in new_shape.array.flat))
    return Sizes(np.broadcast_to(x.array, target).copy(), x.dtype)


def _reduced(function: Callable[..., Any], start: Any) -> Callable[..., Any]:
    def compute(x: Sizes, axes: Any = None, *, keepdims: int = 1, **old: Any) -> Any:
        if x.array.ndim > 1:
            return None
        shape = (1,) * x.array.ndim if keepdims else ()
        return Sizes(_array([reduce(function, x.array.flat, start)], shape), x.dtype)

    return compute


on_sizes("ReduceProd")(_reduced(lambda a, b: a * b, 1))
on_sizes("ReduceSum")(_reduced(lambda a, b: a + b, 0))


@on_sizes("Split")
def split(x: Sizes, lengths: Any = None, *, axis: int = 0, split: Any = None, num_outputs: int | None = None) -> Any:
    parts = split or (list(map(int, lengths.array.flat)) if lengths is not None else None)
    if parts is None and num_outputs is None:
        return None
    bounds: Any = np.cumsum(parts)[:-1] if parts else num_outputs
    pieces = np.split(x.array, bounds, axis)
    return tuple(Sizes(piece, x.dtype) for piece in pieces)


@reads("ConstantOfShape")
def constant_of_shape(r: Reader, sizes: Any, *, value: Any = None) -> Any:
    filled = torch.zeros(1) if value is None else value
    entries = r.ints(sizes)
    refuse(not any(map(varies, entries)) and math.prod(entries) > 2**28, "it computes a constant of more than 1 GiB")
    return r.call(torch.full, tuple(entries), filled.item(), dtype=filled.dtype)


def arange_of(start: Any, limit: Any, delta: Any) -> Tensor:
    """`torch.arange` of bounds that are numbers or tensors with one entry."""
    numbers = (bound.item() if isinstance(bound, Tensor) else bound for bound in (start, limit, delta))
    dtype = next(bound.dtype for bound in (limit, start, delta) if isinstance(bound, Tensor))
    return torch.arange(
        *numbers, dtype=dtype, device=next(b.device for b in (limit, start, delta) if isinstance(b, Tensor))
    )


@reads("Range")
def range_(r: Reader, start: Any, limit: Any, delta: Any) -> Any:
    bounds = (start, limit, delta)
    if any(isinstance(bound, Traced) for bound in bounds):
        tensors = [bound if isinstance(bound, Traced) else r.number(bound) for bound in bounds]
        return r.call_of_data(arange_of, *tensors, like=lambda count: (count,), dtype=r.like(limit).dtype)
    return r.call(torch.arange, *map(r.number, (start, limit, delta)), dtype=r.like(limit).dtype)
