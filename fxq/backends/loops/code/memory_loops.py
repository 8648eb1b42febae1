"""What the loops of a program share: memory by its address, floats of integers and back, functions of floats."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]  # Numba does not list them
from numba.extending import intrinsic

from fxq.backends.loops.code.compiler import helper
from fxq.backends.loops.code.finish_code import bend, bound, gelu, hardsigmoid, hardswish, sigmoid, silu, tanh

_f, _i = np.float32, np.int32
NAMES = ("clamp", "prelu", "silu", "hardswish", "gelu", "sigmoid", "tanh", "hardsigmoid")
"""What is computed of results, by its number, as below."""
CLAMP, PRELU, SILU, HARDSWISH, GELU, SIGMOID, TANH, HARDSIGMOID = range(len(NAMES))
NOTHING = -1
"""No function, and no bounds but those of integers."""


def _pointer(dtype: Any) -> Any:
    @intrinsic
    def pointer(_typing: Any, _address: Any) -> Any:
        kind = types.CPointer(dtype)

        def code(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            return b.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.int64), code

    return pointer


floats, bytes_, ints = _pointer(types.float32), _pointer(types.uint8), _pointer(types.int32)


@helper
def at(bases, step, k):
    """The address that two fields say."""
    return bases[step[k]] + step[k + 1]


@helper
def scratch_of(bases):
    """Memory of a step while it runs."""
    return bases[2]


@helper
def read(x, is_float, scale, shift, out, count):
    """Integers or floats as floats."""
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
    """Floats to memory, or rounded to integers."""
    real = carray(floats(x), count)
    if to_floats:
        y = carray(floats(out), count)
        for j in range(count):
            y[j] = real[j]
        return
    about, y = carray(floats(numbers), 4), carray(bytes_(out), count)
    low, high, factor, zero = about[0], about[1], about[2], about[3]
    for j in range(count):
        value = real[j] * factor + zero
        value = low if not value > low else value
        value = high if value > high else value
        y[j] = np.uint8(_i(np.rint(value)))


def _each(function: Any) -> Any:
    """A function of 16 floats in place, for as many as there are."""

    @helper
    def each(x, count):
        for j in range(0, count, 16):
            function(x + 4 * j)

    return each


_silu, _hardswish, _gelu, _sigmoid, _tanh, _hardsigmoid = map(
    _each, (silu, hardswish, gelu, sigmoid, tanh, hardsigmoid)
)


@helper
def apply(kind, x, count, slope, numbers):
    """A function of floats in place, 16 at a time; `slope` has that of each of the 16, `numbers` two bounds."""
    if kind == CLAMP:
        for j in range(0, count, 16):
            bound(x + 4 * j, numbers)
    elif kind == PRELU:
        for j in range(0, count, 16):
            bend(x + 4 * j, slope)
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
