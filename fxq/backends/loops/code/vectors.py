"""LLVM instructions on vectors of 16 numbers, for any vector unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import machine_code

LANES = 16
"""Numbers of a vector."""
INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT32 = ir.FloatType()
INTS, FLOATS = ir.VectorType(INT32, LANES), ir.VectorType(FLOAT32, LANES)
BYTES = ir.VectorType(INT8, LANES)

LOG2E = 1.4426950408889634
"""exp(x) is 2**(x * LOG2E)."""
_MAX_EXPONENT = 120.0
"""Powers of two stay within 2**-120 and 2**120: a sigmoid of these is 1 or 0."""
_ROUNDING_OFFSET = 12582912.0
"""1.5 * 2**23: adding it to a float leaves the nearest integer in the lowest bits."""


def number(value: int) -> Any:
    """Constant int64."""
    return ir.Constant(INT64, value)


def splat(b: Any, value: Any, lanes: int = LANES) -> Any:
    """Vector with one number in all lanes: a value of the code, or a Python float."""
    if isinstance(value, float):
        return ir.Constant(ir.VectorType(FLOAT32, lanes), [value] * lanes)
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = b.insert_element(undefined, value, ir.Constant(INT32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes))


def load(b: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    """Load a value of type `kind` from an address plus `offset` bytes, without alignment."""
    place = b.add(address, number(offset)) if offset else address
    value = b.load(b.inttoptr(place, kind.as_pointer()))
    value.align = 1
    return value


def store(b: Any, value: Any, address: Any) -> None:
    """Store a value at an address, without alignment."""
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 1


def call_intrinsic(b: Any, name: str, result: Any, values: Sequence[Any]) -> Any:
    """Call an LLVM intrinsic by name."""
    function_type = ir.FunctionType(result, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, function_type, name), values)


def load_some(b: Any, address: Any, is_read: Any) -> Any:
    """Load those floats at an address whose lanes are true in `is_read`; the others are 0, and are not read."""
    lanes = is_read.type.count
    kind = ir.VectorType(FLOAT32, lanes)
    values = [b.inttoptr(address, kind.as_pointer()), ir.Constant(INT32, 4), is_read, ir.Constant(kind, None)]
    return call_intrinsic(b, f"llvm.masked.load.v{lanes}f32.p0v{lanes}f32", kind, values)


def store_some(b: Any, value: Any, address: Any, is_written: Any) -> None:
    """Store those floats of a vector at an address whose lanes are true in `is_written`; other memory stays."""
    lanes = value.type.count
    values = [value, b.inttoptr(address, value.type.as_pointer()), ir.Constant(INT32, 4), is_written]
    call_intrinsic(b, f"llvm.masked.store.v{lanes}f32.p0v{lanes}f32", ir.VoidType(), values)


def prefetch(b: Any, address: Any, level: int = 1) -> None:
    """Fetch the cache line at an address into the first- or second-level cache. Any address is allowed."""
    to_read, locality, data = (ir.Constant(INT32, value) for value in (0, 4 - level, 1))
    place = b.inttoptr(address, INT8.as_pointer())
    call_intrinsic(b, "llvm.prefetch.p0i8", ir.VoidType(), [place, to_read, locality, data])


def multiply_add(b: Any, x: Any, factor: Any, added: Any) -> Any:
    """x * factor + added, for floats."""
    lanes = x.type.count
    values = [value if not isinstance(value, float) else splat(b, value, lanes) for value in (x, factor, added)]
    return call_intrinsic(b, f"llvm.fmuladd.v{lanes}f32", x.type, values)


def clamp(b: Any, x: Any, low: Any, high: Any) -> Any:
    """Clamp x to two bounds. NaN becomes the lower bound."""
    x = b.select(b.fcmp_ordered(">", x, low), x, low)
    return b.select(b.fcmp_ordered("<", x, high), x, high)


def clamp_keep_nan(b: Any, x: Any, low: Any, high: Any) -> Any:
    """Clamp x to two bounds. NaN stays."""
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    return b.select(b.fcmp_ordered(">", x, high), high, x)


def larger(b: Any, x: Any, y: Any) -> Any:
    """Maximum of x and y; y where one of them is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def scale_negative(b: Any, x: Any, slope: Any) -> Any:
    """x where it is at least zero, else x * slope."""
    return b.select(b.fcmp_ordered("<", x, splat(b, 0.0)), b.fmul(x, slope), x)


