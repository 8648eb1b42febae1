"""Division of a step among threads: the row of integers that describes it becomes one row for each part.

A step can be divided along axes, such as its pixels or its blocks of columns. Parts begin where a tile of the whole
step begins, so that each number is computed by the same code with any number of threads: results are equal bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from types import ModuleType

from fxq.backends.loops.code.step_fields import (
    AmxField,
    AttentionField,
    DepthwiseField,
    LinearField,
    MoveField,
    NormField,
    PointwiseField,
    PoolField,
    ProductField,
    QuantizeField,
)
from fxq.backends.loops.programs.areas import LANES

TAKING_NANOSECONDS = 400.0
"""Time for one thread to take a part and to report it done. Threads do this one after the other."""
_WEIGHT_SPEED, _VALUE_SPEED = 200.0, 6.0
"""Bytes that a part reads in a nanosecond: of a weight, and of values that other threads may have written."""
_INT_BYTES = 4


@dataclass(frozen=True, eq=False)
class Axis:
    """Axis along which a step can be divided.

    Attributes:
        field: Position of the axis' size in the row.
        steps: By position in the row, the amount that is added to it for each element before the part.
        unit: Number of elements of which each part starts at a multiple.
        nanoseconds: Time of each part beyond its share of the step, since it reads memory that other parts also read,
            or that another thread has just written.
    """

    field: int
    steps: Mapping[int, int]
    unit: int = 1
    nanoseconds: float = 0.0

    def cuts(self, size: int, parts: int) -> list[int]:
        """First elements of parts of nearly equal sizes, and the end."""
        inner = [min(round(size * k / parts / self.unit) * self.unit, size) for k in range(1, parts)]
        return [0, *inner, size]

    def largest_share(self, size: int, parts: int) -> float:
        """Share of the elements that the largest part has."""
        return max(end - first for first, end in pairwise(self.cuts(size, parts))) / size

    def divided(self, row: Sequence[int], parts: int) -> Iterator[list[int]]:
        """Rows of the parts. Parts without elements are left out."""
        for first, end in pairwise(self.cuts(row[self.field], parts)):
            if end > first:
                part = list(row)
                for position, step in self.steps.items():
                    part[position] += step * first
                part[self.field] = end - first
                yield part


@dataclass(frozen=True)
class StepWork:
    """Estimated time of a step on one thread, and the axes along which it can be divided."""

    nanoseconds: float
    axes: Sequence[Axis]


def split_row(loops: ModuleType, row: Sequence[int], parts: int) -> list[list[int]]:
    """Rows of up to `parts` parts of a step that may run at once: the row itself if it is too small to be divided.

    The step is divided along one axis or along two, so that its slowest part takes the least time. Among equal choices,
    parts are far from each other in memory, since a CPU also prefetches lines next to its own, which other threads use.
    """
    work = next(work for name, work in _WORK.items() if getattr(loops, name) == row[0])(loops, row)
    parts = min(parts, int(math.sqrt(work.nanoseconds / TAKING_NANOSECONDS)))  # least sum of computing and taking
    axes = [axis for axis in work.axes if row[axis.field] > axis.unit]
    counts = [{a: n, b: parts // n} for a, b in combinations(axes, 2) for n in range(parts, 0, -1)]
    best = min(counts or [{axis: parts} for axis in axes], key=partial(_time, work, row), default={})
    rows = [list(row)]
    if parts > 1 and _time(work, row, best) < work.nanoseconds:
        for axis, count in best.items():
            rows = [part for whole in rows for part in axis.divided(whole, count)]
    return rows


def _time(work: StepWork, row: Sequence[int], counts: Mapping[Axis, int]) -> float:
    """Nanoseconds of the largest part of a step that is divided along some axes."""
    share = math.prod(axis.largest_share(row[axis.field], count) for axis, count in counts.items())
    return work.nanoseconds * share + sum(axis.nanoseconds for axis, count in counts.items() if count > 1)


def _product(loops: ModuleType, row: Sequence[int]) -> StepWork:
    f = ProductField
    pixels, blocks, depth = row[f.PIXELS], row[f.BLOCKS], row[f.RUN_COUNT] * max(row[f.GROUPS] * loops.GROUP, 1)
    sums = pixels * blocks * LANES
    by_pixel: dict[int, int] = {f.X_PLACES: _INT_BYTES, f.OUT_PLACES: _INT_BYTES}
    if row[f.RESIDUAL_PLACES]:
        by_pixel[f.RESIDUAL_PLACES] = _INT_BYTES
    axes = [Axis(f.PIXELS, by_pixel, loops.TILE_PIXELS, row[f.BLOCK_BYTES] * blocks / _WEIGHT_SPEED)]
    if row[f.IS_DEPTHWISE]:  # the rows of its weight have all channels
        return StepWork(sums * (depth + _FINISH) / (LANES * _SPEED), axes)
    axes.append(Axis(f.BLOCKS, _steps_of_blocks(f, row), 1, pixels * row[f.GROUPS] * loops.GROUP / _VALUE_SPEED))
    return StepWork(sums * (depth / loops.GROUP + _FINISH) / (LANES * _SPEED), axes)


def _steps_of_blocks(f: type[ProductField] | type[AmxField], row: Sequence[int]) -> dict[int, int]:
    """Steps of an axis of blocks of 16 columns, see `Axis`."""
    step = _INT_BYTES * LANES
    return {
        f.WEIGHT: row[f.BLOCK_BYTES], f.START: step, f.SCALE: step, f.BIAS: step, f.SLOPE: step,
        f.OUT + 1: 0 if row[f.SPREAD] else step if row[f.TO_FLOATS] else LANES, f.CHANNELS: -LANES,
        f.SPREAD: step if row[f.SPREAD] else 0, f.RESIDUAL + 1: LANES if row[f.RESIDUAL_GRID] else step,
    }  # fmt: skip


def _amx_product(loops: ModuleType, row: Sequence[int]) -> StepWork:
    f, rows = AmxField, int(loops.TILE_ROWS)
    tiles, blocks, depth = row[f.TILES], row[f.BLOCKS], row[f.DEPTH] * (1 if row[f.GROUPS] else row[f.RUN_COUNT])
    places = _INT_BYTES * rows
    by_tile: dict[int, int] = {f.X_PLACES: places if row[f.GROUPS] else _INT_BYTES, f.OUT_PLACES: places}
    if row[f.RESIDUAL_PLACES]:
        by_tile[f.RESIDUAL_PLACES] = places
    of_weight, of_pixels = row[f.BLOCK_BYTES] * blocks / _WEIGHT_SPEED, tiles * rows * depth * row[f.SIZE]
    axes = [
        Axis(f.TILES, by_tile, 2, of_weight),
        Axis(f.BLOCKS, _steps_of_blocks(f, row), loops.BLOCKS_AT_ONCE, of_pixels / row[f.RUN_COUNT] / _VALUE_SPEED),
    ]
    return StepWork(tiles * blocks * rows * (depth * LANES / _AMX_RATIO + _FINISH) / _SPEED, axes)


def _depthwise(loops: ModuleType, row: Sequence[int]) -> StepWork:
    f, parts = DepthwiseField, row[DepthwiseField.PARTS]
    channels = loops.WIDE_CHANNELS // parts
    by_pixel: dict[int, int] = {f.X_PLACES: _INT_BYTES, f.OUT_PLACES: _INT_BYTES}
    step = _INT_BYTES * loops.WIDE_CHANNELS
    by_block: dict[int, int] = {
        f.X + 1: channels, f.OUT + 1: channels, f.WEIGHT: (row[f.FOURS] + row[f.LAST]) * step, f.START: step,
        f.SCALE: step, f.BIAS: step, f.SLOPE: step,
    }  # fmt: skip
    vectors = row[f.PIXELS] * row[f.BLOCKS] * channels // LANES
    axes = [
        Axis(f.PIXELS, by_pixel, loops.WIDE_TILE_PIXELS[loops.PARTS.index(parts)]),
        Axis(f.BLOCKS, by_block, nanoseconds=vectors * LANES / _VALUE_SPEED),
    ]
    return StepWork(vectors * (3 * (row[f.FOURS] + row[f.LAST]) + _FINISH) / _SPEED, axes)


def _quantize(loops: ModuleType, row: Sequence[int]) -> StepWork:
    f, x = QuantizeField, [4 * row[QuantizeField.X_STRIDES + k] for k in (0, 2, 3)]
    axes = _image_axes(f.SHAPE, [(f.X + 1, x), (f.OUT + 1, _strides(row, f.OUT_STRIDES))])
    return StepWork(_elements(row, f.SHAPE) / _ELEMENTS, axes)


def _pointwise(loops: ModuleType, row: Sequence[int]) -> StepWork:
    f, period = PointwiseField, row[PointwiseField.PERIOD]
    places = [(f.X + 1, f.X_STRIDES, f.X_IS_FLOAT), (f.Y + 1, f.Y_STRIDES, f.Y_IS_FLOAT)]
    places.append((f.OUT + 1, f.OUT_STRIDES, f.TO_FLOATS))
    axes = _image_axes(f.RUNS, [(place, _strides(row, strides)) for place, strides, _ in places])
    sizes = {place: 4 if row[is_float] else 1 for place, _, is_float in places}
    if period or row[f.Y_IS_ONE]:  # the loop reads y from its start for each sample or run
        sizes[f.Y + 1] = 0
    chunk = loops.CHUNK // period * period if period else loops.CHUNK
    axes.append(Axis(f.RUNS + 3, sizes, chunk))
    cost = 1 if row[f.FUNCTION] in (loops.NO_FUNCTION, loops.FUNCTION_NAMES.index("clamp")) else 3
    return StepWork(_elements(row, f.RUNS) * cost * row[f.OPERATION] / _ELEMENTS, axes)


def _pool(loops: ModuleType, row: Sequence[int]) -> StepWork:
    f = PoolField
    down, right = row[f.STRIDE], row[f.STRIDE + 1]
    x, out = _strides(row, f.X_STRIDES), _strides(row, f.OUT_STRIDES)
    by_channel = {f.X + 1: 4 if row[f.X_IS_FLOAT] else 1, f.OUT + 1: 4 if row[f.TO_FLOATS] else 1}
    axes = [
        Axis(f.SHAPE, {f.X + 1: x[0], f.OUT + 1: out[0]}),
        Axis(f.SHAPE + 1, {f.PADDING: -down, f.OUT + 1: out[1]}),
        Axis(f.SHAPE + 2, {f.PADDING + 1: -right, f.OUT + 1: out[2]}),
        Axis(f.SHAPE + 3, by_channel, LANES),
    ]
    return StepWork(_elements(row, f.SHAPE) * row[f.KERNEL] * row[f.KERNEL + 1] / _ELEMENTS, axes)


def _norm(loops: ModuleType, row: Sequence[int]) -> StepWork:
    f = NormField
    axes = _image_axes(f.SHAPE, [(f.X + 1, _strides(row, f.X_STRIDES)), (f.OUT + 1, _strides(row, f.OUT_STRIDES))])
    return StepWork(3 * _elements(row, f.SHAPE) / _ELEMENTS, axes)


def _move(loops: ModuleType, row: Sequence[int]) -> StepWork:
    f, size = MoveField, row[MoveField.ITEM_SIZE]
    places = [(f.X + 1, f.X_STRIDES), (f.OUT + 1, f.OUT_STRIDES)]
    axes = _image_axes(f.SHAPE, [(place, [size * n for n in _strides(row, strides)]) for place, strides in places])
    return StepWork(2 * _elements(row, f.SHAPE) / _ELEMENTS, axes)


def _attention(loops: ModuleType, row: Sequence[int]) -> StepWork:
    f, depth = AttentionField, row[AttentionField.DEPTH]
    by_sample = {place + 1: row[strides] for place, strides in (
        (f.QUERY, f.QUERY_STRIDES), (f.KEY, f.KEY_STRIDES), (f.VALUE, f.VALUE_STRIDES), (f.OUT, f.OUT_STRIDES),
        (f.MASK, f.MASK_STRIDES),
    )}  # fmt: skip
    by_head = {place + 1: 4 * depth for place in (f.QUERY, f.KEY, f.VALUE)}
    by_head |= {f.OUT + 1: depth * (4 if row[f.TO_FLOATS] else 1), f.MASK + 1: row[f.MASK_STRIDES + 1]}
    products = 2 * row[f.SAMPLES] * row[f.HEADS] * row[f.QUERIES] * row[f.KEYS] * depth
    return StepWork(products / (LANES * _SPEED), [Axis(f.SAMPLES, by_sample), Axis(f.HEADS, by_head)])


def _linear(loops: ModuleType, row: Sequence[int]) -> StepWork:
    f = LinearField
    by_column = {f.WEIGHT: 4, f.BIAS: 4, f.OUT + 1: 4}
    axes = [
        Axis(f.ROWS, {f.X + 1: row[f.X_STRIDE], f.OUT + 1: row[f.OUT_STRIDE]}, 8),
        Axis(f.COLUMNS, by_column, LANES),
    ]
    return StepWork(row[f.ROWS] * row[f.DEPTH] * row[f.COLUMNS] / (LANES * _SPEED), axes)


def _strides(row: Sequence[int], field: int) -> Sequence[int]:
    """Strides of a sample, row and pixel."""
    return row[field : field + 3]


def _elements(row: Sequence[int], field: int) -> int:
    """Number of elements of four axes."""
    return math.prod(row[field : field + 4])


def _image_axes(shape: int, places: Sequence[tuple[int, Sequence[int]]]) -> list[Axis]:
    """Axes of samples, rows and pixels, for the positions of places in memory with their strides in bytes."""
    return [Axis(shape + k, {place: strides[k] for place, strides in places}) for k in range(3)]


_SPEED = 4.0
"""Vectors of products that are added to sums in a nanosecond."""
_AMX_RATIO = 8.0
"""Products of AMX for each of other vectors, in the same time."""
_FINISH = 4
"""Time to scale and round a vector of sums, in vectors of products."""
_ELEMENTS = 4.0
"""Elements that other steps compute in a nanosecond."""
_WORK: Mapping[str, Callable[[ModuleType, Sequence[int]], StepWork]] = {
    "PRODUCT": _product, "DEPTHWISE": _depthwise, "QUANTIZE": _quantize, "POINTWISE": _pointwise, "POOL": _pool,
    "NORM": _norm, "MOVE": _move, "ATTENTION": _attention, "LINEAR": _linear, "AMX_PRODUCT": _amx_product,
}  # fmt: skip
"""StepWork of each kind of step, by the name of its code."""
