"""Steps of layers: integer layers, float layers and attention.

Each step writes rows of numbers, which a loop reads by the names of `step_fields.py`, and the constants that the rows
point to. A figure of the tiles that read them is in `fxq/backends/loops/code/layer_loops.py`::

    weight, int8 (columns, taps, C)           taps that are side by side in memory are one run
        -> (blocks, runs, groups, 16, GROUP)  columns padded to blocks of 16, runs padded to groups of GROUP
        or as tiles of AMX, see `amx_tiles.py`
        or (blocks, runs, groups, 2, 16, 2)   for kinds of CPU without `dot`: two of a group, then the others
    weight of a depthwise layer, int8 (C, taps)
        -> (taps, blocks * 16)                tiles of 16 channels
        -> (blocks, fours, channels, 4)       tiles that fill registers with channels: channels of all parts
    scale, bias, slope, start (columns,)
        -> (blocks * 16,)
    places, int32 (pixels,)                   of input and result: elements from the begin of an area to each pixel
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.loops.code.step_fields import AmxField, AttentionField, DepthwiseField, LinearField, ProductField
from fxq.backends.loops.programs.amx_tiles import AmxTiles, PixelGrid, amx_tiles
from fxq.backends.loops.programs.areas import ABSOLUTE, ARENA, LANES, SLACK_BYTES, Area
from fxq.backends.loops.programs.program_steps import CLAMP, ProgramStep, RowWriter
from fxq.quant.qparams import QParams

MIN_PIXELS_AT_ONCE = 192
"""Pixels that are computed for all columns before further pixels, even if their input exceeds the cache."""


@dataclass(eq=False)
class ProductStep(ProgramStep):
    """Step of an integer layer.

    Attributes:
        x: Input, uint8, with the border that windows reach into.
        x_grid: Grid of the input.
        weight: int8 (columns, taps, C), or of a depthwise layer (C, taps).
        taps: (row, column) of the pixel that each tap reads, relative to the first pixel of the window.
        scale: Scale of the weight, float32 (columns,).
        bias: float32 (columns,).
        windows: Rows and columns of windows.
        first: Row and column of the first pixel of the first window.
        stride: Rows and columns from a window to the next.
        out_stride: Rows and columns from a result to the next; more than 1 for a transposed convolution.
        spread: (row, column, channel) of each column, relative to the first one; None if columns are channels.
        residual: Value that is added before the function, uint8 or float32.
        residual_grid: Grid of the residual; None if it is float32.
    """

    x: Area = field(kw_only=True)
    x_grid: QParams = field(kw_only=True)
    weight: Tensor = field(kw_only=True)
    taps: Sequence[tuple[int, int]] = field(kw_only=True)
    scale: Tensor = field(kw_only=True)
    bias: Tensor | None = field(kw_only=True)
    windows: tuple[int, int] = field(kw_only=True)
    first: tuple[int, int] = (0, 0)
    stride: tuple[int, int] = (1, 1)
    out_stride: tuple[int, int] = (1, 1)
    spread: Sequence[tuple[int, int, int]] | None = None
    residual: Area | None = None
    residual_grid: QParams | None = None

    @property
    def reads(self) -> list[Area]:
        return [self.x] if self.residual is None else [self.x, self.residual]

    @property
    def can_fold_scale(self) -> bool:
        """Whether a factor may be folded into scale and bias, since nothing else is computed of the results yet."""
        return self.function == CLAMP and self.residual is None and self.spread is None

    @property
    def can_add_floats(self) -> bool:
        """Whether a float value may be added to the results, since nothing else is computed of them yet."""
        is_plain = self.function == CLAMP and self.residual is None and self.weight.dim() == 3
        return is_plain and (self.spread is None or len(self._slices()) > 1)

    def fold_scale(self, factor: Tensor) -> None:
        """Multiply the results by a factor, float32 (columns,), by folding it into scale and bias."""
        self.scale = self.scale * factor
        self.bias = None if self.bias is None else self.bias * factor

    def border(self) -> tuple[int, int, int, int]:
        """Pixels that windows reach beyond the input: above, on the left, below and on the right."""
        rows, columns = ([tap[k] for tap in self.taps] for k in (0, 1))
        ends = [self.first[k] + (self.windows[k] - 1) * self.stride[k] for k in (0, 1)]
        _, high, broad, _ = self.x.shape
        return (
            max(-self.first[0] - min(rows), 0), max(-self.first[1] - min(columns), 0),
            max(ends[0] + max(rows) - high + 1, 0), max(ends[1] + max(columns) - broad + 1, 0),
        )  # fmt: skip

    def scratch(self, loops: ModuleType) -> int:
        usual = super().scratch(loops)
        if loops.X_BYTES == 2 and self.weight.dim() == 3:
            of_block = LANES * len(self.taps) * (self.weight.shape[2] + loops.GROUP)
            wide = loops.X_BYTES * (of_block + self._read_at_once(loops)) + SLACK_BYTES
            return max(usual, int(loops.CONVERTED_AT) + 4 * (self._pixels_at_once(loops) + LANES) + wide)
        tiles = self._amx_tiles(loops, self.weight[self._slices()[0]])
        return usual if tiles is None else max(usual, int(loops.amx_scratch(tiles.copied, tiles.depth)))

    def _pixels_at_once(self, loops: ModuleType) -> int:
        """Number of pixels that all columns are computed for, before further pixels."""
        bytes_per_pixel = self.x.pixel_stride * self.stride[1] * self.stride[0] * loops.X_BYTES
        fitting = max(MIN_PIXELS_AT_ONCE, loops.MAX_TILE_INPUT_BYTES // bytes_per_pixel)
        return int(fitting // loops.TILE_PIXELS * loops.TILE_PIXELS)

    def _read_at_once(self, loops: ModuleType) -> int:
        """Largest number of integers from the first one that so many pixels read to the last one."""
        x, offsets = self.x, [self.x.place(*tap) for tap in self.taps]
        places = self._places(x, self.first, self.stride)
        at_once = min(self._pixels_at_once(loops), len(places))
        distance = int((places[at_once - 1 :] - places[: len(places) - at_once + 1]).max())
        return distance + max(offsets) - min(offsets) + x.pixel_stride + loops.GROUP

    def _amx_tiles(self, loops: ModuleType, weight: Tensor) -> AmxTiles | None:
        """Tiles of AMX that compute the columns of a weight; None if it does not, or is slower."""
        if not loops.KIND.has_amx or weight.dim() == 2:
            return None
        x, (down, right) = self.x, self.stride
        first = x.place(*self.first)
        counts, steps = (x.shape[0], *self.windows), (x.sample_stride, down * x.row_stride, right * x.pixel_stride)
        grid = PixelGrid(counts, steps, first, may_exceed=x.root.base == ARENA)
        return amx_tiles(grid, [x.place(*tap) - x.place(0, 0) for tap in self.taps], weight, x.pixel_stride, loops)

    def _slices(self) -> list[slice]:
        """Columns of each row of the step: all of them, or of equal size, those of each place of a window's results."""
        columns = len(self.weight)
        channels = columns // math.prod(self.out_stride)
        if self.spread is None or channels % LANES:
            return [slice(columns)]
        return [slice(k, k + channels) for k in range(0, columns, channels)]

    def rows(self, writer: RowWriter) -> list[list[int]]:
        columns, wide, slices = len(self.weight), writer.loops.WIDE_CHANNELS, self._slices()
        if self.spread is not None and slices != [slice(columns)]:
            return [self._product_row(writer, part, first=self.spread[part.start]) for part in slices]
        if self.spread is not None:
            places = [self.out.place(r, c) - self.out.place(0, 0) + k for r, c, k in self.spread]
            spread = writer.constant(torch.tensor(places, dtype=torch.int32))
            return [self._product_row(writer, slice(columns), spread)]
        if self.weight.dim() == 2 and wide and self.grid is not None and self.residual is None:
            return [self._depthwise_row(writer, *run) for run in _runs_of_channels(writer.loops, columns)]
        return [self._product_row(writer, slice(columns))]

    def _product_row(
        self, writer: RowWriter, columns: slice, spread: int = 0, first: tuple[int, int, int] = (0, 0, 0)
    ) -> list[int]:
        """Row for some of the columns.

        Args:
            writer: Builder of rows.
            columns: The columns.
            spread: `ProductField.SPREAD`.
            first: Row, column and channel of the first result, relative to those of all columns.
        """
        weight, is_depthwise, x, out = self.weight[columns], self.weight.dim() == 2, self.x, self.out
        tiles = self._amx_tiles(writer.loops, weight)
        if tiles is not None:
            return self._amx_row(writer, tiles, columns, spread, first)
        count, channel = len(weight), columns.start if self.spread is None and columns.start else 0
        blocks = -(-count // LANES)
        packed, runs, groups = self._packed(weight, writer.loops, blocks)
        x_places = self._places(x, self.first, self.stride, channel if is_depthwise else 0)
        out_places = self._places(out, first[:2], self.out_stride, channel + first[2])
        epilogue = writer.loops.STORE_SUMS if is_depthwise or spread else self._epilogue(writer.loops)
        pixels_at_once = self._pixels_at_once(writer.loops)
        return writer.row(
            writer.loops.PRODUCT, ProductField, x=x.start, out=out.start,
            x_places=writer.constant(x_places), out_places=writer.constant(out_places), pixels=len(x_places),
            runs=writer.constant(runs), run_count=len(runs), groups=groups,
            weight=writer.constant(packed), blocks=blocks,
            **self._column_values(writer, columns, blocks * LANES, epilogue == writer.loops.ROUND, packed=packed),
            function=self.kind(writer), to_floats=self.grid is None, channels=count,
            block_bytes=LANES if is_depthwise else packed.numel() // blocks,
            pixels_at_once=pixels_at_once,
            is_depthwise=is_depthwise, block_step=LANES if is_depthwise else 0, spread=spread,
            **self._residual_fields(writer, first, channel), epilogue=epilogue,
        )  # fmt: skip

    def _amx_row(
        self, writer: RowWriter, tiles: AmxTiles, columns: slice, spread: int, first: tuple[int, int, int]
    ) -> list[int]:
        """Row for some of the columns, computed by AMX. Arguments: see `_product_row`."""
        count, loops = len(tiles.runs.weight), writer.loops
        channel, blocks = columns.start if self.spread is None and columns.start else 0, -(-count // LANES)
        packed, epilogue = tiles.packed(blocks, loops), loops.STORE_SUMS if spread else self._epilogue(loops)
        out_places = self._places(self.out, first[:2], self.out_stride, channel + first[2])
        return writer.row(
            loops.AMX_PRODUCT, AmxField, x=self.x.start, out=self.out.start,
            x_places=writer.constant(tiles.x_places.to(torch.int32)),
            out_places=writer.constant(tiles.places_of(out_places, -1)), tiles=len(tiles.pixels), x_step=tiles.x_step,
            runs=writer.constant(torch.tensor(tiles.runs.offsets, dtype=torch.int32)),
            run_count=len(tiles.runs.offsets), depth=tiles.depth, groups=tiles.groups,
            weight=writer.constant(packed), blocks=blocks,
            **self._column_values(writer, columns, blocks * LANES, epilogue == loops.ROUND),
            function=self.kind(writer), to_floats=self.grid is None, channels=count,
            block_bytes=packed.numel() // blocks, tiles_at_once=tiles.at_once, spread=spread,
            **self._residual_fields(writer, first, channel, tiles), epilogue=epilogue,
            size=tiles.size,
        )  # fmt: skip

    def _residual_fields(
        self, writer: RowWriter, first: tuple[int, int, int], channel: int, tiles: AmxTiles | None = None
    ) -> dict[str, int | Sequence[int]]:
        """Values of the fields of the residual, whose places are those of pixels, or of tiles of AMX.

        `first`: see `_product_row`. `channel` is that of the first column.
        """
        if self.residual is None:
            return {"residual": (0, 0), "residual_places": 0, "residual_grid": 0}
        places = self._places(self.residual, first[:2], self.out_stride, channel + first[2])
        address = writer.constant(places if tiles is None else tiles.places_of(places))
        grid = 0 if self.residual_grid is None else writer.grid(self.residual_grid)
        return {"residual": self.residual.start, "residual_places": address, "residual_grid": grid}

    def _epilogue(self, loops: ModuleType) -> int:
        """Epilogue of large tiles, see `layer_loops.py`."""
        if self.grid is None:
            is_clamp = self.function.name == "clamp" and self.residual_grid is None
            return int(loops.STORE_FLOATS if is_clamp else loops.STORE_SUMS)
        if self.residual is not None:
            is_quick = self.function.name == "clamp" and self.residual_grid is not None
            return int(loops.ADD_RESIDUAL if is_quick else loops.STORE_SUMS)
        epilogues = {"clamp": loops.ROUND, "prelu": loops.APPLY_PRELU}
        epilogues.update(dict.fromkeys(("silu", "hardswish", "gelu"), loops.APPLY_FUNCTION))
        return int(epilogues.get(self.function.name, loops.STORE_SUMS))

    def _depthwise_row(self, writer: RowWriter, columns: slice, parts: int) -> list[int]:
        """Row for some of the columns of a depthwise layer.

        Args:
            writer: Builder of rows.
            columns: The columns. The layer has room for a multiple of 16.
            parts: Number of pixels that share a register.
        """
        x, loops, wide = self.x, writer.loops, writer.loops.WIDE_CHANNELS
        weight = self.weight[columns]
        blocks, missing = -(-len(weight) // (wide // parts)), -len(self.taps) % loops.RUNS_AT_ONCE
        padded, last = blocks * wide // parts, missing == loops.RUNS_AT_ONCE - 1
        weight = F.pad(weight, (0, missing, 0, padded - len(weight)))
        weight = _wide_order(weight.view(blocks, wide // parts, -1, loops.RUNS_AT_ONCE), parts)
        offsets = [x.place(*tap) - x.place(0, 0) for tap in self.taps]
        runs = torch.tensor(offsets + offsets[-1:] * missing, dtype=torch.int32)  # read again, with weights of zero
        unit = loops.WIDE_TILE_PIXELS[loops.PARTS.index(parts)]
        x_places = _whole_tiles(self._places(x, self.first, self.stride, columns.start), unit)
        out_places = _whole_tiles(self._places(self.out, (0, 0), (1, 1), columns.start), unit)
        rounds = self.function.name == "clamp"
        return writer.row(
            loops.DEPTHWISE, DepthwiseField, x=x.start, out=self.out.start,
            x_places=writer.constant(x_places), out_places=writer.constant(out_places), pixels=len(x_places),
            runs=writer.constant(runs), fours=weight.shape[2] - last, last=last,
            weight=writer.constant(weight.transpose(1, 2)), blocks=blocks,
            **self._column_values(writer, columns, padded, rounds, parts), function=self.kind(writer), parts=parts,
        )  # fmt: skip

    def _column_values(
        self, writer: RowWriter, columns: slice, padded: int, rounds: bool, parts: int = 0, packed: Tensor | None = None
    ) -> dict[str, int]:
        """Addresses of the start, scale, bias and slope of each column, and of `numbers`, by field.

        Args:
            writer: Builder of rows.
            columns: The columns.
            padded: Number of columns with padding.
            rounds: Whether scale and bias include the grid of the result.
            parts: Number of pixels that share a register of a depthwise row; 0 for other rows.
            packed: The packed weight of another row.
        """
        scale = self.x_grid.s * self.scale[columns]
        bias = torch.zeros_like(scale) if self.bias is None else self.bias[columns]
        low, high, factor, zero = self.numbers()
        if rounds:
            scale, bias = scale * factor, bias * factor + zero
        offset = 0 if self.weight.dim() == 2 else writer.loops.KIND.x_offset
        start = (offset - self.x_grid.z) * self.weight[columns].flatten(1).sum(1, dtype=torch.int32)
        slope = torch.zeros(1, dtype=torch.float32) if self.function.slope is None else self.function.slope
        slope = slope.repeat(len(self.weight) // slope.numel())[columns]
        values = {"start": start, "scale": scale, "bias": bias, "slope": slope}
        values = {name: F.pad(t, (0, padded - len(t))) for name, t in values.items()}
        if packed is not None and self.weight.dim() == 3 and not writer.loops.KIND.dot:
            values["start"] = values["start"] - _own_products(packed)
        if parts:
            channels = writer.loops.WIDE_CHANNELS // parts
            values = {name: _wide_order(t.view(-1, channels, 1), parts).flatten() for name, t in values.items()}
        addresses = {name: writer.constant(t) for name, t in values.items()}
        return {**addresses, "numbers": writer.floats(low, high, factor, zero)}

    def _packed(self, weight: Tensor, loops: ModuleType, blocks: int) -> tuple[Tensor, Tensor, int]:
        """Pack a weight as tiles read it.

        Returns:
            The weight, the offsets of the runs of a window, int32, and the groups of each run.
        """
        x = self.x
        offsets = [x.place(*tap) - x.place(0, 0) for tap in self.taps]
        if weight.dim() == 2:
            padded = F.pad(weight, (0, 0, 0, blocks * LANES - len(weight)))
            return padded.t().contiguous(), torch.tensor(offsets, dtype=torch.int32), 0
        columns, _, channels = weight.shape
        length = channels
        lines = [k for k in range(len(offsets)) if not k or offsets[k] != offsets[k - 1] + channels]
        taps = len(offsets) // len(lines)
        if x.pixel_stride == channels and lines == list(range(0, len(offsets), taps)):  # taps side by side are one run
            weight, offsets = weight.reshape(columns, len(lines), -1), [offsets[k] for k in lines]
            length = taps * channels
        group = loops.GROUP
        groups = -(-length // group)
        weight = F.pad(weight, (0, groups * group - length, 0, 0, 0, blocks * LANES - columns))
        weight = weight.view(blocks, LANES, len(offsets), groups, group // 2, 2)
        order = (0, 2, 3, 1, 4, 5) if loops.KIND.dot else (0, 2, 3, 4, 1, 5)
        weight = weight.permute(order).contiguous()
        return weight, torch.tensor(offsets, dtype=torch.int32), groups

    def _places(self, area: Area, first: tuple[int, int], stride: tuple[int, int], channel: int = 0) -> Tensor:
        """Elements from the begin of an area to a pixel of each window, int32: `first`, and `stride` further each."""
        rows, columns = (torch.arange(count, dtype=torch.int32) for count in self.windows)
        samples = torch.arange(self.x.shape[0], dtype=torch.int32)[:, None, None]
        row_offsets = (first[0] + rows * stride[0])[:, None] * area.row_stride
        offsets = row_offsets + (first[1] + columns * stride[1]) * area.pixel_stride
        return (area.place(0, 0) + channel + samples * area.sample_stride + offsets).to(torch.int32).flatten()


def _own_products(packed: Tensor) -> Tensor:
    """Sums of the products within the groups of each column, for kinds of CPU without `dot`: see `products.py`."""
    first, second = packed.to(torch.int32).unbind(3)  # (blocks, runs, groups, 16, 2)
    return (first * second).sum((1, 2, 4), dtype=torch.int32).flatten()


def _wide_order(by_channel: Tensor, parts: int) -> Tensor:
    """Reorder values of channels, (blocks, channels, ...), to the order of the sums of a register, once for each part.

    The first of four vectors of sums has the first four of each 16 channels, and so on; see `depthwise_code.py`.
    """
    by_channel = by_channel.repeat(1, parts, *[1] * (by_channel.dim() - 2))
    return by_channel.unflatten(1, (-1, 4, 4)).transpose(1, 2).flatten(1, 3)


def _whole_tiles(places: Tensor, unit: int) -> Tensor:
    """Places of pixels, to which the last one is added until there is a multiple of `unit`: it is computed again."""
    return torch.cat([places, places[-1:].expand(-len(places) % unit)])


def _runs_of_channels(loops: ModuleType, count: int) -> Iterator[tuple[slice, int]]:
    """Runs of the channels of a depthwise layer, and the number of pixels that share a register.

    As many channels as possible fill registers alone. Other runs have as many channels as a part of a register.
    """
    first = 0
    for parts in loops.PARTS:
        at_once = loops.WIDE_CHANNELS // parts
        left = -(-(count - first) // LANES) * LANES
        end = min(first + left // at_once * at_once, count) if at_once else first
        if end > first:
            yield slice(first, end), parts
        first = end


@dataclass(eq=False)
class LinearStep(ProgramStep):
    """Step of a float layer of few rows: weight float32 (O, I), bias (O,)."""

    writes_dense: ClassVar[bool] = False
    takes_grid: ClassVar[bool] = False
    x: Area = field(kw_only=True)
    weight: Tensor = field(kw_only=True)
    bias: Tensor | None = field(kw_only=True)

    @property
    def reads(self) -> list[Area]:
        return [self.x]

    def rows(self, writer: RowWriter) -> list[list[int]]:
        columns, depth = self.weight.shape
        x, out = self.x, self.out
        room = out.pixel_stride - columns
        bias = torch.zeros(columns, dtype=torch.float32) if self.bias is None else self.bias
        row = writer.row(
            writer.loops.LINEAR, LinearField, x=x.origin, x_stride=x.byte_strides[0],
            out=out.origin, out_stride=out.byte_strides[0], rows=x.shape[0], depth=depth, columns=out.pixel_stride,
            weight=writer.constant(F.pad(self.weight.t(), (0, room))), weight_stride=out.pixel_stride,
            bias=writer.constant(F.pad(bias, (0, room))),
            function=writer.loops.NO_FUNCTION if self.function == CLAMP else self.kind(writer),
            slope=self.slopes(writer), numbers=writer.floats(*self.numbers()),
        )  # fmt: skip
        return [row]


@dataclass(eq=False)
class AttentionStep(ProgramStep):
    """Step that computes softmax(query @ key.T * scale + mask) @ value in float.

    Heads are side by side among the channels.

    Attributes:
        query: float32 (N, 1, L, heads * depth).
        key: float32 (N, 1, S, heads * depth).
        value: float32 (N, 1, S, heads * depth).
        heads: Number of heads.
        scale: Factor of the scores.
        is_causal: Whether a query reads only keys up to its own position.
        mask: float32 that is added to scores; or bytes, 0 where a score does not count; or None.
        mask_strides: Function that returns elements of the mask from a sample, head, query and key to the next. Called
            once the area has its strides.
    """

    takes_function: ClassVar[bool] = False
    query: Area = field(kw_only=True)
    key: Area = field(kw_only=True)
    value: Area = field(kw_only=True)
    heads: int = field(kw_only=True)
    scale: float = field(kw_only=True)
    is_causal: bool = False
    mask: Area | None = None
    mask_strides: Callable[[], Sequence[int]] = tuple

    @property
    def reads(self) -> list[Area]:
        return [self.query, self.key, self.value] + ([] if self.mask is None else [self.mask])

    def scratch(self, loops: ModuleType) -> int:
        return int(loops.attention_scratch(self.key.shape[2], self.key.shape[3] // self.heads))

    def rows(self, writer: RowWriter) -> list[list[int]]:
        loops, mask = writer.loops, self.mask
        areas = {"query": self.query, "key": self.key, "value": self.value, "out": self.out}
        strides = {f"{name}_strides": (a.byte_strides[0], a.byte_strides[2]) for name, a in areas.items()}
        origin, mask_kind, mask_strides = [ABSOLUTE, 0], loops.CAUSAL if self.is_causal else loops.NO_MASK, [0] * 4
        if mask is not None:
            origin, mask_kind = mask.origin, loops.FLOAT_MASK if mask.is_float else loops.BOOL_MASK
            mask_strides = [stride * mask.size for stride in self.mask_strides()]
        samples, _, length, channels = self.query.shape
        row = writer.row(
            loops.ATTENTION, AttentionField, **{name: area.origin for name, area in areas.items()}, mask=origin,
            **strides, mask_strides=mask_strides, samples=samples, queries=length, keys=self.key.shape[2],
            heads=self.heads, depth=channels // self.heads, mask_kind=mask_kind, scale=writer.floats(self.scale),
            numbers=writer.floats(*self.numbers()), to_floats=self.grid is None,
        )  # fmt: skip
        return [row]
