"""Tiles of pixels of integer layers that AMX computes, and the order of their weights.

A tile has 16 pixels at equal distances in memory, see `fxq/backends/loops/code/amx_loops.py`. Its places are those of
the pixels of a layer, or places between them, such as in the border of an image, whose results are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

VECTOR_CYCLES = 0.6
"""Cycles of a vector of 16 columns and a group of four integers of a pixel, where AMX is not used."""
_TILE_CYCLES = 16.0
"""Cycles of the product of two tiles."""
_RUN_CYCLES, _LINE_CYCLES = 4.0, 5.0
"""Cycles of copying a run of a pixel, and of each 64 bytes of it."""
_MIN_BYTES_AT_ONCE, _MAX_BYTES_AT_ONCE = 1 << 14, 1 << 18
"""Bytes of pixels and results that all columns are computed for, before further pixels. Between them, as many bytes as
the weight has: each is read again for a part of the other, from the nearest cache where both fit."""


@dataclass(frozen=True)
class PixelGrid:
    """Places of the windows of a layer in memory, in bytes.

    Attributes:
        counts: Images, rows and columns.
        steps: Bytes from an image, row and column to the next.
        first: Place of the first window.
        may_exceed: Whether bytes after the last run may be read, up to 63.
    """

    counts: tuple[int, int, int]
    steps: tuple[int, int, int]
    first: int
    may_exceed: bool

    def places(self) -> Tensor:
        """Place of each window, int64 (windows,)."""
        places = torch.tensor(self.first)
        for count, step in zip(self.counts, self.steps, strict=True):
            places = places[..., None] + step * torch.arange(count)
        return places.flatten()


@dataclass(frozen=True)
class Runs:
    """Runs of integers that a window reads.

    Attributes:
        offsets: Bytes from a window to each run.
        weight: Weight of each integer of the runs, int8 (columns, runs, length).
    """

    offsets: Sequence[int]
    weight: Tensor

    @staticmethod
    def choices(offsets: Sequence[int], weight: Tensor, pixel_stride: int) -> Iterator[Runs]:
        """Ways to see the taps of a window, whose weight is int8 (columns, taps, channels), as runs.

        Each tap is a run, or taps that are neighbours in memory are one. Bytes between them have weights of zero then.
        """
        yield Runs(offsets, weight)
        columns, taps, channels = weight.shape
        begins = [k for k in range(taps) if not k or offsets[k] != offsets[k - 1] + pixel_stride]
        together = taps // len(begins)
        if together > 1 and begins == list(range(0, taps, together)):
            padded = F.pad(weight, (0, pixel_stride - channels)).reshape(columns, len(begins), -1)
            yield Runs([offsets[k] for k in begins], padded[..., : (together - 1) * pixel_stride + channels])


@dataclass(frozen=True)
class AmxTiles:
    """Tiles of the pixels of a layer.

    Attributes:
        x_places: Places of the tiles, int64 (tiles,); if pixels are copied, of their pixels, (tiles, 16).
        pixels: Index of each pixel, int64 (tiles, 16); -1 for places that are no pixel of the tile.
        x_step: Bytes from a pixel to the next; 0 if they are copied.
        runs: Runs that a pixel reads.
        depth: Tiles of a run; of all runs if pixels are copied.
        size: Integers of a pixel in a tile.
        cycles: Estimated time of the products and copies.
        at_once: Number of tiles that all columns are computed for, before further tiles.
    """

    x_places: Tensor
    pixels: Tensor
    x_step: int
    runs: Runs
    depth: int
    size: int
    cycles: float
    at_once: int

    @property
    def copied(self) -> int:
        """Number of tiles of pixels that are copied at once."""
        return 0 if self.x_step else self.at_once

    @property
    def groups(self) -> int:
        """Groups of four integers of a run that are copied; 0 if none are."""
        return 0 if self.x_step else -(-self.runs.weight.shape[2] // 4)

    def places_of(self, by_pixel: Tensor, missing: int | None = None) -> Tensor:
        """Numbers of the pixels of each tile, int32 (tiles, 16). Where there is none, `missing`, or that of another."""
        values = by_pixel[self.pixels.clamp(min=0)]
        if missing is not None:
            values = torch.where(self.pixels < 0, missing, values)
        return values.to(torch.int32)

    def packed(self, blocks: int, loops: ModuleType) -> Tensor:
        """Weight as tiles read it, int8 (blocks, groups of all tiles, 16, GROUP), with columns and integers padded."""
        weight, group = self.runs.weight, int(loops.GROUP)
        run = self.depth * self.size if self.x_step else -(-weight.shape[2] // group) * group
        weight = F.pad(weight, (0, run - weight.shape[2])).flatten(1)
        total = self.depth * self.size * (len(self.runs.offsets) if self.x_step else 1)
        weight = F.pad(weight, (0, total - weight.shape[1], 0, 16 * blocks - len(weight)))
        return weight.reshape(blocks, 16, -1, group).transpose(1, 2).contiguous()


def amx_tiles(
    grid: PixelGrid, offsets: Sequence[int], weight: Tensor, pixel_stride: int, loops: ModuleType
) -> AmxTiles | None:
    """Return the tiles of a layer that take the least time; None if other products are faster.

    Args:
        grid: Its windows.
        offsets: Bytes from a window to each tap.
        weight: int8 (columns, taps, channels).
        pixel_stride: Bytes from a pixel to the next.
        loops: Compiled functions, `program_loops`.
    """
    columns, taps, channels = weight.shape
    choices = [
        tiles for runs in Runs.choices(offsets, weight, pixel_stride) for tiles in _tiles(grid, runs, columns, loops)
    ]
    best = min(choices, key=lambda tiles: tiles.cycles)
    others = math.prod(grid.counts) * -(-columns // 16) * taps * -(-channels // 4) * VECTOR_CYCLES
    return best if best.cycles < others else None


def _tiles(grid: PixelGrid, runs: Runs, columns: int, loops: ModuleType) -> Iterator[AmxTiles]:
    """Tiles that are read where they are, if there are any, and tiles of copied pixels."""
    row_bytes, rows = int(loops.ROW_BYTES), int(loops.TILE_ROWS)
    count, length = len(runs.offsets), runs.weight.shape[2]
    of_depth = _TILE_CYCLES * -(-columns // 16)
    depth, size = _divided(length, row_bytes)
    if grid.may_exceed or depth * size == length:
        step = next((step for count, step in zip(grid.counts[::-1], grid.steps[::-1], strict=True) if count > 1), 1)
        for starts, pixels in _places_of_tiles(grid, rows, step):
            cycles = len(starts) * count * depth * of_depth
            yield AmxTiles(
                starts, pixels, step, runs, depth, size, cycles, _tiles_at_once(runs, rows * (step + columns))
            )
    places, (depth, size) = grid.places(), _divided(count * -(-length // 4) * 4, row_bytes)
    pixels = torch.arange(-(-len(places) // rows) * rows).view(-1, rows)
    copying = len(places) * count * (_RUN_CYCLES + _LINE_CYCLES * -(-length // row_bytes))
    at_once = _tiles_at_once(runs, rows * (int(loops.pixel_bytes(depth)) + columns))
    x_places = places[pixels.clamp(max=len(places) - 1)]
    pixels = torch.where(pixels < len(places), pixels, -1)
    cycles = len(pixels) * depth * of_depth + copying
    yield AmxTiles(x_places, pixels, 0, runs, depth, size, cycles, min(at_once, len(pixels)))


def _divided(length: int, row_bytes: int) -> tuple[int, int]:
    """Number of tiles for so many integers of a pixel, and integers of each, a multiple of four."""
    depth = -(-length // row_bytes)
    return depth, -(-length // (4 * depth)) * 4


def _tiles_at_once(runs: Runs, tile_bytes: int) -> int:
    """Number of tiles that all columns are computed for before further tiles, with the bytes of a tile."""
    return max(min(max(runs.weight.numel(), _MIN_BYTES_AT_ONCE), _MAX_BYTES_AT_ONCE) // tile_bytes // 2 * 2, 2)


def _places_of_tiles(grid: PixelGrid, rows: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Places of tiles, and the pixels of each, see `AmxTiles`: tiles that cross the ends of rows, and tiles of rows.

    No tile reaches beyond the first or the last window: it begins before others end instead.
    """
    images, high, broad = grid.counts
    of_image, of_row, _ = grid.steps
    of_row = of_row if high > 1 else broad * step
    of_image = of_image if images > 1 else high * of_row
    last = grid.first + (images - 1) * of_image + (high - 1) * of_row + (broad - 1) * step
    latest = last - (rows - 1) * step
    if latest < grid.first:
        return
    slots = torch.arange(rows)
    if step and of_row % step == 0 and of_image % step == 0:
        begins = torch.arange(0, (last - grid.first) // step + 1, rows)
        starts = begins.clamp(max=(latest - grid.first) // step)
        positions = starts[:, None] + slots
        image, rest = positions // (of_image // step), positions % (of_image // step)
        row, column = rest // (of_row // step), rest % (of_row // step)
        is_pixel = (column < broad) & (row < high) & (positions >= begins[:, None])
        pixels = torch.where(is_pixel, (image * high + row) * broad + column, -1)
        used = is_pixel.any(1)
        yield grid.first + starts[used] * step, pixels[used]
    image, row, begin = torch.meshgrid(
        torch.arange(images), torch.arange(high), torch.arange(0, broad, rows), indexing="ij"
    )
    wanted = grid.first + image * of_image + row * of_row + torch.clamp(begin, max=max(broad - rows, 0)) * step
    shift = torch.clamp(-((latest - wanted) // step), min=0) if step else torch.zeros_like(wanted)
    starts = wanted - shift * step
    if bool((starts < grid.first).any()):
        return
    column = (torch.clamp(begin, max=max(broad - rows, 0)) - shift)[..., None] + slots
    is_pixel = (column >= begin[..., None]) & (column < broad)
    pixels = torch.where(is_pixel, (image * high + row)[..., None] * broad + column, -1)
    yield starts.flatten(), pixels.flatten(0, 2)
