"""Packing of 4-bit integers, two to a byte.

Each row, an entry of the first axis, is split into halves: the first half is in the low four bits of its bytes, the
second half in the high four bits. Both halves are unpacked without interleaving, and a row of a table stays a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BITS = 4
"""Largest width of values that are packed."""


def pack(values: Tensor) -> Tensor:
    """Pack two values to a byte.

    Args:
        values: int8 in -8..7, or uint8 in 0..15, (N, ...).

    Returns:
        uint8 (N, ceil(values per row / 2)).

    Example:
        >>> pack(torch.tensor([[1, -2, 3]], dtype=torch.int8)).tolist()
        [[49, 14]]
    """
    rows = values.reshape(len(values), math.prod(values.shape[1:])).view(torch.uint8)
    half = (rows.shape[1] + 1) // 2
    packed = rows[:, :half] & 15
    packed[:, : rows.shape[1] - half] |= rows[:, half:] << 4
    return packed


def halves(packed: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the values of the low and of the high bits of packed bytes: int8 if `signed`, else uint8, same shape."""
    if not signed:
        return packed & 15, packed >> 4
    bits = packed.view(torch.int8)
    return (bits << 4) >> 4, bits >> 4


def unpack(packed: Tensor, shape: Sequence[int], signed: bool) -> Tensor:
    """Inverse of `pack`.

    Args:
        packed: uint8 (N, bytes per row).
        shape: shape of one row of values.
        signed: whether the values are signed.

    Returns:
        int8 if `signed`, else uint8, (N, *shape).
    """
    values = torch.cat(halves(packed, signed), 1)
    return values[:, : math.prod(shape)].reshape(len(packed), *shape)
