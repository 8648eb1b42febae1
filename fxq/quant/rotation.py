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
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(device, dtype)


def rotated(x: Tensor) -> Tensor:
    """Rotate the last axis of x, `rotation_size` values at a time. Rotating the result gives x, up to rounding.

    Products of two rotated rows are those of the rows (QuaRot: Ashkboos et al. 2024, section 4, key-value caches).
    """
    size = rotation_size(x.shape[-1])
    return (x.unflatten(-1, (-1, size)) @ hadamard(size, x.dtype, str(x.device))).flatten(-2)
