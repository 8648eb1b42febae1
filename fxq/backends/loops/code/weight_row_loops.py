"""Loops that read rows of a low-bit weight one by one: as floats, or unpacked, with blocks of whole chunks."""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code import few_rows_code as code
from fxq.backends.loops.code.chunk_code import CHUNK
from fxq.backends.loops.code.compiler import helper
from fxq.backends.loops.code.memory_loops import bytes_, floats
from fxq.backends.loops.code.unpacking_code import unpack_row
from fxq.backends.loops.code.vectors import LANES

_f = np.float32
SIGNED8, UNSIGNED8, SIGNED4, UNSIGNED4 = range(4)
"""Kinds of weights: int8, uint8, and two values of 4 bits per byte as `fxq/quant/packing.py` packs them."""
UNPACKED = 16
"""UNPACKED + bits is the kind of weights of which rows are unpacked to uint8, or which tiles unpack. `bits` is as in
`unpack_row`. Those of 4 bits are of this kind if their rows or blocks are not of whole chunks."""
_MAX_EXPONENT = 100 + 127
"""Exponent in the bits of a float from which sums of its products with integers might overflow."""
_SHIFT_ERROR = 2.0**-23
"""Relative error of a zero point that was multiplied by its scale, which is rounded."""
_MAX_OUTLIER_RATIO = 64
"""Limit on max|x| * sqrt(n) / (sum of the other |x|) for a row of n values: above it, the products of the largest value
with integers and zero points cancel, with an error that is visible in the result."""


@helper
def unpacked(kind, row_bytes, columns):
    """Width to unpack rows from first (0: none), then the kind and the bytes per row that are read."""
    return (kind - UNPACKED, UNSIGNED8, columns) if kind >= UNPACKED else (0, kind, row_bytes)


@helper
def padded_block(kind, block, scales):
    """Number of values of a block as tiles read it, of whole chunks with zeros at its end; 0 if nothing is added."""
    return (block + CHUNK - 1) // CHUNK * CHUNK if kind >= UNPACKED and scales > 1 and block % CHUNK else 0


