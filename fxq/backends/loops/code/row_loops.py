"""Dynamic quantization of rows, and scaling of the products of such rows: one loop each.

Minimum and maximum are computed with integers, many at a time. The bits of floats are ordered as integers are once the
bits of negative floats are inverted. NaN is ordered beyond infinity, so it is not lost.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.compiler import compiled, helper
from fxq.quant.dynamic_grid import MIN_SCALE

_f = np.float32
SYMMETRIC, ROW, NEAREST = 0, 1, 2
"""Kinds of dynamic grids: symmetric; zero point rounded up; zero point rounded to nearest. See
`fxq/quant/dynamic_grid.py`."""


@helper
def ends_of_row(bits):
    """Bits of the smallest and the largest float of a row, zero included, whose bits are int32."""
    low, high, all_but_sign = np.int32(0), np.int32(0), np.int32(0x7FFFFFFF)
    for j in range(len(bits)):
        ordered = np.int32(bits[j] ^ ((bits[j] >> np.int32(31)) & all_but_sign))
        low, high = min(low, ordered), max(high, ordered)
    return np.int32(low ^ ((low >> np.int32(31)) & all_but_sign)), high


def _quantize_rows(x, scale, zero, integers, rows, columns, kind, steps, qmin, qmax):
    """Compute the dynamic grid of each row, and quantize the row to it.

    Args:
        x: float32 (rows, columns).
        scale: float32 (rows,), written.
        zero: Zero points, float32 (rows,), written, also if symmetric.
        integers: uint8 (rows, columns), written.
        rows: Number of rows.
        columns: Values per row.
        kind: SYMMETRIC, ROW or NEAREST.
        steps: `DynamicGrid.steps`.
        qmin: Smallest integer.
        qmax: Largest integer.
    """
    x, integers = carray(x, (rows, columns)), carray(integers, (rows, columns))
    scale, zero = carray(scale, rows), carray(zero, rows)
    bits, end_bits = x.view(np.int32), np.zeros(2, np.int32)
    for i in range(rows):
        end_bits[0], end_bits[1] = ends_of_row(bits[i])
        lowest, highest = end_bits.view(np.float32)
        if highest != highest or lowest != lowest:
            step = _f(np.nan)
        elif kind == SYMMETRIC:
            step = max(highest, -lowest) / steps
        else:
            step = highest / steps - lowest * (_f(1) / steps)  # highest - lowest may overflow float32
        if step < _f(MIN_SCALE):
            step = _f(MIN_SCALE)
        if kind == SYMMETRIC:
            middle = _f((qmin + qmax + 1) // 2)
        elif kind == ROW:
            middle = _f(qmin) + np.ceil(-lowest / step)
        else:
            middle = _f(qmin) - np.rint(lowest / step)
        if middle != middle:  # an infinite range has no grid
            step = _f(np.nan)
        scale[i], zero[i] = step, middle
        factor, first, last = _f(1) / step, np.int32(qmin), np.int32(qmax)
        for j in range(columns):
            nearest = np.int32(np.rint(x[i, j] * factor) + middle)
            integers[i, j] = np.uint8(max(min(nearest, last), first))


quantize = helper(_quantize_rows)
quantize_rows = compiled("f* f* f* u8* i i i f i i")(_quantize_rows)


@helper
def _gelu(x):
    """Compute x * (1 + erf(x / sqrt(2))) / 2.

    erf is a ratio of polynomials that is 1 within rounding from 3.83 on. Source: the float32 erf of Eigen and XLA.
    """
    a = x * _f(0.7071067811865476)
    a = _f(3.8325069) if a > _f(3.8325069) else a
    a = _f(-3.8325069) if a < _f(-3.8325069) else a
    b = a * a
    numerator = _f(2.2905065861350646e-4) * b + _f(3.4082910107109506e-3)
    numerator = (numerator * b + _f(5.0955695062380861e-2)) * b + _f(1.8520832239976145e-1)
    numerator = numerator * b + _f(1.128379143519084)
    denominator = _f(-1.1791602954361697e-7) * b + _f(2.3547966471313185e-5)
    denominator = (denominator * b + _f(1.0179625278914885e-3)) * b + _f(1.4070470171167667e-2)
    denominator = ((denominator * b + _f(1.1098505178285362e-1)) * b + _f(4.9746925110067538e-1)) * b + _f(1)
    return _f(0.5) * x * (_f(1) + a * numerator / denominator)


def _scale_rows(
    sums, scale, scales, zero, zeros, ones, weight_scale, bias, biases, out, rows, columns, lower, upper, is_gelu
):
    """Scale the product of rows with dynamic grids, add the bias, and apply the activation function.

    Args:
        sums: Product of the integers, int32 or float32 (rows, columns).
        scale: Scale of each row, float32 (rows,), or one scale.
        scales: 1, or 0 if there is one scale for all rows.
        zero: Zero point of each row, float32 (rows,), or one zero point.
        zeros: 1, or 0 if there is one zero point for all rows.
        ones: Product of a row of ones, (columns,), in the dtype of `sums`.
        weight_scale: float32 (columns,).
        bias: float32 (rows, columns), or (columns,).
        biases: 1, or 0 if there is one bias for all rows.
        out: float32 (rows, columns), written.
        rows: Number of rows.
        columns: Outputs per row.
        lower: Results are at least this; -inf for no bound.
        upper: Results are at most this; inf for no bound.
        is_gelu: 1 to apply gelu instead of the bounds.
    """
    sums, out = carray(sums, (rows, columns)), carray(out, (rows, columns))
    scale, zero, ones = carray(scale, rows), carray(zero, rows), carray(ones, columns)
    weight_scale, bias = carray(weight_scale, columns), carray(bias, (rows, columns))
    for i in range(rows):
        added = bias[i * biases]
        kind = sums.dtype.type  # otherwise Numba would compute integers with 64 bits
        step, zero_point = scale[i * scales], kind(zero[i * zeros])
        if is_gelu:
            for j in range(columns):
                out[i, j] = _gelu(
                    _f(kind(sums[i, j] - kind(zero_point * ones[j]))) * (step * weight_scale[j]) + added[j]
                )
            continue
        for j in range(columns):
            out[i, j] = _f(kind(sums[i, j] - kind(zero_point * ones[j]))) * (step * weight_scale[j]) + added[j]
        if lower > -np.inf or upper < np.inf:
            for j in range(columns):
                y = lower if out[i, j] < lower else out[i, j]  # NaN stays
                out[i, j] = upper if y > upper else y


scale_sums = compiled("i32* f* i f* i i32* f* f* i f* i i f f i")(_scale_rows)
scale_products = compiled("f* f* i f* i f* f* f* i f* i i f f i")(_scale_rows)
