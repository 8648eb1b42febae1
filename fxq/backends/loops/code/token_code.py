"""Machine code for attention of a few queries to a cache: products of queries with all keys, where they are stored."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import vectors
from fxq.backends.loops.code.attention_code import QUERIES_AT_ONCE, integers_at
from fxq.backends.loops.code.machine_code import KIND, choose, on_addresses
from fxq.backends.loops.code.vectors import (
    BYTES,
    FLOAT32,
    FLOATS,
    INT8,
    INT32,
    INT64,
    INTS,
    LANES,
    load,
    number,
    splat,
    store,
)

_KEYS_AT_ONCE = 4
KEY_QUERIES = QUERIES_AT_ONCE if KIND.has_avx512 else 1
"""Queries that are multiplied with keys in integers at once: so many sums for each of four keys stay in registers."""


@on_addresses
def key_products(b, query, keys, key_stride, count, blocks, out):
    """Write the products of a query with `count` keys, float32 (blocks, 16) each, `key_stride` bytes apart."""
    with cgutils.for_range(b, count, intp=INT64) as key:
        line, total = b.add(keys, b.mul(key.index, key_stride)), cgutils.alloca_once(b, FLOATS)
        b.store(splat(b, 0.0), total)
        with cgutils.for_range(b, blocks, intp=INT64) as block:
            offset = b.mul(block.index, number(4 * LANES))
            x, y = (load(b, b.add(start, offset), FLOATS) for start in (query, line))
            b.store(vectors.multiply_add(b, x, y, b.load(total)), total)
        store(b, vectors.reduced(b, b.load(total), b.fadd), b.add(out, b.mul(key.index, number(4))))


@on_addresses
def integer_key_products(
    b, queries, query, query_sums, keys, key_stride, scale, zero, count, blocks, out, out_stride
):  # fmt: skip
    """Write the products of 1 to `KEY_QUERIES` queries with `count` keys in integers.

    Arguments, as addresses and bytes: `query`, float32 (queries, blocks, 16), contiguous; `query_sums`, float32
    (queries,), sums of their values; `keys`, uint8 (blocks, 16) each, `key_stride` apart; `scale`, float32 (count,) and
    `zero`, uint8 (count,), of the keys; `out`, float32, with `out_stride` between queries.
    """

    def tile(of_queries: int, of_keys: int, first: Any) -> None:
        """Products of some queries with the keys from `first` on: scale * (query @ integers - zero * sum(query))."""
        lines = [b.add(keys, b.mul(b.add(first, number(k)), key_stride)) for k in range(of_keys)]
        totals = [[cgutils.alloca_once(b, FLOATS) for _ in lines] for _ in range(of_queries)]
        for total in (total for row in totals for total in row):
            b.store(splat(b, 0.0), total)
        with cgutils.for_range(b, blocks, intp=INT64) as block:
            offset = b.mul(block.index, number(LANES))
            xs = [integers_at(b, b.add(line, offset)) for line in lines]
            for r, row in enumerate(totals):
                start = b.add(query, b.mul(b.add(b.mul(number(r), blocks), block.index), number(4 * LANES)))
                y = load(b, start, FLOATS)
                for x, total in zip(xs, row, strict=True):
                    b.store(vectors.multiply_add(b, x, y, b.load(total)), total)
        steps = load(b, b.add(scale, b.mul(first, number(4))), ir.VectorType(FLOAT32, of_keys))
        zeros = b.uitofp(load(b, b.add(zero, first), ir.VectorType(INT8, of_keys)), steps.type)
        for r, row in enumerate(totals):
            sums = vectors.sums_of(b, [b.load(total) for total in row])
            shift = b.fmul(zeros, splat(b, load(b, query_sums, FLOAT32, 4 * r), of_keys))
            place = b.add(b.add(out, b.mul(out_stride, number(r))), b.mul(first, number(4)))
            store(b, b.fmul(steps, b.fsub(sums, shift)), place)

    def all_keys(of_queries: int) -> None:
        tiles = b.udiv(count, number(_KEYS_AT_ONCE))
        with cgutils.for_range(b, tiles, intp=INT64) as key:
            tile(of_queries, _KEYS_AT_ONCE, b.mul(key.index, number(_KEYS_AT_ONCE)))
        done = b.mul(tiles, number(_KEYS_AT_ONCE))
        with cgutils.for_range(b, b.sub(count, done), intp=INT64) as key:
            tile(of_queries, 1, b.add(done, key.index))

    choose(b, queries, range(1, KEY_QUERIES + 1), all_keys)


def _rows_as_floats(bits: int) -> Any:
    """Return code that writes rows of a cache in integers of 8 or 4 bits as floats.

    Arguments of the code, as addresses and bytes: `rows`, uint8, `stride` apart; `scale`, float32 (blocks,) for each
    row, `scale_stride` apart, and `zero`, uint8; `count`, the number of rows; `blocks` of a row, and `vectors` of 16
    values of a block; `out`, float32 (count, blocks, vectors, 16). With 4 bits, half a row is a multiple of 16 values.
    """

    def code(b, rows, stride, scale, scale_stride, zero, zero_stride, count, blocks, vectors, out):
        of_row = b.mul(blocks, vectors)
        half = b.lshr(of_row, number(1))
        with cgutils.for_range(b, count, intp=INT64) as row, cgutils.for_range(b, blocks, intp=INT64) as block:
            line = b.add(rows, b.mul(row.index, stride))
            steps, zeros = (
                b.add(start, b.mul(row.index, apart)) for start, apart in ((scale, scale_stride), (zero, zero_stride))
            )
            step = splat(b, load(b, b.add(steps, b.mul(block.index, number(4))), FLOAT32))
            middle = splat(b, b.uitofp(load(b, b.add(zeros, block.index), INT8), FLOAT32))
            with cgutils.for_range(b, vectors, intp=INT64) as vector:
                index = b.add(b.mul(block.index, vectors), vector.index)
                if bits == 8:
                    x = integers_at(b, b.add(line, b.mul(index, number(LANES))))
                else:
                    is_high = b.icmp_unsigned(">=", index, half)
                    place = b.sub(index, b.select(is_high, half, number(0)))
                    pairs = b.zext(load(b, b.add(line, b.mul(place, number(LANES))), BYTES), INTS)
                    shift = b.select(is_high, ir.Constant(INT32, 4), ir.Constant(INT32, 0))
                    x = b.sitofp(b.and_(b.lshr(pairs, splat(b, shift)), ir.Constant(INTS, [15] * LANES)), FLOATS)
                place = b.add(b.mul(row.index, of_row), index)
                store(b, b.fmul(b.fsub(x, middle), step), b.add(out, b.mul(place, number(4 * LANES))))

    return on_addresses(code)


bytes_as_floats, pairs_as_floats = map(_rows_as_floats, (8, 4))