@helper
def _convert(kind, is_high, source, count, numbers, out):
    """Write integers as floats: whole vectors, then one that ends with the integers."""
    flip = 0x88 if kind == SIGNED4 else 0
    if count < LANES:  # only of 8 bits: other blocks are longer
        pair, stored, y = carray(floats(numbers), 2), carray(bytes_(source), count), carray(floats(out), count)
        for j in range(count):
            value = np.int64(stored[j])
            y[j] = _f(value - 256 if kind == SIGNED8 and value > 127 else value) * pair[0] + pair[1]
        return
    for k in range(1 if count % LANES == 0 else 2):
        first, blocks = (0, count // LANES) if k == 0 else (count - LANES, 1)
        if kind == SIGNED8:
            code.floats_of_signed8(source + first, blocks, flip, numbers, out + 4 * first)
        elif kind == UNSIGNED8:
            code.floats_of_bytes(source + first, blocks, flip, numbers, out + 4 * first)
        elif is_high:
            code.floats_of_high4(source + first, blocks, flip, numbers, out + 4 * first)
        else:
            code.floats_of_low4(source + first, blocks, flip, numbers, out + 4 * first)


@helper
def _factors(scale, shift):
    """Factor and summand of the integers with a scale: of their values, or of these divided by the scale.

    A zero point that is a whole number is subtracted before the scale is applied, so that its value is exactly zero.
    """
    zero = np.float64(shift) / np.float64(scale) if scale != 0 else 0.5
    whole = np.floor(zero + 0.5)
    if abs(zero - whole) <= _SHIFT_ERROR * abs(whole):
        return _f(1), _f(-whole)
    return scale, -shift


@helper
def row_as_floats(source, scale, offset, zero, kind, columns, row_bytes, block, target):
    """Write a row of a weight as floats.

    Args:
        source: Address of the row.
        scale: float32 (scales,), those of the row.
        offset: float32 (scales,), those of the row.
        zero: Factor of all offsets.
        kind: Kind of the weight.
        columns: Number of values.
        row_bytes: Bytes of the row.
        block: Number of values with the same scale.
        target: Address of float32 (columns,), written.
    """
    bits, kind, row_bytes = unpacked(kind, row_bytes, columns)
    numbers, is_packed, of_row = np.empty(2, _f), kind >= SIGNED4, np.empty(columns if bits else 1, np.uint8)
    if bits:
        unpack_row(bits, source, columns, of_row.ctypes.data)
        source = np.int64(of_row.ctypes.data)
    row = carray(floats(target), columns)
    for k in range(len(scale)):
        numbers[0], numbers[1] = _factors(scale[k], offset[k] * zero)
        low, end = k * block, min((k + 1) * block, columns)
        middle = max(min(end, row_bytes), low) if is_packed else end
        if middle > low:
            _convert(kind, False, source + low, middle - low, numbers.ctypes.data, target + 4 * low)
        if end > middle:
            _convert(kind, True, source + middle - row_bytes, end - middle, numbers.ctypes.data, target + 4 * middle)
        if numbers[0] != scale[k]:
            for j in range(low, end):
                row[j] *= scale[k]
    numbers[0], of_row[0] = 0, 0  # keeps both arrays alive until here, as only their addresses are used


@helper
def needs_floats(x, columns, zero):
    """Whether a row of the input is multiplied by the values of the weight, instead of its integers and zero points.

    That is the case if their sums might overflow, if a value is not finite, or, for weights with zero points (`zero` is
    not 0), if they lose what is small by cancelling.
    """
    bits, largest = x.view(np.int32), np.int32(0)
    for j in range(columns):  # the bits of positive floats are ordered as the floats
        largest = max(largest, bits[j] & np.int32(0x7FFFFFFF))
    if largest >> np.int32(23) >= _MAX_EXPONENT:
        return True
    if zero == 0:
        return False
    lanes, done = np.zeros(LANES, _f), columns // LANES * LANES
    for j in range(0, done, LANES):
        for i in range(LANES):
            lanes[i] += abs(x[j + i])
    total = np.float64(0)
    for i in range(LANES):
        total += lanes[i]
    for j in range(done, columns):
        total += abs(x[j])
    of_largest = np.empty(1, np.int32)
    of_largest[0] = largest
    top = np.float64(of_largest.view(np.float32)[0])
    return top * np.sqrt(np.float64(columns)) > _MAX_OUTLIER_RATIO * (total - top)


@helper
def rows_in_floats(x, rows, columns, zero):
    """Which rows of the input `needs_floats` selects, and their number."""
    in_floats, count = np.zeros(rows, np.bool_), 0
    for r in range(rows):
        in_floats[r] = needs_floats(x[r], columns, zero)
        count += in_floats[r]
    return in_floats, count


@helper
def _dot(x, y, columns, lanes):
    """Compute the sum of products of floats in vectors. `lanes` is scratch memory, float32 (16,)."""
    lanes[:] = 0
    done, total = columns // LANES * LANES, _f(0)
    for j in range(0, done, LANES):
        for i in range(LANES):
            lanes[i] += x[j + i] * y[j + i]
    for j in range(done, columns):
        total += x[j] * y[j]
    for i in range(LANES):
        total += lanes[i]
    return total


@helper
def multiply_in_floats(
    x, in_floats, weight, scale, offset, zero, bias, out, kind, rows, columns, outputs, row_bytes, block, scales,
    first, end
):  # fmt: skip
    """Compute results from `first` to `end` of some rows of the input with the float values of the weight.

    `x` is float32 (rows, columns), and `in_floats` says for each row if it is computed. For other arguments see
    `few_rows`.
    """
    row, lanes = np.empty(columns, _f), np.empty(LANES, _f)
    scale, offset = carray(floats(scale), (end, scales)), carray(floats(offset), (end, scales))
    bias, out = carray(floats(bias), end), carray(floats(out), (rows, outputs))
    for c in range(first, end):
        row_as_floats(
            weight + row_bytes * c, scale[c], offset[c], zero, kind, columns, row_bytes, block, row.ctypes.data
        )
        for r in range(rows):
            if in_floats[r]:
                out[r, c] = _dot(x[r], row, columns, lanes) + bias[c]
