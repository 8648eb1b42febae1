"""Checksums of tensors, to notice that their values changed. Of a large tensor only some values are looked at."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

MOST = 65_536
"""Values of a tensor that are looked at; of a larger one, some at equal distances."""


def checksum(tensor: Tensor, most: int = MOST) -> int:
    """A number from 0 to 2**32 - 1 that is another one when the values change; of a large tensor, `most` of them.

    Args:
        tensor: any shape and dtype, on any device.
        most: how many values are looked at.

    Example:
        >>> checksum(torch.ones(2)) == checksum(torch.ones(2)), checksum(torch.ones(2)) == checksum(torch.zeros(2))
        (True, False)
    """
    flat = tensor.detach().reshape(-1)
    some = flat[:: stride(flat.numel(), most)].cpu().contiguous()
    return zlib.crc32(some.view(torch.uint8).numpy().tobytes())


def stride(count: int, most: int = MOST) -> int:
    """The distance between the values looked at: it shares no factor with their number, so all channels are seen."""
    step = max(-(-count // most), 1)
    while math.gcd(step, count) > 1:
        step += 1
    return step


def bit_sum(tensor: Tensor) -> int:
    """Sum of the bit patterns of all values: quick, and another one when a single value changes.

    It does not see the order of the values, unlike `checksum`.

    Args:
        tensor: any shape and dtype, on any device.

    Example:
        >>> bit_sum(torch.ones(2)) == bit_sum(torch.ones(2)), bit_sum(torch.ones(2)) == bit_sum(torch.tensor([1.0, 2]))
        (True, False)
    """
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return int(values.reshape(-1).view(_BITS[values.element_size()]).sum(dtype=torch.int64))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
