"""Loop for the product of many rows of integers with a low-bit weight, whose integers are unpacked once per call."""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code import machine_code
from fxq.backends.loops.code.compiler import compiled, helper
from fxq.backends.loops.code.few_rows_code import CHUNK
from fxq.backends.loops.code.few_rows_loops import HAS_ROW_DOT, SIGNED4
from fxq.backends.loops.code.many_rows_code import COLUMNS, ROWS, ManyRows, many_rows
from fxq.backends.loops.code.memory_loops import bytes_, floats, ints

__all__ = ["COLUMNS", "HAS_ROW_DOT", "MANY_ROWS_FIELDS", "many_integers_part"]
X_OFFSET = np.float32(machine_code.KIND.x_offset)
_WORDS = CHUNK // 4
"""Words of four integers that are unpacked at once. They have one zero point."""


@helper
def _address(array):
    """Address of an array."""
    return np.int64(array.ctypes.data)


@helper
def _less(word, zero):
    """Four integers of a word, each 0 to 15, less a zero point of 0 to 15, as int8."""
    return ((word | 0x80808080) - 0x01010101 * zero) ^ 0x80808080


@helper
def _unpack4(weight, row_bytes, count, flip, zeros, block, out):
    """Write `count` rows of 4-bit values without their zero points to `out`, int32 (words, COLUMNS)."""
    words = row_bytes // 4
    for first in range(0, words, _WORDS):
        low, high = 4 * first // block, (row_bytes + 4 * first) // block
        for c in range(count):
            stored, low_zero, high_zero = carray(ints(weight + row_bytes * c), words), zeros[c, low], zeros[c, high]
            for w in range(first, min(first + _WORDS, words)):
                word = (np.int64(stored[w]) & 0xFFFFFFFF) ^ flip
                out[w, c] = np.int32(_less(word & 0x0F0F0F0F, np.int64(low_zero)))
                out[words + w, c] = np.int32(_less((word >> 4) & 0x0F0F0F0F, np.int64(high_zero)))


@helper
def _unpack8(weight, row_bytes, count, out):
    """Write `count` rows of int8 to `out`, int32 (words, COLUMNS)."""
    words = row_bytes // 4
    for first in range(0, words, _WORDS):
        for c in range(count):
            stored = carray(ints(weight + row_bytes * c), words)
            for w in range(first, min(first + _WORDS, words)):
                out[w, c] = stored[w]


MANY_ROWS_FIELDS = 13
"""Number of integers that describe a part of a product, see `many_integers_part`."""


@compiled("i64* i i64*")
def many_integers_part(part, _count, bases):
    """Compute columns of the product of rows of integers with the weight, of which blocks are added exactly.

    `part` holds the addresses of the weight, (outputs, row_bytes), of its scales, float32 (outputs, scales), its zero
    points, uint8 (outputs, scales), the bias, float32 (outputs,), and the sums of its rows, float32 (outputs,); the
    kind, of which `SIGNED4` and `UNSIGNED4` are packed and others are int8; columns, outputs, row_bytes, block, scales,
    as of `few_rows_loops.few_rows`; the first of the columns to compute, and their end.

    `bases` holds the addresses of x, uint8 (rows, columns), and out, float32 (rows, outputs), the number of rows, at
    least `ROWS`, the addresses of scales and zero points of x, float32, and for both of them 1 if each row has its own,
    else 0.
    """
    part, bases = carray(part, MANY_ROWS_FIELDS), carray(bases, 7)
    weight, kind, columns, outputs = part[0], part[5], part[6], part[7]
    row_bytes, block, scales, end = part[8], part[9], part[10], part[12]
    x, out, rows, words = bases[0], bases[1], bases[2], columns // 4
    scale, zeros = carray(floats(part[1]), (outputs, scales)), carray(bytes_(part[2]), (outputs, scales))
    bias, ones = carray(floats(part[3]), outputs), carray(floats(part[4]), outputs)
    x_scale, x_zero = carray(floats(bases[3]), rows), carray(floats(bases[4]), rows)
    grids = np.empty((rows, 2), np.float32)
    for r in range(rows):
        grids[r, 0], grids[r, 1] = x_scale[r * bases[5]], X_OFFSET - x_zero[r * bases[6]]
    unpacked, numbers = np.zeros((words, COLUMNS), np.int32), np.zeros((scales + 2, COLUMNS), np.float32)
    scratch = np.empty((ROWS, COLUMNS), np.float32)
    at_unpacked, at_numbers, at_grids = _address(unpacked), _address(numbers), _address(grids)
    for column in range(part[11], end, COLUMNS):
        count = min(COLUMNS, end - column)
        for c in range(count):
            for k in range(scales):
                numbers[k, c] = scale[column + c, k]
            numbers[scales, c], numbers[scales + 1, c] = ones[column + c], bias[column + c]
        if kind >= SIGNED4:
            flip = 0x88888888 if kind == SIGNED4 else 0
            _unpack4(weight + row_bytes * column, row_bytes, count, flip, zeros[column:], block, unpacked)
        else:
            _unpack8(weight + row_bytes * column, row_bytes, count, unpacked)
        target, target_bytes = out + 4 * column, 4 * outputs
        for first in range(0, rows, ROWS):
            r = min(first, rows - ROWS)  # the last tile may compute rows of the one before again
            if count == COLUMNS:
                target = out + 4 * (outputs * r + column)
            else:
                target, target_bytes = _address(scratch), 4 * COLUMNS
            many_rows(
                ManyRows(
                    x + columns * r, columns, at_unpacked, words, (block + 3) // 4, at_numbers, at_grids + 8 * r,
                    at_numbers + 4 * COLUMNS * scales, at_numbers + 4 * COLUMNS * (scales + 1), target, target_bytes,
                )
            )  # fmt: skip
            for i in range(ROWS if count < COLUMNS else 0):
                results = carray(floats(out + 4 * (outputs * (r + i) + column)), count)
                for c in range(count):
                    results[c] = scratch[i, c]
    unpacked[0, 0], scratch[0, 0], numbers[0, 0], grids[0, 0] = 0, 0, 0, 0  # keeps them alive, as addresses are used
