"""Pieces of machine code for 16 numbers at a time, as LLVM has them for any vector unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code.machine_code import HAS_AVX512

LANES = 16
"""How many numbers a piece of code computes at once."""
INT8, INT32, INT64, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
INTS, FLOATS = ir.VectorType(INT32, LANES), ir.VectorType(FLOAT, LANES)

LOG2E = 1.4426950408889634
"""exp(x) is 2**(x * LOG2E)."""
_MOST = 120.0
"""Powers of two are kept within 2**-120 and 2**120: a sigmoid with these is 1 and 0."""
_ROUNDS = 12582912.0
"""1.5 * 2**23: a float that this was added to has the nearest integer in its lowest bits."""


def number(value: int) -> Any:
    """An integer of 64 bits."""
    return ir.Constant(INT64, value)


def splat(b: Any, value: Any, lanes: int = LANES) -> Any:
    """A number in all lanes: a value of the code, or a Python float."""
    if isinstance(value, float):
        return ir.Constant(ir.VectorType(FLOAT, lanes), [value] * lanes)
    nothing = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = b.insert_element(nothing, value, ir.Constant(INT32, 0))
    return b.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes))


def load(b: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    """What lies at an address, some bytes on."""
    place = b.add(address, number(offset)) if offset else address
    found = b.load(b.inttoptr(place, kind.as_pointer()))
    found.align = 1
    return found


def store(b: Any, value: Any, address: Any) -> None:
    """Write a value to an address."""
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 1


def intrinsic_of(b: Any, name: str, result: Any, values: Sequence[Any]) -> Any:
    """The value of an instruction that LLVM knows by name."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), values)


def prefetch(b: Any, address: Any) -> None:
    """Fetch the cache line of an address, which is read soon, into the first cache. It may be any address."""
    to_read, first, data = (ir.Constant(INT32, value) for value in (0, 3, 1))
    place = b.inttoptr(address, INT8.as_pointer())
    intrinsic_of(b, "llvm.prefetch.p0i8", ir.VoidType(), [place, to_read, first, data])


def fused(b: Any, x: Any, factor: Any, added: Any) -> Any:
    """x * factor + added, of floats."""
    values = [value if not isinstance(value, float) else splat(b, value) for value in (x, factor, added)]
    return intrinsic_of(b, "llvm.fmuladd.v16f32", FLOATS, values)


def clamped(b: Any, x: Any, low: Any, high: Any) -> Any:
    """x within two bounds; NaN becomes the lower one."""
    x = b.select(b.fcmp_ordered(">", x, low), x, low)
    return b.select(b.fcmp_ordered("<", x, high), x, high)


def within(b: Any, x: Any, low: Any, high: Any) -> Any:
    """The same, and NaN stays."""
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    return b.select(b.fcmp_ordered(">", x, high), high, x)


def larger(b: Any, x: Any, y: Any) -> Any:
    """The larger of two; y where one of them is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def bent(b: Any, x: Any, slope: Any) -> Any:
    """x, and where it is below zero x * slope."""
    return b.select(b.fcmp_ordered("<", x, splat(b, 0.0)), b.fmul(x, slope), x)


def nearest(b: Any, x: Any) -> Any:
    """Floats of 0 to 255 as integers of 32 bits, the nearest ones."""
    bits = b.bitcast(b.fadd(x, splat(b, _ROUNDS)), INTS)
    return b.and_(bits, ir.Constant(INTS, [0xFF] * LANES))


def rounded(b: Any, x: Any) -> Any:
    """Floats of 0 to 255 as bytes, the nearest ones."""
    return b.trunc(nearest(b, x), ir.VectorType(INT8, LANES))


def reduced(b: Any, x: Any, join: Callable[[Any, Any], Any]) -> Any:
    """All lanes as one number, which halves of them are joined to."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        order = ir.VectorType(INT32, lanes)
        x = join(*(b.shuffle_vector(x, x, ir.Constant(order, [k + half for k in range(lanes)])) for half in (0, lanes)))
    return b.extract_element(x, ir.Constant(INT32, 0))


def bounds(b: Any, numbers: Any) -> list[Any]:
    """The two floats at an address, each in all lanes."""
    return [splat(b, load(b, numbers, FLOAT, 4 * k)) for k in (0, 1)]


