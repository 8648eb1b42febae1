"""Rotation of rows by a Hadamard matrix. It divides the outliers of a few channels among all values of a row."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

MIN_ROTATED = 32
"""Number of values from which on rotating them is worth it."""


def rotation_size(count: int) -> int:
    """Number of values that are rotated together, in a row of `count` values: the largest power of two dividing it."""
    return count & -count


@lru_cache(maxsize=32)
def hadamard(size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Orthonormal Hadamard matrix, (size, size), of a power of two. It is symmetric, so it is its own inverse."""
    with torch.inference_mode(False), torch.no_grad():
        return _by_halves(torch.eye(size, dtype=torch.float64, device="cpu")).to(device, dtype)


def rotated(x: Tensor) -> Tensor:
    """Rotate the last axis of x, `rotation_size` values at a time. Rotating the result gives x, up to rounding.

    Products of two rotated rows are those of the rows (QuaRot: Ashkboos et al. 2024, section 4, key-value caches).
    """
    size = rotation_size(x.shape[-1])
    pieces = x.unflatten(-1, (-1, size))
    # A tensor that stands for values, as in torch.export, cannot be multiplied with a matrix that has some.
    return (pieces @ hadamard(size, x.dtype, str(x.device)) if type(x) is Tensor else _by_halves(pieces)).flatten(-2)


def _by_halves(x: Tensor) -> Tensor:
    """Rotate the last axis, a power of two, by sums and differences of halves: the fast Walsh-Hadamard transform."""
    size, half = x.shape[-1], 1
    y = x
    while half < size:
        first, second = y.unflatten(-1, (size // (2 * half), 2, half)).unbind(-2)
        y = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return y / size**0.5
