"""Rows of the op table: data movement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.ops.table import aten, row
from fxq.optable import Arguments, moves, spell


def _pad_module(mode: str) -> Any:
    def adapt(bound: Arguments) -> Arguments:
        pad = bound.pop("padding")
        return {**bound, "pad": tuple(pad), "mode": mode, "value": bound.get("value", 0.0)}

    return adapt


def _pad_function(bound: Arguments) -> Arguments:
    value = bound.get("value")
    return {**bound, "value": 0.0 if value is None else value}


def _pads_a_value(options: Mapping[str, Any]) -> bool:
    return options["mode"] == "constant" and options["value"] != 0


def _upsample_nearest(bound: Arguments) -> Arguments:
    return {**bound, "mode": "nearest"}


def _nearest(options: Mapping[str, Any]) -> str | None:
    mode = options["mode"]
    return None if mode in ("nearest", "nearest-exact") else f"interpolates ({mode})"


@row(nn.Flatten, torch.flatten, "flatten", quant=moves("x", layout=True, view=True))
def flatten(x: Tensor, *, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Merge the axes start_dim..end_dim into one."""
    return torch.flatten(x, start_dim, end_dim)


def _sizes(bound: Arguments) -> Arguments | str:
    shape = bound.get("shape", ())
    if isinstance(shape, torch.dtype) or (isinstance(shape, tuple) and any(isinstance(s, torch.dtype) for s in shape)):
        return "changes the dtype"
    return {**bound, "shape": tuple(shape)} if isinstance(shape, (tuple, list)) else bound


@row(
    spell(torch.reshape, "x shape", _sizes),
    spell("reshape", "x *shape", _sizes),
    spell("view", "x *shape", _sizes),
    spell(aten.reshape.default, "x shape", _sizes),
    spell(aten.view.default, "x shape", _sizes),
    quant=moves("x", layout=True, view=True),
)
def reshape(x: Tensor, *, shape: Any) -> Tensor:
    """The same elements in another shape; `view` is one of its spellings."""
    return torch.reshape(x, shape)


@row(
    spell(torch.permute, "x dims"),
    spell("permute", "x *dims"),
    spell(aten.permute.default, "x dims"),
    quant=moves("x", layout=True, view=True),
)
def permute(x: Tensor, *, dims: Any) -> Tensor:
    """Reorder the axes."""
    return torch.permute(x, tuple(dims))


@row(
    spell(torch.transpose, "x dim0 dim1"),
    spell("transpose", "x dim0 dim1"),
    spell(torch.swapaxes, "x dim0 dim1"),
    spell(aten.transpose.int, "x dim0 dim1"),
    quant=moves("x", layout=True, view=True),
)
def transpose(x: Tensor, *, dim0: int, dim1: int) -> Tensor:
    """Swap two axes."""
    return torch.transpose(x, dim0, dim1)


@row("contiguous", quant=moves("x", layout=True, view=True))
def contiguous(x: Tensor, *, memory_format: Any = torch.contiguous_format) -> Tensor:
    """The same values, laid out in memory as asked."""
    return x.contiguous(memory_format=memory_format)


@row(
    nn.PixelShuffle,
    spell(F.pixel_shuffle, "x upscale_factor"),
    aten.pixel_shuffle.default,
    quant=moves("x", layout=True),
)
def pixel_shuffle(x: Tensor, *, upscale_factor: int) -> Tensor:
    """x (N, C*r*r, H, W) -> (N, C, H*r, W*r).  Source: Shi et al. 2016, section 3.2."""
    return F.pixel_shuffle(x, upscale_factor)


@row(
    spell(F.pad, "x pad mode value", _pad_function),
    spell(nn.ZeroPad2d, "x padding", _pad_module("constant")),
    spell(nn.ConstantPad2d, "x padding value", _pad_module("constant")),
    spell(nn.ReflectionPad2d, "x padding", _pad_module("reflect")),
    spell(nn.ReplicationPad2d, "x padding", _pad_module("replicate")),
    spell(nn.CircularPad2d, "x padding", _pad_module("circular")),
    spell(aten.constant_pad_nd.default, "x pad value"),
    quant=moves("x", extends=_pads_a_value),
)
def pad(x: Tensor, *, pad: Any, mode: str = "constant", value: float = 0.0) -> Tensor:
    """Pad the last axes: `pad` is (left, right) of the last axis, then of the one before."""
    return F.pad(x, pad, mode, value if mode == "constant" else None)


_INTERPOLATE = "x size scale_factor mode align_corners recompute_scale_factor antialias"


@row(
    spell(F.interpolate, _INTERPOLATE),
    spell(nn.Upsample, _INTERPOLATE),
    spell(nn.UpsamplingNearest2d, "x size scale_factor", _upsample_nearest),
    quant=moves("x", layout=True, unless=_nearest),
)
def interpolate(
    x: Tensor,
    *,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Resize the spatial axes; only the nearest modes are pure data movement."""
    return F.interpolate(x, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)


def _dropout(bound: Arguments) -> Arguments | str:
    bound.pop("p", None)
    return "drops values at random (training=True)" if bound.get("training", True) else bound


_DROPOUT = "x p training inplace"


@row(
    *(spell(t, _DROPOUT, _dropout) for t in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)),
    *(spell(t, _DROPOUT, _dropout) for t in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)),
    quant=moves("x", layout=True, view=True),
)
def dropout(x: Tensor, *, training: bool) -> Tensor:
    """The identity: `training` is false, else the call stays as it is written. Canonicalize removes it."""
    return F.dropout(x, training=training)


@row(nn.Identity, quant=moves("x", layout=True, view=True))
def identity(x: Tensor) -> Tensor:
    """x itself; canonicalize removes it."""
    return x
