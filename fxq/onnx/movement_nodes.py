"""ONNX form of ops that move values: slicing, concatenation, reshaping and permutation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Value, Writer, refuse, writes
from fxq.ops import OPS

_AXIS_END = 2**31 - 1
"""Stop of a slice to the end of an axis."""


def _reshape(name: str) -> Any:
    def reshape(w: Writer, x: Value, **options: Any) -> str:
        return w.reshaped(x, OPS[name].target(x.like, **options).shape)

    return reshape


for _name in ("flatten", "unflatten", "reshape", "squeeze", "unsqueeze"):
    writes(_name)(_reshape(_name))


@writes("permute")
def permute(w: Writer, x: Value, *, dims: Sequence[int]) -> str:
    return w.emit("Transpose", x, perm=[dim % x.rank for dim in dims])


@writes("transpose")
def transpose(w: Writer, x: Value, *, dim0: int, dim1: int) -> str:
    perm = list(range(x.rank))
    if perm:
        perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return w.emit("Transpose", x, perm=perm)


@writes("contiguous", "dropout", "identity")
def same(w: Writer, x: Value, **options: Any) -> str:
    refuse(options.get("training"), "it drops values at random")
    return x.name


@writes("expand")
def expand(w: Writer, x: Value, *, sizes: Any) -> str:
    return w.emit("Expand", x, w.ints(OPS["expand"].target(x.like, sizes=sizes).shape))


@writes("expand_as")
def expand_as(w: Writer, x: Value, other: Value) -> str:
    return w.emit("Expand", x, w.ints(other.shape))


@writes("reshape_as")
def reshape_as(w: Writer, x: Value, other: Value) -> str:
    return w.reshaped(x, other.shape)


@writes("repeat")
def repeat(w: Writer, x: Value, *, repeats: Sequence[int]) -> str:
    expanded = x if len(repeats) == x.rank else w.reshaped(x, [1] * (len(repeats) - x.rank) + list(x.shape))
    return w.emit("Tile", expanded, w.ints(repeats))


@writes("cat")
def cat(w: Writer, xs: Sequence[Value], *, dim: int) -> str:
    parts = [x for x in xs if x.shape != (0,)]  # torch.cat ignores empty tensors
    refuse(len({x.dtype for x in parts}) > 1, "its inputs have different dtypes")
    return w.joined(parts, dim % parts[0].rank)


@writes("append")
def append(w: Writer, past: Value, new: Value, *, dim: int) -> str:
    return cat(w, [past, new], dim=dim)


@writes("stack")
def stack(w: Writer, xs: Sequence[Value], *, dim: int) -> str:
    refuse(len({x.dtype for x in xs}) > 1, "its inputs have different dtypes")
    axis = dim % (xs[0].rank + 1)
    shape = [*xs[0].shape[:axis], 1, *xs[0].shape[axis:]]
    return w.joined([w.reshaped(x, shape) for x in xs], axis)


@writes("getitem")
def getitem(w: Writer, x: Value, *, index: Any) -> str:
    parts = list(index) if isinstance(index, tuple) else [index]
    plain = all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)
    refuse(not plain, "its index is a tensor")
    if Ellipsis in parts:
        i = parts.index(Ellipsis)
        taken = sum(part is not None for part in parts) - 1
        parts[i : i + 1] = [slice(None)] * (x.rank - taken)
    result: Value | str = x
    axis = 0
    for part in parts:
        if part is None:
            continue
        size = x.shape[axis]
        if isinstance(part, int):
            result = w.cut(result, axis, part % size, part % size + 1)
        elif part != slice(None):
            if any(map(varies, (size, part.start, part.stop))):
                start, stop, step = _slice_bounds(part)
            else:
                start, stop, step = part.indices(size)
                stop = max(stop, start)
            result = w.cut(result, axis, start, stop, step)
        axis += 1
    out = x.like[index].shape
    return result.name if isinstance(result, Value) and result.shape == out else w.reshaped(result, out)


def _slice_bounds(part: slice) -> tuple[Any, Any, Any]:
    """Start, stop and step of a slice of a dynamic axis; negative numbers count from the end, as in ONNX."""
    refuse((part.step or 1) < 0, "its slice has a negative step")
    return part.start or 0, _AXIS_END if part.stop is None else part.stop, part.step or 1


def _split_part(name: str) -> Any:
    def part(w: Writer, x: Value, *, dim: int, index: int, **options: Any) -> str:
        axis = dim % x.rank
        numbers = torch.arange(x.shape[axis], device="cpu")
        taken = OPS[name].target(numbers, dim=0, index=index, **options)
        start = int(taken[0]) if len(taken) else 0
        return w.cut(x, axis, start, start + len(taken))

    return part


for _name in ("chunk", "split", "tensor_split"):
    writes(_name)(_split_part(_name))


@writes("index_select")
def index_select(w: Writer, x: Value, index: Value, *, dim: int) -> str:
    return w.emit("Gather", x, w.index(index, x.shape[dim]), axis=dim)


@writes("flip")
def flip(w: Writer, x: Value, *, dims: Any) -> str:
    result: Value | str = x
    for dim in dims:
        result = w.cut(result, dim % x.rank, -1, -_AXIS_END, -1)
    return result.name if isinstance(result, Value) else result


@writes("roll")
def roll(w: Writer, x: Value, *, shifts: Any, dims: Any) -> str:
    refuse(not dims, "it rolls the flattened tensor")
    result: Value | str = x
    for shift, dim in zip(shifts, dims, strict=True):
        axis = dim % x.rank
        size = x.shape[axis]
        start = -shift % size
        if start:
            result = w.emit("Concat", w.cut(result, axis, start, size), w.cut(result, axis, 0, start), axis=axis)
    return result.name if isinstance(result, Value) else result


@writes("repeat_interleave")
def repeat_interleave(w: Writer, x: Value, *, repeats: int, dim: int | None) -> str:
    shape, axis = ((math.prod(x.shape),), 0) if dim is None else (x.shape, dim % x.rank)
    before, after = shape[: axis + 1], shape[axis + 1 :]
    repeated = w.emit("Expand", w.reshaped(x, (*before, 1, *after)), w.ints((*before, repeats, *after)))
    return w.reshaped(repeated, (*shape[:axis], shape[axis] * repeats, *after))
