"""Grids that are measured on rows, and products of such rows: one loop each.

The bits of a float are ordered as an integer is once those of negative ones are turned around, and so is NaN, which
lies beyond infinity: with integers, smallest and largest are found many at a time, and NaN is not lost.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.compiler import compiled, helper
from fxq.quant.dynamic_grid import MIN_SCALE

_f = np.float32
SYMMETRIC, ROW, NEAREST = 0, 1, 2
"""How a grid is measured: around zero; with a zero point that is rounded up; with the nearest one. See `measured.py`"""


@compiled("f* f* f* u8* i i i f i i")
def quantize_rows(x, scale, zero, integers, rows, columns, kind, steps, qmin, qmax):
    """Measure the grid of each row, and round to it.

    Args:
        x: float32 (rows, columns).
        scale: float32 (rows,), written.
        zero: the zero point, float32 (rows,), written, also where it is known.
        integers: uint8 (rows, columns), written.
        rows: how many there are.
        columns: how many values each has.
        kind: SYMMETRIC, ROW or NEAREST.
        steps: as `DynamicGrid.steps`.
        qmin: smallest integer.
        qmax: largest integer.
    """
    x, integers = carray(x, (rows, columns)), carray(integers, (rows, columns))
    scale, zero = carray(scale, rows), carray(zero, rows)
    bits, ends = x.view(np.int32), np.zeros(2, np.int32)
    turned = np.int32(0x7FFFFFFF)
    for i in range(rows):
        low, high = np.int32(0), np.int32(0)
        for j in range(columns):
            ordered = np.int32(bits[i, j] ^ ((bits[i, j] >> np.int32(31)) & turned))
            low, high = min(low, ordered), max(high, ordered)
        ends[0], ends[1] = low ^ ((low >> np.int32(31)) & turned), high
        least, most = ends.view(np.float32)
        if most != most or least != least:
            step = _f(np.nan)
        elif kind == SYMMETRIC:
            step = max(most, -least) / steps
        else:
            step = most / steps - least * (_f(1) / steps)  # most - least may be too large for float32
        if step < _f(MIN_SCALE):
            step = _f(MIN_SCALE)
        if kind == SYMMETRIC:
            middle = _f((qmin + qmax + 1) // 2)
        elif kind == ROW:
            middle = _f(qmin) + np.ceil(-least / step)
        else:
            middle = _f(qmin) - np.rint(least / step)
        if middle != middle:  # a range without an end: nothing of the row is known
            step = _f(np.nan)
        scale[i], zero[i] = step, middle
        factor, first, last = _f(1) / step, np.int32(qmin), np.int32(qmax)
        for j in range(columns):
            nearest = np.int32(np.rint(x[i, j] * factor) + middle)
            integers[i, j] = np.uint8(max(min(nearest, last), first))


@helper
def _gelu(x):
    """x * (1 + erf(x / sqrt(2))) / 2, with an erf that is a ratio of polynomials: 1 within rounding from 3.83 on.

    Source: the erf of float32 in Eigen and XLA.
    """
    a = x * _f(0.7071067811865476)
    a = _f(3.8325069) if a > _f(3.8325069) else a
    a = _f(-3.8325069) if a < _f(-3.8325069) else a
    b = a * a
    over = _f(2.2905065861350646e-4) * b + _f(3.4082910107109506e-3)
    over = (over * b + _f(5.0955695062380861e-2)) * b + _f(1.8520832239976145e-1)
    over = over * b + _f(1.128379143519084)
    under = _f(-1.1791602954361697e-7) * b + _f(2.3547966471313185e-5)
    under = (under * b + _f(1.0179625278914885e-3)) * b + _f(1.4070470171167667e-2)
    under = ((under * b + _f(1.1098505178285362e-1)) * b + _f(4.9746925110067538e-1)) * b + _f(1)
    return _f(0.5) * x * (_f(1) + a * over / under)


def _scale(
    sums, scale, scales, zero, zeros, ones, weight_scale, bias, biases, out, rows, columns, least, most, is_gelu
):
    """Scale the product of rows whose grids were measured, with bias and activation function.

    Args:
        sums: int32 or float32 (rows, columns): the product of the integers.
        scale: that of each row, float32 (rows,), or one for all.
        scales: 1, or 0 where it is one.
        zero: the zero point of each row, float32 (rows,), or one for all.
        zeros: 1, or 0 where it is one.
        ones: what a row of ones gives, (columns,), of the type of `sums`.
        weight_scale: float32 (columns,).
        bias: float32 (rows, columns), or (columns,).
        biases: 1, or 0 where it is one for all rows.
        out: float32 (rows, columns), written.
        rows: how many rows there are.
        columns: how many outputs each has.
        least: no result is below it.
        most: no result is above it.
        is_gelu: 1: gelu is applied to the result instead.
    """
    sums, out = carray(sums, (rows, columns)), carray(out, (rows, columns))
    scale, zero, ones = carray(scale, rows), carray(zero, rows), carray(ones, columns)
    weight_scale, bias = carray(weight_scale, columns), carray(bias, (rows, columns))
    for i in range(rows):
        added = bias[i * biases]
        kind = sums.dtype.type  # without it Numba would compute integers with 64 bits
        step, middle = scale[i * scales], kind(zero[i * zeros])
        if is_gelu:
            for j in range(columns):
                out[i, j] = _gelu(_f(kind(sums[i, j] - kind(middle * ones[j]))) * (step * weight_scale[j]) + added[j])
            continue
        for j in range(columns):
            out[i, j] = _f(kind(sums[i, j] - kind(middle * ones[j]))) * (step * weight_scale[j]) + added[j]
        if least > -np.inf or most < np.inf:
            for j in range(columns):
                y = least if out[i, j] < least else out[i, j]  # NaN is neither
                out[i, j] = most if y > most else y


scale_sums = compiled("i32* f* i f* i i32* f* f* i f* i i f f i")(_scale)
scale_products = compiled("f* f* i f* i f* f* f* i f* i i f f i")(_scale)
