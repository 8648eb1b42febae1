"""ONNX of what moves values: parts of tensors, joined tensors, other shapes and orders of axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Value, Writer, refuse, writes
from fxq.ops import OPS

_LAST = 2**31 - 1


def _reshapes(name: str) -> Any:
    def reshape(w: Writer, x: Value, **options: Any) -> str:
        return w.reshaped(x, OPS[name].target(x.like, **options).shape)

    return reshape


for _name in ("flatten", "unflatten", "reshape", "squeeze", "unsqueeze"):
    writes(_name)(_reshapes(_name))


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
    wide = x if len(repeats) == x.rank else w.reshaped(x, [1] * (len(repeats) - x.rank) + list(x.shape))
    return w.emit("Tile", wide, w.ints(repeats))


@writes("cat")
def cat(w: Writer, xs: Sequence[Value], *, dim: int) -> str:
    parts = [x for x in xs if x.shape != (0,)]  # torch leaves those out
    refuse(len({x.dtype for x in parts}) > 1, "it joins values of several types")
    return w.joined(parts, dim % parts[0].rank)


@writes("stack")
def stack(w: Writer, xs: Sequence[Value], *, dim: int) -> str:
    refuse(len({x.dtype for x in xs}) > 1, "it joins values of several types")
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
    made: Value | str = x
    axis = 0
    for part in parts:
        if part is None:
            continue
        size = x.shape[axis]
        if isinstance(part, int):
            made = w.cut(made, axis, part % size, part % size + 1)
        elif part != slice(None):
            if any(map(varies, (size, part.start, part.stop))):
                start, stop, step = _ends(part)
            else:
                start, stop, step = part.indices(size)
                stop = max(stop, start)
            made = w.cut(made, axis, start, stop, step)
        axis += 1
    out = x.like[index].shape
    return made.name if isinstance(made, Value) and made.shape == out else w.reshaped(made, out)


def _ends(part: slice) -> tuple[Any, Any, Any]:
    """Where a slice of an axis of any size begins and ends; numbers from the end are below zero, as in ONNX."""
    refuse((part.step or 1) < 0, "it is cut backwards")
    return part.start or 0, _LAST if part.stop is None else part.stop, part.step or 1


def _parts(name: str) -> Any:
    def part(w: Writer, x: Value, *, dim: int, index: int, **options: Any) -> str:
        axis = dim % x.rank
        numbers = torch.arange(x.shape[axis], device="cpu")
        taken = OPS[name].target(numbers, dim=0, index=index, **options)
        start = int(taken[0]) if len(taken) else 0
        return w.cut(x, axis, start, start + len(taken))

    return part


for _name in ("chunk", "split", "tensor_split"):
    writes(_name)(_parts(_name))


@writes("index_select")
def index_select(w: Writer, x: Value, index: Value, *, dim: int) -> str:
    return w.emit("Gather", x, w.index(index, x.shape[dim]), axis=dim)


@writes("flip")
def flip(w: Writer, x: Value, *, dims: Any) -> str:
    made: Value | str = x
    for dim in dims:
        made = w.cut(made, dim % x.rank, -1, -_LAST, -1)
    return made.name if isinstance(made, Value) else made


@writes("roll")
def roll(w: Writer, x: Value, *, shifts: Any, dims: Any) -> str:
    refuse(not dims, "it rolls all axes as one")
    made: Value | str = x
    for shift, dim in zip(shifts, dims, strict=True):
        axis = dim % x.rank
        size = x.shape[axis]
        start = -shift % size
        if start:
            made = w.emit("Concat", w.cut(made, axis, start, size), w.cut(made, axis, 0, start), axis=axis)
    return made.name if isinstance(made, Value) else made


@writes("repeat_interleave")
def repeat_interleave(w: Writer, x: Value, *, repeats: int, dim: int | None) -> str:
    shape, axis = ((math.prod(x.shape),), 0) if dim is None else (x.shape, dim % x.rank)
    before, behind = shape[: axis + 1], shape[axis + 1 :]
    wide = w.emit("Expand", w.reshaped(x, (*before, 1, *behind)), w.ints((*before, repeats, *behind)))
    return w.reshaped(wide, (*shape[:axis], shape[axis] * repeats, *behind))
