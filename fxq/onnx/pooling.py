"""ONNX of pooling, reductions, padding and resampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxq.onnx.layers import _PADS, onnx_pads
from fxq.onnx.writer import Value, Writer, refuse, writes
from fxq.ops import OPS


def _ends(x: Value, out: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[int]:
    """How much is padded behind each axis, so that there are as many windows as torch has."""
    sizes = zip(x.shape[-len(kernel) :], out.shape[-len(kernel) :], kernel, stride, padding, dilation, strict=True)
    return [max((o - 1) * s + d * (k - 1) + 1 - i - p, 0) for i, o, k, s, p, d in sizes]


@writes(*OPS.family("max_pool"))
def max_pool(
    w: Writer, x: Value, *, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> str:
    refuse(x.rank != len(kernel_size) + 2, "its input has no batch axis")
    out = OPS[f"max_pool{len(kernel_size)}d"].target(
        x.like.float(), kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode
    )
    ends = _ends(x, out, kernel_size, stride, padding, dilation) if ceil_mode else list(padding)
    return w.emit(
        "MaxPool", x, kernel_shape=list(kernel_size), strides=list(stride), pads=[*padding, *ends],
        dilations=list(dilation),
    )  # fmt: skip


@writes(*OPS.family("avg_pool"))
def avg_pool(
    w: Writer,
    x: Value,
    *,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> str:
    refuse(x.rank != len(kernel_size) + 2, "its input has no batch axis")
    refuse(divisor_override is not None, "its divisor is given")
    ends = list(padding)
    if ceil_mode:
        out = OPS[f"avg_pool{len(kernel_size)}d"].target(
            x.like, kernel_size=kernel_size, stride=stride, padding=padding, ceil_mode=True
        )
        ends = _ends(x, out, kernel_size, stride, padding, [1] * len(kernel_size))
        refuse(ends != list(padding) and any(padding) and count_include_pad, "its last windows go beyond the padding")
    return w.emit(
        "AveragePool", x, kernel_shape=list(kernel_size), strides=list(stride), pads=[*padding, *ends],
        count_include_pad=int(count_include_pad and any(padding)),
    )  # fmt: skip


@writes(*OPS.family("adaptive_avg_pool"))
def adaptive_avg_pool(w: Writer, x: Value, *, output_size: Any) -> str:
    return _adaptive(w, x, output_size, "GlobalAveragePool", "AveragePool")


@writes(*OPS.family("adaptive_max_pool"))
def adaptive_max_pool(w: Writer, x: Value, *, output_size: Any) -> str:
    return _adaptive(w, x, output_size, "GlobalMaxPool", "MaxPool")


def _adaptive(w: Writer, x: Value, output_size: Any, whole: str, windows: str) -> str:
    refuse(x.rank != len(output_size) + 2, "its input has no batch axis")
    sizes = x.shape[2:]
    wanted = [size if out is None else out for size, out in zip(sizes, output_size, strict=True)]
    if all(out == 1 for out in wanted):
        return w.emit(whole, x)
    refuse(any(size % out for size, out in zip(sizes, wanted, strict=True)), "its windows are not of one size")
    kernel = [size // out for size, out in zip(sizes, wanted, strict=True)]
    return w.emit(windows, x, kernel_shape=kernel, strides=kernel)


def _reduction(kind: str) -> Any:
    def reduce(w: Writer, x: Value, *, dim: Any, keepdim: bool) -> str:
        axes = [dim] if isinstance(dim, int) else list(dim if dim is not None else range(x.rank))
        axes = sorted(axis % x.rank for axis in axes) or list(range(x.rank))
        if kind == "ReduceMean" and x.rank > 2 and axes == list(range(2, x.rank)):
            made = w.emit("GlobalAveragePool", x)  # which engines have on integers
            return made if keepdim else w.reshaped(made, x.shape[:2])
        refuse(kind == "ReduceSum" and not x.dtype.is_floating_point, "it adds up integers")
        return w.emit(kind, x, w.ints(axes), keepdims=int(keepdim))

    return reduce


for _name, _kind in {"mean": "ReduceMean", "sum": "ReduceSum", "amax": "ReduceMax", "amin": "ReduceMin"}.items():
    writes(_name)(_reduction(_kind))


@writes("pad")
def pad(w: Writer, x: Value, *, pad: Any, mode: str, value: float | None) -> str:
    pads = w.ints(onnx_pads(pad, x.rank))
    if mode == "constant":
        return w.emit("Pad", x, pads, w.number(value or 0, x))
    return w.emit("Pad", x, pads, mode=_PADS[mode])


_MODES = {
    "nearest": ("nearest", "asymmetric"), "nearest-exact": ("nearest", "half_pixel"), "linear": ("linear", ""),
    "bilinear": ("linear", ""), "trilinear": ("linear", ""), "bicubic": ("cubic", ""),
}  # fmt: skip


@writes("interpolate")
def interpolate(
    w: Writer,
    x: Value,
    *,
    size: Any,
    scale_factor: Any,
    mode: str,
    align_corners: bool | None,
    recompute_scale_factor: bool | None,
    antialias: bool,
) -> str:
    refuse(antialias, "it smoothes (antialias)")
    refuse(mode not in _MODES, f"mode {mode!r}")
    kind, coordinates = _MODES[mode]
    coordinates = coordinates or ("align_corners" if align_corners else "pytorch_half_pixel")
    attributes = {
        "mode": kind, "coordinate_transformation_mode": coordinates,
        "nearest_mode": {"nearest": "floor", "nearest-exact": "round_prefer_ceil"}.get(mode),
        "cubic_coeff_a": -0.75 if kind == "cubic" else None,
    }  # fmt: skip
    spatial = x.rank - 2
    if scale_factor is not None and not recompute_scale_factor:
        factors = scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor] * spatial
        scales = torch.tensor([1.0, 1.0, *map(float, factors)], device="cpu")
        return w.emit("Resize", x, None, scales, **attributes)
    out = OPS["interpolate"].target(
        x.like.float(), size=size, scale_factor=scale_factor, mode=mode, align_corners=align_corners,
        recompute_scale_factor=recompute_scale_factor,
    )  # fmt: skip
    return w.emit("Resize", x, None, None, w.ints(out.shape), **attributes)


@writes("grid_sample")
def grid_sample(w: Writer, x: Value, grid: Value, *, mode: str, padding_mode: str, align_corners: bool | None) -> str:
    kind = {"bilinear": "linear", "nearest": "nearest", "bicubic": "cubic"}[mode]
    return w.emit("GridSample", x, grid, mode=kind, padding_mode=padding_mode, align_corners=int(bool(align_corners)))


def split_axes(w: Writer, x: Value, shape: Sequence[int], perm: Sequence[int], out: Sequence[int]) -> str:
    """Axes taken apart, put into another order, and joined."""
    return w.reshaped(w.emit("Transpose", w.reshaped(x, shape), perm=list(perm)), out)


@writes("pixel_shuffle")
def pixel_shuffle(w: Writer, x: Value, *, upscale_factor: int) -> str:
    refuse(x.rank != 4, "its input is no batch of images")
    n, c, h, v = x.shape
    r = upscale_factor
    return split_axes(w, x, (n, c // r**2, r, r, h, v), (0, 1, 4, 2, 5, 3), (n, c // r**2, h * r, v * r))


@writes("pixel_unshuffle")
def pixel_unshuffle(w: Writer, x: Value, *, downscale_factor: int) -> str:
    refuse(x.rank != 4, "its input is no batch of images")
    n, c, h, v = x.shape
    r = downscale_factor
    return split_axes(w, x, (n, c, h // r, r, v // r, r), (0, 1, 3, 5, 2, 4), (n, c * r**2, h // r, v // r))


@writes("channel_shuffle")
def channel_shuffle(w: Writer, x: Value, *, groups: int) -> str:
    n, c, *size = x.shape
    shape = (n, groups, c // groups, math.prod(size))
    return split_axes(w, x, shape, (0, 2, 1, 3), x.shape)
