"""Rotation of rows by a Hadamard matrix. It divides the outliers of a few channels among all values of a row."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fxq.common.isolation import without_autocast

MIN_ROTATED = 32
"""Minimum number of values that are worth rotating together."""
MAX_ROTATED = 128
"""Maximum number of values that are rotated together: the products with a larger matrix take too long."""


def rotation_size(count: int) -> int:
    """Number of values that are rotated together in rows of `count` values: a power of two that divides it."""
    return min(count & -count, MAX_ROTATED)


@lru_cache(maxsize=32)
def hadamard(size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Orthonormal Hadamard matrix, (size, size), of a power of two. It is symmetric, so it is its own inverse."""
    with torch.inference_mode(False), torch.no_grad():
        return _by_halves(torch.eye(size, dtype=torch.float64, device="cpu")).to(device, dtype)


def rotated(x: Tensor, size: int | None = None) -> Tensor:
    """Rotate the last axis of x, `size` values at a time. Rotating the result gives x, up to rounding.

    Products of two rotated rows are those of the rows (QuaRot: Ashkboos et al. 2024, section 4, key-value caches).

    Args:
        x: float tensor, (..., N).
        size: a power of two that divides N; default: `rotation_size(N)`.
    """
    size = size or rotation_size(x.shape[-1])
    if type(x) is not Tensor:  # it stands for values, and cannot be multiplied with a matrix that has some
        return rotated_by_halves(x, size)
    with without_autocast():
        return (x.unflatten(-1, (-1, size)) @ hadamard(size, x.dtype, str(x.device))).flatten(-2)


def rotated_by_halves(x: Tensor, size: int | None = None) -> Tensor:
    """Compute `rotated(x, size)` without a matrix, for exported programs."""
    return _by_halves(x.unflatten(-1, (-1, size or rotation_size(x.shape[-1])))).flatten(-2)


def _by_halves(x: Tensor) -> Tensor:
    """Rotate the last axis, a power of two, by sums and differences of halves: the fast Walsh-Hadamard transform."""
    size, half = x.shape[-1], 1
    y = x
    while half < size:
        first, second = y.unflatten(-1, (size // (2 * half), 2, half)).unbind(-2)
        y = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return y / size**0.5
