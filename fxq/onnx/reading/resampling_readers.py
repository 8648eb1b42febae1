"""Reader of the ONNX op Resize: `F.interpolate` where both compute the same, else one matrix for each axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.onnx.reading.graph_builder import Sizes, Traced
from fxq.onnx.reading.pointwise_readers import cast_to
from fxq.onnx.reading.reader import Reader, reads
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import refuse

_ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}
_KERNELS = {3: "linear", 4: "bilinear", 5: "trilinear"}


def _coordinates(kind: str, size: int, target: int, scale: float) -> np.ndarray:
    """Coordinate in the input of each position of the output, by ONNX's `coordinate_transformation_mode`."""
    x = np.arange(target, dtype=np.float64)
    if kind == "asymmetric":
        return x / scale
    if kind == "align_corners":
        length = size * scale
        return x * (size - 1) / (length - 1) if length > 1 else 0 * x
    if kind == "pytorch_half_pixel" and target == 1:
        return 0 * x
    half = (x + 0.5) / scale - 0.5
    if kind == "half_pixel_symmetric":
        return size / 2 * (1 - target / (scale * size)) + half
    refuse(kind not in ("half_pixel", "pytorch_half_pixel"), f"it resizes with {kind} coordinates")
    return half


def _kernel(mode: str, a: float) -> tuple[Callable[[np.ndarray], np.ndarray], int]:
    """Weight of a value by its distance, and half of the kernel's width."""
    if mode == "linear":
        return lambda d: np.maximum(0, 1 - np.abs(d)), 1

    def cubic(d: np.ndarray) -> np.ndarray:
        d = np.abs(d)
        near = (a + 2) * d**3 - (a + 3) * d**2 + 1
        far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0))

    return cubic, 2


def axis_matrix(
    mode: str, coordinates: str, rounding: str, size: int, target: int, scale: float, *, cubic_a: float = -0.75,
    antialias: bool = False, exclude_outside: bool = False,
) -> Tensor:  # fmt: skip
    """Matrix float[target, size] that resizes one axis, by the definition of ONNX's op Resize.

    Args:
        mode: "nearest", "linear" or "cubic".
        coordinates: `coordinate_transformation_mode`.
        rounding: `nearest_mode`.
        size: size of the axis.
        target: size after resizing.
        scale: ratio of the sizes as the file gives it.
        cubic_a: coefficient of the cubic kernel.
        antialias: whether the kernel is widened when the axis shrinks.
        exclude_outside: whether weights outside of the axis are zero instead of those of its ends.
    """
    where = _coordinates(coordinates, size, target, scale)
    matrix = np.zeros((target, size))
    rows = np.arange(target)
    if mode == "nearest":
        matrix[rows, np.clip(_ROUNDINGS[rounding](where), 0, size - 1).astype(int)] = 1
        return torch.from_numpy(matrix).float()
    weight, reach = _kernel(mode, cubic_a)
    stretch = max(1.0, 1 / scale) if antialias else 1.0
    first = np.floor(where).astype(int)
    for offset in range(-math.ceil(reach * stretch), math.ceil(reach * stretch) + 2):
        index = first + offset
        value = weight((index - where) / stretch)
        if exclude_outside:
            value = np.where((index < 0) | (index >= size), 0, value)
        np.add.at(matrix, (rows, np.clip(index, 0, size - 1)), value)
    if exclude_outside or antialias:
        matrix /= matrix.sum(1, keepdims=True)
    return torch.from_numpy(matrix).float()


@reads("Resize", "Upsample")
def resize(
    r: Reader, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None, *, mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel", nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75, antialias: int = 0, exclude_outside: int = 0, axes: Any = None,
    keep_aspect_ratio_policy: str = "stretch", extrapolation_value: float = 0.0, **old: Any,
) -> Any:  # fmt: skip
    if r.opset < 11:  # before, the inputs were x and scales, and coordinates were asymmetric
        scales = torch.tensor(old["scales"]) if "scales" in old else roi
        coordinate_transformation_mode, nearest_mode = "asymmetric", "floor"
    shape = r.shape_of(x)
    where = [axis % len(shape) for axis in axes] if axes is not None else list(range(len(shape)))
    target, factors = _targets(r, shape, where, scales, sizes)
    if keep_aspect_ratio_policy != "stretch":
        refuse(any(varies(target[i]) or varies(shape[i]) for i in where), "it keeps the aspect ratio of a dynamic size")
        common = (min if keep_aspect_ratio_policy == "not_larger" else max)(factors[i] for i in where)
        for i in where:
            factors[i], target[i] = common, math.floor(common * shape[i] + 0.5)
    resized = [i for i in where if str(target[i]) != str(shape[i]) or factors[i] != 1]
    mode = {"bilinear": "linear"}.get(mode, mode)
    options: dict[str, Any] = {
        "cubic_a": cubic_coeff_a, "antialias": bool(antialias), "exclude_outside": bool(exclude_outside)
    }  # fmt: skip
    dtype = r.like(x).dtype
    is_dynamic = any(varies(target[i]) or varies(shape[i]) for i in resized)
    if not dtype.is_floating_point and (mode != "nearest" or (is_dynamic and dtype is not torch.uint8)):
        # PyTorch resizes uint8 alone, and rounds it, where the runtimes truncate.
        x = cast_to(r, x, torch.float32 if dtype.itemsize == 1 else torch.float64)
    if is_dynamic:
        grows = all(isinstance(factors[i], float) and factors[i] >= 1 for i in resized)
        refuse(antialias and mode != "nearest" and not grows, "it antialiases a dynamic size")
        special = cubic_coeff_a != -0.75 or exclude_outside
        refuse(mode == "cubic" and special, "it resizes a dynamic size with a cubic kernel that PyTorch lacks")
        result = _dynamic(r, x, mode, coordinate_transformation_mode, nearest_mode, target, factors, resized)
        return cast_to(r, result, dtype)
    matrices = {
        i: axis_matrix(
            mode, coordinate_transformation_mode, nearest_mode, shape[i], target[i], float(factors[i]), **options
        )
        for i in resized
    }
    plain = _interpolation(matrices, len(shape), mode, shape, target)
    if plain is not None and (r.like(x).is_floating_point() or dtype is torch.uint8):
        return cast_to(r, r.call(F.interpolate, x, tuple(target[2:]), **plain), dtype)
    for axis, matrix in matrices.items():
        if mode == "nearest":
            x = r.call(torch.index_select, x, axis, matrix.argmax(1))
        else:
            turned = r.call(torch.matmul, r.call(torch.movedim, x, axis, -1), matrix.T.contiguous())
            x = r.call(torch.movedim, turned, -1, axis)
    return cast_to(r, x, dtype)


