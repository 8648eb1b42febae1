"""`StoredWeights`: weights of files by name, each read when it is asked for; `GridWeight`: one in integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.errors import ExportError, FileError, words_of
from fxq.quant.packing import pack_adjacent, unpack_adjacent
from fxq.quant.qparams import QParams, dequantize


@dataclass(frozen=True)
class GridWeight:
    """Weight of a file in integers, on the grid of the file.

    Attributes:
        integers: int8 or uint8, (O, I).
        grid: scale and zero point per block of a row, each (O, blocks), as float32 and int32. The zero point is float32
            if the file has an offset per block that is no multiple of the scale.
    """

    integers: Tensor
    grid: QParams

    @classmethod
    def of(cls, integers: Tensor, scale: Tensor, zero_point: Tensor, block: int, bits: int) -> GridWeight:
        """Make a weight of `bits` bits: unsigned if `integers` are uint8, else signed.

        Blocks of scale 0, whose values are all 0, get the scale 1 and integers of that value.

        Args:
            integers: (O, I).
            scale: floats (O, blocks).
            zero_point: (O, blocks).
            block: values of a row that share a scale.
            bits: width of the integers.

        Raises:
            FileError: a scale or zero point is infinite or NaN, or the scales are no floats.
        """
        signed = integers.dtype is torch.int8
        if not scale.is_floating_point():
            raise FileError(f"its scales are {scale.dtype} and must be floats.")
        scale = scale.to(torch.float32).contiguous()
        zero_point = zero_point if zero_point.is_floating_point() else zero_point.to(torch.int32)
        if not bool(scale.isfinite().all() and zero_point.isfinite().all()):
            raise FileError("a scale or zero point is infinite or NaN.")
        lowest = -(2 ** (bits - 1)) if signed else 0
        highest = lowest + 2**bits - 1
        zeros = scale == 0
        if bool(zeros.any()):
            if bool((zeros & ((zero_point < lowest) | (zero_point > highest))).any()):
                zero_point = torch.where(zeros, lowest, zero_point)
            scale = torch.where(zeros, 1.0, scale)
            spread = zeros.repeat_interleave(block, 1)[:, : integers.shape[1]]
            wanted = zero_point.repeat_interleave(block, 1)[:, : integers.shape[1]].to(integers.dtype)
            integers = torch.where(spread, wanted, integers)
        return cls(integers, QParams(scale, zero_point.contiguous(), lowest, highest, integers.dtype, 1, block))

    @classmethod
    def of_layer(cls, values: Tensor, grid: QParams) -> GridWeight | None:
        """Weight of a layer of a graph, with 4 or 8 bits, a block per row if it has none; None if it is no matrix.

        Args:
            values: integers on the grid, unpacked.
            grid: the grid.
        """
        if values.dim() != 2 or values.dtype not in (torch.int8, torch.uint8):
            return None
        if grid.block is None and grid.axis not in (None, 0):
            return None
        rows, columns = values.shape
        block = min(grid.block or columns, columns)
        scale, zero_point = (
            t.reshape(-1, blocks_of(columns, block)).expand(rows, -1) for t in (grid.scale, grid.zero_point)
        )
        return cls.of(values, scale, zero_point, block, 4 if grid.bits <= 4 else 8)

    def unsigned(self) -> tuple[Tensor, Tensor]:
        """Integers from 0 on, uint8 (O, I), and their zero points, (O, blocks).

        Raises:
            ExportError: the zero points lie between integers.
        """
        if self.grid.zero_point.is_floating_point():
            raise ExportError(
                "zero points lie between integers, as in Q4_1 and Q4_K of GGUF, and formats have integers."
            )
        shift = -self.grid.qmin
        return (self.integers.to(torch.int16) + shift).to(torch.uint8), self.grid.zero_point + shift

    @property
    def floats(self) -> Tensor:
        """Values of the weight, float32 (O, I)."""
        return dequantize(self.integers, self.grid)

    def rows(self, order: Tensor) -> GridWeight:
        """The weight with its rows in another order, int64 (O,)."""
        grid = replace(self.grid, scale=self.grid.scale[order], zero_point=self.grid.zero_point[order])
        return GridWeight(self.integers[order], grid)


class StoredWeights(Mapping[str, "Tensor | GridWeight"]):
    """Weights of files by name. A weight is read from its file each time that it is asked for.

    Attributes:
        path: the file or folder, for messages.
    """

    def __init__(self, path: Path, readers: Mapping[str, Callable[[], Tensor | GridWeight]]) -> None:
        self.path, self._readers = path, dict(readers)

    def __getitem__(self, name: str) -> Tensor | GridWeight:
        """Read a weight.

        Raises:
            FileError: one of its tensors is missing, or has a shape, dtype or values that the format does not have.
            KeyError: there is no weight of this name.
        """
        reader = self._readers[name]
        try:
            return reader()
        except FileError as error:
            raise FileError(f"cannot read {name!r} of {str(self.path)!r}: {error}") from error
        except KeyError as error:
            raise FileError(f"cannot read {name!r} of {str(self.path)!r}: there is no tensor {error}.") from error
        except (ValueError, RuntimeError, TypeError, IndexError) as error:  # shapes that do not belong together
            raise FileError(f"cannot read {name!r} of {str(self.path)!r}: {words_of(error)}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def renamed(self, names: Mapping[str, str]) -> StoredWeights:
        """The weights whose names `names` has, under its values."""
        return StoredWeights(self.path, {new: self._readers[old] for old, new in names.items() if old in self._readers})


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
    """Return a tensor of a file.

    Raises:
        FileError: it has another shape or dtype.
    """
    if tuple(tensor.shape) != shape or (dtypes and tensor.dtype not in dtypes):
        kinds = f" of {' or '.join(map(str, dtypes))}" if dtypes else ""
        raise FileError(f"{name} is {tensor.dtype} {list(tensor.shape)} and must be {list(shape)}{kinds}.")
    return tensor


PACKED_BITS = (2, 4, 8)
"""Widths of integers that fill a word of 32 bits."""


def check_bits(bits: Any) -> int:
    """Return the width of packed integers. Raises `FileError` if it does not divide 32 bits."""
    if type(bits) is not int or bits not in PACKED_BITS:
        raise FileError(f"its integers have {bits!r} bits; fxq reads {', '.join(map(str, PACKED_BITS))}.")
    return bits


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack integers of 32-bit words, the first in the lowest bits.

    Args:
        words: int32 (N, words).
        bits: width of the integers: 2, 4 or 8.
        count: integers per row.

    Returns:
        uint8 (N, count).
    """
    return unpack_adjacent(words.contiguous().view(torch.uint8), bits, count)  # little-endian


def pack_words(values: Tensor, bits: int) -> Tensor:
    """Inverse of `unpack_words`: int32 (N, ceil(count * bits / 32)) of uint8 (N, count)."""
    return pack_adjacent(F.pad(values, (0, -values.shape[1] % (32 // bits))), bits).view(torch.int32)


def blocks_of(columns: int, block: int) -> int:
    """Number of blocks of a row, of which the last may be shorter."""
    return math.ceil(columns / block)
