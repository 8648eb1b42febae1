"""Machine code that adds products of unsigned and signed integers to 16 sums, exactly, for each kind of CPU.

Four integers of a pixel, uint8, are multiplied by four of each of 16 columns, int8. CPUs with VNNI add all four
products at once. On others, integers of 16 bits are multiplied, and products are added in pairs, in int32: sums of
pairs in 16 bits would saturate. Pixels are int16 there (`CpuKind.x_bytes`), and half of the multiplications become
additions, as in Winograd (1968), "A new algorithm for inner product"::

    x0 w0 + x2 w2 = (x0 + w2) (x2 + w0) - x0 x2 - w2 w0

The products of two integers of a pixel do not depend on the column (`add_own_products`), and those of two weights not
on the pixel: initial sums contain both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir

from fxq.backends.loops.code import machine_code, vectors
from fxq.backends.loops.code.vectors import INT8, INT16, INT32, INT64, INTS, LANES, load, splat

_PAIRS = ir.VectorType(INT16, 2 * LANES)
"""Two integers of each of 16 sums."""


def group_of_pixel(b: Any, address: Any) -> list[Any]:
    """Vectors that `add_products` multiplies: four integers of a pixel, of `CpuKind.x_bytes` each."""
    kind = machine_code.KIND
    x = load(b, address, INT32)
    if kind.dot:
        return [splat(b, b.xor(x, ir.Constant(INT32, kind.x_offset * 0x01010101)) if kind.x_offset else x)]
    return [b.bitcast(splat(b, pair), _PAIRS) for pair in (x, load(b, address, INT32, 4))]


def group_of_weight(b: Any, address: Any, size: int = 1) -> list[Any]:
    """Vectors that `add_products` multiplies: four weights of each of 16 columns, of `size` bytes each.

    With `CpuKind.dot`, it is one vector, else one with the first two weights of each column, and one with the others.
    """
    if machine_code.KIND.dot:
        return [load(b, address, INTS)]
    weights = ir.VectorType(ir.IntType(8 * size), 2 * LANES)
    halves = (load(b, address, weights, 2 * LANES * size * k) for k in (0, 1))
    return [half if size == 2 else b.sext(half, _PAIRS) for half in halves]


def add_products(b: Any, total: Any, xs: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Add the products of two groups to 16 sums; without `CpuKind.dot` also those within each group."""
    if machine_code.KIND.dot:
        return add_dot(b, total, xs[0], weights[0])
    return b.add(total, add_pairs(b, b.add(xs[1], weights[0]), b.add(xs[0], weights[1])))


