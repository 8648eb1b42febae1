"""Rows of the op table: indexing, splitting, concatenation and repetition of tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxq.ops.registry import aten, row
from fxq.ops.table import Arguments, Redirect, shape_of, spell
from fxq.ops.traits import float_only, moves

_PART = moves("x", layout=True, view=True, selects=True)
_COPY = moves("x", layout=True)
_ALL = slice(None)
_ATEN_END = 2**63 - 1  # `end` of aten.slice for a slice without an end


def _plain(part: Any) -> Any:
    """Normalize a slice: defaults become None."""
    if not isinstance(part, slice):
        return part
    start = None if isinstance(part.start, int) and part.start == 0 else part.start
    stop = None if isinstance(part.stop, int) and part.stop == _ATEN_END else part.stop
    step = None if isinstance(part.step, int) and part.step == 1 else part.step
    return slice(start, stop, step)


def index_parts(index: Any) -> tuple[Any, ...]:
    """Return what each axis is indexed with. x[[0, 1]] selects positions of one axis; x[[y, z]] is x[y, z]."""
    if isinstance(index, list) and all(isinstance(i, (int, fx.Node)) and shape_of(i) is None for i in index):
        return (index,)
    return tuple(index) if isinstance(index, (tuple, list)) else (index,)


def indexed(x: Any, index: Any) -> Arguments | Redirect | str:
    """Arguments of x[index] in normal form: a tuple without `...` and without full slices at its end."""
    indices = [_plain(entry) for entry in index_parts(index)]
    for entry in indices:
        if not (entry is None or entry is Ellipsis or type(entry) in (int, slice) or isinstance(entry, fx.Node)):
            return f"is indexed with a {'list' if isinstance(entry, list) else type(entry).__name__}"
        if shape_of(entry) is not None:
            return "is indexed with a tensor"
    rank = len(shape_of(x) or ())
    if Ellipsis in indices:
        i = indices.index(Ellipsis)
        indexed_axes = sum(entry is not None for entry in indices) - 1
        indices[i : i + 1] = [_ALL] * (rank - indexed_axes)
    while indices and indices[-1] == _ALL:
        indices.pop()
    if not indices:
        return Redirect("identity", {"x": x})
    if indices[-1] is None and all(entry == _ALL for entry in indices[:-1]):
        return Redirect("unsqueeze", {"x": x, "dim": len(indices) - 1})
    return {"x": x, "index": tuple(indices)}


def _along(x: Any, dim: Any, part: Any) -> Arguments | Redirect | str:
    if not isinstance(dim, int):
        return "splits along an axis that is computed at run time"
    rank = len(shape_of(x) or ())
    return indexed(x, (*[_ALL] * (dim % rank if rank else 0), part))


def _getitem(bound: Arguments) -> Arguments | Redirect | str:
    return indexed(bound["x"], bound["index"])


def _select(bound: Arguments) -> Arguments | Redirect | str:
    return _along(bound["x"], bound["dim"], bound["index"])


def _slice(bound: Arguments) -> Arguments | Redirect | str:
    part = slice(bound.get("start"), bound.get("end"), bound.get("step", 1))
    return _along(bound["x"], bound.get("dim", 0), part)


def _narrow(bound: Arguments) -> Arguments | Redirect | str:
    start, length = bound["start"], bound["length"]
    if not all(isinstance(n, int) for n in (start, length, bound["dim"])):
        return "has a start or an end that is computed at run time"
    start = start if start >= 0 else start + (shape_of(bound["x"]) or ())[bound["dim"]]
    return _along(bound["x"], bound["dim"], slice(start, start + length))


def _unbound(bound: Arguments, index: Any) -> Arguments | Redirect | str:
    return _along(bound["x"], bound.get("dim", 0), index) if isinstance(index, int) else f"is read by {index!r}"


@row(
    spell(operator.getitem, "x index", _getitem),
    *(spell(t, "x dim index", _select) for t in (torch.select, "select", aten.select.int)),
    *(spell(t, "x dim start length", _narrow) for t in (torch.narrow, "narrow", aten.narrow.default)),
    spell(aten.slice.Tensor, "x dim start end step", _slice),
    *(spell(t, "x dim", pick=_unbound) for t in (torch.unbind, "unbind", aten.unbind.int)),
    traits=_PART,
)
def getitem(x: Tensor, *, index: Any) -> Tensor:
    """x[index], for a tuple of numbers, slices and None."""
    return x[index]


@row(traits=float_only("x", "value", fill_constants=("value",)))
def assign(x: Tensor, value: Any, *, index: Any) -> Tensor:
    """Copy of x after x[index] = value, for an index of numbers, slices and None."""
    result = x.clone()
    result[index] = value
    return result


def _nth(bound: Arguments, index: Any) -> Arguments | str:
    return {**bound, "index": index} if isinstance(index, int) else f"is read by {index!r}"


_CHUNK = "x chunks dim"


@row(*(spell(t, _CHUNK, pick=_nth) for t in (torch.chunk, "chunk", aten.chunk.default)), traits=_PART)
def chunk(x: Tensor, *, chunks: int, dim: int = 0, index: int = 0) -> Tensor:
    """Part `index` of x, split along `dim` into `chunks` parts."""
    return torch.chunk(x, chunks, dim)[index]


def _sizes(bound: Arguments) -> Arguments:
    names = ("split_size_or_sections", "split_size", "split_sizes", "sizes")
    return {**bound, "sizes": next(bound.pop(name) for name in names if name in bound)}


@row(
    *(spell(t, "x sizes dim", _sizes, _nth) for t in (torch.split, torch.split_with_sizes)),
    *(spell(t, "x sizes dim", _sizes, _nth) for t in ("split", "split_with_sizes")),
    *(spell(t, "x sizes dim", _sizes, _nth) for t in (aten.split.Tensor, aten.split_with_sizes.default)),
    traits=_PART,
)
def split(x: Tensor, *, sizes: Any, dim: int = 0, index: int = 0) -> Tensor:
    """Part `index` of x, split along `dim` into parts of one size or of given sizes."""
    return torch.split(x, list(sizes) if isinstance(sizes, tuple) else sizes, dim)[index]


def _sections(bound: Arguments) -> Arguments:
    names = ("indices_or_sections", "indices", "sections")
    return {**bound, "sections": next(bound.pop(name) for name in names if name in bound)}


@row(
    *(spell(t, "x sections dim", _sections, _nth) for t in (torch.tensor_split, "tensor_split")),
    traits=_PART,
)
def tensor_split(x: Tensor, *, sections: Any, dim: int = 0, index: int = 0) -> Tensor:
    """Part `index` of x, split along `dim` into a number of nearly equal parts or at given indices."""
    return torch.tensor_split(x, sections, dim)[index]


@row(
    *(spell(t, "x dim index") for t in (torch.index_select, "index_select", aten.index_select.default)),
    traits=moves("x", layout=True, selects=True),
)
def index_select(x: Tensor, index: Tensor, *, dim: int) -> Tensor:
    """Entries of x along `dim` with the indices `index`, int64 (n,)."""
    return torch.index_select(x, dim, index)


@row(
    *(spell(t, "xs dim") for t in (torch.cat, torch.concat, torch.concatenate, aten.cat.default)),
    traits=moves("xs", layout=True),
)
def cat(xs: Sequence[Tensor], *, dim: int = 0) -> Tensor:
    """Concatenate tensors along `dim`."""
    return torch.cat(list(xs), dim)


@row(*(spell(t, "xs dim") for t in (torch.stack, aten.stack.default)), traits=moves("xs", layout=True))
def stack(xs: Sequence[Tensor], *, dim: int = 0) -> Tensor:
    """Stack tensors of one shape along a new axis."""
    return torch.stack(list(xs), dim)


@row(
    spell(torch.flip, "x dims"),
    spell("flip", "x *dims"),
    spell(aten.flip.default, "x dims"),
    traits=_COPY,
)
def flip(x: Tensor, *, dims: Any) -> Tensor:
    """Reverse the order of the entries along axes."""
    return torch.flip(x, tuple(dims))


def _shifts(bound: Arguments) -> Arguments:
    tuples = {key: (value,) if isinstance(value, int) else value for key, value in bound.items() if key != "x"}
    return {"x": bound["x"], **tuples}


@row(*(spell(t, "x shifts dims", _shifts) for t in (torch.roll, "roll", aten.roll.default)), traits=_COPY)
def roll(x: Tensor, *, shifts: Any, dims: Any = ()) -> Tensor:
    """Shift the entries along axes, cyclically; without `dims`, shift the flattened tensor."""
    return torch.roll(x, shifts, dims)


def _tiled(bound: Arguments) -> Arguments | str:
    repeats = bound.pop("dims", bound.get("repeats"))
    if not isinstance(repeats, (tuple, list)):
        return "has numbers of repetitions that are computed at run time"
    missing = len(shape_of(bound["x"]) or ()) - len(repeats)
    return {**bound, "repeats": (*[1] * missing, *repeats)}


@row(
    *(spell(t, "x *repeats", _tiled) for t in ("repeat", "tile")),
    *(spell(t, "x repeats", _tiled) for t in (torch.tile, aten.repeat.default, aten.tile.default)),
    traits=_COPY,
)
def repeat(x: Tensor, *, repeats: Any) -> Tensor:
    """Repeat the tensor along each axis."""
    return x.repeat(repeats)


def _times(bound: Arguments) -> Arguments | str:
    bound.pop("output_size", None)
    repeats = bound["repeats"]
    is_number = isinstance(repeats, int) or (isinstance(repeats, fx.Node) and shape_of(repeats) is None)
    return bound if is_number else "repeats entries different numbers of times"


@row(
    *(spell(t, "x repeats dim", _times) for t in (torch.repeat_interleave, "repeat_interleave")),
    spell(aten.repeat_interleave.self_int, "x repeats dim", _times),
    traits=_COPY,
)
def repeat_interleave(x: Tensor, *, repeats: int, dim: int | None = None) -> Tensor:
    """Repeat each entry along `dim`; without `dim`, each element of the flattened tensor."""
    return torch.repeat_interleave(x, repeats, dim)
