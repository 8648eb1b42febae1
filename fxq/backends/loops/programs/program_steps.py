"""Steps of a program, as they are planned. Each becomes one or more rows of integers for the loops that run them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.loops.code.step_fields import MoveField, NormField, PointwiseField, PoolField, QuantizeField
from fxq.backends.loops.programs.areas import ABSOLUTE, LANES, Area
from fxq.quant.qparams import QParams

_INF = math.inf


class Function(NamedTuple):
    """Function of each result: a clamp to (low, high), or a function by name.

    Attributes:
        slope: slopes of negative values, float32 (1,) or (channels,).
    """

    name: str
    low: float = -_INF
    high: float = _INF
    slope: Tensor | None = None


CLAMP = Function("clamp")


class RowWriter:
    """Builder of the rows of steps: it has the loops that read the rows, and keeps the constants that they point to."""

    def __init__(self, loops: ModuleType) -> None:
        self.loops = loops
        self.constants: list[Tensor] = []

    def constant(self, tensor: Tensor) -> int:
        """Keep a tensor, and return its address."""
        tensor = tensor.contiguous()
        self.constants.append(tensor)
        return tensor.data_ptr()

    def floats(self, *values: float) -> int:
        """Address of a few float32."""
        return self.constant(torch.tensor(values, dtype=torch.float32, device="cpu"))

    def grid(self, grid: QParams | None) -> int:
        """Address of the scale and shift that dequantize integers: q * scale + shift."""
        return self.floats(grid.s, -grid.z * grid.s) if grid is not None else self.floats(1.0, 0.0)

    def row(self, code: int, fields: type[IntEnum], **values: int | Sequence[int]) -> list[int]:
        """Row of a step: its code, then the values of its fields by their names in lower case.

        Raises:
            ValueError: The names are not those of the fields, or the values of a field do not fill its positions.
        """
        positions = {field_.name.lower(): field_.value for field_ in fields}
        if positions.keys() != values.keys():
            raise ValueError(f"{fields.__name__}: missing or unknown: {sorted(positions.keys() ^ values.keys())}")
        row = [code]
        for name, position in positions.items():
            if len(row) != position:
                raise ValueError(f"{fields.__name__}: {name} is at {position}, but {len(row)} numbers are before it")
            value = values[name]
            row += [int(value)] if isinstance(value, int) else map(int, value)
        return row


@dataclass(eq=False)
class ProgramStep(ABC):
    """Step of a program.

    Attributes:
        name: Name of the node that it computes.
        out: Area that it writes.
        function: Function of each result.
        grid: Grid of the integers that it writes; None if it writes floats.
        takes_function: Whether it can compute a function of its results.
        takes_grid: Whether it can write its results as integers on a grid.
        writes_dense: Whether it can write to an area without room after the channels.
    """

    takes_function: ClassVar[bool] = True
    takes_grid: ClassVar[bool] = True
    writes_dense: ClassVar[bool] = True
    name: str
    out: Area
    function: Function = CLAMP
    grid: QParams | None = None

    @property
    @abstractmethod
    def reads(self) -> list[Area]:
        """Areas that it reads."""

    @abstractmethod
    def rows(self, writer: RowWriter) -> list[list[int]]:
        """Rows of the step, one for each of its parts, once all areas have their offsets."""

    def numbers(self) -> tuple[float, float, float, float]:
        """Lower bound, upper bound, factor and zero point of the results. With a grid, the bounds are integers."""
        if self.grid is None:
            return self.function.low, self.function.high, 1.0, 0.0
        scale, zero, qmin, qmax = self.grid.s, self.grid.z, self.grid.qmin, self.grid.qmax
        low, high = (
            min(max(round(bound / scale) + zero, qmin), qmax) if math.isfinite(bound) else limit
            for bound, limit in ((self.function.low, qmin), (self.function.high, qmax))
        )
        return float(low), float(high), 1 / scale, float(zero)

    def slopes(self, writer: RowWriter) -> int:
        """Address of the slopes of 16 channels for a function with one slope."""
        slope = self.function.slope
        return writer.constant(torch.ones(LANES, dtype=torch.float32) if slope is None else slope.expand(LANES))

    def scratch(self, loops: ModuleType) -> int:
        """Bytes of scratch memory of the step."""
        return int(loops.SCRATCH_BYTES) + 8 * max(
            area.pixel_stride for area in (*self.reads, self.out) if area.base != ABSOLUTE
        )

    def kind(self, writer: RowWriter) -> int:
        """Number of the function."""
        return int(writer.loops.FUNCTION_NAMES.index(self.function.name))


@dataclass(eq=False)
class QuantizeStep(ProgramStep):
    """Step that quantizes an input of the program, in the memory format of the input."""

    x: Area = field(kw_only=True)
    strides: Callable[[], Sequence[int]] = field(kw_only=True)
    """Strides of the input: sample, channel, row, pixel, in elements. Called at the end, since further steps may change
    the format."""

    @property
    def reads(self) -> list[Area]:
        return [self.x]

    def rows(self, writer: RowWriter) -> list[list[int]]:
        assert self.grid is not None
        scale, zero, qmin, qmax = self.grid.s, self.grid.z, self.grid.qmin, self.grid.qmax
        row = writer.row(
            writer.loops.QUANTIZE, QuantizeField,
            x=self.x.origin, x_strides=self.strides(), shape=self.x.shape,
            out=self.out.origin, out_strides=self.out.byte_strides,
            grid=writer.floats(1 / scale, zero, qmin - zero, qmax - zero),
        )  # fmt: skip
        return [row]


@dataclass(eq=False)
class PointwiseStep(ProgramStep):
    """Step that computes a function of each element of one value, or of two.

    The second value may be broadcast over pixels or over channels. With `applies_first`, it is added to the function of
    the first one, which is no clamp then.
    """

    x: Area = field(kw_only=True)
    x_grid: QParams | None = field(kw_only=True)
    y: Area | None = None
    y_grid: QParams | None = None
    multiplies: bool = False
    applies_first: bool = False

    @property
    def reads(self) -> list[Area]:
        return [self.x] if self.y is None else [self.x, self.y]

    @property
    def is_conversion(self) -> bool:
        """Whether the step only converts a value to another type."""
        return self.y is None and self.function == CLAMP

    def rows(self, writer: RowWriter) -> list[list[int]]:
        samples, high, broad, channels = self.x.shape
        out, inputs, period = self.out, dict[str, int | Sequence[int]](), 0
        for name, area, grid in (("x", self.x, self.x_grid), ("y", self.y or self.x, self.y_grid)):
            is_constant = area.base == ABSOLUTE
            is_pixel = is_constant or area.shape[1:3] != (high, broad)
            inputs[name], inputs[f"{name}_grid"] = area.origin, writer.grid(grid)
            inputs[f"{name}_is_float"] = bool(area.is_float)
            inputs[f"{name}_strides"] = (
                [0 if is_constant else area.byte_strides[0], 0, 0] if is_pixel else area.byte_strides
            )
            period = out.pixel_stride if is_pixel else period
        in_rows = all(area.parent is None and area.pixel_stride == out.pixel_stride for area in (*self.reads, out))
        y_is_one = self.y is not None and self.y.shape[3] != channels
        in_rows = in_rows and period <= writer.loops.CHUNK and not y_is_one
        is_plain = self.function == CLAMP or (self.grid is not None and self.function.name == "clamp")
        row = writer.row(
            writer.loops.POINTWISE, PointwiseField, **inputs, out=out.origin, out_strides=out.byte_strides,
            runs=[samples, high, 1, broad * out.pixel_stride] if in_rows else [samples, high, broad, channels],
            operation=1 if self.y is None else 4 if self.applies_first else 2 + self.multiplies,
            function=writer.loops.NO_FUNCTION if is_plain else self.kind(writer), slope=self.slopes(writer),
            numbers=writer.floats(*self.numbers()), to_floats=bool(out.is_float), period=period if in_rows else 0,
            y_is_one=y_is_one,
        )  # fmt: skip
        return [row]


@dataclass(eq=False)
class PoolStep(ProgramStep):
    """Step that computes the maximum of windows, or their mean."""

    takes_function: ClassVar[bool] = False
    x: Area = field(kw_only=True)
    x_grid: QParams | None = field(kw_only=True)
    kernel: tuple[int, int] = field(kw_only=True)
    stride: tuple[int, int] = field(kw_only=True)
    padding: tuple[int, int] = (0, 0)
    takes_mean: bool = True
    counts_padding: bool = True

    @property
    def reads(self) -> list[Area]:
        return [self.x]

    def rows(self, writer: RowWriter) -> list[list[int]]:
        scale, zero = (1.0, 0) if self.x_grid is None else (self.x_grid.s, self.x_grid.z)
        row = writer.row(
            writer.loops.POOL, PoolField,
            x=self.x.origin, x_strides=self.x.byte_strides,
            out=self.out.origin, out_strides=self.out.byte_strides, shape=self.out.shape,
            kernel=self.kernel, stride=self.stride, padding=self.padding, x_size=self.x.shape[1:3],
            takes_mean=self.takes_mean, counts_padding=self.counts_padding,
            numbers=writer.floats(*self.numbers(), scale, zero),
            to_floats=bool(self.out.is_float), x_is_float=bool(self.x.is_float),
        )  # fmt: skip
        return [row]


@dataclass(eq=False)
class NormStep(ProgramStep):
    """Step that normalizes the channels of each pixel, times a weight plus a bias, float32 (C,)."""

    takes_function: ClassVar[bool] = False
    x: Area = field(kw_only=True)
    x_grid: QParams | None = field(kw_only=True)
    weight: Tensor = field(kw_only=True)
    bias: Tensor = field(kw_only=True)
    eps: float = field(kw_only=True)

    @property
    def reads(self) -> list[Area]:
        return [self.x]

    def rows(self, writer: RowWriter) -> list[list[int]]:
        room = -len(self.weight) % LANES
        row = writer.row(
            writer.loops.NORM, NormField,
            x=self.x.origin, x_strides=self.x.byte_strides, x_is_float=bool(self.x.is_float),
            x_grid=writer.grid(self.x_grid),
            out=self.out.origin, out_strides=self.out.byte_strides, shape=self.x.shape,
            weight=writer.constant(F.pad(self.weight, (0, room))), bias=writer.constant(F.pad(self.bias, (0, room))),
            eps=writer.floats(self.eps), numbers=writer.floats(*self.numbers()), to_floats=bool(self.out.is_float),
        )  # fmt: skip
        return [row]


@dataclass(eq=False)
class MoveStep(ProgramStep):
    """Step that copies values to another order.

    Attributes:
        x: Area that it reads; with heads (N, 1, L, C).
        out_strides: Elements of the result from a row, pixel and channel of the input to the next.
        heads: Number of parts of the channels that count as rows of the input; 1 for none.
    """

    takes_function: ClassVar[bool] = False
    takes_grid: ClassVar[bool] = False
    x: Area = field(kw_only=True)
    out_strides: Callable[[Area], tuple[int, int, int]] = field(kw_only=True)
    heads: int = 1

    @property
    def reads(self) -> list[Area]:
        return [self.x]

    def rows(self, writer: RowWriter) -> list[list[int]]:
        samples, high, broad, channels = self.x.shape
        depth, x = channels // self.heads, self.x
        strides, shape = [x.sample_stride, x.row_stride, x.pixel_stride], [samples, high, broad, channels]
        if self.heads > 1:
            strides, shape = [x.sample_stride, depth, x.pixel_stride], [samples, self.heads, broad, depth]
        row = writer.row(
            writer.loops.MOVE, MoveField, x=x.origin, x_strides=strides, out=self.out.origin,
            out_strides=[self.out.sample_stride, *self.out_strides(self.out)], shape=shape, item_size=x.size,
        )  # fmt: skip
        return [row]
