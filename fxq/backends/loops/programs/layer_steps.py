"""The steps of layers: products of integers, and layers in float."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.loops.programs.areas import ABSOLUTE, LANES, Area, ByteGrid
from fxq.backends.loops.programs.program_steps import CLAMP, ProgramStep, StepRows


@dataclass(eq=False)
class ProductStep(ProgramStep):
    """A layer on integers.

    Attributes:
        x: what it reads, uint8, with the border that its windows reach into.
        x_grid: its grid.
        weight: int8 (columns, taps, C), or of a depthwise layer (C, taps).
        taps: of each, (row, column) of the pixel that it reads, from that which the window begins with.
        scale: float32 (columns,): of the weight.
        bias: float32 (columns,).
        windows: rows and columns of windows.
        first: row and column of the pixel that the first window begins with.
        stride: rows and columns from a window to the next.
        placed: of the result, row and column of the first, and rows and columns to the next.
        spread: of several results of each window, (row, column, channel) from the first one, by column; None: they are
            channels.
        residual: what is added before the function, uint8.
        residual_grid: its grid.
    """

    x: Area = field(kw_only=True)
    x_grid: ByteGrid = field(kw_only=True)
    weight: Tensor = field(kw_only=True)
    taps: Sequence[tuple[int, int]] = field(kw_only=True)
    scale: Tensor = field(kw_only=True)
    bias: Tensor | None = field(kw_only=True)
    windows: tuple[int, int] = field(kw_only=True)
    first: tuple[int, int] = (0, 0)
    stride: tuple[int, int] = (1, 1)
    placed: tuple[int, int, int, int] = (0, 0, 1, 1)
    spread: Sequence[tuple[int, int, int]] | None = None
    residual: Area | None = None
    residual_grid: ByteGrid | None = None

    @property
    def reads(self) -> list[Area]:
        return [self.x] if self.residual is None else [self.x, self.residual]

    @property
    def folds(self) -> bool:
        """Whether what it makes may be multiplied in its scale and bias: nothing else is computed of it yet."""
        return self.function == CLAMP and self.residual is None and self.spread is None

    def scaled(self, factor: Tensor) -> None:
        """Multiply its results, float32 (columns,), which is part of its scale and bias."""
        self.scale = self.scale * factor
        self.bias = None if self.bias is None else self.bias * factor

    def border(self) -> tuple[int, int, int, int]:
        """How far its windows reach beyond what it reads: above, on the left, below and on the right."""
        rows, columns = ([tap[k] for tap in self.taps] for k in (0, 1))
        ends = [self.first[k] + (self.windows[k] - 1) * self.stride[k] for k in (0, 1)]
        _, high, broad, _ = self.x.shape
        return (
            max(-self.first[0] - min(rows), 0), max(-self.first[1] - min(columns), 0),
            max(ends[0] + max(rows) - high + 1, 0), max(ends[1] + max(columns) - broad + 1, 0),
        )  # fmt: skip

    def rows(self, rows: StepRows) -> list[list[int]]:
        columns, wide = len(self.weight), rows.loops.WIDE
        if self.spread is not None and columns // self.placed[2] // self.placed[3] % LANES == 0:
            each = columns // self.placed[2] // self.placed[3]
            return [self._part(rows, slice(k, k + each), at=self.spread[k]) for k in range(0, columns, each)]
        if self.spread is not None:
            to = [self.out.place(r, c) - self.out.place(0, 0) + k for r, c, k in self.spread]
            return [self._part(rows, slice(columns), rows.constant(torch.tensor(to, dtype=torch.int32)))]
        if self.weight.dim() == 2 and rows.loops.HAS_VNNI and self.grid is not None and self.residual is None:
            first = columns // wide * wide
            parts = [self._wide_part(rows, first)] if first else []
            return [*parts, self._part(rows, slice(first, columns))] if first < columns else parts
        return [self._part(rows, slice(columns))]

    def _part(self, rows: StepRows, which: slice, spread: int = 0, at: tuple[int, int, int] = (0, 0, 0)) -> list[int]:
        """The numbers for some of the columns, whose results begin at a pixel and a channel of the first ones."""
        weight, depthwise, x, out = self.weight[which], self.weight.dim() == 2, self.x, self.out
        columns, first = len(weight), which.start if self.spread is None and which.start else 0
        blocks = -(-columns // LANES)
        packed, runs, groups = self._packed(weight, rows.loops.GROUP, blocks)
        places = self._places(x, self.first, self.stride, first if depthwise else 0)
        to = self._places(out, (self.placed[0] + at[0], self.placed[1] + at[1]), self.placed[2:], first + at[2])
        way = rows.loops.BY_SUMS if depthwise or spread else self._way(rows.loops)
        at_once = max(LANES * 12, rows.loops.LARGE // (x.wide * self.stride[1] * self.stride[0]))
        kept = [0, 0, 0, 0]
        if self.residual is not None:
            where = self._places(self.residual, self.placed[:2], self.placed[2:], 0)
            kept = [*self.residual.start, rows.constant(where)]
            kept.append(rows.grid(self.residual_grid))
        return [
            rows.loops.PRODUCT, *x.start, *out.start, rows.constant(places), rows.constant(to),
            len(places), rows.constant(runs), len(runs), groups, rows.constant(packed), blocks,
            *self._by_column(rows, which, blocks * LANES, way == rows.loops.ROUNDED), self.kind(rows),
            int(self.grid is None), columns, LANES if depthwise else packed.numel() // blocks, at_once, int(depthwise),
            LANES if depthwise else 0, spread, *kept, way,
        ]  # fmt: skip

    def _way(self, loops: ModuleType) -> int:
        """What becomes of the sums of a large tile before it is stored."""
        if self.grid is None:
            return int(loops.BY_SUMS)
        if self.residual is not None:
            return int(loops.ADDED if self.function.name == "clamp" else loops.BY_SUMS)
        ways = {"clamp": loops.ROUNDED, "prelu": loops.BENT}
        ways.update(dict.fromkeys(("silu", "hardswish", "gelu"), loops.FUSED))
        return int(ways.get(self.function.name, loops.BY_SUMS))

    def _wide_part(self, rows: StepRows, columns: int) -> list[int]:
        """The numbers for the first columns of a depthwise layer, in the order in which many are computed at once."""
        x, wide = self.x, rows.loops.WIDE
        blocks, fours = columns // wide, -(-len(self.taps) // 4)
        weight = F.pad(self.weight[:columns], (0, 4 * fours - len(self.taps)))
        weight = _turned(weight.view(blocks, wide, fours, 4)).permute(0, 3, 1, 2, 4)  # (blocks, fours, 4, 16, 4)
        at = [x.place(*tap) - x.place(0, 0) for tap in self.taps]
        runs = torch.tensor(at + at[-1:] * (4 * fours - len(at)), dtype=torch.int32)
        places, to = self._places(x, self.first, self.stride), self._places(self.out, (0, 0), (1, 1))
        return [
            rows.loops.DEPTHWISE, *x.start, *self.out.start, rows.constant(places),
            rows.constant(to), len(places), rows.constant(runs), fours, rows.constant(weight), blocks,
            *self._by_column(rows, slice(columns), columns, False, wide), self.kind(rows),
        ]  # fmt: skip

    def _by_column(self, rows: StepRows, which: slice, room: int, rounds: bool, wide: int = 0) -> list[int]:
        """The addresses of what each column has, start of sums, scale, bias and slope, and of bounds and the grid."""
        real = self.x_grid.scale * self.scale[which]
        bias = torch.zeros_like(real) if self.bias is None else self.bias[which]
        low, high, factor, zero = self.numbers()
        if rounds:
            real, bias = real * factor, bias * factor + zero
        sums = -self.x_grid.zero * self.weight[which].flatten(1).sum(1, dtype=torch.int32)
        slope = torch.zeros(1, dtype=torch.float32) if self.function.slope is None else self.function.slope
        slope = slope.repeat(len(self.weight) // slope.numel())[which]
        found = [F.pad(t, (0, room - len(t))) for t in (sums, real, bias, slope)]
        if wide:
            found = [_turned(t.view(-1, wide, 1)).flatten() for t in found]
        return [*map(rows.constant, found), rows.floats(low, high, factor, zero)]

    def _packed(self, weight: Tensor, group: int, blocks: int) -> tuple[Tensor, Tensor, int]:
        """A weight as tiles read it, where the runs of a window begin, and how many groups each has."""
        x = self.x
        at = [x.place(*tap) - x.place(0, 0) for tap in self.taps]
        if weight.dim() == 2:
            wide = F.pad(weight, (0, 0, 0, blocks * LANES - len(weight)))
            return wide.t().contiguous(), torch.tensor(at, dtype=torch.int32), 0
        columns, _, channels = weight.shape
        length = channels
        lines = [k for k in range(len(at)) if not k or at[k] != at[k - 1] + channels]
        each = len(at) // len(lines)
        if x.wide == channels and lines == list(range(0, len(at), each)):  # taps side by side are one run
            weight, at, length = weight.reshape(columns, len(lines), -1), [at[k] for k in lines], each * channels
        groups = -(-length // group)
        weight = F.pad(weight, (0, groups * group - length, 0, 0, 0, blocks * LANES - columns))
        weight = weight.view(blocks, LANES, len(at), groups, group).permute(0, 2, 3, 1, 4).contiguous()
        return weight, torch.tensor(at, dtype=torch.int32), groups

    def _places(self, area: Area, first: tuple[int, int], stride: tuple[int, int], channel: int = 0) -> Tensor:
        """Of each window, where something of an area begins that moves on from window to window."""
        rows, columns = (torch.arange(count, dtype=torch.int32) for count in self.windows)
        samples = torch.arange(self.x.shape[0], dtype=torch.int32)[:, None, None]
        line = (first[0] + rows * stride[0])[:, None] * area.pitch + (first[1] + columns * stride[1]) * area.wide
        return (area.place(0, 0) + channel + samples * area.sample + line).to(torch.int32).flatten()


def _turned(by_channel: Tensor) -> Tensor:
    """What 64 channels have, (blocks, 64, ...), in the order of four vectors of sums, (blocks, 4, 16, ...).

    Of each 16 channels, the first vector has the first four, and so on; see `_wide_sums` in `jit/layer_code.py`.
    """
    blocks, _, *others = by_channel.shape
    return by_channel.reshape(blocks, 4, 4, 4, *others).transpose(1, 2).reshape(blocks, 4, 16, *others)


@dataclass(eq=False)
class LinearStep(ProgramStep):
    """A layer in float, of few rows: weight float32 (O, I), bias (O,)."""

    dense: ClassVar[bool] = False
    rounds: ClassVar[bool] = False
    x: Area = field(kw_only=True)
    weight: Tensor = field(kw_only=True)
    bias: Tensor | None = field(kw_only=True)

    @property
    def reads(self) -> list[Area]:
        return [self.x]

    def rows(self, rows: StepRows) -> list[list[int]]:
        columns, depth = self.weight.shape
        room = self.out.wide - columns
        bias = torch.zeros(columns, dtype=torch.float32) if self.bias is None else self.bias
        weight = F.pad(self.weight.t(), (0, room)).contiguous()
        numbers, slopes = rows.floats(*self.numbers()), self.slopes(rows)
        kind = rows.loops.NOTHING if self.function == CLAMP else self.kind(rows)
        return [[
            rows.loops.LINEAR, *self.x.origin, self.x.strides[0], *self.out.origin, self.out.strides[0],
            self.x.shape[0], depth, self.out.wide, rows.constant(weight), rows.constant(F.pad(bias, (0, room))), kind,
            slopes, numbers,
        ]]  # fmt: skip


@dataclass(eq=False)
class AttentionStep(ProgramStep):
    """softmax(query @ key.T * scale + mask) @ value in float, of heads that lie side by side among the channels.

    Attributes:
        query: float32 (N, 1, L, heads * depth).
        key, value: float32 (N, 1, S, heads * depth).
        heads: how many.
        scale: what scores are multiplied with.
        is_causal: whether a query reads only keys up to its own place.
        mask: float32, what is added to scores; or bytes, 0 where a score does not count; or None.
        by_mask: gives elements of the mask from a sample, head, query and key to the next, once it has its place.
    """

    bends: ClassVar[bool] = False
    query: Area = field(kw_only=True)
    key: Area = field(kw_only=True)
    value: Area = field(kw_only=True)
    heads: int = field(kw_only=True)
    scale: float = field(kw_only=True)
    is_causal: bool = False
    mask: Area | None = None
    by_mask: Callable[[], Sequence[int]] = tuple

    @property
    def reads(self) -> list[Area]:
        return [self.query, self.key, self.value] + ([] if self.mask is None else [self.mask])

    def scratch(self, loops: ModuleType) -> int:
        return int(loops.attention_scratch(self.key.shape[2], self.key.shape[3] // self.heads))

    def rows(self, rows: StepRows) -> list[list[int]]:
        loops, areas, mask = rows.loops, [self.query, self.key, self.value, self.out], self.mask
        strides = [step for area in areas for step in (area.strides[0], area.strides[2])]
        which = loops.CAUSAL if self.is_causal else loops.NO_MASK
        masked = [ABSOLUTE, 0, 0, 0, 0, 0]
        if mask is not None:
            which = loops.FLOAT_MASK if mask.is_float else loops.BOOL_MASK
            masked = [*mask.origin, *(step * mask.size for step in self.by_mask())]
        samples, _, length, channels = self.query.shape
        return [[
            loops.ATTENTION, *(number for area in areas for number in area.origin), *masked[:2], *strides,
            *masked[2:], samples, length, self.key.shape[2], self.heads, channels // self.heads, which,
            rows.floats(self.scale), rows.floats(*self.numbers()), int(self.grid is None),
        ]]  # fmt: skip