def _inverse(b: Any, x: Any) -> Any:
    """1 / x of floats from 1 to 2**121; with AVX512 an estimate and a step of Newton, which take less than division."""
    if not HAS_AVX512:
        return b.fdiv(splat(b, 1.0), x)
    all_lanes = ir.Constant(ir.IntType(16), -1)
    y = intrinsic_of(b, "llvm.x86.avx512.rcp14.ps.512", FLOATS, [x, splat(b, 0.0), all_lanes])
    return fused(b, y, fused(b, b.fneg(x), y, 1.0), y)


def _polynomial(b: Any, x: Any, first: float, *others: float) -> Any:
    y = splat(b, first)
    for coefficient in others:
        y = fused(b, y, x, coefficient)
    return y


def power_of_two(b: Any, x: Any) -> Any:
    """2**x, within 2**-120 and 2**120. The whole part of x is the exponent of the float; a polynomial is the rest."""
    power = within(b, x, splat(b, -_MOST), splat(b, _MOST))
    whole = intrinsic_of(b, "llvm.rint.v16f32", FLOATS, [power])
    # of those that are 1 at 0, the one with the least relative error for |r| <= 1/2, which a linear program finds
    y = _polynomial(
        b, b.fsub(power, whole), 1.32546024e-3, 9.67199918e-3, 5.55077932e-2, 2.40222319e-1, 6.93146930e-1, 1.0
    )
    if HAS_AVX512:
        all_lanes, mode = ir.Constant(ir.IntType(16), -1), ir.Constant(INT32, 4)  # rounded as everything is
        return intrinsic_of(b, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, [y, whole, y, all_lanes, mode])
    exponent = b.shl(b.add(b.fptosi(whole, INTS), ir.Constant(INTS, [127] * LANES)), ir.Constant(INTS, [23] * LANES))
    return b.fmul(y, b.bitcast(exponent, FLOATS))


def sigmoid(b: Any, x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    power = b.fmul(x, splat(b, -LOG2E))
    y = _inverse(b, b.fadd(power_of_two(b, power), splat(b, 1.0)))
    return b.select(b.fcmp_ordered(">=", power, splat(b, _MOST)), splat(b, 0.0), y)


def silu(b: Any, x: Any) -> Any:
    """x * sigmoid(x)."""
    return b.fmul(x, sigmoid(b, x))


def tanh(b: Any, x: Any) -> Any:
    """2 * sigmoid(2 x) - 1: with an error near 1e-7, also where it is itself as small."""
    return fused(b, sigmoid(b, b.fadd(x, x)), 2.0, -1.0)


def hardsigmoid(b: Any, x: Any) -> Any:
    """x / 6 + 1/2, within 0 and 1."""
    return within(b, fused(b, x, 1 / 6, 0.5), splat(b, 0.0), splat(b, 1.0))


def hardswish(b: Any, x: Any) -> Any:
    """x * hardsigmoid(x)."""
    return b.fmul(x, hardsigmoid(b, x))


def gelu(b: Any, x: Any) -> Any:
    """x * (1 + erf(x / sqrt(2))) / 2, with an erf that is a ratio of polynomials: 1 within rounding from 3.83 on.

    Source: the erf of float32 in Eigen and XLA.
    """
    scaled, end = b.fmul(x, splat(b, 0.7071067811865476)), 3.8325069
    a = clamped(b, scaled, splat(b, -end), splat(b, end))
    square = b.fmul(a, a)
    over = _polynomial(
        b, square,
        2.2905065861350646e-4, 3.4082910107109506e-3, 5.0955695062380861e-2, 1.8520832239976145e-1, 1.128379143519084,
    )  # fmt: skip
    under = _polynomial(
        b, square,
        -1.1791602954361697e-7, 2.3547966471313185e-5, 1.0179625278914885e-3, 1.4070470171167667e-2,
        1.1098505178285362e-1, 4.9746925110067538e-1, 1.0,
    )  # fmt: skip
    both = fused(b, b.fmul(a, over), _inverse(b, under), 1.0)
    both = b.select(b.fcmp_ordered("<", scaled, splat(b, -end)), splat(b, 0.0), both)
    return b.fmul(b.fmul(x, splat(b, 0.5)), both)
