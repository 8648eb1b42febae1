"""ONNX form of interpolation, grid sampling, pixel and channel shuffles, fold and unfold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from fxq.onnx.padding_nodes import padded
from fxq.onnx.pooling_nodes import adaptive_pool
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Operand, Value, Writer, refuse, writes
from fxq.ops import OPS

_MODES = {"linear": "linear", "bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}


@writes("interpolate")
def interpolate(w: Writer, x: Value, *, mode: str, antialias: bool, **options: Any) -> str:
    refuse(antialias, "it has antialias=True")
    out = tuple(OPS["interpolate"].target(x.like.float(), mode=mode, **options).shape)
    if mode == "area":
        return adaptive_pool(w, x, out[2:], "Average", "ReduceMean")
    if mode in ("nearest", "nearest-exact"):
        return _nearest(w, x, out, mode, options)
    if mode != "bicubic":
        return _resized(w, x, out, mode, options)
    flat = (1, math.prod(x.shape[:2]), *x.shape[2:])  # ONNX Runtime moves a Transpose after Resize, which then fails
    merged = Value(w.reshaped(x, flat), x.like.reshape(flat))
    return w.reshaped(_resized(w, merged, (*flat[:2], *out[2:]), mode, options), out)


def _resized(w: Writer, x: Value, out: Sequence[int], mode: str, options: dict[str, Any]) -> str:
    """Write a Resize that interpolates."""
    align_corners, factor = options["align_corners"], options["scale_factor"]
    attributes = {
        "mode": _MODES[mode], "cubic_coeff_a": -0.75 if mode == "bicubic" else None,
        "coordinate_transformation_mode": "align_corners" if align_corners else "half_pixel",
    }  # fmt: skip
    if factor is None or options["recompute_scale_factor"]:
        return w.emit("Resize", x, None, None, w.ints(out), **attributes)
    factors = factor if isinstance(factor, (tuple, list)) else [factor] * (x.rank - 2)
    scales = torch.tensor([*map(float, factors)], device="cpu")
    sizes = torch.tensor(x.shape[2:]), torch.tensor(out[2:])
    short = (sizes[0] * scales.double()).floor() < sizes[1]  # a scale such as 1.4 may be smaller in float32
    scales = torch.where(short, scales.nextafter(torch.tensor(2.0**20)), scales)
    return w.emit("Resize", x, None, torch.cat([torch.ones(2, device="cpu"), scales]), **attributes)


def _nearest(w: Writer, x: Value, out: Sequence[int], mode: str, options: dict[str, Any]) -> str:
    """Write nearest interpolation: a Resize if all entries repeat equally often, else a Gather of torch's positions."""
    factor = options["scale_factor"]
    if any(map(varies, x.shape[2:])):
        factors_of_axes = factor if isinstance(factor, (tuple, list)) else [factor] * (x.rank - 2)
        refuse(
            not all(f is not None and f == int(f) >= 1 for f in factors_of_axes),
            "its size is dynamic and its factor is not an integer",
        )
        return _repeated(w, x, factors_of_axes)
    places = []
    for i, size in enumerate(x.shape[2:]):
        axis_options = {key: v[i] if isinstance(v, (tuple, list)) else v for key, v in options.items()}
        numbers = torch.arange(float(size), device="cpu").reshape(1, 1, -1)
        places.append(OPS["interpolate"].target(numbers, mode=mode, **axis_options).flatten().to(torch.int64))
    factors = [length // size for length, size in zip(out[2:], x.shape[2:], strict=True)]
    pairs = zip(places, x.shape[2:], factors, strict=True)
    if all(taken.equal(torch.arange(size).repeat_interleave(factor)) for taken, size, factor in pairs):
        return _repeated(w, x, factors)
    result: Operand = x
    for axis, taken in enumerate(places, 2):
        if not taken.equal(torch.arange(x.shape[axis])):
            result = w.emit("Gather", result, taken, axis=axis)
    return w.name_of(result)


def _repeated(w: Writer, x: Value, factors: Sequence[float]) -> str:
    """Write a Resize that repeats each entry, by an integer factor per spatial axis."""
    scales = torch.tensor([1.0, 1.0, *map(float, factors)], device="cpu")
    rounding = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return w.emit("Resize", x, None, scales, mode="nearest", **rounding)


_GRID_MODES = {"bilinear": "linear", "nearest": "nearest", "bicubic": "cubic"}


@writes("grid_sample")
def grid_sample(w: Writer, x: Value, grid: Value, *, mode: str, padding_mode: str, align_corners: bool | None) -> str:
    grid_mode = _GRID_MODES[mode]
    return w.emit(
        "GridSample", x, grid, mode=grid_mode, padding_mode=padding_mode, align_corners=int(bool(align_corners))
    )


def split_axes(w: Writer, x: Value, shape: Sequence[int], perm: Sequence[int], out: Sequence[int]) -> str:
    """Write a reshape, a permutation and another reshape."""
    return w.reshaped(w.emit("Transpose", w.reshaped(x, shape), perm=list(perm)), out)


@writes("pixel_shuffle")
def pixel_shuffle(w: Writer, x: Value, *, upscale_factor: int) -> str:
    refuse(x.rank != 4, "its input is not a batch of images")
    n, c, h, v = x.shape
    r = upscale_factor
    return split_axes(w, x, (n, c // r**2, r, r, h, v), (0, 1, 4, 2, 5, 3), (n, c // r**2, h * r, v * r))


@writes("pixel_unshuffle")
def pixel_unshuffle(w: Writer, x: Value, *, downscale_factor: int) -> str:
    refuse(x.rank != 4, "its input is not a batch of images")
    n, c, h, v = x.shape
    r = downscale_factor
    return split_axes(w, x, (n, c, h // r, r, v // r, r), (0, 1, 3, 5, 2, 4), (n, c * r**2, h // r, v // r))


@writes("channel_shuffle")
def channel_shuffle(w: Writer, x: Value, *, groups: int) -> str:
    n, c, *size = x.shape
    shape = (n, groups, c // groups, math.prod(size))
    return split_axes(w, x, shape, (0, 2, 1, 3), x.shape)


@writes("fold")
def fold(w: Writer, x: Value, *, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> str:
    refuse(x.rank != 3, "its input has no batch axis")
    window = {"dilations": list(dilation), "pads": [*padding, *padding], "strides": list(stride)}
    return w.emit("Col2Im", x, w.ints(output_size), w.ints(kernel_size), **window)


@writes("unfold")
def unfold(w: Writer, x: Value, *, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> str:
    refuse(x.rank != 4, "its input is not a batch of images")
    n, c, *_ = x.shape
    (top, left), (rows, columns) = padding, kernel_size
    image = padded(w, x, (left, left, top, top))
    last = [size - d * (k - 1) for size, d, k in zip(image.shape[2:], dilation, kernel_size, strict=True)]
    windows = []
    for i, j in product(range(rows), range(columns)):
        window: Operand = image
        for axis, at in ((0, i), (1, j)):
            start = at * dilation[axis]
            window = w.cut(window, axis + 2, start, start + last[axis], stride[axis])
        windows.append(w.reshaped(window, (n, c, 1, -1)))
    return w.reshaped(w.joined(windows, 2), (n, c * rows * columns, -1))