def nearest(b: Any, x: Any) -> Any:
    """Round floats from 0 to 255 to int32."""
    lanes = x.type.count
    integers = ir.VectorType(INT32, lanes)
    bits = b.bitcast(b.fadd(x, splat(b, _ROUNDING_OFFSET, lanes)), integers)
    return b.and_(bits, ir.Constant(integers, [0xFF] * lanes))


def rounded(b: Any, x: Any) -> Any:
    """Round floats from 0 to 255 to uint8."""
    return b.trunc(nearest(b, x), BYTES)


def reduced(b: Any, x: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Combine all lanes into one number: `join` combines halves until one lane is left."""
    while x.type.count > 1:
        x = halves_joined(b, x, join)
    return b.extract_element(x, ir.Constant(INT32, 0))


def halves_joined(b: Any, x: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Combine the first half of the lanes with the second one by `join`."""
    lanes = x.type.count // 2
    order = ir.VectorType(INT32, lanes)
    return join(*(b.shuffle_vector(x, x, ir.Constant(order, [k + half for k in range(lanes)])) for half in (0, lanes)))


def sums_of(b: Any, of_floats: Sequence[Any]) -> Any:
    """Sums of the lanes of each of some vectors of floats, as one vector. Their number is a power of two."""
    lanes = size = of_floats[0].type.count
    left = list(of_floats)
    while len(left) > 1:  # of two vectors, halves of runs of `size` lanes become runs of one
        size //= 2
        firsts = [k for k in range(2 * lanes) if k % (2 * size) < size]
        left = [
            b.fadd(*(lanes_of(b, x, y, [k + half for k in firsts]) for half in (0, size)))
            for x, y in zip(left[::2], left[1::2], strict=True)
        ]
    total = left[0]
    for distance in (size >> k for k in range(1, size.bit_length())):
        total = b.fadd(total, lanes_of(b, total, total, [k ^ distance for k in range(lanes)]))
    return lanes_of(b, total, total, range(0, lanes, size))


def lanes_of(b: Any, x: Any, y: Any, order: Sequence[int]) -> Any:
    """Vector of lanes of two vectors: those of the second are numbered after those of the first."""
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(INT32, len(order)), list(order)))


def joined(b: Any, first: Any, second: Any) -> Any:
    """Vector of two vectors of equal length."""
    return lanes_of(b, first, second, range(2 * first.type.count))


def bounds(b: Any, numbers: Any, lanes: int = LANES) -> list[Any]:
    """Two floats at an address, each in all lanes."""
    return [splat(b, load(b, numbers, FLOAT32, 4 * k), lanes) for k in (0, 1)]


def _inverse(b: Any, x: Any) -> Any:
    """1 / x for floats from 1 to 2**121.

    With AVX512 an estimate and one Newton step, which are faster than a division.
    """
    if not machine_code.KIND.has_avx512:
        return b.fdiv(splat(b, 1.0), x)
    all_lanes = ir.Constant(ir.IntType(16), -1)
    y = call_intrinsic(b, "llvm.x86.avx512.rcp14.ps.512", FLOATS, [x, splat(b, 0.0), all_lanes])
    return multiply_add(b, y, multiply_add(b, b.fneg(x), y, 1.0), y)


def polynomial(b: Any, x: Any, first: float, *coefficients: float) -> Any:
    """Evaluate a polynomial with Horner's rule. Coefficients start with that of the highest power."""
    y = splat(b, first)
    for coefficient in coefficients:
        y = multiply_add(b, y, x, coefficient)
    return y


