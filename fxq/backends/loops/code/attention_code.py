"""Machine code for attention: float products in tiles that stay in registers, and exponentials of rows of scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import vectors
from fxq.backends.loops.code.machine_code import KIND, choose, on_addresses
from fxq.backends.loops.code.vectors import (
    BYTES,
    FLOAT32,
    FLOATS,
    INT32,
    INT64,
    INTS,
    LANES,
    load,
    number,
    splat,
    store,
)

TILE_ROWS, TILE_COLUMNS = KIND.float_tile
"""Rows and columns of a large tile. Small tiles have 4 rows, or one."""
QUERIES_AT_ONCE = 4
"""Queries of a head that read a cache in integers at once, which are converted to floats once for all of them."""
_MIN_FLOAT32, _MIN_EXPONENT = -3.4028234663852886e38, -120.0
"""Lowest float32; powers of two with an exponent of at most `_MIN_EXPONENT` count as 0."""


def _tile(rows: int, columns_at: Callable[[Any, Any, int], Any]) -> Any:
    """Return code for the product of `rows` rows and `TILE_COLUMNS` columns.

    Arguments of the code, as addresses and bytes: `x`, float32 (rows, depth), with `row_stride` between rows; `weight`,
    (depth, columns), with `depth_stride` between rows; `out`, float32 (rows, columns), with `out_stride` between rows.
    `columns_at(builder, address, k)` returns the columns of the weight from 16 * k on as floats.
    """

    def code(b, x, row_stride, weight, depth_stride, depth, out, out_stride):
        column_vectors = range(TILE_COLUMNS // LANES)
        totals = [[cgutils.alloca_once(b, FLOATS) for _ in column_vectors] for _ in range(rows)]
        for row in totals:
            for total in row:
                b.store(splat(b, 0.0), total)
        lines = [b.add(x, b.mul(row_stride, number(r))) for r in range(rows)]
        with cgutils.for_range(b, depth, intp=INT64) as step:
            row_address = b.add(weight, b.mul(step.index, depth_stride))
            columns = [columns_at(b, row_address, vector) for vector in column_vectors]
            x_offset = b.mul(step.index, number(4))
            for line, row in zip(lines, totals, strict=True):
                value = splat(b, load(b, b.add(line, x_offset), FLOAT32))
                for total, column in zip(row, columns, strict=True):
                    b.store(vectors.multiply_add(b, value, column, b.load(total)), total)
        for r, row in enumerate(totals):
            for vector, total in zip(column_vectors, row, strict=True):
                store(b, b.load(total), b.add(b.add(out, b.mul(out_stride, number(r))), number(4 * LANES * vector)))

    return code


def _floats_at(b: Any, address: Any, k: int) -> Any:
    return load(b, address, FLOATS, 4 * LANES * k)


many_rows, four_rows, one_row = (on_addresses(_tile(rows, _floats_at)) for rows in (TILE_ROWS, 4, 1))


def integers_at(b: Any, address: Any, k: int = 0) -> Any:
    """16 integers, uint8, from 16 * k bytes after an address on, as floats."""
    return b.sitofp(b.zext(load(b, address, BYTES, LANES * k), INTS), FLOATS)


@on_addresses
def rows_of_integers(b, rows, x, row_stride, weight, depth_stride, depth, out, out_stride):
    """Multiply 1 to 4 rows of floats with columns of a weight in uint8, see `_tile`."""
    arguments = x, row_stride, weight, depth_stride, depth, out, out_stride
    choose(b, rows, range(1, QUERIES_AT_ONCE + 1), lambda count: _tile(count, integers_at)(b, *arguments))


ROWS_AT_ONCE = 4
"""Rows of scores whose exponentials are computed at once, so that none waits for the results of another."""


def _exponentials(rows: int) -> Any:
    """Return code that replaces each y of rows of floats by exp(y - max(y)) in place, and writes the sum of each row.

    Results below 2**-120 become 0. Arguments of the code: `x`, address of float32 (rows, blocks * 16), with
    `row_stride` bytes between rows; `blocks`; `totals`, address of float32 (rows,).
    """

    def code(b, x, row_stride, blocks, totals):
        lines = [b.add(x, b.mul(row_stride, number(r))) for r in range(rows)]
        largest = [cgutils.alloca_once_value(b, splat(b, _MIN_FLOAT32)) for _ in lines]
        with cgutils.for_range(b, blocks, intp=INT64) as block:
            offset = b.mul(block.index, number(4 * LANES))
            for line, largest_so_far in zip(lines, largest, strict=True):
                y = load(b, b.add(line, offset), FLOATS)
                b.store(vectors.larger(b, y, b.load(largest_so_far)), largest_so_far)
        highest = [splat(b, vectors.reduced(b, b.load(y), partial(vectors.larger, b))) for y in largest]
        sums = [cgutils.alloca_once_value(b, splat(b, 0.0)) for _ in lines]
        with cgutils.for_range(b, blocks, intp=INT64) as block:
            offset = b.mul(block.index, number(4 * LANES))
            for line, largest_of_row, total in zip(lines, highest, sums, strict=True):
                place = b.add(line, offset)
                power = b.fmul(b.fsub(load(b, place, FLOATS), largest_of_row), splat(b, vectors.LOG2E))
                y = b.select(
                    b.fcmp_unordered(">", power, splat(b, _MIN_EXPONENT)), vectors.power_of_two(b, power), splat(b, 0.0)
                )
                store(b, y, place)
                b.store(b.fadd(b.load(total), y), total)
        for r, total in enumerate(sums):
            store(b, vectors.reduced(b, b.load(total), b.fadd), b.add(totals, number(4 * r)))

    return code


exponentials_of_rows = on_addresses(_exponentials(ROWS_AT_ONCE))


@on_addresses
def exponentials(b, x, blocks, total):
    """Do what `exponentials_of_rows` does, for one row."""
    _exponentials(1)(b, x, number(0), blocks, total)


@on_addresses
def transpose_floats(b, x, row_stride, factor, out, out_stride):
    """Write 16 rows of 16 floats, `row_stride` bytes apart, as columns, multiplied by the float at `factor`."""
    factors = splat(b, load(b, factor, FLOAT32))
    rows = [b.fmul(load(b, b.add(x, b.mul(row_stride, number(r))), FLOATS), factors) for r in range(LANES)]
    size = 1
    while size < LANES:  # rows that are `size` apart exchange blocks of `size` columns
        for r in range(LANES):
            if not r & size:
                upper, lower = rows[r], rows[r + size]
                rows[r], rows[r + size] = (_exchange(b, upper, lower, size, half) for half in (0, 1))
        size *= 2
    for r, row in enumerate(rows):
        store(b, row, b.add(out, b.mul(out_stride, number(r))))


def _exchange(b: Any, upper: Any, lower: Any, size: int, half: int) -> Any:
    """Interleave two rows in blocks of `size` columns: the first block of each pair, or with `half` the second one."""
    lanes = [k - k % (2 * size) + half * size + k % size + (LANES if k & size else 0) for k in range(LANES)]
    return b.shuffle_vector(upper, lower, ir.Constant(ir.VectorType(INT32, LANES), lanes))
