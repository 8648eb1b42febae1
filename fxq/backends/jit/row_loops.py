"""Grids that are measured on rows, and products of such rows: one loop each.

The bits of a float are ordered as an integer is once those of negative ones are turned around, and so is NaN, which
lies beyond infinity: with integers, smallest and largest are found many at a time, and NaN is not lost.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from fxq.backends.jit.compiler import compiled
from fxq.quant.measured import SMALLEST

SYMMETRIC, ROW, NEAREST = 0, 1, 2
"""How a grid is measured: around zero; with a zero point that is rounded up; with the nearest one. See `measured.py`"""


@compiled("f* f* f* u8* i i i f i i")
def quantize_rows(x, scale, zero, integers, rows, columns, kind, steps, qmin, qmax):  # type: ignore[no-untyped-def]
    """Measure the grid of each row, and round to it.

    Args:
        x: float32 (rows, columns).
        scale: float32 (rows,), written.
        zero: the zero point, float32 (rows,), written, also where it is known.
        integers: uint8 (rows, columns), written.
        rows: how many there are.
        columns: how many values each has.
        kind: SYMMETRIC, ROW or NEAREST.
        steps: as `MeasuredGrid.steps`.
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
            step = np.float32(np.nan)
        elif kind == SYMMETRIC:
            step = max(most, -least) / steps
        else:
            step = most / steps - least * (np.float32(1) / steps)  # most - least may be too large for float32
        if step < np.float32(SMALLEST):
            step = np.float32(SMALLEST)
        if kind == SYMMETRIC:
            middle = np.float32((qmin + qmax + 1) // 2)
        elif kind == ROW:
            middle = np.float32(qmin) + np.ceil(-least / step)
        else:
            middle = np.float32(qmin) - np.rint(least / step)
        scale[i], zero[i] = step, middle
        factor, last = np.float32(1) / step, np.int32(qmax)
        for j in range(columns):  # nothing is below qmin
            integers[i, j] = np.uint8(min(np.int32(np.rint(x[i, j] * factor) + middle), last))


@compiled("i32* f* i f* i i32* f* f* f* i i f f")
def scale_rows(sums, scale, scales, zero, zeros, ones, weight_scale, bias, out, rows, columns, least, most):  # type: ignore[no-untyped-def]
    """Scale the integer sums of a product of rows whose grids were measured, with bias and clamp.

    Args:
        sums: int32 (rows, columns): the product of the integers.
        scale: that of each row, float32 (rows,), or one for all.
        scales: 1, or 0 where it is one.
        zero: the zero point of each row, float32 (rows,), or one for all.
        zeros: 1, or 0 where it is one.
        ones: what a row of ones gives, int32 (columns,).
        weight_scale: float32 (columns,).
        bias: float32 (columns,).
        out: float32 (rows, columns), written.
        rows: how many rows there are.
        columns: how many outputs each has.
        least: no result is below it.
        most: no result is above it.
    """
    sums, out = carray(sums, (rows, columns)), carray(out, (rows, columns))
    scale, zero, ones = carray(scale, rows), carray(zero, rows), carray(ones, columns)
    weight_scale, bias = carray(weight_scale, columns), carray(bias, columns)
    for i in range(rows):
        step, middle = scale[i * scales], np.int32(zero[i * zeros])
        for j in range(columns):
            y = np.float32(sums[i, j] - middle * ones[j]) * (step * weight_scale[j]) + bias[j]
            y = least if y < least else y  # NaN is neither
            out[i, j] = most if y > most else y
