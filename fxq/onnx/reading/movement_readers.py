"""Readers of ONNX ops that move values: reshapes, slices, concatenation, gathering, padding, resizing."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.onnx.reading.reader import Reader, reads
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import refuse


def rank_of(r: Reader, x: Any) -> int:
    """Number of axes of an operand."""
    return len(r.shape_of(x))


def axes_of(r: Reader, operand: Any, attributes: Any, rank: int) -> list[int] | None:
    """Axes of a node, from its input or, before opset 13, its attribute; None if it names none."""
    axes = attributes.get("axes") if operand is None else r.ints(operand)
    return None if axes is None else [int(axis) % max(rank, 1) for axis in axes]


@reads("Transpose")
def transpose(r: Reader, x: Any, *, perm: Sequence[int] | None = None) -> Any:
    axes = tuple(perm) if perm is not None else tuple(range(rank_of(r, x)))[::-1]
    return r.permuted(x, axes) if id(x) in r.grids and isinstance(x, Tensor) else r.call(torch.permute, x, axes)


@reads("Reshape")
def reshape(r: Reader, x: Any, sizes: Any = None, *, shape: Any = None, allowzero: int = 0) -> Any:
    entries = list(shape) if sizes is None else r.ints(sizes)
    old = r.shape_of(x)
    if not allowzero:
        entries = [old[i] if type(size) is int and size == 0 else size for i, size in enumerate(entries)]
    symbols = [i for i, size in enumerate(entries) if varies(size)]
    if len(symbols) == 1 and -1 not in entries and 0 not in entries:
        entries[symbols[0]] = -1
    return r.call(torch.reshape, x, tuple(entries))


@reads("Flatten")
def flatten(r: Reader, x: Any, *, axis: int = 1) -> Any:
    rank = rank_of(r, x)
    axis = axis % rank if axis < 0 else axis
    if axis == 1 and rank > 1:
        return r.call(torch.flatten, x, 1)
    shape = r.shape_of(x)
    return r.call(torch.reshape, x, (math.prod(shape[:axis]), math.prod(shape[axis:])))


@reads("Squeeze")
def squeeze(r: Reader, x: Any, axes: Any = None, **attributes: Any) -> Any:
    rank = rank_of(r, x)
    where = axes_of(r, axes, attributes, rank)
    if where is None:
        shape = r.shape_of(x)
        refuse(any(map(varies, shape)), "it removes all axes of size 1, and some of its axes are dynamic")
        where = [i for i, size in enumerate(shape) if size == 1]
    for axis in sorted(where, reverse=True):
        x = r.call(torch.squeeze, x, axis)
    return x


@reads("Unsqueeze")
def unsqueeze(r: Reader, x: Any, axes: Any = None, **attributes: Any) -> Any:
    positions = attributes["axes"] if axes is None else r.ints(axes)
    rank = rank_of(r, x) + len(positions)
    for axis in sorted(int(axis) % rank for axis in positions):
        x = r.call(torch.unsqueeze, x, axis)
    return x


@reads("Expand")
def expand(r: Reader, x: Any, sizes: Any) -> Any:
    old, new = list(r.shape_of(x)), r.ints(sizes)
    old = [1] * (len(new) - len(old)) + old
    new = [1] * (len(old) - len(new)) + list(new)
    shape = [a if type(b) is int and b == 1 else b for a, b in zip(old, new, strict=True)]
    return x if shape == list(r.shape_of(x)) else r.call("expand", x, tuple(shape))


@reads("Tile")
def tile(r: Reader, x: Any, repeats: Any) -> Any:
    return r.call("repeat", x, tuple(r.ints(repeats)))


@reads("Concat")
def concat(r: Reader, *xs: Any, axis: int) -> Any:
    return r.call(torch.cat, list(xs), axis) if len(xs) > 1 else xs[0]


@reads("Split")
def split(
    r: Reader, x: Any, lengths: Any = None, *, axis: int = 0, split: Any = None, num_outputs: int | None = None
) -> Any:
    size = r.shape_of(x)[axis]
    parts = split if lengths is None else r.ints(lengths)
    if parts is None:
        count = num_outputs or r.outputs
        step = (size + count - 1) // count
        parts = [step] * (count - 1) + [size - (count - 1) * step]
    return r.call(torch.split, x, tuple(parts), axis)


@reads("Slice")
def slice_(
    r: Reader, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None, **old: Any
) -> Any:
    firsts = old["starts"] if starts is None else r.ints(starts)
    lasts = old["ends"] if ends is None else r.ints(ends)
    which = old.get("axes") if axes is None else r.ints(axes)
    strides = [1] * len(firsts) if steps is None else r.ints(steps)
    shape = r.shape_of(x)
    index: list[Any] = [slice(None)] * len(shape)
    for axis, first, last, stride in zip(which or range(len(firsts)), firsts, lasts, strides, strict=True):
        size = shape[axis]
        if stride < 0:
            x = _backwards(r, x, axis % len(shape), first, last, stride, size)
            continue
        start = None if type(first) is int and first == 0 else first
        stop = None if not varies(last) and (last >= 2**31 - 1 or (not varies(size) and last >= size)) else last
        index[axis] = slice(start, stop, None if stride == 1 else stride)
    return x if all(part == slice(None) for part in index) else r.call(operator.getitem, x, tuple(index))


def _backwards(r: Reader, x: Any, axis: int, first: Any, last: Any, stride: int, size: Any) -> Any:
    if stride == -1 and not varies(first) and not varies(last) and first in (-1, 2**63 - 1) and last < -(2**31):
        return r.call(torch.flip, x, (axis,))
    refuse(varies(size) or varies(first) or varies(last), "it steps backwards along a dynamic axis")
    taken = range(*slice(first, last if last >= -size else None, stride).indices(size))
    return r.call(torch.index_select, x, axis, torch.tensor(list(taken), dtype=torch.int64))


@reads("Gather")
def gather(r: Reader, x: Any, index: Any, *, axis: int = 0) -> Any:
    like, shape = r.like(index), r.shape_of(x)
    axis = axis % len(shape)
    if isinstance(index, Tensor) and index.dim() == 0:
        return r.call(torch.select, x, axis, int(index))
    index = _not_negative(r, index, shape[axis])
    if isinstance(x, Tensor) and axis == 0 and len(shape) == 2 and x.is_floating_point():
        return r.call(F.embedding, index, x)
    index = _counted(r, index, shape[axis])
    if like.dim() == 1:
        return r.call(torch.index_select, x, axis, index)
    taken = r.call(torch.index_select, x, axis, r.call(torch.reshape, index, (-1,)))
    return r.call(torch.reshape, taken, (*shape[:axis], *r.shape_of(index), *shape[axis + 1 :]))


def _not_negative(r: Reader, index: Any, size: Any) -> Any:
    """Indices that count from the start; those of the file may count from the end."""
    if isinstance(index, Tensor):
        return (index if varies(size) else torch.where(index < 0, index + size, index)).to(torch.int64)
    if r.like(index).dtype is not torch.int64:
        index = r.call("to", index, torch.int64)
    return index


@reads("GatherElements")
def gather_elements(r: Reader, x: Any, index: Any, *, axis: int = 0) -> Any:
    size = r.shape_of(x)[axis]
    return r.call(torch.gather, x, axis, _counted(r, index, size))


def _counted(r: Reader, index: Any, size: Any) -> Any:
    """Indices, of which negative ones count from the end, as indices from the start."""
    index = _not_negative(r, index, size)
    if isinstance(index, Tensor) and not bool((index < 0).any()):
        return index
    return r.call(torch.where, r.call(torch.lt, index, 0), r.call(torch.add, index, size), index)


@reads("GatherND")
def gather_nd(r: Reader, x: Any, index: Any, *, batch_dims: int = 0) -> Any:
    refuse(batch_dims, "it has batch axes")
    depth = r.shape_of(index)[-1]
    parts = [r.call(torch.select, index, -1, i) for i in range(int(depth))]
    return r.call(operator.getitem, x, tuple(parts))


@reads("ScatterElements", "Scatter")
def scatter_elements(r: Reader, x: Any, index: Any, new: Any, *, axis: int = 0, reduction: str = "none") -> Any:
    index = _counted(r, index, r.shape_of(x)[axis])
    if reduction == "none":
        return r.call(torch.scatter, x, axis, index, new)
    how = {"add": "sum", **_SCATTER_REDUCTIONS}[reduction]
    return r.call(torch.scatter_reduce, x, axis, index, new, how)


_SCATTER_REDUCTIONS = {"mul": "prod", "max": "amax", "min": "amin"}


def _scatter_reduced(r: Reader, x: Any, parts: Sequence[Any], new: Any, how: str) -> Any:
    """Scatter entries with a reduction: on x as a matrix, with a row for each position that `parts` index."""
    shape, depth = r.shape_of(x), len(parts)
    refuse(any(map(varies, shape)), "it reduces entries of a dynamic size")
    count = math.prod(shape[:depth])
    row: Any = torch.tensor(0)
    for part, size in zip(parts, shape, strict=False):
        row = r.call(torch.add, r.call(torch.mul, row, size), r.call(torch.remainder, part, size))
    index = r.call(torch.reshape, row, (-1, 1))
    width = math.prod(shape[depth:])
    columns = r.call(torch.add, index, torch.zeros(1, width, dtype=torch.int64))
    matrix, rows = r.call(torch.reshape, x, (count, width)), r.call(torch.reshape, new, (-1, width))
    return r.call(torch.reshape, r.call(torch.scatter_reduce, matrix, 0, columns, rows, how), shape)


@reads("ScatterND")
def scatter_nd(r: Reader, x: Any, index: Any, new: Any, *, reduction: str = "none") -> Any:
    parts = [r.call(torch.select, index, -1, i) for i in range(int(r.shape_of(index)[-1]))]
    if reduction in _SCATTER_REDUCTIONS:
        return _scatter_reduced(r, x, parts, new, _SCATTER_REDUCTIONS[reduction])
    refuse(reduction not in ("none", "add"), f"it reduces by {reduction!r}")
    return r.call(torch.index_put, x, tuple(parts), new, reduction == "add")


@reads("Pad")
def pad(
    r: Reader, x: Any, pads: Any = None, value: Any = None, axes: Any = None, *, mode: str = "constant", **old: Any
) -> Any:
    amounts = old["pads"] if pads is None else r.ints(pads)
    rank = rank_of(r, x)
    where = range(rank) if axes is None else [int(axis) % rank for axis in r.ints(axes)]
    count = len(amounts) // 2
    begins, ends = [0] * rank, [0] * rank
    for i, axis in enumerate(where):
        begins[axis], ends[axis] = amounts[i], amounts[i + count]
    number = old.get("value", 0.0) if value is None else r.number(value)
    return padded(r, x, begins, ends, {"edge": "replicate", "wrap": "circular"}.get(mode, mode), number)


def padded(
    r: Reader, x: Any, begins: Sequence[Any], ends: Sequence[Any], mode: str = "constant", value: Any = 0
) -> Any:
    """Pad the last axes of an operand; negative amounts crop it.

    Args:
        r: the reader.
        x: the operand.
        begins: amounts before each of the last axes.
        ends: amounts after each of them.
        mode: mode of `torch.nn.functional.pad`.
        value: value of the padding in mode "constant".
    """
    pairs = list(zip(begins, ends, strict=True))[::-1]
    while pairs and all(type(v) is int and v == 0 for v in pairs[-1]):
        pairs.pop()
    if not pairs:
        return x
    flat = tuple(itertools.chain.from_iterable(pairs))
    if mode == "constant":
        return r.call(F.pad, x, flat, mode, value)
    rank, count = rank_of(r, x), len(pairs)
    lead = rank - count
    if lead in (1, 2):
        return r.call(F.pad, x, flat, mode)
    shape = r.shape_of(x)
    head = shape[:lead]
    flattened = r.call(torch.reshape, x, (1, math.prod(head), *shape[lead:]))
    result = r.call(F.pad, flattened, flat, mode)
    return r.call(torch.reshape, result, (*head, *r.shape_of(result)[2:]))


@reads("DepthToSpace")
def depth_to_space(r: Reader, x: Any, *, blocksize: int, mode: str = "DCR") -> Any:
    if mode == "CRD":
        return r.call(F.pixel_shuffle, x, blocksize)
    n, c, h, w = r.shape_of(x)
    apart = r.call(torch.reshape, x, (n, blocksize, blocksize, c // blocksize**2, h, w))
    turned = r.call(torch.permute, apart, (0, 3, 4, 1, 5, 2))
    return r.call(torch.reshape, turned, (n, c // blocksize**2, h * blocksize, w * blocksize))


@reads("SpaceToDepth")
def space_to_depth(r: Reader, x: Any, *, blocksize: int, mode: str = "DCR") -> Any:
    n, c, h, w = r.shape_of(x)
    apart = r.call(torch.reshape, x, (n, c, h // blocksize, blocksize, w // blocksize, blocksize))
    turned = r.call(torch.permute, apart, (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4))
    return r.call(torch.reshape, turned, (n, c * blocksize**2, h // blocksize, w // blocksize))


@reads("GridSample")
def grid_sample(
    r: Reader, x: Any, grid: Any, *, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
) -> Any:
    kind = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return r.call(F.grid_sample, x, grid, kind, padding_mode, bool(align_corners))


@reads("Trilu")
def trilu(r: Reader, x: Any, diagonal: Any = None, *, upper: int = 1) -> Any:
    return r.call(torch.triu if upper else torch.tril, x, int(r.number(diagonal)) if diagonal is not None else 0)


@reads("EyeLike")
def eye_like(r: Reader, x: Any, *, dtype: int | None = None, k: int = 0) -> Any:
    from fxq.onnx.reading.onnx_file import dtype_of_number

    rows, columns = r.shape_of(x)
    kind = r.like(x).dtype if dtype is None else dtype_of_number(dtype)
    if k == 0:
        return r.call(torch.eye, rows, columns, dtype=kind)
    ones = r.call(torch.ones, (rows, columns), dtype=kind)
    return r.call(torch.triu, r.call(torch.tril, ones, k), k)


@reads("OneHot")
def one_hot(r: Reader, index: Any, depth: Any, values: Any, *, axis: int = -1) -> Any:
    count = int(r.number(depth))
    refuse(not isinstance(values, Tensor), "its values are computed from data")
    rank = rank_of(r, index) + 1
    whole = r.call("to", index, torch.int64)
    positive = r.call(torch.remainder, whole, count)
    inside = r.call(torch.logical_and, r.call(torch.ge, whole, -count), r.call(torch.lt, whole, count))
    spread = r.call(torch.eq, r.call(torch.unsqueeze, positive, -1), torch.arange(count))
    hot = r.call(torch.logical_and, spread, r.call(torch.unsqueeze, inside, -1))
    result = r.call(torch.where, hot, values[1], values[0])
    axis = axis % rank
    return result if axis == rank - 1 else r.call(torch.movedim, result, -1, axis)
