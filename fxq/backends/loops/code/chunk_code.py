"""Chunks of a row of a low-bit weight, as products of a few rows read and multiply them, for each kind of CPU.

A chunk is loaded as it is stored, and becomes vectors of floats, or of integers of 8 bits, in registers. Products are
added up in the lanes of a vector. Its length depends on the kind of CPU: ARM has 32 registers of 128 bits, of which the
sums of a tile take about eight, so that instructions need not wait for each other.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir

from fxq.backends.loops.code import machine_code, products, vectors
from fxq.backends.loops.code.unpacking_code import half_of_unit
from fxq.backends.loops.code.vectors import BYTES, FLOAT32, FLOATS, INT8, INT16, INT32, INTS, LANES, load
from fxq.quant.packing import UNIT

CHUNK = 32
"""Bytes of a row of the weight that are converted at once, unless tiles unpack them. They have one scale, or two if
they hold 4-bit values."""
_SUMS_AT_ONCE = 8
"""Registers with sums that ARM's instructions add to in turn."""
_ARM_LANES = 4
"""Numbers of 32 bits in a register of ARM."""
_NO_BYTE = 255
"""Index beyond the end of a vector: ARM reads 0 for it."""


class Chunk8:
    """Chunk of 32 values of 8 bits, for an input of floats.

    Attributes:
        stored: Bytes of a chunk of the weight.
        values: Values of a chunk.
        halves: Number of scales of a chunk.
        loaded: Type of the vectors of the input, each of which is multiplied at once.
        size: Bytes of a value of the input, or of a digit of one.
        digits: Number of digits of a value of the input, see `digit_code.py`.
    """

    stored, values, halves, loaded, size, digits = CHUNK, CHUNK, 1, FLOATS, 4, 1

    def __init__(self, signed: bool) -> None:
        self.signed = signed

    def sums(self, rows: int, columns: int) -> Any:
        """Vector type of the sums of a result, or of a pair of rows and of columns, in a tile of this size."""
        if not machine_code.KIND.is_arm:
            return self.loaded
        registers = 1 if self.has_pairs(rows, columns) else max(_SUMS_AT_ONCE // (rows * columns * self.halves), 1)
        return ir.VectorType(self.loaded.element, min(_ARM_LANES * registers, self.loaded.count))

    def raw(self, b: Any, address: Any) -> Any:
        """Bytes of a chunk, as they are loaded."""
        return [load(b, address, ir.VectorType(INT8, LANES), LANES * k) for k in range(CHUNK // LANES)]

    def prepared(self, b: Any, raw: Any, k: int) -> Any:
        """Vector k of the integers of a chunk, as floats."""
        return _floats_of(b, raw[k], self.signed)

    def plus_products(self, b: Any, total: Any, x: Any, weight: Any) -> Any:
        """Sums with the products of a vector of the input and a prepared vector of the weight."""
        count = x.type.count // total.type.count
        if count == 1:
            return self._plus_product(b, total, x, weight)
        for k in range(count):
            total = self._plus_product(b, total, *(products.part(b, value, k, count) for value in (x, weight)))
        return total

    def _plus_product(self, b: Any, total: Any, x: Any, weight: Any) -> Any:
        return vectors.multiply_add(b, x, weight, total)

    def has_pairs(self, _rows: int, _columns: int) -> bool:
        """Whether one instruction multiplies two rows of the input and two of the weight in tiles of this size."""
        return False

    def as_floats(self, _b: Any, sums: Any) -> Any:
        """Sums as floats."""
        return sums


def word_bytes() -> int:
    """Bytes of a word that holds 4-bit values, see `Chunk4`."""
    return 4 if machine_code.KIND.is_arm else 2


def input_factors() -> list[float]:
    """Factors of the input for the values of a word, see `Chunk4`."""
    return [1.0] * 8 if machine_code.KIND.is_arm else [16.0**-k for k in range(4)]


class Chunk4(Chunk8):
    """Chunk of 64 values of 4 bits: 32 in the low bits of its bytes, 32 in the high bits, each half with its own scale.

    Words of two bytes, or of four on ARM, become int32, each of which holds four values, or eight. Value k is masked
    but not shifted down, so it is 16**k times too large; the input is divided by 16**k instead, which is exact, or on
    ARM the value, as it becomes a float. The highest bit of signed values is flipped, which makes them unsigned with a
    zero point of 8.
    """

    values, halves = 2 * CHUNK, 2

    @property
    def loaded(self) -> Any:
        """Type of the vectors of the input: one number for each word."""
        return ir.VectorType(FLOAT32, CHUNK // word_bytes())

    def raw(self, b: Any, address: Any) -> Any:
        """Words of a chunk, int32."""
        count, is_whole = self.loaded.count, machine_code.KIND.is_arm
        words = load(b, address, ir.VectorType(INT32 if is_whole else INT16, count))
        words = words if is_whole else b.zext(words, ir.VectorType(INT32, count))
        flip = 0x88888888 if is_whole else 0x8888
        return b.xor(words, ir.Constant(words.type, [flip] * count)) if self.signed else words

    def prepared(self, b: Any, raw: Any, k: int) -> Any:
        """Values k of the words, of the low and of the high bits of a byte in turn, as floats."""
        if k == 0 and machine_code.KIND.has_avx512:  # one instruction, which reads the lowest four bits
            table = ir.Constant(FLOATS, [float(value) for value in range(LANES)])
            return vectors.call_intrinsic(b, "llvm.x86.avx512.permvar.sf.512", FLOATS, [table, raw])
        values = b.and_(raw, ir.Constant(raw.type, [15 << 4 * k] * raw.type.count))
        return _fixed_point(b, values, False, 4 * k) if machine_code.KIND.is_arm else b.sitofp(values, FLOATS)


class UnitChunk(Chunk8):
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


def _floats_of(b: Any, stored: Any, signed: bool) -> Any:
    """Floats of 16 integers of 8 bits."""
    if machine_code.KIND.is_arm:
        return _floats_of_bytes(b, stored, signed)
    return b.sitofp((b.sext if signed else b.zext)(stored, INTS), FLOATS)


def _floats_of_bytes(b: Any, stored: Any, signed: bool) -> Any:
    """Floats of 16 integers of 8 bits, on ARM. Each becomes the upper byte of an int32, four by one instruction."""
    parts = []
    for k in range(0, LANES, _ARM_LANES):
        places = [place for j in range(k, k + _ARM_LANES) for place in (_NO_BYTE, _NO_BYTE, _NO_BYTE, j)]
        order = _in_register(b, ir.Constant(BYTES, places))
        upper = vectors.call_intrinsic(b, "llvm.aarch64.neon.tbl1.v16i8", BYTES, [stored, order])
        parts.append(b.bitcast(upper, ir.VectorType(INT32, _ARM_LANES)))
    return _fixed_point(b, products.all_joined(b, parts), signed, 24)


def _fixed_point(b: Any, integers: Any, signed: bool, bits: int) -> Any:
    """Floats integer / 2**bits, on ARM."""
    count = integers.type.count // _ARM_LANES
    if not bits:
        return (b.sitofp if signed else b.uitofp)(integers, ir.VectorType(FLOAT32, integers.type.count))
    name, floats = f"llvm.aarch64.neon.vcvtfx{'s' if signed else 'u'}2fp", ir.VectorType(FLOAT32, _ARM_LANES)
    parts = [[products.part(b, integers, k, count), ir.Constant(INT32, bits)] for k in range(count)]
    parts = [vectors.call_intrinsic(b, f"{name}.v4f32.v4i32", floats, values) for values in parts]
    return products.all_joined(b, parts)


def _in_register(b: Any, constant: Any) -> Any:
    """Constant that stays in a register of ARM over a loop: LLVM would load it again each time, with its address."""
    llvmlite.binding.initialize_native_asmparser()
    same = ir.InlineAsm(ir.FunctionType(constant.type, [constant.type]), "", "=w,0")
    return b.call(same, [constant], attrs=("readnone", "nounwind"))


class Integers8(Chunk8):
    """Chunk of 32 values of 8 bits, for an input of integers: unsigned if those of the weight are signed, else signed.

    If `CpuKind.unsigned_dot` multiplies them, both are signed or both unsigned. One instruction adds four products to
    each of some sums where there is `CpuKind.dot`.
    """

    loaded, size = ir.VectorType(INT32, CHUNK // 4), 1

    def raw(self, b: Any, address: Any) -> Any:
        """Bytes of a chunk, as they are loaded: four to an int32."""
        return load(b, address, self.loaded)

    def prepared(self, _b: Any, raw: Any, _k: int) -> Any:
        """The bytes."""
        return raw

    def _plus_product(self, b: Any, total: Any, x: Any, weight: Any) -> Any:
        kind, (unsigned, signed) = machine_code.KIND, (x, weight) if self.signed else (weight, x)
        if kind.dot and not kind.has_avx512:
            return products.add_dot(b, total, unsigned, signed, bool(kind.unsigned_dot) and not self.signed)
        if kind.dot:
            return vectors.call_intrinsic(b, "llvm.x86.avx512.vpdpbusd.256", self.loaded, [total, unsigned, signed])
        unsigned, signed = (b.bitcast(value, ir.VectorType(INT8, CHUNK)) for value in (unsigned, signed))
        return b.add(total, self._sums(b, unsigned, signed))

    def has_pairs(self, rows: int, columns: int) -> bool:
        """Whether one instruction multiplies two rows of the input and two of the weight in tiles of this size."""
        return bool(machine_code.KIND.pair_dot) and rows % 2 == columns % 2 == 0

    def pair(self, b: Any, first: Any, second: Any) -> Any:
        """Eight integers of two vectors in turn."""
        return vectors.lanes_of(b, first, second, [lane for k in range(0, 8, 2) for lane in (k, k + 1, k + 8, k + 9)])

    def pair_lane(self, row: int, column: int) -> int:
        """Lane of the sum of a row of the input and a row of the weight, of two each."""
        return 2 * row + column if self.signed else 2 * column + row

    def plus_pairs(self, b: Any, total: Any, x: Any, weight: Any) -> Any:
        """Sums with the products of pairs of the input and of the weight."""
        for k in range(4):
            values = [products.part(b, value, k, 4) for value in ((x, weight) if self.signed else (weight, x))]
            total = products.add_pair_dot(b, total, *values)
        return total

    def as_floats(self, b: Any, sums: Any) -> Any:
        """Sums as floats. Those of unsigned products are not negative."""
        is_unsigned = machine_code.KIND.unsigned_dot and not self.signed
        return (b.uitofp if is_unsigned else b.sitofp)(sums, ir.VectorType(FLOAT32, sums.type.count))

    def _sums(self, b: Any, unsigned: Any, signed: Any) -> Any:
        """Sums of 32 products, each of four of them."""
        pairs = ir.VectorType(INT16, CHUNK)
        return vectors.halves_joined(b, products.add_pairs(b, b.zext(unsigned, pairs), b.sext(signed, pairs)), b.add)


class Integers4(Integers8):
    """Chunk of 64 values of 4 bits as in `Chunk4`, for an input of signed integers. The nibbles are made unsigned."""

    values, halves = 2 * CHUNK, 2

    def __init__(self, signed: bool) -> None:
        super().__init__(False)
        self._flip = 0x88888888 if signed else 0

    def raw(self, b: Any, address: Any) -> Any:
        """Bytes of a chunk, as they are loaded: four to an int32."""
        raw = load(b, address, self.loaded)
        return b.xor(raw, ir.Constant(self.loaded, [self._flip] * self.loaded.count)) if self._flip else raw

    def prepared(self, b: Any, raw: Any, k: int) -> Any:
        """The low or the high bits of each byte."""
        raw = b.lshr(raw, ir.Constant(self.loaded, [4] * self.loaded.count)) if k else raw
        return b.and_(raw, ir.Constant(self.loaded, [0x0F0F0F0F] * self.loaded.count))

    def _sums(self, b: Any, unsigned: Any, signed: Any) -> Any:
        return (
            products.small_sums(b, unsigned, signed) if machine_code.KIND.pairs else super()._sums(b, unsigned, signed)
        )


class IntegerUnit(Integers4):
    """Chunk of 64 values of 2, 3 or 6 bits as in `UnitChunk`, for an input of signed integers."""

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


class Digits4(Integers4):
    """Chunk of 64 values of 4 bits as in `Chunk4`, in one vector of 512 bits, for the digits of floats.

    The digits are those of `arranging_loops.split_digits`: integers of 8 bits.
    """

    bits, loaded, digits = 4, ir.VectorType(INT32, 2 * CHUNK // 4), 3

    def raw(self, b: Any, address: Any) -> Any:
        """Bytes of a chunk, twice."""
        raw = load(b, address, Integers4.loaded)
        return vectors.lanes_of(b, raw, raw, list(range(self.loaded.count)))

    def prepared(self, b: Any, raw: Any, _k: int) -> Any:
        """The low bits of each byte, then the high bits."""
        count = self.loaded.count // 2
        shifted = b.lshr(raw, ir.Constant(self.loaded, [0] * count + [4] * count))
        flipped = b.xor(shifted, ir.Constant(self.loaded, [self._flip] * 2 * count)) if self._flip else shifted
        return b.and_(flipped, ir.Constant(self.loaded, [0x0F0F0F0F] * 2 * count))

    def _plus_product(self, b: Any, total: Any, x: Any, weight: Any) -> Any:
        return vectors.call_intrinsic(b, machine_code.KIND.dot, self.loaded, [total, weight, x])


class DigitUnit(IntegerUnit):
    """Chunk of 64 values of 2, 3 or 6 bits as in `UnitChunk`, in one vector of 512 bits, for the digits of floats."""

    loaded, digits = Digits4.loaded, Digits4.digits

    def raw(self, b: Any, address: Any) -> Any:
        """Integers of a chunk, four to an int32."""
        first, second = super().raw(b, address)
        return vectors.joined(b, first, second)

    def prepared(self, _b: Any, raw: Any, _k: int) -> Any:
        """The integers."""
        return raw

    _plus_product = Digits4._plus_product
