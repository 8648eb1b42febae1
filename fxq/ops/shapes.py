"""Rows of the op table: changes of shape, order of axes, memory layout or dtype, and identities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.ops.registry import as_tuple, aten, named, row
from fxq.ops.sizes import leads
from fxq.ops.table import Arguments, Redirect, dtype_of, shape_of, spell
from fxq.ops.traits import float_only, moves

_VIEW = moves("x", layout=True, view=True)


@row(nn.Flatten, torch.flatten, "flatten", aten.flatten.using_ints, traits=_VIEW)
def flatten(x: Tensor, *, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Merge the axes start_dim..end_dim into one."""
    return torch.flatten(x, start_dim, end_dim)


def _unflattened(bound: Arguments) -> Arguments | str:
    sizes = bound.pop("unflattened_size", bound.get("sizes"))
    return {**bound, "sizes": tuple(sizes)} if isinstance(sizes, (tuple, list)) else "is given names of axes"


@row(
    spell(nn.Unflatten, "x dim unflattened_size", _unflattened),
    spell(torch.unflatten, "x dim sizes", _unflattened),
    spell("unflatten", "x dim sizes", _unflattened),
    spell(aten.unflatten.int, "x dim sizes", _unflattened),
    traits=_VIEW,
)
def unflatten(x: Tensor, *, dim: int, sizes: Any) -> Tensor:
    """Split the axis `dim` into axes of these sizes; one of them may be -1."""
    return torch.unflatten(x, dim, sizes)


def _sizes(bound: Arguments) -> Arguments | Redirect | str:
    """Return the shape as a tuple; a reshape to `(x.size(0), -1)` is a flatten."""
    shape = bound.get("shape", ())
    if isinstance(shape, torch.dtype) or (isinstance(shape, tuple) and any(isinstance(s, torch.dtype) for s in shape)):
        return "changes the dtype"
    if not isinstance(shape, (tuple, list)):
        return bound
    if shape and shape[-1] == -1 and leads(bound["x"], shape[:-1]):
        return Redirect("flatten", {"x": bound["x"], "start_dim": len(shape) - 1})
    return {**bound, "shape": tuple(shape)}


@row(
    spell(torch.reshape, "x shape", _sizes),
    spell("reshape", "x *shape", _sizes),
    spell("view", "x *shape", _sizes),
    *(spell(t, "x shape", _sizes) for t in (aten.reshape.default, aten.view.default, aten._unsafe_view.default)),
    traits=_VIEW,
)
def reshape(x: Tensor, *, shape: Any) -> Tensor:
    """Return the elements of x in another shape; `view` is one of its spellings."""
    return torch.reshape(x, shape)


def _moved_axes(bound: Arguments) -> Redirect | str:
    """Convert movedim to a permutation."""
    rank = len(shape_of(bound["x"]) or ())
    if any(not isinstance(d, int) for key in ("source", "destination") for d in as_tuple(bound[key], 1)):
        return "moves an axis that is computed at run time"
    source, to = (tuple(d % rank for d in as_tuple(bound[key], 1)) for key in ("source", "destination"))
    rest = iter(d for d in range(rank) if d not in source)
    dims = tuple(source[to.index(d)] if d in to else next(rest) for d in range(rank))
    return Redirect("permute", {"x": bound["x"], "dims": dims})


@row(
    spell(torch.permute, "x dims"),
    spell("permute", "x *dims"),
    spell(aten.permute.default, "x dims"),
    *(spell(t, "x source destination", _moved_axes) for t in (torch.movedim, torch.moveaxis, "movedim", "moveaxis")),
    spell(aten.movedim.int, "x source destination", _moved_axes),
    traits=_VIEW,
)
def permute(x: Tensor, *, dims: Any) -> Tensor:
    """Reorder the axes."""
    return torch.permute(x, tuple(dims))


def _turned(bound: Arguments) -> Arguments | Redirect:
    """Convert x.t() to a transpose, or the identity if x has fewer than two axes."""
    if len(shape_of(bound["x"]) or ()) < 2:
        return Redirect("identity", bound)
    return {**bound, "dim0": 0, "dim1": 1}


def _attribute(bound: Arguments) -> Arguments | Redirect | str:
    """Convert x.T, x.mT and x.data, which torch.fx traces as getattr."""
    name, x = bound.pop("name"), bound["x"]
    if name == "data":
        return Redirect("identity", bound)
    if name == "mT":
        return {"x": x, "dim0": -2, "dim1": -1}
    if name == "T":
        rank = len(shape_of(x) or ())
        return _turned(bound) if rank <= 2 else Redirect("permute", {"x": x, "dims": tuple(range(rank))[::-1]})
    return f"reads .{name}, which is not an op"


@row(
    *(spell(t, "x dim0 dim1") for t in (torch.transpose, "transpose", aten.transpose.int)),
    *(spell(t, "x dim0 dim1") for t in (torch.swapaxes, torch.swapdims, "swapaxes", "swapdims")),
    *(spell(t, "x", _turned) for t in (torch.t, "t", aten.t.default)),
    spell(getattr, "x name", _attribute),
    traits=_VIEW,
)
def transpose(x: Tensor, *, dim0: int, dim1: int) -> Tensor:
    """Swap two axes."""
    return torch.transpose(x, dim0, dim1)


def _one_dim(bound: Arguments) -> Arguments:
    dim = bound.get("dim")
    return {**bound, "dim": dim[0]} if isinstance(dim, (tuple, list)) and len(dim) == 1 else bound


