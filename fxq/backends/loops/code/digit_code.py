"""Machine code for the product of a row of floats with a weight of 6 bits or fewer, by instructions for integers.

The floats of a row become integers of 24 bits with one power of two as their scale, and these three digits of 8 bits
each, which CPUs with VNNI multiply by the integers of the weight 64 at a time. Sums of a few chunks are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import machine_code, vectors
from fxq.backends.loops.code.chunk_code import Digits4, DigitUnit
from fxq.backends.loops.code.few_rows_code import (
    UNIT_BITS,
    FewRows,
    add_to,
    read_chunk,
    registers,
    smaller,
    store_results,
    subtract_offsets,
)
from fxq.backends.loops.code.machine_code import on_addresses
from fxq.backends.loops.code.vectors import FLOAT32, FLOATS, INT32, INT64, LANES, load, number, splat

HAS_DIGITS = machine_code.KIND.has_avx512 and bool(machine_code.KIND.dot)
"""Whether these tiles are faster than those of `few_rows_code.py` for one row of floats."""
DIGIT_COLUMNS = 4
"""Rows of the weight of a tile."""
DIGIT_CHUNKS, DIGIT_UNITS = tuple(map(Digits4, (True, False))), tuple(map(DigitUnit, UNIT_BITS))
"""Chunks by kind of the weight: 4 bits signed, 4 unsigned; and 2, 3, and 6 bits."""


def tiles(chunk: Any) -> tuple[Any, ...]:
    """Tiles of a kind of chunk, for one row of the weight and for `DIGIT_COLUMNS`."""
    return tuple(on_addresses(_tiles(chunk, columns)) for columns in (1, DIGIT_COLUMNS))


def _tiles(chunk: Any, columns: int) -> Callable[..., None]:
    """Code that computes a row of results, for some tiles of `columns` rows of the weight each."""

    def code(b: Any, few: Any) -> None:
        spans = b.udiv(b.add(few.chunks, b.sub(few.span, number(1))), few.span)
        with cgutils.for_range(b, few.tiles, intp=INT64) as tile:
            _compute_tile(b, chunk, columns, few.from_column(b, b.mul(tile.index, number(columns))), spans)

    return code


def _chunks_at_once(bits: int) -> int:
    """Number of chunks whose products with values of so many bits are added as int32: one, or two if they fit."""
    return 2 if 8 * (2**bits - 1) * 2**23 < 2**31 else 1


def _compute_tile(b: Any, chunk: Any, columns: int, few: FewRows, spans: Any) -> None:
    """Compute results for `columns` rows of the weight, each of which has `spans` spans."""
    totals, at_once = registers(b, FLOATS, columns, 1), _chunks_at_once(chunk.bits)
    digit_bytes, scale_bytes = b.mul(few.chunks, number(chunk.values)), b.mul(few.scales, number(4))
    digits = [b.add(few.x, b.mul(digit_bytes, number(d))) for d in range(chunk.digits)]
    scales, offsets = (
        [b.add(first, b.mul(scale_bytes, number(c))) for c in range(columns)] for first in (few.scale, few.offset)
    )
    with b.if_then(b.icmp_signed("!=", few.x_sums, number(0))):
        subtract_offsets(b, few, offsets, scales, totals)

    def add_chunks(first: Any, count: int, factors: Sequence[Any]) -> None:
        chunks = [b.add(first, number(k)) for k in range(count)]
        for of_row, total, factor in zip(totals, _sums(b, chunk, few, chunks, digits, columns), factors, strict=True):
            add_to(b, of_row[0], b.sitofp(total, FLOATS), factor)

    with b.if_else(b.icmp_signed("==", few.span, number(1))) as (of_one_chunk, of_several):
        with of_one_chunk, cgutils.for_range(b, few.chunks, intp=INT64) as span:
            add_chunks(span.index, 1, _scales(b, chunk, few.places, span.index, scales))
        with of_several, cgutils.for_range(b, spans, intp=INT64) as span:
            factors = _scales(b, chunk, few.places, span.index, scales)
            first = b.mul(span.index, few.span)
            count = b.sub(smaller(b, b.add(first, few.span), few.chunks), first)
            with cgutils.for_range(b, b.udiv(count, number(at_once)), intp=INT64) as group:
                add_chunks(b.add(first, b.mul(group.index, number(at_once))), at_once, factors)
            with b.if_then(b.icmp_signed("!=", b.urem(count, number(at_once)), number(0))):
                add_chunks(b.sub(b.add(first, count), number(1)), 1, factors)
    store_results(b, chunk, few, totals, totals)


def _sums(b: Any, chunk: Any, few: FewRows, chunks: Sequence[Any], digits: Sequence[Any], columns: int) -> list[Any]:
    """Sums of the products of some chunks with the integers of the row, int32 (16,), by row of the weight.

    Args:
        b: builder of the code.
        chunk: kind of the chunks.
        few: operands of the tile.
        chunks: numbers of the chunks.
        digits: address of each digit of the row.
        columns: number of rows of the weight.
    """
    weights = [[chunk.prepared(b, raw, 0) for raw in read_chunk(b, chunk, few, k, columns)] for k in chunks]
    totals = [ir.Constant(chunk.loaded, None)] * columns
    for digit in reversed(digits):  # the highest first
        totals = [b.shl(total, ir.Constant(chunk.loaded, [8] * LANES)) for total in totals]
        for k, of_chunk in zip(chunks, weights, strict=True):
            x = load(b, b.add(digit, b.mul(k, number(chunk.values))), chunk.loaded)
            totals = [chunk.plus_products(b, total, x, weight) for total, weight in zip(totals, of_chunk, strict=True)]
    return totals


def _scales(b: Any, chunk: Any, places: Any, span: Any, lines: Sequence[Any]) -> list[Any]:
    """Scales of a span in the lanes of its sums, float32 (16,), by row of the weight."""
    indices = [b.add(b.mul(span, number(chunk.halves)), number(half)) for half in range(chunk.halves)]
    distances = [b.sext(load(b, b.add(places, b.mul(index, number(4))), INT32), INT64) for index in indices]
    parts = [[splat(b, load(b, b.add(line, d), FLOAT32), LANES // chunk.halves) for d in distances] for line in lines]
    return [part[0] if len(part) == 1 else vectors.joined(b, *part) for part in parts]
