"""Loops for the product of many rows of floats with a low-bit weight on CPUs with AMX; see `split_float_code.py`.

`split_part` writes the rows of a call as tiles, `multiply_split_part` multiplies them by columns of the weight. Where
values of 4 bits are packed, the two halves of a row have tiles of their own: numbers beyond a half are 0.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code import machine_code
from fxq.backends.loops.code.amx_code import ROW_BYTES, STATE_BYTES, TILE_BYTES, TILE_ROWS, configure, release
from fxq.backends.loops.code.compiler import compiled, helper
from fxq.backends.loops.code.memory_loops import bytes_
from fxq.backends.loops.code.panel_loops import (
    COLUMNS,
    FloatPartField,
    address_of_array,
    half_of,
    read_numbers,
    read_words,
)
from fxq.backends.loops.code.split_float_code import (
    BLOCK_COUNTS,
    ROWS_AT_ONCE,
    STEP_BYTES,
    STEP_DEPTH,
    SUMS_BYTES,
    WEIGHT_STEP_BYTES,
    PairsOfWords,
    ScaledSums,
    SplitTiles,
    add_scaled_sums,
    one_split_tile,
    signed_to_pairs,
    split_row,
    two_split_tiles,
    unsigned_to_pairs,
)
from fxq.backends.loops.code.weight_row_loops import SIGNED8

__all__ = [
    "COLUMNS", "IS_FASTER", "MAX_ROWS", "STEP_DEPTH", "FloatPartField", "SplitCallField", "SplitPartField",
    "multiply_split_part", "split_bytes", "split_part", "steps_of",
]  # fmt: skip
_HAS_AMX = machine_code.KIND.has_amx
IS_FASTER = machine_code.KIND.has_amx and not machine_code.KIND.is_played
"""Whether the loop is faster than products of floats."""
MAX_ROWS = 512
"""Maximum number of rows of a call: their tiles stay in the caches."""
_BLOCK_PANELS = 4
"""Groups of 32 columns that are unpacked at once."""
_DEPTH = 1024
"""Numbers of a row that are multiplied at once: a multiple of `UNIT`, the unit of packed values."""
_f = np.float32


class SplitPartField(IntEnum):
    """Fields of the steps that one thread splits."""

    COLUMNS = 0  # number of values of a row
    HALF = 1  # number of values of its first part
    FIRST = 2  # first value to write, a multiple of `STEP_DEPTH`, and their end
    END = 3


class SplitCallField(IntEnum):
    """Fields of a call: its rows of floats, their tiles, and the result."""

    X = 0  # address of float32 (rows, columns)
    SPLIT = 1  # address of bfloat16 (tiles of rows, steps, 3, 16, 32)
    OUT = 2  # address of float32 (rows, outputs), written
    ROWS = 3


_SPLIT_FIELDS, _PART_FIELDS, _CALL_FIELDS = len(SplitPartField), len(FloatPartField), len(SplitCallField)


def steps_of(columns: int, half: int) -> int:
    """Number of steps of a row whose first part has `half` values."""
    return -(-half // STEP_DEPTH) - (half - columns) // STEP_DEPTH


def split_bytes(rows: int, steps: int) -> int:
    """Bytes of the tiles of some rows."""
    return -(-rows // TILE_ROWS) * steps * STEP_BYTES


_steps_of = helper(steps_of)


@helper
def _clear_row(out):
    """Set a row of three tiles to 0."""
    for k in range(STEP_BYTES // TILE_BYTES):
        carray(bytes_(out + TILE_BYTES * k), ROW_BYTES)[:] = 0


@helper
def _split(part, call):
    """Write steps of all rows as tiles. Fields: `SplitPartField` and `SplitCallField`."""
    columns, half = part[SplitPartField.COLUMNS], part[SplitPartField.HALF]
    first_step, end_step = part[SplitPartField.FIRST] // STEP_DEPTH, part[SplitPartField.END] // STEP_DEPTH
    x, split, rows = call[SplitCallField.X], call[SplitCallField.SPLIT], call[SplitCallField.ROWS]
    steps, of_half = _steps_of(columns, half), (half + STEP_DEPTH - 1) // STEP_DEPTH
    for r in range((rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS):
        out = split + r // TILE_ROWS * steps * STEP_BYTES + r % TILE_ROWS * ROW_BYTES
        for step in range(first_step, end_step):
            start = STEP_DEPTH * step if step < of_half else half + STEP_DEPTH * (step - of_half)
            if r < rows:
                count = (half if step < of_half else columns) - start
                split_row(x + 4 * (columns * r + start), count, out + STEP_BYTES * step)
            else:
                _clear_row(out + STEP_BYTES * step)


@helper
def _unpack(part, column, first, depth, numbers, words, of_rows, out):
    """Unpack values `first` to `first + depth` of 32 rows of the weight from `column` on to tiles at the address `out`.

    `words` and `of_rows`: see `read_words`. `numbers` is the address of the scales and offsets of the rows.
    """
    block, scales = part[FloatPartField.BLOCK], part[FloatPartField.SCALES]
    shift, mask = read_words(part, column, first, depth, words, of_rows)
    done = 0
    while done < depth:
        k = (first + done) // block
        size = min(depth, (k + 1) * block - first) - done
        read = PairsOfWords(
            address_of_array(words) + COLUMNS * done, (size + 3) // 4, shift, mask,
            numbers + 4 * COLUMNS * (scales + k), out + WEIGHT_STEP_BYTES * (done // STEP_DEPTH),
        )  # fmt: skip
        if part[FloatPartField.KIND] == SIGNED8:
            signed_to_pairs(read)
        else:
            unsigned_to_pairs(read)
        done += size


@helper
def _multiply_panel(part, split, x_bytes, rows, column, first, depth, numbers, unpacked, out, zeros, sums, state):
    """Multiply values `first` to `first + depth` of one or two tiles of rows by 32 columns, and add to their results.

    `split` and `unpacked` are the addresses of their tiles, `numbers` that of the scales, offsets and biases, and `out`
    that of the results.
    """
    outputs, scales = part[FloatPartField.OUTPUTS], part[FloatPartField.SCALES]
    block, done = part[FloatPartField.BLOCK], 0
    while done < depth:
        start, count = done, 0
        while done < depth and count < BLOCK_COUNTS[0]:
            step, size = done // STEP_DEPTH, min(depth, ((first + done) // block + 1) * block - first) - done
            tiles = SplitTiles(
                split + STEP_BYTES * step, x_bytes, unpacked + WEIGHT_STEP_BYTES * step,
                (size + STEP_DEPTH - 1) // STEP_DEPTH, zeros, sums + SUMS_BYTES * count, state,
            )  # fmt: skip
            if rows > TILE_ROWS:
                two_split_tiles(tiles)
            else:
                one_split_tile(tiles)
            done += size
            count += 1
        added, added_bytes = (out, 4 * outputs) if first + start else (numbers + 8 * COLUMNS * scales, 0)
        add_scaled_sums(
            ScaledSums(
                sums, count, rows, part[FloatPartField.END] - column,
                numbers + 4 * COLUMNS * ((first + start) // block), added, added_bytes, out, 4 * outputs,
            )
        )  # fmt: skip


@helper
def _multiply(part, call):
    """Compute columns of the product. Fields: `FloatPartField` and `SplitCallField`."""
    columns, outputs, end = part[FloatPartField.COLUMNS], part[FloatPartField.OUTPUTS], part[FloatPartField.END]
    split, out, rows = call[SplitCallField.SPLIT], call[SplitCallField.OUT], call[SplitCallField.ROWS]
    half = half_of(part)
    steps, of_half = _steps_of(columns, half), (half + STEP_DEPTH - 1) // STEP_DEPTH
    numbers = np.zeros((_BLOCK_PANELS, 2 * part[FloatPartField.SCALES] + 1, COLUMNS), _f)
    unpacked = np.zeros((_BLOCK_PANELS, _DEPTH // STEP_DEPTH * WEIGHT_STEP_BYTES), np.uint8)
    words, of_rows = np.zeros((_DEPTH // 4, COLUMNS), np.int32), np.empty((COLUMNS, _DEPTH), np.uint8)
    state, zeros = np.zeros(STATE_BYTES, np.uint8), np.zeros(ROW_BYTES, np.uint8)
    sums = np.empty((BLOCK_COUNTS[0], SUMS_BYTES // 4), _f)
    configure(address_of_array(state), ROW_BYTES)
    for column in range(part[FloatPartField.FIRST], end, COLUMNS * _BLOCK_PANELS):
        width = min(COLUMNS * _BLOCK_PANELS, end - column)
        panels, first = (width + COLUMNS - 1) // COLUMNS, 0
        read_numbers(part, column, width, numbers)
        while first < columns:
            depth = min(_DEPTH, (half if first < half else columns) - first)
            step = first // STEP_DEPTH if first < half else of_half + (first - half) // STEP_DEPTH
            for p in range(panels):
                at_numbers, at_panel = address_of_array(numbers[p]), address_of_array(unpacked[p])
                _unpack(part, column + COLUMNS * p, first, depth, at_numbers, words, of_rows, at_panel)
            for k in range((rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE * panels):
                p, r = k % panels, ROWS_AT_ONCE * (k // panels)
                _multiply_panel(
                    part, split + (r // TILE_ROWS * steps + step) * STEP_BYTES, steps * STEP_BYTES,
                    min(ROWS_AT_ONCE, rows - r), column + COLUMNS * p, first, depth, address_of_array(numbers[p]),
                    address_of_array(unpacked[p]), out + 4 * (outputs * r + column + COLUMNS * p),
                    address_of_array(zeros), address_of_array(sums), address_of_array(state),
                )  # fmt: skip
            first += depth
    release(address_of_array(state))
    unpacked[0, 0], of_rows[0, 0], sums[0, 0], zeros[0] = words[0, 0] + state[0], 0, numbers[0, 0, 0], 0  # kept alive


@compiled("i64* i i64*")
def split_part(part, _count, call):
    """Write steps of all rows as tiles. Fields: `SplitPartField` and `SplitCallField`."""
    if _HAS_AMX:  # otherwise Numba does not compile it
        _split(carray(part, _SPLIT_FIELDS), carray(call, _CALL_FIELDS))


@compiled("i64* i i64*")
def multiply_split_part(part, _count, call):
    """Compute columns of the product of rows that are split with the weight.

    A result does not depend on the number of rows, or of parts. Fields: `FloatPartField`, where a value of the weight
    is (integer - offset * zero) * scale, and `SplitCallField`.
    """
    if _HAS_AMX:  # otherwise Numba does not compile it
        _multiply(carray(part, _PART_FIELDS), carray(call, _CALL_FIELDS))
