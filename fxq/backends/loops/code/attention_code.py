"""Products of floats in tiles that stay in registers, and exponentials of their rows: what attention is made of."""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import vectors
from fxq.backends.loops.code.machine_code import HAS_AVX512, on_addresses
from fxq.backends.loops.code.vectors import FLOAT, FLOATS, INT32, INT64, LANES, load, number, splat, store

TILE_COLUMNS = 2 * LANES if HAS_AVX512 else LANES
"""Of how many columns a tile is."""
TILE_ROWS = 12 if HAS_AVX512 else 4
"""Of how many rows a large tile is. Small ones are of 4, or of one."""
_LOWEST, _NONE = -3.4028234663852886e38, -120.0
"""The lowest float32; the exponent from which on a power of two counts as 0."""


def _float_tile(rows: int) -> Any:
    """A product of some rows and `TILE_COLUMNS` columns.

    Of the code: `x` float32 (rows, depth), each row `by_row` bytes behind the one before; `weight` (depth, columns),
    each `by_depth` behind; `out` (rows, columns), each `to_row` behind.
    """

    def code(b, x, by_row, weight, by_depth, depth, out, to_row):
        parts = range(TILE_COLUMNS // LANES)
        totals = [[cgutils.alloca_once(b, FLOATS) for _ in parts] for _ in range(rows)]
        for row in totals:
            for total in row:
                b.store(splat(b, 0.0), total)
        lines = [b.add(x, b.mul(by_row, number(r))) for r in range(rows)]
        with cgutils.for_range(b, depth, intp=INT64) as step:
            at = b.add(weight, b.mul(step.index, by_depth))
            columns = [load(b, at, FLOATS, 4 * LANES * part) for part in parts]
            along = b.mul(step.index, number(4))
            for line, row in zip(lines, totals, strict=True):
                value = splat(b, load(b, b.add(line, along), FLOAT))
                for total, column in zip(row, columns, strict=True):
                    b.store(vectors.fused(b, value, column, b.load(total)), total)
        for r, row in enumerate(totals):
            for part, total in zip(parts, row, strict=True):
                store(b, b.load(total), b.add(b.add(out, b.mul(to_row, number(r))), number(4 * LANES * part)))

    return on_addresses(code)


many_rows, four_rows, one_row = (_float_tile(rows) for rows in (TILE_ROWS, 4, 1))


@on_addresses
def exponentials(b, x, blocks, total):
    """exp(y - the largest y) of float32 y (blocks, 16) in place, those below 2**-120 as 0, and their sum to `total`."""
    largest = cgutils.alloca_once(b, FLOATS)
    b.store(splat(b, _LOWEST), largest)
    with cgutils.for_range(b, blocks, intp=INT64) as block:
        y, most = load(b, b.add(x, b.mul(block.index, number(4 * LANES))), FLOATS), b.load(largest)
        b.store(vectors.larger(b, y, most), largest)
    most = splat(b, vectors.reduced(b, b.load(largest), partial(vectors.larger, b)))
    sums = cgutils.alloca_once(b, FLOATS)
    b.store(splat(b, 0.0), sums)
    with cgutils.for_range(b, blocks, intp=INT64) as block:
        place = b.add(x, b.mul(block.index, number(4 * LANES)))
        power = b.fmul(b.fsub(load(b, place, FLOATS), most), splat(b, vectors.LOG2E))
        y = b.select(b.fcmp_unordered(">", power, splat(b, _NONE)), vectors.power_of_two(b, power), splat(b, 0.0))
        store(b, y, place)
        b.store(b.fadd(b.load(sums), y), sums)
    store(b, vectors.reduced(b, b.load(sums), b.fadd), total)


@on_addresses
def transpose_floats(b, x, by_row, factor, out, to_row):
    """16 rows of 16 floats, each `by_row` bytes behind the one before, as columns, times the float at `factor`."""
    by = splat(b, load(b, factor, FLOAT))
    rows = [b.fmul(load(b, b.add(x, b.mul(by_row, number(r))), FLOATS), by) for r in range(LANES)]
    size = 1
    while size < LANES:  # of two rows that are `size` apart, the parts of that many columns change places
        for r in range(LANES):
            if not r & size:
                one, other = rows[r], rows[r + size]
                rows[r], rows[r + size] = (_exchanged(b, one, other, size, half) for half in (0, 1))
        size *= 2
    for r, row in enumerate(rows):
        store(b, row, b.add(out, b.mul(to_row, number(r))))


def _exchanged(b: Any, one: Any, other: Any, size: int, half: int) -> Any:
    """Of each 2 * `size` columns of two rows, the first halves side by side, or with `half` the second ones."""
    lanes = [k - k % (2 * size) + half * size + k % size + (LANES if k & size else 0) for k in range(LANES)]
    return b.shuffle_vector(one, other, ir.Constant(ir.VectorType(INT32, LANES), lanes))