def power_of_two(b: Any, x: Any) -> Any:
    """2**x, within 2**-120 and 2**120.

    The whole part of x becomes the exponent of the float; a polynomial gives the rest.
    """
    power = clamp_keep_nan(b, x, splat(b, -_MAX_EXPONENT), splat(b, _MAX_EXPONENT))
    whole = call_intrinsic(b, "llvm.rint.v16f32", FLOATS, [power])
    # least relative error for |r| <= 1/2 among polynomials that are 1 at 0, found by a linear program
    y = polynomial(
        b, b.fsub(power, whole), 1.32546024e-3, 9.67199918e-3, 5.55077932e-2, 2.40222319e-1, 6.93146930e-1, 1.0
    )
    if machine_code.KIND.has_avx512:
        all_lanes, mode = ir.Constant(ir.IntType(16), -1), ir.Constant(INT32, 4)  # current rounding mode
        return call_intrinsic(b, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, [y, whole, y, all_lanes, mode])
    exponent = b.shl(b.add(b.fptosi(whole, INTS), ir.Constant(INTS, [127] * LANES)), ir.Constant(INTS, [23] * LANES))
    return b.fmul(y, b.bitcast(exponent, FLOATS))


def sigmoid(b: Any, x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    power = b.fmul(x, splat(b, -LOG2E))
    y = _inverse(b, b.fadd(power_of_two(b, power), splat(b, 1.0)))
    return b.select(b.fcmp_ordered(">=", power, splat(b, _MAX_EXPONENT)), splat(b, 0.0), y)


def silu(b: Any, x: Any) -> Any:
    """x * sigmoid(x)."""
    return b.fmul(x, sigmoid(b, x))


def tanh(b: Any, x: Any) -> Any:
    """2 * sigmoid(2 x) - 1, with an absolute error near 1e-7. Tiny x have a large relative error."""
    return multiply_add(b, sigmoid(b, b.fadd(x, x)), 2.0, -1.0)


def hardsigmoid(b: Any, x: Any) -> Any:
    """x / 6 + 1/2, clamped to 0 and 1."""
    return clamp_keep_nan(b, multiply_add(b, x, 1 / 6, 0.5), splat(b, 0.0), splat(b, 1.0))


def hardswish(b: Any, x: Any) -> Any:
    """x * hardsigmoid(x)."""
    return b.fmul(x, hardsigmoid(b, x))


def gelu(b: Any, x: Any) -> Any:
    """x * (1 + erf(x / sqrt(2))) / 2.

    erf is a ratio of polynomials that is 1 within rounding from 3.83 on. Source: the float32 erf of Eigen and XLA.
    """
    scaled, end = b.fmul(x, splat(b, 0.7071067811865476)), 3.8325069
    a = clamp(b, scaled, splat(b, -end), splat(b, end))
    square = b.fmul(a, a)
    numerator = polynomial(
        b, square,
        2.2905065861350646e-4, 3.4082910107109506e-3, 5.0955695062380861e-2, 1.8520832239976145e-1, 1.128379143519084,
    )  # fmt: skip
    denominator = polynomial(
        b, square,
        -1.1791602954361697e-7, 2.3547966471313185e-5, 1.0179625278914885e-3, 1.4070470171167667e-2,
        1.1098505178285362e-1, 4.9746925110067538e-1, 1.0,
    )  # fmt: skip
    one_plus_erf = multiply_add(b, b.fmul(a, numerator), _inverse(b, denominator), 1.0)
    one_plus_erf = b.select(b.fcmp_ordered("<", scaled, splat(b, -end)), splat(b, 0.0), one_plus_erf)
    return b.fmul(b.fmul(x, splat(b, 0.5)), one_plus_erf)


LAYER_FUNCTIONS = (silu, hardswish, gelu)
"""Activation functions that layers apply to their sums, besides clamps and PReLU."""
