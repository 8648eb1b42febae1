"""Machine code for products of many rows of integers with a low-bit weight that has a scale per block.

ARM reads some groups of a row at once, since an instruction can multiply by any group of a register. With
`CpuKind.pair_dot`, it multiplies two rows by two columns: sums are those of a pair of rows and a pair of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import machine_code, products, vectors
from fxq.backends.loops.code.machine_code import GROUP, on_addresses
from fxq.backends.loops.code.vectors import FLOAT32, FLOATS, INT16, INT32, INT64, INTS, LANES, load, number, splat

ROWS, VECTORS = (6, 2) if machine_code.KIND.has_avx512 else (4 if machine_code.KIND.is_arm else 3, 1)
"""Rows of the input, and vectors of 16 columns of the result, of a tile: all their sums stay in registers."""
COLUMNS = LANES * VECTORS
"""Columns of the result of a tile."""
_PAIR, _REGISTER_GROUPS = 2, 4
"""Rows, or columns, of a pair; groups of a register of ARM."""


class ManyRows(NamedTuple):
    """Operands of a tile of `ROWS` rows of the input and `COLUMNS` rows of the weight.

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


def many_rows_tile(rows: int, count: int) -> Any:
    """Function that computes (x + added) @ weight.T * scale + bias for a tile of this size, see `ROWS`."""
    return on_addresses(partial(_many_rows, rows, count))


def _many_rows(rows: int, count: int, b: Any, many: Any) -> None:
    """Compute a tile. Products of a span are added as integers."""
    form = _PairedSums(rows, count) if machine_code.KIND.pair_dot and rows % _PAIR == 0 else _Sums(rows, count)
    sums, totals = form.allocated(b, INT32), form.allocated(b, FLOAT32)
    lines = [b.add(many.x, b.mul(many.x_bytes, number(r))) for r in range(rows)]
    spans = b.udiv(b.add(many.words, b.sub(many.span, number(1))), many.span)
    with cgutils.for_range(b, spans, intp=INT64) as span:
        for total in (total for row in sums for total in row):
            b.store(ir.Constant(total.type.pointee, None), total)
        first = b.mul(span.index, many.span)
        left = b.sub(many.words, first)
        left = b.select(b.icmp_signed("<", many.span, left), many.span, left)
        for size in (form.groups, 1) if form.groups > 1 else (1,):
            runs = b.udiv(left, number(size)) if size > 1 else left
            with cgutils.for_range(b, runs, intp=INT64) as inner:
                index = b.add(first, b.mul(inner.index, number(size)) if size > 1 else inner.index)
                form.add_groups(b, many, index, size, lines, sums)
            if size > 1:
                first, left = b.add(first, b.mul(runs, number(size))), b.urem(left, number(size))
        scales = b.add(many.scale, b.mul(span.index, number(4 * form.columns)))
        for v, factor in enumerate(form.factors(b, scales)):
            for total, row in zip(totals, sums, strict=True):
                part = b.sitofp(b.load(row[v]), factor.type)
                b.store(vectors.multiply_add(b, part, factor, b.load(total[v])), total[v])
    columns = list(zip(form.numbers(b, many.ones), form.numbers(b, many.bias), strict=True))
    for r in range(rows):
        scale, added = (splat(b, load(b, many.grids, FLOAT32, 8 * r + 4 * k)) for k in (0, 1))
        out = b.add(many.out, b.mul(many.out_bytes, number(r)))
        for v, (ones, bias) in enumerate(columns):
            y = vectors.multiply_add(b, added, ones, form.of_row(b, totals, r, v))
            vectors.store(b, vectors.multiply_add(b, y, scale, bias), b.add(out, number(4 * LANES * v)))


class _Sums:
    """Sums of a tile in memory of the code, which LLVM keeps in registers: a vector for 16 columns of a row.

    Args:
        rows: Rows of the tile.
        count: Vectors of 16 columns.
    """

    def __init__(self, rows: int, count: int) -> None:
        self.rows, self.count, self.columns = rows, count, LANES * count

    @property
    def groups(self) -> int:
        """Groups that are multiplied at once, but for the last ones of a span."""
        return _REGISTER_GROUPS if machine_code.KIND.is_arm else 1

    def allocated(self, b: Any, kind: Any) -> list[list[Any]]:
        """Memory for sums, by row and vector, all 0."""
        zero = ir.Constant(ir.VectorType(kind, LANES), None)
        return [[cgutils.alloca_once_value(b, zero) for _ in range(self.count)] for _ in range(self.rows)]

    def numbers(self, b: Any, address: Any) -> list[Any]:
        """Numbers of all columns, float32, in vectors."""
        return [load(b, address, FLOATS, 4 * LANES * v) for v in range(self.count)]

    def factors(self, b: Any, address: Any) -> list[Any]:
        """Numbers of all columns, in the order of the sums of a row."""
        return self.numbers(b, address)

    def of_row(self, b: Any, totals: Any, row: int, v: int) -> Any:
        """Vector v of the sums of a row."""
        return b.load(totals[row][v])

    def add_groups(self, b: Any, many: Any, index: Any, size: int, lines: Sequence[Any], sums: Any) -> None:
        """Add the products of `size` groups of `GROUP` integers of each row, from group `index` on."""
        address = b.add(many.weight, b.mul(index, number(GROUP * self.columns)))
        loaded = [] if size == 1 else [_groups_of_row(b, b.add(x, b.mul(index, number(GROUP))), size) for x in lines]
        for k in range(size):
            places = [GROUP * (self.columns * k + LANES * v) for v in range(self.count)]
            weights = [group_of_columns(b, b.add(address, number(place))) for place in places]
            offset = b.mul(index, number(GROUP))
            for r, row in enumerate(sums):
                values = loaded[r][k] if loaded else group_of_row(b, b.add(lines[r], offset))
                for total, weight in zip(row, weights, strict=True):
                    b.store(add_group(b, b.load(total), values, weight), total)


