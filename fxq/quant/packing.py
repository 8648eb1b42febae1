"""Packing of integers of few bits into bytes, in two orders.

`pack` is fxq's own, for 4 bits: each row, an entry of the first axis, is split into halves. The first half is in the
low four bits of its bytes, the second half in the high four bits. Both halves are unpacked without interleaving, and a
row of a table stays a row. `pack_adjacent` packs neighbours into a byte, as most files of other tools do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
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


def pack_adjacent(values: Tensor, bits: int) -> Tensor:
    """Pack adjacent values of a row into a byte, the first in the lowest bits.

    Args:
        values: uint8 (N, M), less than 2**bits.
        bits: width of a value: 1, 2, 4 or 8.

    Returns:
        uint8 (N, ceil(M * bits / 8)); the last byte is padded with zeros.

    Example:
        >>> pack_adjacent(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 4).tolist()
        [[33, 3]]
    """
    per_byte = 8 // bits
    padded = F.pad(values, (0, -values.shape[1] % per_byte))
    packed = padded[:, ::per_byte].clone(memory_format=torch.contiguous_format)
    for i in range(1, per_byte):
        packed |= padded[:, i::per_byte] << (i * bits)
    return packed


def unpack_adjacent(packed: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `pack_adjacent`: uint8 (N, count) of uint8 (N, bytes)."""
    if bits == 8:
        return packed[:, :count].contiguous()
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(1)[:, :count].contiguous()
