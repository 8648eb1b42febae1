"""Loop for the product of many rows of integers with a low-bit weight, whose integers are unpacked once per call."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code import machine_code
from fxq.backends.loops.code.chunk_code import CHUNK
from fxq.backends.loops.code.compiler import compiled, helper
from fxq.backends.loops.code.many_rows_code import COLUMNS, ROWS, VECTORS, ManyRows, many_rows_tile
from fxq.backends.loops.code.memory_loops import bytes_, floats, ints
from fxq.backends.loops.code.unpacking_code import unpack_row
from fxq.backends.loops.code.weight_row_loops import SIGNED4, UNPACKED

__all__ = ["ARRANGED", "COLUMNS", "IS_FASTER", "ROWS", "CallField", "PartField", "many_integers_part"]
IS_FASTER = machine_code.KIND.has_many_rows
"""Whether the loop is faster than PyTorch's product of floats."""
X_OFFSET = np.float32(machine_code.KIND.x_offset)
ARRANGED = 8
"""Kind of int8 weights that are stored as tiles read them: (tiles, words, COLUMNS, 4), and zeros after the last row."""
_tile = many_rows_tile(ROWS, VECTORS)
_WORDS = CHUNK // 4
"""Words of four integers that are unpacked at once. They have one zero point."""


@helper
def _address(array):
    """Address of an array."""
    return np.int64(array.ctypes.data)


@helper
def _less(word, zero):
    """Four integers of a word, each 0 to 127, less a zero point of 0 to 127, as int8."""
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


@helper
def _unpack_other(bits, weight, row_bytes, count, zeros, block, of_row, out):
    """Do what `_unpack4` does, for packed values of other widths. `of_row` is scratch memory, int32 (words,)."""
    words = len(of_row)
    for c in range(count):
        unpack_row(bits, weight + row_bytes * c, 4 * words, _address(of_row))
        for first in range(0, words, _WORDS):
            zero = np.int64(zeros[c, 4 * first // block])
            for w in range(first, min(first + _WORDS, words)):
                out[w, c] = np.int32(_less(np.int64(of_row[w]) & 0xFFFFFFFF, zero))


@helper
def _weight_of_tile(kind, weight, row_bytes, count, zeros, block, of_row, out):
    """Address of `count` rows of a weight without their zero points, int32 (words, COLUMNS), which may be `out`."""
    if kind == ARRANGED:
        return weight
    if kind >= UNPACKED:
        _unpack_other(kind - UNPACKED, weight, row_bytes, count, zeros, block, of_row, out)
    elif kind >= SIGNED4:
        _unpack4(weight, row_bytes, count, 0x88888888 if kind == SIGNED4 else 0, zeros, block, out)
    else:
        _unpack8(weight, row_bytes, count, out)
    return _address(out)


class PartField(IntEnum):
    """Fields of a part of a product: the weight, and the columns of the result to compute."""

    WEIGHT = 0  # address of the stored integers, (outputs, row_bytes)
    SCALE = 1  # address of float32 (outputs, scales)
    ZEROS = 2  # address of the zero points of packed values, uint8 (outputs, scales)
    BIAS = 3  # address of float32 (outputs,)
    ONES = 4  # address of the sums of the rows of the weight, float32 (outputs,)
    KIND = 5  # of `weight_row_loops`, where values of 8 bits are int8, or ARRANGED
    COLUMNS = 6  # number of values of a row of the weight
    OUTPUTS = 7
    ROW_BYTES = 8
    BLOCK = 9  # number of values of a row with one scale
    SCALES = 10  # number of scales of a row
    FIRST = 11  # first column of the result, and its end
    END = 12


class CallField(IntEnum):
    """Fields of a call: its rows of integers, with their grids, and the result."""

    X = 0  # address of uint8 (rows, columns)
    OUT = 1  # address of float32 (rows, outputs), written
    ROWS = 2  # at least the rows of a tile
    SCALE = 3  # address of float32 (rows,), or of one number
    ZERO = 4  # address of float32 (rows,), or of one number
    SCALE_STEP = 5  # 1 if each row has a scale, else 0
    ZERO_STEP = 6  # 1 if each row has a zero point, else 0


_PART_FIELDS, _CALL_FIELDS = len(PartField), len(CallField)


@compiled("i64* i i64*")
def many_integers_part(part, _count, call):
    """Compute columns of the product of rows of integers with the weight. Products with one scale are added exactly.

    Fields: `PartField` and `CallField`.
    """
    part, call = carray(part, _PART_FIELDS), carray(call, _CALL_FIELDS)
    weight, kind, columns, outputs = (
        part[PartField.WEIGHT], part[PartField.KIND], part[PartField.COLUMNS], part[PartField.OUTPUTS],
    )  # fmt: skip
    row_bytes, block, scales, end = (
        part[PartField.ROW_BYTES], part[PartField.BLOCK], part[PartField.SCALES], part[PartField.END],
    )  # fmt: skip
    x, out, rows, words = call[CallField.X], call[CallField.OUT], call[CallField.ROWS], columns // 4
    scale = carray(floats(part[PartField.SCALE]), (outputs, scales))
    zeros = carray(bytes_(part[PartField.ZEROS]), (outputs, scales))
    bias, ones = carray(floats(part[PartField.BIAS]), outputs), carray(floats(part[PartField.ONES]), outputs)
    x_scale, x_zero = carray(floats(call[CallField.SCALE]), rows), carray(floats(call[CallField.ZERO]), rows)
    grids = np.empty((rows, 2), np.float32)
    for r in range(rows):
        grids[r, 0] = x_scale[r * call[CallField.SCALE_STEP]]
        grids[r, 1] = X_OFFSET - x_zero[r * call[CallField.ZERO_STEP]]
    unpacked, numbers = np.zeros((words, COLUMNS), np.int32), np.zeros((scales + 2, COLUMNS), np.float32)
    scratch, of_row = np.empty((ROWS, COLUMNS), np.float32), np.empty(words, np.int32)
    at_numbers, at_grids = _address(numbers), _address(grids)
    for column in range(part[PartField.FIRST], end, COLUMNS):
        count = min(COLUMNS, end - column)
        for c in range(count):
            for k in range(scales):
                numbers[k, c] = scale[column + c, k]
            numbers[scales, c], numbers[scales + 1, c] = ones[column + c], bias[column + c]
        of_tile = _weight_of_tile(
            kind, weight + row_bytes * column, row_bytes, count, zeros[column:], block, of_row, unpacked
        )  # fmt: skip
        target, target_bytes = out + 4 * column, 4 * outputs
        for first in range(0, rows, ROWS):
            r = min(first, rows - ROWS)  # the last tile may compute rows of the one before again
            if count == COLUMNS:
                target = out + 4 * (outputs * r + column)
            else:
                target, target_bytes = _address(scratch), 4 * COLUMNS
            _tile(
                ManyRows(
                    x + columns * r, columns, of_tile, words, (block + 3) // 4, at_numbers, at_grids + 8 * r,
                    at_numbers + 4 * COLUMNS * scales, at_numbers + 4 * COLUMNS * (scales + 1), target, target_bytes,
                )
            )  # fmt: skip
            for i in range(ROWS if count < COLUMNS else 0):
                results = carray(floats(out + 4 * (outputs * (r + i) + column)), count)
                for c in range(count):
                    results[c] = scratch[i, c]
    unpacked[0, 0], scratch[0, 0], numbers[0, 0], grids[0, 0] = of_row[0], 0, 0, 0  # keeps all alive until here
