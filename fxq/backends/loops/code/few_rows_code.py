"""Machine code for products of a few rows with a low-bit weight, which is read once, as it is stored.

The rows hold floats, or integers of 8 bits whose products with the weight are added exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import machine_code, products, vectors
from fxq.backends.loops.code.machine_code import on_addresses
from fxq.backends.loops.code.unpacking_code import half_of_unit
from fxq.backends.loops.code.vectors import FLOAT32, FLOATS, INT8, INT16, INT32, INT64, INTS, LANES, load, number, splat
from fxq.quant.packing import UNIT

CHUNK = 32
"""Bytes of a row of the weight that are converted at once, unless tiles unpack them. They have one scale, or two if
they hold 4-bit values."""

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
        x: Address of the input as `few_rows_loops` arranges it, float32 or bytes (rows, chunks, 32 or 64).
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


class _Chunk8:
    """Chunk of 32 values of 8 bits, for an input of floats.

    Attributes:
        stored: Bytes of a chunk of the weight.
        values: Values of a chunk.
        halves: Number of scales of a chunk.
        sums: Vector type of sums.
        size: Bytes of a value of the input.
    """

    stored, values, halves, sums, size = CHUNK, CHUNK, 1, FLOATS, 4

    def __init__(self, signed: bool) -> None:
        self.signed = signed

    def raw(self, b: Any, address: Any) -> Any:
        """Bytes of a chunk, as they are loaded."""
        return [load(b, address, ir.VectorType(INT8, LANES), LANES * k) for k in range(CHUNK // LANES)]

    def prepared(self, b: Any, raw: Any, k: int) -> Any:
        """Vector k of the integers of a chunk, as floats."""
        return b.sitofp((b.sext if self.signed else b.zext)(raw[k], INTS), FLOATS)

    def plus_product(self, b: Any, total: Any, x: Any, weight: Any) -> Any:
        """Sums with the products of a vector of the input and a prepared vector of the weight."""
        return vectors.multiply_add(b, x, weight, total)


class _Chunk4(_Chunk8):
    """Chunk of 64 values of 4 bits: 32 in the low bits of its bytes, 32 in the high bits, each half with its own scale.

    Two bytes become an int32, which holds four values. Value k is masked but not shifted down, so it is 16**k times too
    large; the input is divided by 16**k instead, which is exact. The highest bit of signed values is flipped, which
    makes them unsigned with a zero point of 8.
    """

    values, halves = 2 * CHUNK, 2

    def raw(self, b: Any, address: Any) -> Any:
        """Bytes of a chunk in pairs, int32."""
        pairs = b.zext(load(b, address, ir.VectorType(INT16, LANES)), INTS)
        return b.xor(pairs, ir.Constant(INTS, [0x8888] * LANES)) if self.signed else pairs

    def prepared(self, b: Any, raw: Any, k: int) -> Any:
        """Vector k of the integers of a chunk times 16**k, as floats: of the low and of the high bits in turn."""
        if k == 0 and machine_code.KIND.has_avx512:  # one instruction, which reads the lowest four bits
            table = ir.Constant(FLOATS, [float(value) for value in range(LANES)])
            return vectors.call_intrinsic(b, "llvm.x86.avx512.permvar.sf.512", FLOATS, [table, raw])
        return b.sitofp(b.and_(raw, ir.Constant(INTS, [15 << 4 * k] * LANES)), FLOATS)


class _Unit(_Chunk8):
    """Chunk of 64 values of 2, 3 or 6 bits, packed as `fxq/quant/packing.py` says, for an input of floats."""

    values = UNIT

    def __init__(self, bits: int) -> None:
        super().__init__(False)
        self.bits, self.stored = bits, bits * UNIT // 8

    def raw(self, b: Any, address: Any) -> Any:
        """Integers of a chunk, 16 to a vector."""
        halves = [half_of_unit(b, address, self.bits, half) for half in range(2)]
        kind = ir.VectorType(INT8, UNIT // 2)
        places = ir.VectorType(INT32, LANES)
        return [
            b.shuffle_vector(b.bitcast(half, kind), ir.Constant(kind, ir.Undefined), ir.Constant(places, order))
            for half in halves
            for order in (list(range(LANES)), list(range(LANES, 2 * LANES)))
        ]


def has_row_dot() -> bool:
    """Whether one instruction of this kind of CPU adds four products of uint8 and int8 to each of eight sums."""
    return bool(machine_code.KIND.dot) and machine_code.KIND.bits >= 256


class _Integers8:
    """Chunk of 32 values of 8 bits, for an input of integers: unsigned if those of the weight are signed, else signed.

    One instruction adds four products to each of eight sums where there is VNNI.
    """

    stored, values, halves, sums, size = CHUNK, CHUNK, 1, ir.VectorType(INT32, CHUNK // 4), 1

    def __init__(self, signed: bool) -> None:
        self.signed = signed

    def raw(self, b: Any, address: Any) -> Any:
        """Bytes of a chunk, as they are loaded: four to an int32."""
        return load(b, address, self.sums)

    def prepared(self, _b: Any, raw: Any, _k: int) -> Any:
        """The bytes."""
        return raw

    def plus_product(self, b: Any, total: Any, x: Any, weight: Any) -> Any:
        """Sums with the products of 32 integers of the input and of the weight."""
        unsigned, signed = (x, weight) if self.signed else (weight, x)
        if has_row_dot() and machine_code.KIND.bits == 256:
            return products.add_dot(b, total, unsigned, signed)
        if has_row_dot():
            return vectors.call_intrinsic(b, "llvm.x86.avx512.vpdpbusd.256", self.sums, [total, unsigned, signed])
        unsigned, signed = (b.bitcast(value, ir.VectorType(INT8, CHUNK)) for value in (unsigned, signed))
        return b.add(total, self._sums(b, unsigned, signed))

    def _sums(self, b: Any, unsigned: Any, signed: Any) -> Any:
        """Sums of 32 products, each of four of them."""
        pairs = ir.VectorType(INT16, CHUNK)
        return vectors.halves_joined(b, products.add_pairs(b, b.zext(unsigned, pairs), b.sext(signed, pairs)), b.add)


class _Integers4(_Integers8):
    """Chunk of 64 values of 4 bits as in `_Chunk4`, for an input of signed integers. The nibbles are made unsigned."""

    values, halves = 2 * CHUNK, 2

    def __init__(self, signed: bool) -> None:
        super().__init__(False)
        self._flip = 0x88888888 if signed else 0

    def raw(self, b: Any, address: Any) -> Any:
        """Bytes of a chunk, as they are loaded: four to an int32."""
        raw = load(b, address, self.sums)
        return b.xor(raw, ir.Constant(self.sums, [self._flip] * self.sums.count)) if self._flip else raw

    def prepared(self, b: Any, raw: Any, k: int) -> Any:
        """The low or the high bits of each byte."""
        raw = b.lshr(raw, ir.Constant(self.sums, [4] * self.sums.count)) if k else raw
        return b.and_(raw, ir.Constant(self.sums, [0x0F0F0F0F] * self.sums.count))

    def _sums(self, b: Any, unsigned: Any, signed: Any) -> Any:
        return (
            products.small_sums(b, unsigned, signed) if machine_code.KIND.pairs else super()._sums(b, unsigned, signed)
        )


class _IntegerUnit(_Integers4):
    """Chunk of 64 values of 2, 3 or 6 bits as in `_Unit`, for an input of signed integers."""

    halves = 1

    def __init__(self, bits: int) -> None:
        super().__init__(False)
        self.bits, self.stored = bits, bits * UNIT // 8

    def raw(self, b: Any, address: Any) -> Any:
        """Integers of a chunk, 32 to a vector, four to an int32."""
        return [half_of_unit(b, address, self.bits, half) for half in range(2)]

    def prepared(self, _b: Any, raw: Any, k: int) -> Any:
        """Vector k of the integers."""
        return raw[k]


def _registers(b: Any, kind: Any, *sizes: int) -> Any:
    """Registers for sums of a vector type, in nested lists of these sizes. They start with 0."""
    if not sizes:
        return cgutils.alloca_once_value(b, ir.Constant(kind, None))
    return [_registers(b, kind, *sizes[1:]) for _ in range(sizes[0])]


def _add(b: Any, total: Any, x: Any, factor: Any) -> None:
    """Add x * factor to the sums in a register."""
    b.store(vectors.multiply_add(b, x, factor, b.load(total)), total)


def _smaller(b: Any, x: Any, y: Any) -> Any:
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
    totals = _registers(b, _floats_like(chunk.sums), columns, rows)
    sums = _registers(b, chunk.sums, columns, rows, chunk.halves)
    x_bytes, scale_bytes = b.mul(few.chunks, number(chunk.size * chunk.values)), b.mul(few.scales, number(4))
    inputs = [b.add(few.x, b.mul(x_bytes, number(r))) for r in range(rows)]
    scale_lines, offset_lines = (
        [b.add(first, b.mul(scale_bytes, number(c))) for c in range(columns)] for first in (few.scale, few.offset)
    )
    with b.if_then(b.icmp_signed("!=", few.x_sums, number(0))):
        _subtract_offsets(b, few, offset_lines, scale_lines, totals)
    with b.if_else(b.icmp_signed("==", few.span, number(1))) as (of_one_chunk, of_several):
        with of_one_chunk, cgutils.for_range(b, few.chunks, intp=INT64) as span:
            scales = _start_span(b, chunk, few.places, span.index, scale_lines, sums)
            _add_chunk(b, chunk, few, span.index, inputs, sums)
            _end_span(b, sums, scales, totals)
        with of_several, cgutils.for_range(b, spans, intp=INT64) as span:
            scales = _start_span(b, chunk, few.places, span.index, scale_lines, sums)
            first = b.mul(span.index, few.span)
            count = b.sub(_smaller(b, b.add(first, few.span), few.chunks), first)
            with cgutils.for_range(b, count, intp=INT64) as inner:
                _add_chunk(b, chunk, few, b.add(first, inner.index), inputs, sums)
            _end_span(b, sums, scales, totals)
    _store_results(b, few, totals, chunk.sums is not FLOATS)


def _add_chunk(b: Any, chunk: Any, few: Any, index: Any, inputs: Sequence[Any], sums: Any) -> None:
    """Add the products of a chunk of each row of the weight, and fetch as much of later rows."""
    stored = chunk.stored
    start = _smaller(b, b.mul(index, number(stored)), b.sub(few.row_bytes, number(stored)))
    addresses = [b.add(b.add(few.weight, b.mul(few.row_bytes, number(c))), start) for c in range(len(sums))]
    raw = [chunk.raw(b, address) for address in addresses]
    columns, is_short = len(sums), b.icmp_signed("<", few.row_bytes, number(_SHORT_ROW_BYTES))
    ahead = b.select(is_short, number(_BYTES_AHEAD), b.mul(few.row_bytes, number(_TILES_AHEAD * columns)))
    of_chunk, of_row = b.select(is_short, number(stored * columns), number(stored)), number(stored)
    later = b.add(b.add(few.weight, ahead), b.mul(index, of_chunk))
    for c in range(columns):
        row = b.mul(b.select(is_short, of_row, few.row_bytes), number(c))
        vectors.prefetch(b, b.add(later, row), level=2)
    offset, vector_bytes = b.mul(index, number(chunk.size * chunk.values)), 4 * chunk.sums.count
    for k in range(chunk.size * chunk.values // vector_bytes):
        values = [load(b, b.add(x, offset), chunk.sums, vector_bytes * k) for x in inputs]
        for of_column, of_rows in zip(raw, sums, strict=True):
            weight = chunk.prepared(b, of_column, k)
            for value, of_halves in zip(values, of_rows, strict=True):
                total = of_halves[k % chunk.halves]
                b.store(chunk.plus_product(b, b.load(total), value, weight), total)


def _store_results(b: Any, few: Any, totals: Any, of_integers: bool) -> None:
    """Add up the lanes of each total, scale products of integers, and store the results."""
    columns = ir.VectorType(FLOAT32, len(totals))
    bias = load(b, few.bias, columns)
    for r in range(len(totals[0])):
        y = vectors.sums_of(b, [b.load(of_rows[r]) for of_rows in totals])
        if of_integers:
            scale, added = (splat(b, load(b, few.grids, FLOAT32, 8 * r + 4 * k), columns.count) for k in (0, 1))
            y = b.fmul(b.fadd(y, b.fmul(added, load(b, few.ones, columns))), scale)
        vectors.store(b, b.fadd(y, bias), b.add(few.out, b.mul(few.out_bytes, number(r))))


def _floats_like(kind: Any) -> Any:
    return ir.VectorType(FLOAT32, kind.count)


def _start_span(b: Any, chunk: Any, places: Any, span: Any, lines: Sequence[Any], sums: Any) -> list[list[Any]]:
    """Load the scales of a span, by row of the weight and half of a chunk, and set the sums of the span to 0."""
    for total in (total for of_rows in sums for of_halves in of_rows for total in of_halves):
        b.store(ir.Constant(chunk.sums, None), total)
    indices = [b.add(b.mul(span, number(chunk.halves)), number(half)) for half in range(chunk.halves)]
    distances = [b.sext(load(b, b.add(places, b.mul(index, number(4))), INT32), INT64) for index in indices]
    lanes = chunk.sums.count
    return [[splat(b, load(b, b.add(line, distance), FLOAT32), lanes) for distance in distances] for line in lines]


def _end_span(b: Any, sums: Any, scales: Sequence[Sequence[Any]], totals: Any) -> None:
    """Add the sums of a span times their scales to the totals."""
    for of_column, of_rows, factors in zip(totals, sums, scales, strict=True):
        for total, of_halves in zip(of_column, of_rows, strict=True):
            for scale, part in zip(factors, of_halves, strict=True):
                value = b.load(part)
                _add(b, total, value if value.type == scale.type else b.sitofp(value, scale.type), scale)


def _subtract_offsets(b: Any, few: Any, lines: Sequence[Any], scale_lines: Sequence[Any], totals: Any) -> None:
    """Subtract sums of the input times offsets, 16 at a time, and fetch later offsets and scales as `_add_chunk` does.

    `lines` and `scale_lines` are the addresses of the offsets and of the scales of each row of the weight.
    """
    ahead = b.mul(few.scales, number(4 * _TILES_AHEAD * len(lines)))
    steps = b.udiv(b.add(few.scales, number(LANES - 1)), number(LANES))
    x_bytes = b.mul(steps, number(4 * LANES))
    kind = totals[0][0].type.pointee
    numbers, size = ir.Constant(ir.VectorType(INT32, kind.count), list(range(kind.count))), 4 * kind.count
    with cgutils.for_range(b, steps, intp=INT64) as step:
        first = b.mul(step.index, number(4 * LANES))
        left = b.trunc(b.sub(few.scales, b.mul(step.index, number(LANES))), INT32)
        for line in (*lines, *scale_lines):
            vectors.prefetch(b, b.add(b.add(line, first), ahead), level=2)
        for k in range(LANES // kind.count):
            place = b.add(first, number(size * k))
            is_offset = b.icmp_signed(
                "<", numbers, splat(b, b.sub(left, ir.Constant(INT32, kind.count * k)), kind.count)
            )
            offsets = [vectors.load_some(b, b.add(line, place), is_offset) for line in lines]
            for r in range(len(totals[0])):
                x = b.fneg(load(b, b.add(b.add(few.x_sums, b.mul(x_bytes, number(r))), place), kind))
                for offset, of_rows in zip(offsets, totals, strict=True):
                    _add(b, of_rows[r], x, offset)


SIZES = (4, 4, 2) if machine_code.KIND.has_avx512 else (2, 2, 1)
"""Sizes of tiles of floats: rows of the input; rows of the weight with one row of the input; and with so many."""
INTEGER_SIZES = (4, 4, 2) if machine_code.KIND.has_avx512 else (2, 4, 2)
"""Sizes of tiles of integers."""
CHUNKS = tuple(kind(signed) for kind in (_Chunk8, _Chunk4) for signed in (True, False))
INTEGER_CHUNKS = tuple(kind(signed) for kind in (_Integers8, _Integers4) for signed in (True, False))
"""Chunks by kind of the weight: 8 bits signed, 8 unsigned, 4 signed, 4 unsigned."""
UNIT_BITS = (2, 3, 6)
"""Bits of values that tiles of one row unpack themselves."""
UNITS, INTEGER_UNITS = tuple(map(_Unit, UNIT_BITS)), tuple(map(_IntegerUnit, UNIT_BITS))


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
