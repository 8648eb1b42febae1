"""Machine code that adds products of unsigned and signed integers to 16 sums, exactly, for each kind of CPU.

Four integers of a pixel, uint8, are multiplied by four of each of 16 columns, int8. CPUs with VNNI add all four
products at once. On others, integers of 16 bits are multiplied, and products are added in pairs, in int32: the first
and the third, then the second and the fourth. Sums of pairs in 16 bits would saturate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir

from fxq.backends.loops.code import machine_code, vectors
from fxq.backends.loops.code.vectors import INT8, INT16, INT32, INTS, LANES, load, splat

_PAIRS = ir.VectorType(INT16, 2 * LANES)
"""Two integers of each of 16 sums."""


def group_of_pixel(b: Any, x: Any) -> list[Any]:
    """Vectors that `add_products` multiplies: of four integers of a pixel, which are an int32."""
    kind = machine_code.KIND
    if kind.dot:
        return [splat(b, b.xor(x, ir.Constant(INT32, kind.x_offset * 0x01010101)) if kind.x_offset else x)]
    every = splat(b, x)
    pairs = b.bitcast(every, _PAIRS)
    low, shift = (ir.Constant(_PAIRS, [value] * (2 * LANES)) for value in (255, 8))
    return [b.and_(pairs, low), b.lshr(pairs, shift)]


def group_of_weight(b: Any, address: Any) -> list[Any]:
    """Vectors that `add_products` multiplies: of four weights of each of 16 columns, as they are stored."""
    if machine_code.KIND.dot:
        return [load(b, address, INTS)]
    halves = (load(b, address, ir.VectorType(INT8, 2 * LANES), 2 * LANES * k) for k in (0, 1))
    return [b.sext(half, _PAIRS) for half in halves]


def add_products(b: Any, total: Any, xs: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Add the products of two groups to 16 sums."""
    for x, weight in zip(xs, weights, strict=True):
        total = add_dot(b, total, x, weight) if machine_code.KIND.dot else b.add(total, add_pairs(b, x, weight))
    return total


def add_dot(b: Any, total: Any, x: Any, weight: Any) -> Any:
    """Add four products to the sums of a vector. All arguments are int32."""
    kind = machine_code.KIND
    if kind.is_played and kind.bits == 256:  # LLVM has the instruction only together with wider vectors
        llvmlite.binding.initialize_native_asmparser()
        register = ir.VectorType(INT32, kind.bits // 32)
        asm = ir.InlineAsm(ir.FunctionType(register, [register] * 3), "vpdpbusd $3, $2, $0", "=x,0,x,x")
        return _by_register(b, lambda *values: b.call(asm, values), total, x, weight)

    def dot(*values: Any) -> Any:
        if kind.bits == 128:
            values = (values[0], *(b.bitcast(value, ir.VectorType(INT8, LANES)) for value in values[1:]))
        return vectors.call_intrinsic(b, kind.dot, values[0].type, values)

    return _by_register(b, dot, total, x, weight)


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


def side_by_side(b: Any, integers: Sequence[Any], signed: bool) -> Any:
    """Integers of two vectors of 16, of 8 bits, in turns, as int16 for `add_pairs`."""
    (first, second), widen, half = integers, b.sext if signed else b.zext, LANES // 2
    if machine_code.KIND.bits == 512:
        low = b.and_(widen(first, INTS), ir.Constant(INTS, [0xFFFF] * LANES)) if signed else widen(first, INTS)
        return b.bitcast(b.or_(low, b.shl(widen(second, INTS), ir.Constant(INTS, [16] * LANES))), _PAIRS)
    order = [k // 2 + LANES * (k % 2) for k in range(2 * LANES)]
    lanes = ir.VectorType(INT32, LANES)
    parts = (b.shuffle_vector(first, second, ir.Constant(lanes, order[k : k + 2 * half])) for k in (0, 2 * half))
    return _joined(b, *(widen(part, ir.VectorType(INT16, LANES)) for part in parts))


def _by_register(b: Any, instruction: Callable[..., Any], *values: Any) -> Any:
    """Apply an instruction of one register to vectors, whose parts fill a register each."""
    kind = machine_code.KIND
    count = max(values[0].type.count * values[0].type.element.width // kind.bits, 1)
    if count == 1:
        return instruction(*values)
    parts = [instruction(*(_part(b, value, k, count) for value in values)) for k in range(count)]
    while len(parts) > 1:
        parts = [_joined(b, *parts[k : k + 2]) for k in range(0, len(parts), 2)]
    return parts[0]


def _part(b: Any, value: Any, k: int, count: int) -> Any:
    """Part k of a vector."""
    lanes = value.type.count // count
    order = ir.Constant(ir.VectorType(INT32, lanes), list(range(k * lanes, (k + 1) * lanes)))
    return b.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), order)


def _joined(b: Any, first: Any, second: Any) -> Any:
    """Vector of two vectors of equal length."""
    lanes = 2 * first.type.count
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT32, lanes), list(range(lanes))))
