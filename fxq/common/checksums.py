"""Checksums of tensors, to detect changed values."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

MAX_CHECKSUM_VALUES = 65_536
"""Largest number of values that a checksum reads; of a larger tensor, it reads values at equal distances."""


def checksum(tensor: Tensor, max_values: int = MAX_CHECKSUM_VALUES) -> int:
    """Return a checksum of the values of a tensor, from 0 to 2**32 - 1.

    Args:
        tensor: any shape and dtype, on any device.
        max_values: largest number of values to read; of a larger tensor, values at equal distances are read.

    Example:
        >>> checksum(torch.ones(2)) == checksum(torch.ones(2)), checksum(torch.ones(2)) == checksum(torch.zeros(2))
        (True, False)
    """
    flat = tensor.detach().reshape(-1)
    part = flat[:: stride(flat.numel(), max_values)].cpu()
    # A copy: a single value may have a stride, whose bytes cannot be viewed.
    values = part.clone(memory_format=torch.contiguous_format)
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes())


def stride(count: int, max_values: int = MAX_CHECKSUM_VALUES) -> int:
    """Return the distance between the values to read of `count` values.

    It has no factor in common with `count`, so that values of all channels are read.
    """
    step = max(-(-count // max_values), 1)
    while math.gcd(step, count) > 1:
        step += 1
    return step


def bit_sum(tensor: Tensor) -> int:
    """Return the sum of the bit patterns of all values: fast, and different if a single value changes.

    Unlike `checksum`, it does not depend on the order of the values.

    Args:
        tensor: any shape and dtype, on any device.

    Example:
        >>> bit_sum(torch.ones(2)) == bit_sum(torch.ones(2)), bit_sum(torch.ones(2)) == bit_sum(torch.tensor([1.0, 2]))
        (True, False)
    """
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return int(values.reshape(-1).view(_BITS[values.element_size()]).sum(dtype=torch.int64))


def word_sum(tensor: Tensor) -> int:
    """Return the sum of the memory of all values in words of 8 bytes: different if a single value changes.

    It takes a small part of the time of `bit_sum`.

    Args:
        tensor: any shape and dtype, on any device.

    Example:
        >>> word_sum(torch.ones(2)) == word_sum(torch.ones(2)), word_sum(torch.ones(3)) == word_sum(torch.zeros(3))
        (True, False)
    """
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    memory = values.reshape(-1).contiguous()
    memory = memory.clone() if memory.storage_offset() else memory  # words begin at the start of memory
    data = memory.view(torch.uint8)
    words = len(data) // 8 * 8
    return int(data[:words].view(torch.int64).sum()) + int(data[words:].sum())


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
