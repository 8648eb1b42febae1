"""The steps of a program, as they are planned; each becomes a row of numbers for the loop that runs it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.loops.programs.areas import ABSOLUTE, LANES, Area, ByteGrid

_INF = math.inf


class Function(NamedTuple):
    """What is computed of each result: a clamp to (low, high), or a function by its name.

    Attributes:
        slope: of prelu, float32 of one value, or one for each channel.
    """

    name: str
    low: float = -_INF
    high: float = _INF
    slope: Tensor | None = None


CLAMP = Function("clamp")


class StepRows:
    """What the rows of steps are made with: the loops that read them, and the constants that they point to."""

    def __init__(self, loops: ModuleType) -> None:
        self.loops = loops
        self.constants: list[Tensor] = []

    def constant(self, tensor: Tensor) -> int:
        """The address of a tensor, which stays."""
        tensor = tensor.contiguous()
        self.constants.append(tensor)
        return tensor.data_ptr()

    def floats(self, *values: float) -> int:
        """The address of a few float32."""
        return self.constant(torch.tensor(values, dtype=torch.float32, device="cpu"))

    def grid(self, grid: ByteGrid | None) -> int:
        """The address of what makes real values of integers: scale and shift."""
        return self.floats(grid.scale, -grid.zero * grid.scale) if grid is not None else self.floats(1.0, 0.0)


@dataclass(eq=False)
class ProgramStep(ABC):
    """One step.

    Attributes:
        name: of the node that it computes.
        out: what it writes.
        function: what it computes of each result.
        grid: the grid of its integers; None: it writes floats.
        bends: whether it can compute a function of its results.
        rounds: whether it can write its results on a grid.
        dense: whether it can write results without room behind the channels.
    """

    bends: ClassVar[bool] = True
    rounds: ClassVar[bool] = True
    dense: ClassVar[bool] = True
    name: str
    out: Area
    function: Function = CLAMP
    grid: ByteGrid | None = None

    @property
    @abstractmethod
    def reads(self) -> list[Area]:
        """What it reads."""

    @abstractmethod
    def rows(self, rows: StepRows) -> list[list[int]]:
        """Its numbers, once everything has its place: a row for each of its parts."""

    def numbers(self) -> tuple[float, float, float, float]:
        """Two bounds, what results are multiplied with before they are rounded, and the zero point."""
        if self.grid is None:
            return self.function.low, self.function.high, 1.0, 0.0
        scale, zero, qmin, qmax = self.grid
        low, high = (
            min(max(round(bound / scale) + zero, qmin), qmax) if math.isfinite(bound) else limit
            for bound, limit in ((self.function.low, qmin), (self.function.high, qmax))
        )
        return float(low), float(high), 1 / scale, float(zero)

    def slopes(self, rows: StepRows) -> int:
        """The address of what each of 16 results below zero is multiplied with, where that is the function."""
        slope = self.function.slope
        return rows.constant(torch.ones(LANES, dtype=torch.float32) if slope is None else slope.expand(LANES))

    def scratch(self, loops: ModuleType) -> int:
        """Bytes of memory that it needs while it runs."""
        return int(loops.SCRATCH) + 8 * max(area.wide for area in (*self.reads, self.out) if area.base != ABSOLUTE)

    def kind(self, rows: StepRows) -> int:
        """The number of its function."""
        return int(rows.loops.NAMES.index(self.function.name))


@dataclass(eq=False)
class QuantizeStep(ProgramStep):
    """Rounds an input of the program, as it lies, to a grid."""

    x: Area = field(kw_only=True)
    strides: Callable[[], Sequence[int]] = field(kw_only=True)
    """Of the input: (n, c, h, w), in elements. Asked for at the end, since other steps may want it laid out."""

    @property
    def reads(self) -> list[Area]:
        return [self.x]

    def rows(self, rows: StepRows) -> list[list[int]]:
        assert self.grid is not None
        scale, zero, qmin, qmax = self.grid
        numbers = rows.floats(1 / scale, zero, qmin - zero, qmax - zero)
        return [[
            rows.loops.QUANTIZE, *self.x.origin, *self.strides(), *self.x.shape, *self.out.origin, *self.out.strides,
            numbers,
        ]]  # fmt: skip


@dataclass(eq=False)
class PointwiseStep(ProgramStep):
    """A function of each element of a value, or of two, which may have one pixel for all."""

    x: Area = field(kw_only=True)
    x_grid: ByteGrid | None = field(kw_only=True)
    y: Area | None = None
    y_grid: ByteGrid | None = None
    multiplies: bool = False

    @property
    def reads(self) -> list[Area]:
        return [self.x] if self.y is None else [self.x, self.y]

    @property
    def is_conversion(self) -> bool:
        """Whether it does nothing but write a value in another type."""
        return self.y is None and self.function == CLAMP

    def rows(self, rows: StepRows) -> list[list[int]]:
        samples, high, broad, channels = self.x.shape
        out, read, period = self.out, list[int](), 0
        for area, grid in ((self.x, self.x_grid), (self.y or self.x, self.y_grid)):
            is_constant = area.base == ABSOLUTE
            is_pixel = is_constant or area.shape[1:3] != (high, broad)
            steps = [0 if is_constant else area.strides[0], 0, 0] if is_pixel else area.strides
            read += [*area.origin, *steps, int(bool(area.is_float)), rows.grid(grid)]
            period = out.wide if is_pixel else period
        whole = all(area.whole is None and area.wide == out.wide for area in (*self.reads, out))
        whole = whole and period <= rows.loops.CHUNK
        run = [samples, high, 1, broad * out.wide] if whole else [samples, high, broad, channels]
        numbers = rows.floats(*self.numbers())
        count = 1 if self.y is None else 2 + self.multiplies
        bare = self.function == CLAMP or (self.grid is not None and self.function.name == "clamp")
        kind = rows.loops.NOTHING if bare else self.kind(rows)
        return [[
            rows.loops.POINTWISE, *read, *out.origin, *out.strides, *run, count, kind,
            self.slopes(rows), numbers, int(bool(out.is_float)), period if whole else 0,
        ]]  # fmt: skip


@dataclass(eq=False)
class PoolStep(ProgramStep):
    """The largest value of windows, or their mean."""

    bends: ClassVar[bool] = False
    x: Area = field(kw_only=True)
    x_grid: ByteGrid | None = field(kw_only=True)
    kernel: tuple[int, int] = field(kw_only=True)
    stride: tuple[int, int] = field(kw_only=True)
    padding: tuple[int, int] = (0, 0)
    takes_mean: bool = True
    counts_padding: bool = True

    @property
    def reads(self) -> list[Area]:
        return [self.x]

    def rows(self, rows: StepRows) -> list[list[int]]:
        scale, zero = (1.0, 0) if self.x_grid is None else self.x_grid[:2]
        numbers = rows.floats(*self.numbers(), scale, zero)
        _, high, broad, _ = self.x.shape
        return [[
            rows.loops.POOL, *self.x.origin, *self.x.strides, *self.out.origin, *self.out.strides, *self.out.shape,
            *self.kernel, *self.stride, *self.padding, high, broad, int(self.takes_mean), int(self.counts_padding),
            numbers, int(bool(self.out.is_float)), int(bool(self.x.is_float)),
        ]]  # fmt: skip


@dataclass(eq=False)
class NormStep(ProgramStep):
    """Each pixel's channels with the mean 0 and the variance 1, times a weight plus a bias, float32 (C,)."""

    bends: ClassVar[bool] = False
    x: Area = field(kw_only=True)
    x_grid: ByteGrid | None = field(kw_only=True)
    weight: Tensor = field(kw_only=True)
    bias: Tensor = field(kw_only=True)
    eps: float = field(kw_only=True)

    @property
    def reads(self) -> list[Area]:
        return [self.x]

    def rows(self, rows: StepRows) -> list[list[int]]:
        room = -len(self.weight) % LANES
        return [[
            rows.loops.NORM, *self.x.origin, *self.x.strides, int(bool(self.x.is_float)),
            rows.grid(self.x_grid), *self.out.origin, *self.out.strides, *self.x.shape,
            rows.constant(F.pad(self.weight, (0, room))), rows.constant(F.pad(self.bias, (0, room))),
            rows.floats(self.eps), rows.floats(*self.numbers()), int(bool(self.out.is_float)),
        ]]  # fmt: skip


@dataclass(eq=False)
class MoveStep(ProgramStep):
    """The same values in another order.

    Attributes:
        x: what it reads; with heads (N, 1, L, C).
        by: of what is written, the elements from a row, pixel and channel of what is read to the next.
        heads: how many parts of a pixel's channels count as so many rows of what is read; 1: none.
    """

    bends: ClassVar[bool] = False
    rounds: ClassVar[bool] = False
    x: Area = field(kw_only=True)
    by: Callable[[Area], tuple[int, int, int]] = field(kw_only=True)
    heads: int = 1

    @property
    def reads(self) -> list[Area]:
        return [self.x]

    def rows(self, rows: StepRows) -> list[list[int]]:
        samples, high, broad, channels = self.x.shape
        depth, x = channels // self.heads, self.x
        strides, counts = [x.sample, x.pitch, x.wide], [samples, high, broad, channels]
        if self.heads > 1:
            strides, counts = [x.sample, depth, x.wide], [samples, self.heads, broad, depth]
        return [[
            rows.loops.MOVE, *x.origin, *strides, *self.out.origin, self.out.sample, *self.by(self.out), *counts,
            x.size,
        ]]  # fmt: skip