@row(
    *(spell(t, "x dim", _one_dim) for t in (torch.squeeze, "squeeze", "squeeze_")),
    *(spell(t, "x dim", _one_dim) for t in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)),
    traits=_VIEW,
)
def squeeze(x: Tensor, *, dim: Any = None) -> Tensor:
    """Drop axes of size 1: `dim`, or all of them."""
    return torch.squeeze(x) if dim is None else torch.squeeze(x, dim)


@row(torch.unsqueeze, "unsqueeze", "unsqueeze_", aten.unsqueeze.default, traits=_VIEW)
def unsqueeze(x: Tensor, *, dim: int) -> Tensor:
    """Insert an axis of size 1."""
    return torch.unsqueeze(x, dim)


def _expanded(bound: Arguments) -> Arguments:
    bound.pop("implicit", None)
    return {**bound, "sizes": tuple(bound["sizes"])} if isinstance(bound["sizes"], (tuple, list)) else bound


@row(
    spell("expand", "x *sizes", _expanded),
    *(spell(t, "x sizes", _expanded) for t in (torch.broadcast_to, "broadcast_to", aten.expand.default)),
    traits=_VIEW,
)
def expand(x: Tensor, *, sizes: Any) -> Tensor:
    """Repeat axes of size 1 up to `sizes`, without copying; -1 leaves an axis as it is."""
    return x.expand(sizes)


@row("reshape_as", "view_as", traits=_VIEW)
def reshape_as(x: Tensor, other: Tensor) -> Tensor:
    """`reshape` to the shape of `other`."""
    return x.reshape(other.shape)


@row("expand_as", traits=_VIEW)
def expand_as(x: Tensor, other: Tensor) -> Tensor:
    """`expand` to the shape of `other`."""
    return x.expand_as(other)


def _same_type(bound: Arguments) -> Arguments | Redirect | str:
    """Convert `to` and similar methods: the identity if nothing changes, a cast, or `contiguous` for another layout."""
    layout = bound.pop("memory_format", None)
    options = [*bound.pop("args", ()), *(bound.pop(key, None) for key in ("dtype", "device", "other", "layout"))]
    x, keeps_layout = bound["x"], layout is None or layout is torch.preserve_format
    dtypes = [
        v if isinstance(v, torch.dtype) else dtype_of(v) for v in options if not (v is None or isinstance(v, bool))
    ]
    if None in dtypes:
        return "may change the device"
    if any(dtype is not dtype_of(x) for dtype in dtypes):
        return Redirect("cast", {"x": x, "dtype": dtypes[0]}) if keeps_layout else "changes the dtype and the layout"
    return Redirect("identity", {"x": x}) if keeps_layout else {"x": x, "memory_format": layout}


def _to(dtype: torch.dtype) -> Callable[[Arguments], Arguments | Redirect | str]:
    return lambda bound: _same_type({**bound, "dtype": dtype})


_TYPES = {"float": torch.float32, "int": torch.int32, "long": torch.int64, "bool": torch.bool}


def _same_values(bound: Arguments) -> Arguments | Redirect:
    layout = bound.pop("memory_format", None)
    if layout is None or layout is torch.preserve_format:
        return Redirect("identity", {"x": bound["x"]})
    return {**bound, "memory_format": layout}


@row(
    "contiguous",
    aten.contiguous.default,
    spell("to", "x *args", _same_type),
    spell("type", "x *args", _same_type),
    spell("type_as", "x other", _same_type),
    *(spell(name, "x", _to(dtype)) for name, dtype in _TYPES.items()),
    spell(aten._to_copy.default, "x", _same_type),
    spell(aten.to.dtype, "x dtype non_blocking copy memory_format", _same_type),
    *(spell(t, "x", _same_values) for t in (torch.clone, "clone", aten.clone.default)),
    traits=_VIEW,
)
def contiguous(x: Tensor, *, memory_format: Any = torch.contiguous_format) -> Tensor:
    """Return x in another memory layout."""
    return x.contiguous(memory_format=memory_format)


@row(traits=float_only("x"))
def cast(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Convert x to another dtype."""
    return x.to(dtype)


def _dropout(bound: Arguments) -> Arguments | str:
    drops = bound.pop("p", 0.5) != 0 and bound.get("training", True)
    return "drops values at random (training=True)" if drops else {**bound, "training": False}


def _stochastic_depth(bound: Arguments) -> Arguments | str:
    return _dropout({name: value for name, value in bound.items() if name != "mode"})


_DROPOUT = "x p training inplace"
_DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, F.dropout, F.alpha_dropout, F.feature_alpha_dropout)


@row(
    *(spell(t, _DROPOUT, _dropout) for t in (*_DROPOUTS, *named("nn.Dropout{n}d F.dropout{n}d"))),
    *(spell(t, "x p training", _dropout) for t in (torch.dropout, aten.dropout.default)),
    spell("torchvision.ops.stochastic_depth:stochastic_depth", "x p mode training", _stochastic_depth),
    traits=_VIEW,
)
def dropout(x: Tensor, *, training: bool) -> Tensor:
    """The identity, since `training` is False (other calls are not canonical). Canonicalize removes it."""
    return F.dropout(x, training=training)


@row(
    nn.Identity,
    *(spell(t, "x") for t in (torch.detach, "detach", "detach_", "requires_grad_")),
    *(spell(t, "x") for t in (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)),
    traits=_VIEW,
)
def identity(x: Tensor) -> Tensor:
    """Return x. Canonicalize removes it."""
    return x
