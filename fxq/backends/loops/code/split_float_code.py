"""Machine code for products of rows of float32 with integers of a weight on CPUs with AMX, as exact as in float32.

A float32 is the sum of three bfloat16, which have 8 bits each of its 24, and an integer of a weight of up to 8 bits is
a bfloat16. So three products of AMX, whose sums are float32, make one of float32::

    row of the input, float32      bits 23 .. 16 | bits 15 .. 8 | bits 7 .. 0        each with its exponent
    three tiles                      bfloat16         bfloat16      bfloat16

Source: Henry, Tang and Heinecke (2019), "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations", section III.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import machine_code, vectors
from fxq.backends.loops.code.amx_code import (
    PIXEL_TILE,
    ROW_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    WEIGHT_TILE,
    load_tile,
    multiply_float_tiles,
    store_tile,
)
from fxq.backends.loops.code.machine_code import on_addresses
from fxq.backends.loops.code.panel_code import byte_of_words
from fxq.backends.loops.code.vectors import FLOATS, INT32, INT64, INTS, LANES, load, number, splat, store

TERMS = 3
"""bfloat16 numbers whose sum is a float32."""
STEP_DEPTH = 32
"""Numbers of a row in a tile."""
STEP_BYTES = TERMS * TILE_BYTES
"""Bytes of the tiles of 16 rows with `STEP_DEPTH` numbers of each."""
PANELS = 2
"""Tiles of 16 columns that are multiplied at once."""
WEIGHT_STEP_BYTES = PANELS * TILE_BYTES
"""Bytes of the tiles of 32 columns with `STEP_DEPTH` numbers of each."""
ROWS_AT_ONCE = 2 * TILE_ROWS
"""Rows whose sums are in tiles at once."""
SUMS_BYTES = 4 * ROWS_AT_ONCE * LANES * PANELS
"""Bytes of the sums of `ROWS_AT_ONCE` rows and `PANELS` tiles of columns."""
BLOCK_COUNTS = (2, 1)
"""Numbers of blocks whose sums are scaled at once."""
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


@on_addresses
def split_row(b, x, count, out):
    """Write `STEP_DEPTH` numbers as one row of each of three tiles. Numbers from `count` on are 0.

    `x` is the address of the first number, `out` that of the row of the first tile. An infinite number or NaN is in the
    first tile only.
    """
    if not machine_code.KIND.has_amx:
        return
    terms = []
    for v in range(2):
        exist = b.icmp_signed("<", _lane_numbers(v), splat(b, b.trunc(count, INT32)))
        terms.append(_split(b, vectors.load_some(b, b.add(x, number(4 * LANES * v)), exist)))
    for k, halves in enumerate(zip(*terms, strict=True)):
        low, high = (b.bitcast(term, _HALVES) for term in halves)
        upper = vectors.lanes_of(b, low, high, range(1, 4 * LANES, 2))
        store(b, upper, b.add(out, number(TILE_BYTES * k)))


def _lane_numbers(vector: int) -> Any:
    return ir.Constant(INTS, [LANES * vector + k for k in range(LANES)])


def _split(b: Any, x: Any) -> list[Any]:
    """Three vectors of float32 whose lower 16 bits are 0 and whose sum is x."""
    is_finite = b.icmp_unsigned("<", b.and_(b.bitcast(x, INTS), _all(0x7FFFFFFF)), _all(0x7F800000))
    first = _upper(b, x)
    first = b.select(b.fcmp_unordered("uno", x, x), b.bitcast(_all(0x7FC00000), FLOATS), first)
    rest = b.select(is_finite, b.fsub(x, first), splat(b, 0.0))
    second = _upper(b, rest)
    return [first, second, b.fsub(rest, second)]


def _upper(b: Any, x: Any) -> Any:
    """Floats with their lower 16 bits set to 0."""
    return b.bitcast(b.and_(b.bitcast(x, INTS), _all(0xFFFF0000)), FLOATS)


def _all(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


class PairsOfWords(NamedTuple):
    """Arguments of the code that writes integers of 8 bits as pairs of bfloat16, in the tiles of a weight.

    Fields are int64 in loops and LLVM values in the code here.

    Attributes:
        source: Address of int32 (words, 32): four adjacent integers of each of 32 rows of the weight.
        words: Number of words of a row.
        shift: Shift to the right of each word before integers are read.
        mask: Bits of a word that are read, after the shift.
        offset: Address of float32 (32,), whole numbers that are added.
        out: Address of the tiles, written: `PANELS` tiles for each `STEP_DEPTH` integers of a row.
    """

    source: Any
    words: Any
    shift: Any
    mask: Any
    offset: Any
    out: Any


def _words_to_pairs(signed: bool) -> Any:
    """Code that writes integers + offset. Signed integers are neither shifted nor masked."""

    def code(b: Any, read: Any) -> None:
        if not machine_code.KIND.has_amx:
            return
        shift, mask = (splat(b, b.trunc(value, INT32)) for value in (read.shift, read.mask))
        offsets = [load(b, read.offset, FLOATS, 4 * LANES * v) for v in range(PANELS)]
        with cgutils.for_range(b, read.words, intp=INT64) as word:
            source = b.add(read.source, b.mul(word.index, number(4 * LANES * PANELS)))
            step = b.mul(b.lshr(word.index, number(3)), number(WEIGHT_STEP_BYTES))
            rows = b.mul(b.and_(word.index, number(7)), number(2 * ROW_BYTES))
            out = b.add(read.out, b.add(step, rows))
            for v, offset in enumerate(offsets):
                values = load(b, source, INTS, 4 * LANES * v)
                values = values if signed else b.and_(b.lshr(values, shift), mask)
                real = [b.fadd(b.sitofp(byte_of_words(b, values, k, signed), FLOATS), offset) for k in range(4)]
                for k in (0, 2):
                    low, high = (b.bitcast(x, INTS) for x in real[k : k + 2])
                    pairs = b.or_(b.lshr(low, _all(16)), b.and_(high, _all(0xFFFF0000)))
                    store(b, pairs, b.add(out, number(TILE_BYTES * v + ROW_BYTES * (k // 2))))

    return on_addresses(code)


signed_to_pairs, unsigned_to_pairs = _words_to_pairs(True), _words_to_pairs(False)


class SplitTiles(NamedTuple):
    """Operands of a product of one or two tiles of rows with 32 columns of a weight, all with one scale.

    Fields are int64 in loops and LLVM values in the code here.

    Attributes:
        x: Address of the tiles of the first 16 rows, `TERMS` for each step.
        x_bytes: Stride to the tiles of the next 16 rows, in bytes.
        weight: Address of the tiles of the weight, `PANELS` for each step.
        steps: Number of steps, of `STEP_DEPTH` products.
        zeros: Address of `ROW_BYTES` bytes that are 0.
        sums: Address of float32 (PANELS, 32, 16), written.
        state: Address of the configuration of tiles, see `amx_code.configure`.
    """

    x: Any
    x_bytes: Any
    weight: Any
    steps: Any
    zeros: Any
    sums: Any
    state: Any


def _sums_of_split_tiles(rows: int) -> Any:
    """Code that stores the sums of one or two tiles of rows."""

    def code(b: Any, tiles: Any) -> None:
        if not machine_code.KIND.has_amx:
            return
        pairs = [(r, c) for r in range(rows) for c in range(PANELS)]
        for r, c in pairs:
            load_tile(b, tiles.state, PANELS * r + c, tiles.zeros, number(0))
        with cgutils.for_range(b, tiles.steps, intp=INT64) as step:
            weight = b.add(tiles.weight, b.mul(step.index, number(WEIGHT_STEP_BYTES)))
            x = b.add(tiles.x, b.mul(step.index, number(STEP_BYTES)))
            for c in range(PANELS):
                place = b.add(weight, number(TILE_BYTES * c))
                load_tile(b, tiles.state, WEIGHT_TILE + c, place, number(ROW_BYTES))
            for term in reversed(range(TERMS)):
                for r in range(rows):
                    place = b.add(x, b.add(b.mul(tiles.x_bytes, number(r)), number(TILE_BYTES * term)))
                    load_tile(b, tiles.state, PIXEL_TILE + r, place, number(ROW_BYTES))
                for r, c in pairs:
                    multiply_float_tiles(b, tiles.state, PANELS * r + c, PIXEL_TILE + r, WEIGHT_TILE + c)
        for r, c in pairs:
            store_tile(b, tiles.state, PANELS * r + c, b.add(tiles.sums, number(TILE_BYTES * (2 * c + r))))

    return on_addresses(code, is_called=True)


one_split_tile, two_split_tiles = _sums_of_split_tiles(1), _sums_of_split_tiles(2)


class ScaledSums(NamedTuple):
    """Sums of one or two blocks of the weight, to be scaled per column and added to the results.

    Fields are int64 in loops and LLVM values in the code here.

    Attributes:
        sums: Address of float32 (blocks, PANELS, 32, 16).
        blocks: Number of blocks, one of `BLOCK_COUNTS`.
        rows: Number of rows.
        columns: Number of columns, up to 32.
        scale: Address of float32 (blocks, 32).
        added: Address of float32 (32,), added to the scaled sums of the first row.
        added_bytes: Bytes from there to what is added to those of the next row.
        out: Address of the results of the first row, which may be what is added.
        out_bytes: Bytes from a row of results to the next.
    """

    sums: Any
    blocks: Any
    rows: Any
    columns: Any
    scale: Any
    added: Any
    added_bytes: Any
    out: Any
    out_bytes: Any


@on_addresses
def add_scaled_sums(b, scaled):
    """Write the sum of sums * scale over all blocks, + added."""
    if machine_code.KIND.has_amx:
        machine_code.choose(b, scaled.blocks, BLOCK_COUNTS, lambda blocks: _add_scaled_sums(b, scaled, blocks))


def _add_scaled_sums(b: Any, scaled: Any, blocks: int) -> None:
    count = splat(b, b.trunc(scaled.columns, INT32))
    exist = [b.icmp_signed("<", _lane_numbers(v), count) for v in range(PANELS)]
    scales = [
        [load(b, scaled.scale, FLOATS, 4 * LANES * (PANELS * k + v)) for k in range(blocks)] for v in range(PANELS)
    ]
    with cgutils.for_range(b, scaled.rows, intp=INT64) as row:
        sums = b.add(scaled.sums, b.mul(row.index, number(ROW_BYTES)))
        added = b.add(scaled.added, b.mul(row.index, scaled.added_bytes))
        out = b.add(scaled.out, b.mul(row.index, scaled.out_bytes))
        for v in range(PANELS):
            y = vectors.load_some(b, b.add(added, number(4 * LANES * v)), exist[v])
            for k, scale in enumerate(scales[v]):
                y = vectors.multiply_add(b, load(b, sums, FLOATS, SUMS_BYTES * k + 2 * TILE_BYTES * v), scale, y)
            vectors.store_some(b, y, b.add(out, number(4 * LANES * v)), exist[v])
