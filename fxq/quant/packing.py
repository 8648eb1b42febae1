"""Integers of four bits, two to a byte.

The values of each entry of the first axis, in order, are cut in halves: the first half lies in the low four bits of the
bytes, the second half in the high ones. So both halves are read without moving a value past another, and a row of a
table stays a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BITS = 4
"""Values of at most so many bits share a byte."""


def pack(values: Tensor) -> Tensor:
    """Two values to a byte.

    Args:
        values: int8 in -8..7, or uint8 in 0..15, (N, ...).

    Returns:
        uint8, (N, half as many bytes as a row has values, rounded up).

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
    """The values in the low bits and in the high bits of packed bytes: int8 if `signed`, else uint8, of that shape."""
    if not signed:
        return packed & 15, packed >> 4
    bits = packed.view(torch.int8)
    return (bits << 4) >> 4, bits >> 4


def unpack(packed: Tensor, shape: Sequence[int], signed: bool) -> Tensor:
    """Inverse of `pack`.

    Args:
        packed: uint8, (N, bytes of a row).
        shape: of one row; the result is (N, *shape), int8 if `signed`, else uint8.
        signed: whether values below zero are among them.
    """
    values = torch.cat(halves(packed, signed), 1)
    return values[:, : math.prod(shape)].reshape(len(packed), *shape)