def _targets(r: Reader, shape: Any, where: Any, scales: Any, sizes: Any) -> tuple[list[Any], list[Any]]:
    """Sizes after resizing, and the ratio for each axis."""
    target, factors = list(shape), [1.0] * len(shape)
    if sizes is not None and r.like(sizes).numel():
        for axis, size in zip(where, r.ints(sizes), strict=True):
            target[axis] = size
            factors[axis] = 1.0 if str(size) == str(shape[axis]) else size / shape[axis]
        return target, factors
    refuse(isinstance(scales, Traced), "its scales are computed from data")
    values = list(scales.array.flat) if isinstance(scales, Sizes) else scales.flatten().tolist()
    for axis, factor in zip(where, values, strict=True):
        factors[axis] = factor
        if isinstance(factor, float) and not varies(shape[axis]):
            # A product of float32 numbers, which rounds 10 * 0.7 up to 7.
            target[axis] = math.floor(np.float32(shape[axis]) * np.float32(factor))
            continue
        whole = isinstance(factor, float) and factor == int(factor)
        if isinstance(factor, float) and not (factor * 4096).is_integer():  # so that 10 * 0.7 is 7 as in float32
            factors[axis] = factor = factor * (1 + 2**-25)
        target[axis] = shape[axis] * int(factor) if whole else torch.sym_int(shape[axis] * factor)
    return target, factors


def _interpolation(matrices: dict[int, Tensor], rank: int, mode: str, shape: Any, target: Any) -> dict[str, Any] | None:
    """Options with which `F.interpolate` computes these matrices; None if there are none."""
    if rank not in _KERNELS or min(matrices, default=0) < 2 or (mode == "cubic" and rank != 4):
        return None
    options: list[dict[str, Any]] = [{"mode": "nearest"}, {"mode": "nearest-exact"}]
    if mode != "nearest":
        name = _KERNELS[rank] if mode == "linear" else "bicubic"
        options = [{"mode": name, "align_corners": corners} for corners in (False, True)]
    for option in options:
        if all(_computes(matrix, option, mode) for matrix in matrices.values()):
            return option
    return None


def _computes(matrix: Tensor, options: dict[str, Any], mode: str) -> bool:
    """Whether `F.interpolate` along one axis equals the product with a matrix."""
    target, size = matrix.shape
    identity = torch.eye(size)[None, :, :, None]
    along = {**options, "mode": "bilinear"} if mode == "linear" else options
    result = F.interpolate(identity, (target, 1), **along)[0, :, :, 0].T
    return bool(torch.allclose(result, matrix, atol=1e-4))


def _dynamic(
    r: Reader, x: Any, mode: str, coordinates: str, rounding: str, target: Any, factors: Any, resized: Any
) -> Any:
    """Resize axes of dynamic sizes, where `F.interpolate` follows the same rule for all sizes."""
    rank = len(target)
    refuse(rank not in _KERNELS or min(resized) < 2, "it resizes an axis of dynamic size that is not spatial")
    by_scale = all(isinstance(factors[i], float) for i in resized)
    whole = by_scale and all(factors[i] == int(factors[i]) for i in resized)
    is_exact = whole or not by_scale  # whether the scale is the ratio of the sizes
    half = coordinates in ("half_pixel", "pytorch_half_pixel") or (coordinates == "half_pixel_symmetric" and is_exact)
    options: dict[str, Any] = {}
    if mode == "nearest":
        if (coordinates == "asymmetric" and rounding == "floor") or (half and whole and rounding.startswith("round")):
            options = {"mode": "nearest"}
        elif half and rounding == "round_prefer_ceil":
            options = {"mode": "nearest-exact"}
    elif half or (coordinates == "align_corners" and is_exact):
        options = {"mode": _KERNELS[rank] if mode == "linear" else "bicubic", "align_corners": not half}
    refuse(not options, f"it resizes {mode} with {coordinates} coordinates and a dynamic size")
    if by_scale and not options.get("align_corners"):
        return r.call(F.interpolate, x, scale_factor=tuple(float(factor) for factor in factors[2:]), **options)
    return r.call(F.interpolate, x, tuple(target[2:]), **options)
