"""Machine code for products of many rows of integers with a low-bit weight that has a scale per block."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import machine_code, products, vectors
from fxq.backends.loops.code.machine_code import GROUP, on_addresses
from fxq.backends.loops.code.vectors import FLOAT32, FLOATS, INT16, INT32, INT64, INTS, LANES, load, number, splat

ROWS, VECTORS = (6, 2) if machine_code.KIND.has_avx512 else (3, 1)
"""Rows of the input, and vectors of 16 columns of the result, of a tile: all their sums stay in registers."""
COLUMNS = LANES * VECTORS
"""Columns of the result of a tile."""


class ManyRows(NamedTuple):
    """Operands of a tile: `ROWS` rows of the input, and `COLUMNS` rows of the weight.

    Fields are int64 in loops and LLVM values in the code here.

    Attributes:
        x: Address of the first row, uint8.
        x_bytes: Bytes from a row to the next.
        weight: Address of int8 (words, COLUMNS, GROUP), without zero points.
        words: Number of groups of `GROUP` integers in a row of the weight.
        span: Number of groups with one scale. The last ones may be fewer.
        scale: Address of the scales of the weight, float32 (spans, COLUMNS).
        grids: Address of float32 (ROWS, 2): scale of each row, and what is added to its integers.
        ones: Address of the sum of each row of the weight, float32 (COLUMNS,).
        bias: Address of float32 (COLUMNS,).
        out: Address of the first result.
        out_bytes: Bytes from a row of results to the next.
    """

    x: Any
    x_bytes: Any
    weight: Any
    words: Any
    span: Any
    scale: Any
    grids: Any
    ones: Any
    bias: Any
    out: Any
    out_bytes: Any


@on_addresses
def many_rows(b: Any, many: Any) -> None:
    """Compute (x + added) @ weight.T * scale + bias for a tile. Products of a span are added as integers."""
    sums, totals = (
        [[cgutils.alloca_once_value(b, ir.Constant(kind, None)) for _ in range(VECTORS)] for _ in range(ROWS)]
        for kind in (INTS, FLOATS)
    )
    lines = [b.add(many.x, b.mul(many.x_bytes, number(r))) for r in range(ROWS)]
    spans = b.udiv(b.add(many.words, b.sub(many.span, number(1))), many.span)
    with cgutils.for_range(b, spans, intp=INT64) as span:
        for total in (total for row in sums for total in row):
            b.store(ir.Constant(INTS, None), total)
        first = b.mul(span.index, many.span)
        left = b.sub(many.words, first)
        count = b.select(b.icmp_signed("<", many.span, left), many.span, left)
        with cgutils.for_range(b, count, intp=INT64) as inner:
            _add_word(b, many, b.add(first, inner.index), lines, sums)
        scales = b.add(many.scale, b.mul(span.index, number(4 * COLUMNS)))
        for v, factor in enumerate(_columns(b, scales)):
            for total, row in zip(totals, sums, strict=True):
                part = b.sitofp(b.load(row[v]), FLOATS)
                b.store(vectors.multiply_add(b, part, factor, b.load(total[v])), total[v])
    columns = list(zip(_columns(b, many.ones), _columns(b, many.bias), strict=True))
    for r, row in enumerate(totals):
        scale, added = (splat(b, load(b, many.grids, FLOAT32, 8 * r + 4 * k)) for k in (0, 1))
        out = b.add(many.out, b.mul(many.out_bytes, number(r)))
        for v, (ones, bias) in enumerate(columns):
            y = vectors.multiply_add(b, added, ones, b.load(row[v]))
            vectors.store(b, vectors.multiply_add(b, y, scale, bias), b.add(out, number(4 * LANES * v)))


def _columns(b: Any, address: Any) -> list[Any]:
    """Numbers of all columns, float32, in vectors."""
    return [load(b, address, FLOATS, 4 * LANES * v) for v in range(VECTORS)]


def _add_word(b: Any, many: Any, index: Any, lines: Any, sums: Any) -> None:
    """Add the products of a group of `GROUP` integers of each row."""
    address = b.add(many.weight, b.mul(index, number(GROUP * COLUMNS)))
    weights = [group_of_columns(b, b.add(address, number(GROUP * LANES * v))) for v in range(VECTORS)]
    offset = b.mul(index, number(GROUP))
    for line, row in zip(lines, sums, strict=True):
        values = group_of_row(b, b.add(line, offset))
        for total, weight in zip(row, weights, strict=True):
            b.store(add_group(b, b.load(total), values, weight), total)


_PAIRS = ir.VectorType(INT16, 2 * LANES)
"""Two integers of each of 16 sums."""


def group_of_row(b: Any, address: Any) -> list[Any]:
    """Vectors that `add_group` multiplies, of `GROUP` integers of a row, or of each second one."""
    if machine_code.KIND.dot:
        return products.group_of_pixel(b, address)
    pairs = b.bitcast(splat(b, load(b, address, INT32)), _PAIRS)
    low, shift = (ir.Constant(_PAIRS, [value] * (2 * LANES)) for value in (255, 8))
    return [b.and_(pairs, low), b.lshr(pairs, shift)]


def group_of_columns(b: Any, address: Any) -> list[Any]:
    """Vectors that `add_group` multiplies, of `GROUP` adjacent weights of each of 16 columns."""
    if machine_code.KIND.dot:
        return [load(b, address, INTS)]
    pairs, shift = load(b, address, _PAIRS), ir.Constant(_PAIRS, [8] * (2 * LANES))
    return [b.ashr(b.shl(pairs, shift), shift), b.ashr(pairs, shift)]


def add_group(b: Any, total: Any, xs: list[Any], weights: list[Any]) -> Any:
    """Add the products of two groups to 16 sums."""
    if machine_code.KIND.dot:
        return products.add_products(b, total, xs, weights)
    for x, weight in zip(xs, weights, strict=True):
        total = b.add(total, products.add_pairs(b, x, weight))
    return total