def add_own_products(b: Any, total: Any, address: Any, groups: Any = None) -> Any:
    """Add the products within 8 groups of int16, or the first `groups` of them, to int32 (16,) that is summed later."""
    halves = ir.VectorType(INT64, LANES // 2)
    x = load(b, address, halves)
    if groups is not None:
        numbers = ir.Constant(halves, list(range(LANES // 2)))
        x = b.select(b.icmp_signed("<", numbers, splat(b, groups, LANES // 2)), x, ir.Constant(halves, None))
    last = b.lshr(x, ir.Constant(halves, [32] * (LANES // 2)))  # the last two integers of each group, and two zeros
    return b.add(total, add_pairs(b, b.bitcast(x, _PAIRS), b.bitcast(last, _PAIRS)))


def add_dot(b: Any, total: Any, x: Any, weight: Any, are_unsigned: bool = False) -> Any:
    """Add four products to the sums of a vector. All arguments are int32.

    `are_unsigned` says that both `x` and `weight` hold uint8, which `CpuKind.unsigned_dot` multiplies.
    """
    kind = machine_code.KIND
    name = kind.unsigned_dot if are_unsigned else kind.dot
    if kind.is_played and kind.bits == 256:  # LLVM has the instruction only together with wider vectors
        llvmlite.binding.initialize_native_asmparser()
        register = ir.VectorType(INT32, kind.bits // 32)
        asm = ir.InlineAsm(ir.FunctionType(register, [register] * 3), "vpdpbusd $3, $2, $0", "=x,0,x,x")
        return _by_register(b, lambda *values: b.call(asm, values), total, x, weight)

    def dot(*values: Any) -> Any:
        if kind.bits == 128:
            values = (values[0], *(b.bitcast(value, ir.VectorType(INT8, LANES)) for value in values[1:]))
            if kind.unsigned_dot:  # ARM can multiply by one group of the last register, which is often that of a row
                values = (values[0], values[2], values[1])
        return vectors.call_intrinsic(b, name, values[0].type, values)

    return _by_register(b, dot, total, x, weight)


def add_pair_dot(b: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Add the products of two rows of eight uint8 and two of eight int8 to four sums, see `CpuKind.pair_dot`."""
    rows = [b.bitcast(value, ir.VectorType(INT8, LANES)) for value in (unsigned, signed)]
    return vectors.call_intrinsic(b, machine_code.KIND.pair_dot, total.type, [total, *rows])


def add_pairs(b: Any, x: Any, weight: Any) -> Any:
    """Sums of the products of two integers, int32 (16,). Both arguments are int16 (32,)."""
    kind = machine_code.KIND
    if kind.pairs:
        result = ir.VectorType(INT32, kind.bits // 32)
        return _by_register(b, lambda *values: vectors.call_intrinsic(b, kind.pairs, result, values), x, weight)
    wide = ir.VectorType(INT32, 2 * LANES)
    products, undefined = b.mul(b.sext(x, wide), b.sext(weight, wide)), ir.Constant(wide, ir.Undefined)
    even, odd = (b.shuffle_vector(products, undefined, ir.Constant(INTS, list(range(k, 2 * LANES, 2)))) for k in (0, 1))
    return b.add(even, odd)


def small_sums(b: Any, unsigned: Any, signed: Any) -> Any:
    """Sums of the products of four integers of 8 bits, int32 (8,), on x86: exact if no unsigned one is above 127.

    The sums of two products have 16 bits, in which those of larger integers would saturate.
    """
    pairs, sums = ir.VectorType(INT16, 16), ir.VectorType(INT32, 8)
    sums_of_two = vectors.call_intrinsic(b, "llvm.x86.avx2.pmadd.ub.sw", pairs, [unsigned, signed])
    return vectors.call_intrinsic(b, "llvm.x86.avx2.pmadd.wd", sums, [sums_of_two, ir.Constant(pairs, [1] * 16)])


def side_by_side(b: Any, integers: Sequence[Any], signed: bool) -> Any:
    """Integers of two vectors of 16, of 8 bits, in turns, as int16 for `add_pairs`."""
    (first, second), widen, half = integers, b.sext if signed else b.zext, LANES // 2
    if machine_code.KIND.bits == 512:
        low = b.and_(widen(first, INTS), ir.Constant(INTS, [0xFFFF] * LANES)) if signed else widen(first, INTS)
        return b.bitcast(b.or_(low, b.shl(widen(second, INTS), ir.Constant(INTS, [16] * LANES))), _PAIRS)
    order = [k // 2 + LANES * (k % 2) for k in range(2 * LANES)]
    lanes = ir.VectorType(INT32, LANES)
    parts = (b.shuffle_vector(first, second, ir.Constant(lanes, order[k : k + 2 * half])) for k in (0, 2 * half))
    return vectors.joined(b, *(widen(part, ir.VectorType(INT16, LANES)) for part in parts))


def _by_register(b: Any, instruction: Callable[..., Any], *values: Any) -> Any:
    """Apply an instruction of one register to vectors, whose parts fill a register each."""
    kind = machine_code.KIND
    count = max(values[0].type.count * values[0].type.element.width // kind.bits, 1)
    if count == 1:
        return instruction(*values)
    return all_joined(b, [instruction(*(part(b, value, k, count) for value in values)) for k in range(count)])


def part(b: Any, value: Any, k: int, count: int) -> Any:
    """Part k of a vector that is divided into `count` parts."""
    lanes = value.type.count // count
    order = ir.Constant(ir.VectorType(INT32, lanes), list(range(k * lanes, (k + 1) * lanes)))
    return b.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), order)


def all_joined(b: Any, parts: Sequence[Any]) -> Any:
    """Vector of parts of equal length, whose number is a power of two."""
    left = list(parts)
    while len(left) > 1:
        left = [vectors.joined(b, *left[k : k + 2]) for k in range(0, len(left), 2)]
    return left[0]
