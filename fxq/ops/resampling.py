"""Rows of the op table: padding, interpolation, shuffles and windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.ops.registry import as_tuple, aten, named, row
from fxq.ops.table import Arguments, spell
from fxq.ops.traits import float_only, moves


def _pad_module(mode: str) -> Any:
    def adapt(bound: Arguments) -> Arguments:
        pad = bound.pop("padding")
        return {**bound, "pad": tuple(pad), "mode": mode, "value": bound.get("value", 0.0)}

    return adapt


def _pad_function(bound: Arguments) -> Arguments:
    value = bound.get("value")
    return {**bound, "value": 0.0 if value is None else value}


def _unknown_value(arguments: Mapping[str, Any]) -> str | None:
    is_constant = arguments["mode"] != "constant" or isinstance(arguments["value"], (int, float))
    return None if is_constant else "pads with a value that is computed at run time"


def _pads(mode: str, targets: str) -> Any:
    names = "x padding value" if mode == "constant" else "x padding"
    return (spell(target, names, _pad_module(mode)) for target in named(targets))


@row(
    *(spell(t, "x pad mode value", _pad_function) for t in (F.pad, aten.pad.default)),
    *_pads("constant", "nn.ZeroPad{n}d nn.ConstantPad{n}d"),
    *_pads("reflect", "nn.ReflectionPad{n}d aten.reflection_pad{n}d.default"),
    *_pads("replicate", "nn.ReplicationPad{n}d aten.replication_pad{n}d.default"),
    *_pads("circular", "nn.CircularPad{n}d"),
    spell(aten.constant_pad_nd.default, "x pad value"),
    traits=moves("x", fill_constants=("value",), surrounds="pad", unless=_unknown_value),
)
def pad(x: Tensor, *, pad: Any, mode: str = "constant", value: float = 0.0) -> Tensor:
    """Pad the last axes: `pad` has (left, right) of the last axis, then of the axis before it, and so on."""
    return F.pad(x, pad, mode, value if mode == "constant" else None)


def _nearest(arguments: Mapping[str, Any]) -> str | None:
    mode = arguments["mode"]
    return None if mode in ("nearest", "nearest-exact") else f"interpolates ({mode})"


def _resized(bound: Arguments) -> Arguments:
    """Replace sizes and factors that are equal along all axes by one number."""
    for key in ("size", "scale_factor"):
        value = bound.get(key)
        if isinstance(value, (tuple, list)) and all(v is value[0] or v == value[0] for v in value):
            bound[key] = value[0]
    return bound


def _upsampling(mode: str) -> Any:
    """Adapter for an aten overload or module with a fixed mode. Factors of overloads are ignored; sizes imply them."""

    def adapt(bound: Arguments) -> Arguments:
        for key in ("scales", "scales_d", "scales_h", "scales_w"):
            bound.pop(key, None)
        return {**_resized(bound), "mode": mode}

    return adapt


_INTERPOLATE = "x size scale_factor mode align_corners recompute_scale_factor antialias"
_UPSAMPLE = named("aten.upsample_nearest{n}d")


@row(
    spell(F.interpolate, _INTERPOLATE, _resized),
    spell(nn.Upsample, _INTERPOLATE, _resized),
    spell(nn.UpsamplingNearest2d, "x size scale_factor", _upsampling("nearest")),
    spell(nn.UpsamplingBilinear2d, "x size scale_factor align_corners", _upsampling("bilinear")),
    *(spell(t.vec, "x size scale_factor", _upsampling("nearest")) for t in _UPSAMPLE),
    *(spell(t.default, "x size scales_d scales_h scales_w", _upsampling("nearest")) for t in _UPSAMPLE),
    spell(aten.upsample_bilinear2d.vec, "x size align_corners scale_factor", _upsampling("bilinear")),
    traits=moves("x", layout=True, unless=_nearest),
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
    """Resize the spatial axes. Only the nearest modes move values without arithmetic.

    PyTorch supports uint8, but not int8, so int8 values are viewed as uint8.
    """
    if x.dtype is torch.int8:
        resized = F.interpolate(x.view(torch.uint8), size, scale_factor, mode, align_corners, recompute_scale_factor)
        return resized.view(torch.int8)
    return F.interpolate(x, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)


@row(spell(F.grid_sample, "x grid mode padding_mode align_corners"), traits=float_only("x"))
def grid_sample(
    x: Tensor,
    grid: Tensor,
    *,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """Sample x (N, C, H, W) at the positions `grid` (N, H', W', 2) -> (N, C, H', W')."""
    return F.grid_sample(x, grid, mode, padding_mode, align_corners)


@row(
    nn.PixelShuffle,
    *(spell(t, "x upscale_factor") for t in (F.pixel_shuffle, aten.pixel_shuffle.default)),
    traits=moves("x", layout=True),
)
def pixel_shuffle(x: Tensor, *, upscale_factor: int) -> Tensor:
    """x (N, C*r*r, H, W) -> (N, C, H*r, W*r).  Source: Shi et al. 2016, section 3.2."""
    return F.pixel_shuffle(x, upscale_factor)


@row(
    nn.PixelUnshuffle,
    *(spell(t, "x downscale_factor") for t in (F.pixel_unshuffle, aten.pixel_unshuffle.default)),
    traits=moves("x", layout=True),
)
def pixel_unshuffle(x: Tensor, *, downscale_factor: int) -> Tensor:
    """x (N, C, H*r, W*r) -> (N, C*r*r, H, W)."""
    return F.pixel_unshuffle(x, downscale_factor)


@row(
    nn.ChannelShuffle,
    *(spell(t, "x groups") for t in (F.channel_shuffle, aten.channel_shuffle.default)),
    traits=moves("x", layout=True),
)
def channel_shuffle(x: Tensor, *, groups: int) -> Tensor:
    """Transpose the channels of x (N, C, ...), as (groups, C/groups).  Source: Zhang et al. 2018, section 3.1."""
    return x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


def _window(bound: Arguments) -> Arguments:
    keys = ("output_size", "kernel_size", "dilation", "padding", "stride")
    return {"x": bound["x"], **{key: as_tuple(bound[key], 2) for key in keys if key in bound}}


_UNFOLD = "x kernel_size dilation padding stride"


@row(*(spell(t, _UNFOLD, _window) for t in (nn.Unfold, F.unfold, aten.im2col.default)), traits=moves("x"))
def unfold(
    x: Tensor, *, kernel_size: Any, dilation: Any = (1, 1), padding: Any = (0, 0), stride: Any = (1, 1)
) -> Tensor:
    """Extract the windows of a convolution, x padded with zeros: x (N, C, H, W) -> (N, C*KH*KW, windows)."""
    return F.unfold(x, kernel_size, dilation, padding, stride)


_FOLD = f"x output_size {_UNFOLD.removeprefix('x ')}"


@row(*(spell(t, _FOLD, _window) for t in (nn.Fold, F.fold, aten.col2im.default)), traits=float_only("x"))
def fold(
    x: Tensor,
    *,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = (1, 1),
    padding: Any = (0, 0),
    stride: Any = (1, 1),
) -> Tensor:
    """Add windows up at their positions, the adjoint of `unfold`: x (N, C*KH*KW, windows) -> (N, C, H, W)."""
    return F.fold(x, output_size, kernel_size, dilation, padding, stride)
