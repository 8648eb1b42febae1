"""Machine code of depthwise convolutions that fills a register with channels, for kinds of CPU with `wide_channels`.

A register has the 64 (or 32) channels of one pixel, or 32 channels of each of two pixels, or 16 of each of four: these
are the parts of a register. A tile is some pixels, whose sums stay in registers. The values of a channel in four runs
(see `layer_loops.py`) are brought side by side, and one instruction multiplies them by four weights::

    run 0   a0 a1 a2 ...                              sums of channels 0 1 2 3, 16 17 18 19, ...    first vector
    run 1   b0 b1 b2 ...   ->   a0 b0 c0 d0 a1 b1 ...                  4 5 6 7, 20 21 22 23, ...    second vector
    run 2   c0 c1 c2 ...                              ...
    run 3   d0 d1 d2 ...

All numbers by channel are in the order of the sums, once for each part: see `_wide_order` in `layer_steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import machine_code, products, vectors
from fxq.backends.loops.code.epilogue_code import VECTORS_PACKED, ByteCode
from fxq.backends.loops.code.layer_code import accumulators, offset_of_run, pixel_addresses
from fxq.backends.loops.code.machine_code import choose, on_addresses
from fxq.backends.loops.code.vectors import FLOAT32, INT8, INT32, INT64, LANES, load, number, store

RUNS_AT_ONCE = 4
"""Runs that are multiplied at once."""
PARTS = (1, 2, 4)
"""Numbers of parts that a register may have."""


class WideTiles(NamedTuple):
    """Tiles of some channels of a depthwise convolution.

    In loops, all are int64; in the code here, LLVM values.

    Attributes:
        x: Address of integers, uint8.
        places: Address of int32: bytes from `x` to the first integer of each pixel.
        out: Address of the results, uint8.
        out_places: Address of int32: bytes from `out` to the results of each pixel.
        count: Number of tiles.
        runs: Address of int32: bytes from a pixel to each run that it reads.
        fours: Number of fours of runs.
        last: 1 if there is a run after the last four, else 0.
        weight: Address of int8 (fours + last, channels, 4). The last run has three zeros.
        start: Address of int32 (channels,): initial sums.
        scale: Address of float32 (channels,).
        bias: Address of float32 (channels,).
        numbers: Address of float32: lower and upper bound of the integers, factor, zero point.
    """

    x: Any
    places: Any
    out: Any
    out_places: Any
    count: Any
    runs: Any
    fours: Any
    last: Any
    weight: Any
    start: Any
    scale: Any
    bias: Any
    numbers: Any


def registers_of(kind: Any, parts: int) -> int:
    """Number of registers of a tile. Tiles of several parts have at most twice the pixels of others."""
    return int(kind.wide_pixels if parts <= 2 else (kind.wide_pixels + 1) // 2)


def tile_pixels(kind: Any, parts: int) -> int:
    """Number of pixels of a tile."""
    return registers_of(kind, parts) * parts


def allows(kind: Any, parts: int) -> bool:
    """Whether registers of a kind of CPU have so many parts, of at least 16 channels."""
    return bool(kind.wide_channels >= LANES * parts)


def _wide_sums(b: Any, parts: int, tiles: WideTiles, bases: Sequence[Any]) -> list[list[Any]]:
    """Four vectors of sums of each register. `bases` are the addresses of the pixels."""
    channels = machine_code.KIND.wide_channels
    sums_type = ir.VectorType(INT32, channels // 4)
    start = [load(b, tiles.start, sums_type, channels * v) for v in range(4)]
    totals = accumulators(b, start, registers_of(machine_code.KIND, parts))
    with cgutils.for_range(b, tiles.fours, intp=INT64) as four:
        first = b.mul(four.index, number(RUNS_AT_ONCE))
        offsets = [offset_of_run(b, tiles.runs, b.add(first, number(k))) for k in range(RUNS_AT_ONCE)]
        address = b.add(tiles.weight, b.mul(four.index, number(RUNS_AT_ONCE * channels)))
        columns = [load(b, address, sums_type, channels * v) for v in range(4)]
        for k, row in enumerate(totals):
            pixels = bases[parts * k : parts * (k + 1)]
            values = _side_by_side(b, [_gathered(b, [b.add(base, offset) for base in pixels]) for offset in offsets])
            _add_products(b, row, values, columns)
    with b.if_then(b.icmp_signed(">", tiles.last, number(0))):
        offset = offset_of_run(b, tiles.runs, b.mul(tiles.fours, number(RUNS_AT_ONCE)))
        address = b.add(tiles.weight, b.mul(tiles.fours, number(RUNS_AT_ONCE * channels)))
        columns = [load(b, address, sums_type, channels * v) for v in range(4)]
        for k, row in enumerate(totals):
            values = _alone(b, _gathered(b, [b.add(base, offset) for base in bases[parts * k : parts * (k + 1)]]))
            _add_products(b, row, values, columns)
    return [[b.load(total) for total in row] for row in totals]


def _side_by_side(b: Any, runs: Sequence[Any]) -> list[Any]:
    """Four vectors with the four values of each channel side by side, in two steps, each within 16 bytes."""
    first, second = ([_interleave(b, runs[k], runs[k + 1], 1, half) for half in (0, 1)] for k in (0, 2))
    return [_interleave(b, first[v // 2], second[v // 2], 2, v % 2) for v in range(4)]


def _alone(b: Any, run: Any) -> list[Any]:
    """Four vectors like those of `_side_by_side` for one run: the other values are zero."""
    blocks, zero = range(0, run.type.count, LANES), run.type.count
    orders = [
        [block + 4 * v + k // 4 if k % 4 == 0 else zero for block in blocks for k in range(LANES)] for v in range(4)
    ]
    return [vectors.lanes_of(b, run, ir.Constant(run.type, None), order) for order in orders]


def _add_products(b: Any, totals: Sequence[Any], values: Sequence[Any], columns: Sequence[Any]) -> None:
    """Add the products of four vectors of bytes and of weights to the four sums of a register."""
    for total, vector, column in zip(totals, values, columns, strict=True):
        sums = b.load(total)
        b.store(products.add_dot(b, sums, b.bitcast(vector, sums.type), column), total)


def _gathered(b: Any, addresses: Sequence[Any]) -> Any:
    """Register of the channels at some addresses, equally many of each."""
    kind = ir.VectorType(INT8, machine_code.KIND.wide_channels // len(addresses))
    values = [load(b, address, kind) for address in addresses]
    while len(values) > 1:
        values = [vectors.joined(b, *values[k : k + 2]) for k in range(0, len(values), 2)]
    return values[0]


def _scatter(b: Any, integers: Any, addresses: Sequence[Any]) -> None:
    """Store a register to some addresses, equally many channels to each."""
    count = integers.type.count // len(addresses)
    for k, address in enumerate(addresses):
        store(b, vectors.lanes_of(b, integers, integers, range(k * count, (k + 1) * count)), address)


def _interleave(b: Any, upper: Any, lower: Any, size: int, half: int) -> Any:
    """Interleave blocks of `size` bytes of two vectors: of each 16 bytes the first half, or the second one."""
    count, channels = 8 // size, upper.type.count
    order: list[int] = []
    for block in range(channels // 16):
        for k in range(count):
            for vector in (0, channels):
                first = vector + 16 * block + 8 * half + size * k
                order += range(first, first + size)
    return vectors.lanes_of(b, upper, lower, order)


def _scaled(b: Any, sums: Sequence[Any], scale: Any, bias: Any) -> list[Any]:
    """Four vectors of sums of a register, times scales plus biases."""
    kind = ir.VectorType(FLOAT32, sums[0].type.count)
    factors, added = ([load(b, array, kind, 4 * kind.count * v) for v in range(4)] for array in (scale, bias))
    return [vectors.multiply_add(b, b.sitofp(y, kind), *more) for y, *more in zip(sums, factors, added, strict=True)]


def _grid(b: Any, numbers: Any) -> list[Any]:
    """Factor and zero point of `WideTiles.numbers`, in all lanes of a vector of floats."""
    return vectors.bounds(b, b.add(numbers, number(8)), machine_code.KIND.wide_channels // VECTORS_PACKED)


def _quantized(b: Any, values: Sequence[Any], grid: Sequence[Any]) -> list[Any]:
    """Four vectors of floats as real numbers of a grid."""
    return [vectors.multiply_add(b, y, *grid) for y in values]


def _applied(b: Any, values: Sequence[Any], function: Callable[[Any, Any], Any]) -> list[Any]:
    """Apply a function of 16 floats to four vectors."""
    lanes = values[0].type.count
    if lanes == LANES:
        return [function(b, y) for y in values]
    results: list[Any] = []
    for k in (0, 2):
        y = function(b, vectors.joined(b, values[k], values[k + 1]))
        results += [vectors.lanes_of(b, y, y, range(first, first + lanes)) for first in (0, lanes)]
    return results


def _of_parts(b: Any, parts: Any, code: Callable[[int], None]) -> None:
    """Emit code for each number of parts that registers may have, and choose between them when it runs."""
    allowed = [count for count in PARTS if allows(machine_code.KIND, count)]
    if allowed:
        choose(b, parts, allowed, code)


def wide_tiles(function: Callable[[Any, Any], Any] | None = None) -> Any:
    """Code that computes tiles and writes their integers.

    Without a function, scale and bias include the grid of the result.
    """

    def code(b, parts, tiles):
        def of_parts(count: int) -> None:
            pixels = tile_pixels(machine_code.KIND, count)
            to_bytes = ByteCode(b, tiles.numbers, machine_code.KIND.wide_channels // VECTORS_PACKED)
            grid = _grid(b, tiles.numbers)
            with cgutils.for_range(b, tiles.count, intp=INT64) as tile:
                offset = b.mul(tile.index, number(4 * pixels))
                bases = pixel_addresses(b, tiles.x, b.add(tiles.places, offset), pixels)
                rows = _wide_sums(b, count, tiles, bases)
                lines = pixel_addresses(b, tiles.out, b.add(tiles.out_places, offset), pixels)
                for k, sums in enumerate(rows):
                    values = _scaled(b, sums, tiles.scale, tiles.bias)
                    if function is not None:
                        values = _quantized(b, _applied(b, values, function), grid)
                    _scatter(b, to_bytes.interleaved(values), lines[count * k : count * (k + 1)])

        _of_parts(b, parts, of_parts)

    return on_addresses(code, is_called=True)


@partial(on_addresses, is_called=True)
def wide_floats(b, parts, tiles, out):
    """Store the scaled sums of the first of some tiles: float32 (registers, channels)."""

    def of_parts(count: int) -> None:
        bases = pixel_addresses(b, tiles.x, tiles.places, tile_pixels(machine_code.KIND, count))
        for k, sums in enumerate(_wide_sums(b, count, tiles, bases)):
            for v, y in enumerate(_scaled(b, sums, tiles.scale, tiles.bias)):
                store(b, y, b.add(out, number(4 * y.type.count * (4 * k + v))))

    _of_parts(b, parts, of_parts)


@on_addresses
def pack_wide(b, parts, tiles, floats):
    """Quantize the floats of a tile, in the order of `wide_floats`, and write their integers."""

    def of_parts(count: int) -> None:
        channels = machine_code.KIND.wide_channels
        kind, to_bytes = ir.VectorType(FLOAT32, channels // 4), ByteCode(b, tiles.numbers, channels // VECTORS_PACKED)
        grid = _grid(b, tiles.numbers)
        lines = pixel_addresses(b, tiles.out, tiles.out_places, tile_pixels(machine_code.KIND, count))
        for k in range(registers_of(machine_code.KIND, count)):
            values = [load(b, floats, kind, channels * (4 * k + v)) for v in range(4)]
            integers = to_bytes.interleaved(_quantized(b, values, grid))
            _scatter(b, integers, lines[count * k : count * (k + 1)])

    _of_parts(b, parts, of_parts)


round_wide, (silu_wide, hardswish_wide, _) = wide_tiles(), map(wide_tiles, vectors.LAYER_FUNCTIONS)
