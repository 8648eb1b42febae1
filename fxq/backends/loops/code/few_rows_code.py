"""Machine code for products of a few rows with a low-bit weight, which is read once, as it is stored.

The rows hold floats, or integers of 8 bits whose products with the weight are added exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import machine_code, products, vectors
from fxq.backends.loops.code.chunk_code import Chunk4, Chunk8, Integers4, Integers8, IntegerUnit, UnitChunk
from fxq.backends.loops.code.machine_code import on_addresses
from fxq.backends.loops.code.vectors import FLOAT32, FLOATS, INT8, INT32, INT64, INTS, LANES, load, number, splat

_TILES_AHEAD = 3
"""Distance of prefetches: a tile fetches into the second-level cache what is read this many tiles later."""
_SHORT_ROW_BYTES = 2048
"""Rows of the weight with fewer bytes are fetched in the order of memory. A tile reads some rows in turn, an order that
CPUs do not foresee where the rows share a page."""
_BYTES_AHEAD = 8192
"""Distance of the prefetches of short rows."""


class FewRows(NamedTuple):
    """Operands of some tiles, one after the other: some rows of the input, and some other rows of the weight for each.

    Fields are int64 in loops and LLVM values in the code here.

    Attributes:
        x: Address of the input as `few_rows_loops` arranges it, float32 or bytes (rows, chunks, 32 or 64). Tiles that
            multiply pairs of rows read eight bytes of each of two rows in turn.
        x_sums: Address of the sums of the input by scale, float32 (rows, scales rounded up to 16); 0: no offsets.
        weight: Address of the first row of the weight.
        row_bytes: Bytes of a row of the weight. The last chunk ends with the row and may overlap the one before.
        chunks: Number of chunks of a row. A chunk has 32 bytes, or 64 values of 2, 3 or 6 bits.
        span: Number of chunks with the same scales. The last span of a row may be shorter.
        places: Address of int32: bytes from the first scale of a row to that of each span; for 4-bit values to two,
            one for the low and one for the high bits.
        scale: Address of the scales of the first row, float32.
        scales: Number of scales of a row.
        offset: Address of the offsets of the first row, float32, one per scale. Each is multiplied by its sum in
            `x_sums` and subtracted.
        bias: Address of float32 by row of the weight.
        out: Address of the first result.
        out_bytes: Bytes from a result to that of the next row of the input.
        grids: Address of float32 (rows, 2), only for integers: scale of the row, and what is added to its integers.
        ones: Address of the sum of each row of the weight, float32, only for integers.
        tiles: Number of tiles.
    """

    x: Any
    x_sums: Any
    weight: Any
    row_bytes: Any
    chunks: Any
    span: Any
    places: Any
    scale: Any
    scales: Any
    offset: Any
    bias: Any
    out: Any
    out_bytes: Any
    grids: Any
    ones: Any
    tiles: Any

    def from_column(self, b: Any, first: Any) -> FewRows:
        """Operands of the tiles that start `first` rows of the weight later."""
        numbers, scales = b.mul(first, number(4)), b.mul(b.mul(first, number(4)), self.scales)
        return self._replace(
            weight=b.add(self.weight, b.mul(first, self.row_bytes)), scale=b.add(self.scale, scales),
            offset=b.add(self.offset, scales), bias=b.add(self.bias, numbers), out=b.add(self.out, numbers),
            ones=b.add(self.ones, numbers),
        )  # fmt: skip


def registers(b: Any, kind: Any, *sizes: int) -> Any:
    """Registers for sums of a vector type, in nested lists of these sizes. They start with 0."""
    if not sizes:
        return cgutils.alloca_once_value(b, ir.Constant(kind, None))
    return [registers(b, kind, *sizes[1:]) for _ in range(sizes[0])]


def add_to(b: Any, total: Any, x: Any, factor: Any) -> None:
    """Add x * factor to the sums in a register."""
    b.store(vectors.multiply_add(b, x, factor, b.load(total)), total)


def smaller(b: Any, x: Any, y: Any) -> Any:
    """Minimum of two int64."""
    return b.select(b.icmp_signed("<", x, y), x, y)


def _tiles(chunk: Any, rows: int, columns: int) -> Callable[..., None]:
    """Code that computes `rows` rows of results, for some tiles of `columns` rows of the weight each."""

    def code(b: Any, few: Any) -> None:
        spans = b.udiv(b.add(few.chunks, b.sub(few.span, number(1))), few.span)
        with cgutils.for_range(b, few.tiles, intp=INT64) as tile:
            _compute_tile(b, chunk, rows, columns, few.from_column(b, b.mul(tile.index, number(columns))), spans)

    return code


def _compute_tile(b: Any, chunk: Any, rows: int, columns: int, few: FewRows, spans: Any) -> None:
    """Compute `rows` rows of results for `columns` rows of the weight, each of which has `spans` spans."""
    kind, step = chunk.sums(rows, columns), 2 if chunk.has_pairs(rows, columns) else 1
    floats = ir.VectorType(FLOAT32, kind.count)
    totals = registers(b, floats, columns // step, rows // step)
    offsets = totals if step == 1 else registers(b, floats, columns, rows)
    sums = registers(b, kind, columns // step, rows // step, chunk.halves)
    x_bytes, scale_bytes = b.mul(few.chunks, number(chunk.size * chunk.values)), b.mul(few.scales, number(4))
    inputs = [b.add(few.x, b.mul(x_bytes, number(r))) for r in range(0, rows, step)]
    scale_lines, offset_lines = (
        [b.add(first, b.mul(scale_bytes, number(c))) for c in range(columns)] for first in (few.scale, few.offset)
    )
    with b.if_then(b.icmp_signed("!=", few.x_sums, number(0))):
        subtract_offsets(b, few, offset_lines, scale_lines, offsets)
    with b.if_else(b.icmp_signed("==", few.span, number(1))) as (of_one_chunk, of_several):
        with of_one_chunk, cgutils.for_range(b, few.chunks, intp=INT64) as span:
            scales = _start_span(b, chunk, few.places, span.index, scale_lines, sums)
            _add_chunk(b, chunk, few, span.index, inputs, sums, step)
            _end_span(b, chunk, sums, scales, totals)
        with of_several, cgutils.for_range(b, spans, intp=INT64) as span:
            scales = _start_span(b, chunk, few.places, span.index, scale_lines, sums)
            first = b.mul(span.index, few.span)
            count = b.sub(smaller(b, b.add(first, few.span), few.chunks), first)
            with cgutils.for_range(b, count, intp=INT64) as inner:
                _add_chunk(b, chunk, few, b.add(first, inner.index), inputs, sums, step)
            _end_span(b, chunk, sums, scales, totals)
    store_results(b, chunk, few, totals, offsets)


def _add_chunk(b: Any, chunk: Any, few: Any, index: Any, inputs: Sequence[Any], sums: Any, step: int) -> None:
    """Add the products of a chunk of each row of the weight, and fetch as much of later rows.

    `step` is the number of rows that are multiplied at once, of the input and of the weight.
    """
    raw = read_chunk(b, chunk, few, index, len(sums) * step)
    loaded = ir.VectorType(chunk.loaded.element, step * chunk.loaded.count)
    offset, vector_bytes = b.mul(index, number(step * chunk.size * chunk.values)), 4 * loaded.count
    plus = chunk.plus_products if step == 1 else chunk.plus_pairs
    for k in range(step * chunk.size * chunk.values // vector_bytes):
        values = [load(b, b.add(x, offset), loaded, vector_bytes * k) for x in inputs]
        for c, of_rows in enumerate(sums):
            weights = [chunk.prepared(b, of_column, k) for of_column in raw[step * c : step * (c + 1)]]
            weight = weights[0] if step == 1 else chunk.pair(b, *weights)
            for value, of_halves in zip(values, of_rows, strict=True):
                total = of_halves[k % chunk.halves]
                b.store(plus(b, b.load(total), value, weight), total)


def read_chunk(b: Any, chunk: Any, few: Any, index: Any, columns: int) -> list[Any]:
    """Load chunk `index` of each of `columns` rows of the weight, and fetch as much of later rows."""
    stored = chunk.stored
    start = smaller(b, b.mul(index, number(stored)), b.sub(few.row_bytes, number(stored)))
    addresses = [b.add(b.add(few.weight, b.mul(few.row_bytes, number(c))), start) for c in range(columns)]
    raw = [chunk.raw(b, address) for address in addresses]
    is_short = b.icmp_signed("<", few.row_bytes, number(_SHORT_ROW_BYTES))
    ahead = b.select(is_short, number(_BYTES_AHEAD), b.mul(few.row_bytes, number(_TILES_AHEAD * columns)))
    of_chunk, of_row = b.select(is_short, number(stored * columns), number(stored)), number(stored)
    later = b.add(b.add(few.weight, ahead), b.mul(index, of_chunk))
    for c in range(columns):
        row = b.mul(b.select(is_short, of_row, few.row_bytes), number(c))
        vectors.prefetch(b, b.add(later, row), level=2)
    return raw


def store_results(b: Any, chunk: Any, few: Any, totals: Any, offsets: Any) -> None:
    """Add up the lanes of each total, scale products of integers, and store the results.

    If rows are multiplied in pairs, `totals` have a lane for each of four results, and `offsets` are added up instead.
    """
    columns = ir.VectorType(FLOAT32, len(offsets))
    bias = load(b, few.bias, columns)
    for r in range(len(offsets[0])):
        y = vectors.sums_of(b, [b.load(of_rows[r]) for of_rows in offsets])
        if offsets is not totals:
            y = b.fadd(y, _row_of_pairs(b, chunk, totals, r))
        if chunk.size == 1:
            scale, added = (splat(b, load(b, few.grids, FLOAT32, 8 * r + 4 * k), columns.count) for k in (0, 1))
            y = y if chunk.digits > 1 else b.fadd(y, b.fmul(added, load(b, few.ones, columns)))
            y = b.fmul(y, scale)
        vectors.store(b, b.fadd(y, bias), b.add(few.out, b.mul(few.out_bytes, number(r))))


def _row_of_pairs(b: Any, chunk: Any, totals: Any, row: int) -> Any:
    """Results of a row of the input, of totals of pairs."""
    lanes = [chunk.pair_lane(row % 2, c) for c in range(2)]
    pairs = (b.load(of_rows[row // 2]) for of_rows in totals)
    return products.all_joined(b, [vectors.lanes_of(b, pair, pair, lanes) for pair in pairs])


def _start_span(b: Any, chunk: Any, places: Any, span: Any, lines: Sequence[Any], sums: Any) -> list[list[Any]]:
    """Load the scales of a span, by row of the weight and half of a chunk, and set the sums of the span to 0."""
    kind = sums[0][0][0].type.pointee
    for total in (total for of_rows in sums for of_halves in of_rows for total in of_halves):
        b.store(ir.Constant(kind, None), total)
    indices = [b.add(b.mul(span, number(chunk.halves)), number(half)) for half in range(chunk.halves)]
    distances = [b.sext(load(b, b.add(places, b.mul(index, number(4))), INT32), INT64) for index in indices]
    scales = [
        [splat(b, load(b, b.add(line, distance), FLOAT32), kind.count) for distance in distances] for line in lines
    ]
    if len(lines) == len(sums):
        return scales
    order = [kind.count * c for _, c in sorted((chunk.pair_lane(r, c), c) for r in range(2) for c in range(2))]
    return [
        [vectors.lanes_of(b, first, second, order) for first, second in zip(*scales[c : c + 2], strict=True)]
        for c in range(0, len(lines), 2)
    ]


def _end_span(b: Any, chunk: Any, sums: Any, scales: Sequence[Sequence[Any]], totals: Any) -> None:
    """Add the sums of a span times their scales to the totals."""
    for of_column, of_rows, factors in zip(totals, sums, scales, strict=True):
        for total, of_halves in zip(of_column, of_rows, strict=True):
            for scale, part in zip(factors, of_halves, strict=True):
                add_to(b, total, chunk.as_floats(b, b.load(part)), scale)


def subtract_offsets(b: Any, few: Any, lines: Sequence[Any], scale_lines: Sequence[Any], totals: Any) -> None:
    """Subtract sums of the input times offsets, 16 at a time, and fetch later offsets and scales as `read_chunk` does.

    `lines` and `scale_lines` are the addresses of the offsets and of the scales of each row of the weight.
    """
    ahead = b.mul(few.scales, number(4 * _TILES_AHEAD * len(lines)))
    steps = b.udiv(b.add(few.scales, number(LANES - 1)), number(LANES))
    x_bytes = b.mul(steps, number(4 * LANES))
    with cgutils.for_range(b, steps, intp=INT64) as step:
        first = b.mul(step.index, number(4 * LANES))
        left = b.trunc(b.sub(few.scales, b.mul(step.index, number(LANES))), INT32)
        for line in (*lines, *scale_lines):
            vectors.prefetch(b, b.add(b.add(line, first), ahead), level=2)
        if not machine_code.KIND.has_masks:
            is_whole = b.icmp_signed(">=", left, ir.Constant(INT32, LANES))
            with b.if_else(is_whole) as (of_whole, of_rest):
                with of_whole:
                    _add_offsets(b, few, lines, totals, x_bytes, first)
                with of_rest:
                    _add_offsets(b, few, lines, totals, x_bytes, first, left)
        else:
            _add_offsets(b, few, lines, totals, x_bytes, first, left)


def _add_offsets(
    b: Any, few: Any, lines: Sequence[Any], totals: Any, x_bytes: Any, first: Any, left: Any = None
) -> None:
    """Subtract 16 sums of each row of the input times offsets; `left` is the number of offsets if they may be fewer.

    `x_bytes` is the number of bytes from the sums of a row of the input to those of the next row, and `first` that of
    the bytes before these 16 sums.
    """
    kind = totals[0][0].type.pointee
    numbers, size = ir.Constant(ir.VectorType(INT32, kind.count), list(range(kind.count))), 4 * kind.count
    for k in range(LANES // kind.count):
        place = b.add(first, number(size * k))
        if left is None:
            offsets = [load(b, b.add(line, place), kind) for line in lines]
        else:
            is_offset = b.icmp_signed(
                "<", numbers, splat(b, b.sub(left, ir.Constant(INT32, kind.count * k)), kind.count)
            )
            offsets = [vectors.load_some(b, b.add(line, place), is_offset) for line in lines]
        for r in range(len(totals[0])):
            x = b.fneg(load(b, b.add(b.add(few.x_sums, b.mul(x_bytes, number(r))), place), kind))
            for offset, of_rows in zip(offsets, totals, strict=True):
                add_to(b, of_rows[r], x, offset)


SIZES = (4, 4, 2) if machine_code.KIND.registers == 32 else (2, 2, 1)
"""Sizes of tiles of floats: rows of the input; rows of the weight with one row of the input; and with so many."""
INTEGER_SIZES = (4, 4, 4 if machine_code.KIND.pair_dot else 2) if machine_code.KIND.registers == 32 else (2, 4, 2)
"""Sizes of tiles of integers."""
CHUNKS = tuple(kind(signed) for kind in (Chunk8, Chunk4) for signed in (True, False))
INTEGER_CHUNKS = tuple(kind(signed) for kind in (Integers8, Integers4) for signed in (True, False))
"""Chunks by kind of the weight: 8 bits signed, 8 unsigned, 4 signed, 4 unsigned."""
UNIT_BITS = (2, 3, 6)
"""Bits of values that tiles of one row unpack themselves."""
UNITS, INTEGER_UNITS = tuple(map(UnitChunk, UNIT_BITS)), tuple(map(IntegerUnit, UNIT_BITS))


def tiles(chunk: Any, *sizes: tuple[int, int]) -> tuple[Any, ...]:
    """Tiles of a kind of chunk, of several sizes: rows of the input, and rows of the weight."""
    return tuple(on_addresses(_tiles(chunk, *size)) for size in sizes)


def _conversion(signed: bool, shift: int, mask: int) -> Any:
    """Code that writes blocks of 16 integers as floats: (bits of a byte) * factor + offset.

    Arguments of the code: `source`, the address of the bytes; `blocks`, their number; `flip`, bits to flip in each
    byte; `numbers`, the address of float32: factor and offset; `out`, the address of the floats.
    """

    def code(b: Any, source: Any, blocks: Any, flip: Any, numbers: Any, out: Any) -> None:
        factor, offset = (splat(b, load(b, numbers, FLOAT32, 4 * k)) for k in (0, 1))
        flipped = splat(b, b.trunc(flip, INT32))
        with cgutils.for_range(b, blocks, intp=INT64) as block:
            stored = load(b, b.add(source, b.mul(block.index, number(LANES))), ir.VectorType(INT8, LANES))
            values = (b.sext if signed else b.zext)(stored, INTS)
            if not signed:
                values = b.lshr(b.xor(values, flipped), ir.Constant(INTS, [shift] * LANES))
                values = b.and_(values, ir.Constant(INTS, [mask] * LANES))
            y = vectors.multiply_add(b, b.sitofp(values, FLOATS), factor, offset)
            vectors.store(b, y, b.add(out, b.mul(block.index, number(4 * LANES))))

    return on_addresses(code)


floats_of_signed8, floats_of_bytes = _conversion(True, 0, 255), _conversion(False, 0, 255)
floats_of_low4, floats_of_high4 = _conversion(False, 0, 15), _conversion(False, 4, 15)