class _PairedSums(_Sums):
    """Sums of a tile, as `CpuKind.pair_dot` adds to them: a vector of four for two rows and two columns."""

    groups = 2

    def allocated(self, b: Any, kind: Any) -> list[list[Any]]:
        """Memory for sums, by pair of rows and of columns, all 0."""
        zero, count = ir.Constant(ir.VectorType(kind, _PAIR * _PAIR), None), self.columns // _PAIR
        return [[cgutils.alloca_once_value(b, zero) for _ in range(count)] for _ in range(self.rows // _PAIR)]

    def factors(self, b: Any, address: Any) -> list[Any]:
        """Numbers of all columns, in the order of the sums of a pair of rows."""
        pairs = [load(b, address, ir.VectorType(FLOAT32, _PAIR), 4 * k) for k in range(0, self.columns, _PAIR)]
        return [vectors.joined(b, pair, pair) for pair in pairs]

    def of_row(self, b: Any, totals: Any, row: int, v: int) -> Any:
        """Vector v of the sums of a row."""
        order = [_PAIR * (row % _PAIR) + c for c in range(_PAIR)]
        pairs = [b.load(total) for total in totals[row // _PAIR][LANES // _PAIR * v : LANES // _PAIR * (v + 1)]]
        return products.all_joined(b, [vectors.lanes_of(b, pair, pair, order) for pair in pairs])

    def add_groups(self, b: Any, many: Any, index: Any, size: int, lines: Sequence[Any], sums: Any) -> None:
        """Add the products of two groups, or of one, of each row, from group `index` on."""
        address = b.add(many.weight, b.mul(index, number(GROUP * self.columns)))
        offset, count = b.mul(index, number(GROUP)), _PAIR * _PAIR
        xs = [self._of_row(b, b.add(line, offset), size) for line in lines]
        xs = [vectors.joined(b, *xs[r : r + _PAIR]) for r in range(0, len(xs), _PAIR)]
        for c in range(0, self.columns, count):
            words = [load(b, address, ir.VectorType(INT32, count), GROUP * (self.columns * k + c)) for k in range(size)]
            first, second = words[0], words[1] if size > 1 else ir.Constant(words[0].type, None)
            for k in range(_PAIR):
                order = [lane for column in range(_PAIR * k, _PAIR * (k + 1)) for lane in (column, count + column)]
                weight = vectors.lanes_of(b, first, second, order)
                for x, row in zip(xs, sums, strict=True):
                    total = row[c // _PAIR + k]
                    b.store(products.add_pair_dot(b, b.load(total), x, weight), total)

    def _of_row(self, b: Any, address: Any, size: int) -> Any:
        """Two groups of a row, the second of which is 0 if `size` is 1."""
        values = load(b, address, INT64 if size > 1 else INT32)
        return b.bitcast(values if size > 1 else b.zext(values, INT64), ir.VectorType(INT32, _PAIR))


_PAIRS = ir.VectorType(INT16, 2 * LANES)
"""Two integers of each of 16 sums."""


def group_of_row(b: Any, address: Any) -> list[Any]:
    """Vectors that `add_group` multiplies, of `GROUP` integers of a row, or of each second one."""
    if machine_code.KIND.dot:
        return products.group_of_pixel(b, address)
    pairs = b.bitcast(splat(b, load(b, address, INT32)), _PAIRS)
    low, shift = (ir.Constant(_PAIRS, [value] * (2 * LANES)) for value in (255, 8))
    return [b.and_(pairs, low), b.lshr(pairs, shift)]


def _groups_of_row(b: Any, address: Any, size: int) -> list[list[Any]]:
    """Vectors that `add_group` multiplies, of each of `size` groups of a row."""
    x = load(b, address, ir.VectorType(INT32, size))
    offset = machine_code.KIND.x_offset * 0x01010101
    x = b.xor(x, ir.Constant(x.type, [offset] * size)) if offset else x
    return [[vectors.lanes_of(b, x, x, [k] * LANES)] for k in range(size)]


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
