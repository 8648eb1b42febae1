"""Helpers of the loops of a program: memory at an address, conversion of integers and floats, activation functions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]  # Numba does not list them
from numba.extending import intrinsic

from fxq.backends.loops.code.compiler import helper
from fxq.backends.loops.code.finish_code import (
    clamp,
    gelu,
    hardsigmoid,
    hardswish,
    round_floats,
    scale_negative,
    sigmoid,
    silu,
    tanh,
)
from fxq.backends.loops.code.vectors import LANES

_f, _i = np.float32, np.int32
FUNCTION_NAMES = ("clamp", "prelu", "silu", "hardswish", "gelu", "sigmoid", "tanh", "hardsigmoid")
"""Names of the functions that a step may apply to its results. The number of a function is its index."""
CLAMP, PRELU, SILU, HARDSWISH, GELU, SIGMOID, TANH, HARDSIGMOID = range(len(FUNCTION_NAMES))
FUNCTIONS_OF_X = FUNCTION_NAMES[SILU:]
"""Names of the functions without slopes or bounds."""
NO_FUNCTION = -1
"""Number of no function: results are neither transformed nor clamped, except to the limits of integers."""


def _pointer(dtype: Any) -> Any:
    """Numba function that turns an address, int64, into a pointer to `dtype`."""

    @intrinsic
    def pointer(_typing: Any, _address: Any) -> Any:
        kind = types.CPointer(dtype)

        def code(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            return b.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.int64), code

    return pointer


floats, bytes_, signed_bytes, shorts, ints, words = map(
    _pointer, (types.float32, types.uint8, types.int8, types.int16, types.int32, types.int64)
)


@helper
def address_of(bases, step, field):
    """Address that two fields of a step hold: the number of a base, and an offset in bytes."""
    return bases[step[field]] + step[field + 1]


@helper
def pair_at(step, field):
    """Two numbers of a step, from a field on."""
    return step[field], step[field + 1]


@helper
def triple_at(step, field):
    """Three numbers of a step, from a field on."""
    return step[field], step[field + 1], step[field + 2]


@helper
def four_at(step, field):
    """Four numbers of a step, from a field on."""
    return step[field], step[field + 1], step[field + 2], step[field + 3]


@helper
def scratch_of(bases):
    """Address of the scratch memory of a step."""
    return bases[2]


@helper
def read(x, is_float, scale, shift, out, count):
    """Write integers, dequantized, or floats as floats to `out`."""
    y = carray(floats(out), count)
    if is_float:
        real = carray(floats(x), count)
        for j in range(count):
            y[j] = real[j]
    else:
        integers = carray(bytes_(x), count)
        for j in range(count):
            y[j] = _f(integers[j]) * scale + shift


@helper
def write(x, to_floats, numbers, out, count):
    """Write floats to `out`, as they are or quantized to uint8.

    `numbers` is the address of float32: lower clamp, upper clamp, factor, zero point.
    """
    real = carray(floats(x), count)
    if to_floats:
        y = carray(floats(out), count)
        for j in range(count):
            y[j] = real[j]
        return
    if count >= LANES:
        for j in range(0, count, LANES):
            first = min(j, count - LANES)
            round_floats(x + 4 * first, numbers + 8, numbers, out + first)
        return
    bounds_and_grid, y = carray(floats(numbers), 4), carray(bytes_(out), count)
    low, high, factor, zero = bounds_and_grid[0], bounds_and_grid[1], bounds_and_grid[2], bounds_and_grid[3]
    for j in range(count):
        value = real[j] * factor + zero
        value = low if not value > low else value
        value = high if value > high else value
        y[j] = np.uint8(_i(np.rint(value)))


def _by_16(name: str, function: Any) -> Any:
    """Loop that applies a function of 16 floats in place to `count` floats."""

    def loop(x, count):
        for j in range(0, count, 16):
            function(x + 4 * j)

    return helper(loop, f"{name}_by_16")


_silu, _hardswish, _gelu, _sigmoid, _tanh, _hardsigmoid = map(
    _by_16, FUNCTIONS_OF_X, (silu, hardswish, gelu, sigmoid, tanh, hardsigmoid)
)


@helper
def apply_function(kind, x, count, slope, numbers):
    """Apply the function of number `kind` to floats in place, 16 at a time.

    `slope` is the address of the slopes of the 16 columns, `numbers` that of two bounds.
    """
    if kind == CLAMP:
        for j in range(0, count, 16):
            clamp(x + 4 * j, numbers)
    elif kind == PRELU:
        for j in range(0, count, 16):
            scale_negative(x + 4 * j, slope)
    elif kind == SILU:
        _silu(x, count)
    elif kind == HARDSWISH:
        _hardswish(x, count)
    elif kind == GELU:
        _gelu(x, count)
    elif kind == SIGMOID:
        _sigmoid(x, count)
    elif kind == TANH:
        _tanh(x, count)
    else:
        _hardsigmoid(x, count)
