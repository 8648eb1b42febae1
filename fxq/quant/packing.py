"""Packing of integers of few bits into bytes, in two orders.

`Packing` is fxq's own order. A row, an entry of the first axis, stays a row. It is cut into units of `UNIT` values; the
last one may be shorter. Each unit holds the bits of its values in planes of 4, 2 and 1 bits, whose widths sum to that
of a value: a value of 3 bits has its lower two bits in the first plane, its highest bit in the second. A plane is cut
into parts of equal size, one for each position of its bits in a byte: value j of the unit is in byte j % size, at
position j // size. So a vector of values is unpacked by shifts and masks, without interleaving. With 4 bits, the whole
row is one unit: its first half is in the low four bits of its bytes, its second half in the high four bits.

`pack_adjacent` packs neighbours into a byte, as most files of other tools do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

UNIT = 64
"""Values of a row whose planes are adjacent, if they have other widths than 4 bits."""
PACKED_BITS = (2, 3, 4, 5, 6)
"""Widths of values that are packed. One of 7 bits would save little; it takes a byte."""


class Plane(NamedTuple):
    """Bits of the values of a unit that are stored together.

    Attributes:
        width: number of bits of each value: 1, 2 or 4.
        position: position of the lowest of these bits in a value.
    """

    width: int
    position: int

    @property
    def parts(self) -> int:
        """Number of values that have bits in one byte."""
        return 8 // self.width

    @property
    def mask(self) -> int:
        """The bits of the first value in a byte."""
        return 2**self.width - 1

    def size(self, count: int) -> int:
        """Bytes of the plane of a unit of `count` values."""
        return -(-count // self.parts)


def planes_of(bits: int) -> tuple[Plane, ...]:
    """Planes of values of some width, in the order of their bytes.

    Example:
        >>> [plane.width for plane in planes_of(6)]
        [4, 2]
    """
    widths = [width for width in (4, 2, 1) if bits & width]
    return tuple(Plane(width, sum(widths[:i])) for i, width in enumerate(widths))


@dataclass(frozen=True)
class Packing:
    """Form of integers that are packed into bytes by rows.

    Attributes:
        row: shape of one row of values.
        bits: width of a value, one of `PACKED_BITS`.
        signed: whether the values are int8, from -2**(bits - 1) on; otherwise they are uint8, from 0 on. Signed values
            of 4 bits are stored in two's complement, others with 2**(bits - 1) added.

    Example:
        >>> Packing((3,), 4, True).pack(torch.tensor([[1, -2, 3]], dtype=torch.int8)).tolist()
        [[49, 14]]
    """

    row: tuple[int, ...]
    bits: int
    signed: bool

    @classmethod
    def of_grid(cls, qmin: int, qmax: int, row: tuple[int, ...]) -> Packing | None:
        """Packing with the fewest bits for values from `qmin` to `qmax`; None if they need more than a packing has."""
        signed = qmin < 0
        bits = max((max(qmax, -qmin - 1).bit_length() + 1) if signed else qmax.bit_length(), PACKED_BITS[0])
        return cls(row, bits, signed) if bits in PACKED_BITS else None

    @property
    def count(self) -> int:
        """Number of values of a row."""
        return math.prod(self.row)

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return sum(plane.size(values) * units for units, values in self._units for plane in planes_of(self.bits))

    @property
    def shift(self) -> int:
        """Number that is added to values to store them."""
        return 2 ** (self.bits - 1) if self.signed and self.bits != 4 else 0

    @property
    def _units(self) -> list[tuple[int, int]]:
        """Number of units of a size, and the values of each: the full units, and the shorter last one."""
        size = self.count if self.bits == 4 else UNIT
        full, rest = divmod(self.count, size) if size else (0, 0)
        return [(units, values) for units, values in ((full, size), (1, rest)) if units and values]

    def pack(self, values: Tensor) -> Tensor:
        """Pack values.

        Args:
            values: int8 if `signed`, else uint8, (N, *row).

        Returns:
            uint8 (N, row_bytes).
        """
        codes = (values.reshape(values.shape[0], self.count) + self.shift).view(torch.uint8)
        packed, first = [codes[:, :0]], 0
        for units, size in self._units:
            unit = codes[:, first : first + units * size].reshape(values.shape[0], units, size)
            of_unit = torch.cat([_pack_plane(unit, plane) for plane in planes_of(self.bits)], -1)
            packed.append(of_unit.flatten(1))
            first += units * size
        return torch.cat(packed, 1)

    def pack_last(self, values: Tensor) -> Tensor:
        """Pack values (..., N), whose rows are along the last axis: uint8 (..., row_bytes)."""
        return self.pack(values.reshape(-1, self.count)).reshape(*values.shape[:-1], self.row_bytes)

    def unpack_last(self, packed: Tensor) -> Tensor:
        """Inverse of `pack_last`."""
        return self.unpack(packed.reshape(-1, self.row_bytes)).reshape(*packed.shape[:-1], self.count)

    def unpack(self, packed: Tensor) -> Tensor:
        """Inverse of `pack`: int8 if `signed`, else uint8, (N, *row)."""
        if self.bits == 4:
            values = torch.cat(halves(packed, self.signed), 1)[:, : self.count]
            return values.reshape(packed.shape[0], *self.row)
        unpacked, first = [packed[:, :0]], 0
        for units, size in self._units:
            of_unit = sum(plane.size(size) for plane in planes_of(self.bits))
            unit = packed[:, first : first + units * of_unit].reshape(packed.shape[0], units, of_unit)
            unpacked.append(_unpack_unit(unit, planes_of(self.bits), size).flatten(1))
            first += units * of_unit
        codes = torch.cat(unpacked, 1).reshape(packed.shape[0], *self.row)
        return codes.view(torch.int8) - self.shift if self.signed else codes


def _pack_plane(unit: Tensor, plane: Plane) -> Tensor:
    """Bits of one plane, uint8 (..., bytes), of units of values, uint8 (..., count)."""
    count = unit.shape[-1]
    padded = F.pad((unit >> plane.position) & plane.mask, (0, -count % plane.parts))
    packed, *others = padded.unflatten(-1, (plane.parts, plane.size(count))).unbind(-2)
    for i, part in enumerate(others, start=1):
        packed = packed | (part << (plane.width * i))
    return packed


def _unpack_unit(unit: Tensor, planes: tuple[Plane, ...], count: int) -> Tensor:
    """Values of units, uint8 (..., count), of their bytes, uint8 (..., bytes)."""
    values: list[Tensor] = []
    for plane, part in zip(planes, unit.split([plane.size(count) for plane in planes], -1), strict=True):
        shifted = (part >> (plane.width * i) if i else part for i in range(plane.parts))
        values.append(torch.cat([bits & plane.mask for bits in shifted], -1)[..., :count] << plane.position)
    first, *others = values
    for further in others:
        first = first | further
    return first


def halves(packed: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the values of the low and of the high bits of packed bytes: int8 if `signed`, else uint8, same shape."""
    if not signed:
        return packed & 15, packed >> 4
    bits = packed.view(torch.int8)
    return (bits << 4) >> 4, bits >> 4


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
