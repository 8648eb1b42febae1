"""Loop for the product of many rows of floats with a low-bit weight, of which it unpacks each panel once per call."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code import machine_code
from fxq.backends.loops.code.compiler import compiled, helper
from fxq.backends.loops.code.memory_loops import bytes_, floats, ints
from fxq.backends.loops.code.panel_code import (
    COLUMNS,
    MIN_ROWS,
    ROWS,
    Panel,
    Words,
    multiply_panel,
    signed_to_floats,
    unsigned_to_floats,
)
from fxq.backends.loops.code.unpacking_code import unpack_row
from fxq.backends.loops.code.weight_row_loops import SIGNED4, SIGNED8, UNPACKED
from fxq.quant.packing import UNIT

__all__ = ["COLUMNS", "IS_FASTER", "MIN_ROWS", "ROWS", "FloatCallField", "FloatPartField", "multiply_floats_part"]
IS_FASTER = machine_code.KIND.has_many_rows
"""Whether the loop is faster than PyTorch's product."""
_f = np.float32
_DEPTH = 256
"""Rows of a panel, which stays in L1. Packed values of other widths than 4 bits have units that it is a multiple of."""
_BLOCK_PANELS = 128 // COLUMNS
"""Panels that are unpacked at once, and stay in L2 with the rows of a block."""
_BLOCK_ROWS = 96
"""Rows of the input that are multiplied by a panel before the next panel is."""


class FloatPartField(IntEnum):
    """Fields of a part of a product: the weight, and the columns of the result to compute."""

    WEIGHT = 0  # address of the stored integers, (outputs, row_bytes)
    SCALE = 1  # address of float32 (outputs, scales)
    OFFSET = 2  # address of float32 (outputs, scales): a value is integer * scale - zero * offset
    ZERO = 3
    BIAS = 4  # address of float32 (outputs,)
    KIND = 5  # of `weight_row_loops`
    COLUMNS = 6  # number of values of a row of the weight
    OUTPUTS = 7
    ROW_BYTES = 8
    BLOCK = 9  # number of values of a row with one scale
    SCALES = 10  # number of scales of a row
    FIRST = 11  # first column of the result, and its end
    END = 12


class FloatCallField(IntEnum):
    """Fields of a call: its rows of floats, and the result."""

    X = 0  # address of float32 (rows, columns)
    OUT = 1  # address of float32 (rows, outputs), written
    ROWS = 2  # at least `MIN_ROWS`


_PART_FIELDS, _CALL_FIELDS = len(FloatPartField), len(FloatCallField)


@helper
def address_of_array(array):
    """Address of an array."""
    return np.int64(array.ctypes.data)


@helper
def _copy_words(source, row_bytes, count, length, flip, out):
    """Write `length` bytes of each of `count` rows to `out`, int32 (words, COLUMNS). `flip` are bits to flip."""
    words, rest, flip = length // 4, length % 4, np.int32(flip)
    for c in range(count):
        stored = carray(ints(source + row_bytes * c), words)
        for w in range(words):
            out[w, c] = stored[w] ^ flip
        if rest:
            last, word = carray(bytes_(source + row_bytes * c + 4 * words), rest), np.int64(0)
            for j in range(rest):
                word |= np.int64(last[j]) << (8 * j)
            out[words, c] = np.int32(word) ^ flip


@helper
def read_numbers(part, column, width, out):
    """Write factors, offsets and biases of `width` columns to `out`, float32 (panels, 2 * scales + 1, COLUMNS)."""
    outputs, scales, zero = part[FloatPartField.OUTPUTS], part[FloatPartField.SCALES], _f(part[FloatPartField.ZERO])
    scale = carray(floats(part[FloatPartField.SCALE]), (outputs, scales))
    offset = carray(floats(part[FloatPartField.OFFSET]), (outputs, scales))
    bias = carray(floats(part[FloatPartField.BIAS]), outputs)
    for c in range(width):
        panel, lane = c // COLUMNS, c % COLUMNS
        for k in range(scales):
            out[panel, k, lane] = scale[column + c, k]
            out[panel, scales + k, lane] = -offset[column + c, k] * zero
        out[panel, 2 * scales, lane] = bias[column + c]


@helper
def read_words(part, column, first, depth, words, of_rows):
    """Read values `first` to `first + depth` of rows of the weight from `column` on, four to a word.

    `words`, int32 (words, COLUMNS), is written; `of_rows` is scratch memory, uint8 (COLUMNS, 4 * words).

    Returns:
        Shift to the right of each word before its values are read, and the bits that are read then.
    """
    kind, row_bytes = part[FloatPartField.KIND], part[FloatPartField.ROW_BYTES]
    count = min(COLUMNS, part[FloatPartField.END] - column)
    source, is_packed = part[FloatPartField.WEIGHT] + row_bytes * column, SIGNED4 <= kind < UNPACKED
    is_high = is_packed and first >= row_bytes
    if kind >= UNPACKED:
        bits, at_rows, step = kind - UNPACKED, address_of_array(of_rows), of_rows.shape[1]
        for c in range(count):
            unpack_row(bits, source + row_bytes * c + first // UNIT * (bits * UNIT // 8), depth, at_rows + step * c)
        _copy_words(at_rows, step, count, depth, 0, words)
    else:
        start = first - row_bytes if is_high else first
        _copy_words(source + start, row_bytes, count, depth, 0x88888888 if kind == SIGNED4 else 0, words)
    return 4 if is_high else 0, 0x0F0F0F0F if is_packed else -1


@helper
def _unpack(part, column, first, depth, numbers, words, of_rows, out):
    """Unpack values `first` to `first + depth` of rows of the weight from `column` on to a panel at the address `out`.

    `words` and `of_rows`: see `read_words`. `numbers` is the address of the factors and offsets of the panel.
    """
    kind, block = part[FloatPartField.KIND], part[FloatPartField.BLOCK]
    offsets = 4 * COLUMNS * part[FloatPartField.SCALES]
    shift, mask = read_words(part, column, first, depth, words, of_rows)
    done, at_words = 0, address_of_array(words)
    while done < depth:
        k = (first + done) // block
        size = min(depth, (k + 1) * block - first) - done
        read = Words(
            at_words + COLUMNS * done, (size + 3) // 4, shift, mask, numbers + 4 * COLUMNS * k,
            numbers + 4 * COLUMNS * k + offsets, out + 4 * COLUMNS * done,
        )  # fmt: skip
        if kind == SIGNED8:
            signed_to_floats(read)
        else:
            unsigned_to_floats(read)
        done += size


@helper
def _multiply(x, x_bytes, rows, weight, depth, added, added_bytes, out, out_bytes):
    """Multiply rows of the input by a panel, in tiles of about equal size. For the arguments see `Panel`."""
    tiles = (rows + ROWS - 1) // ROWS
    for t in range(tiles):
        r, end = rows * t // tiles, rows * (t + 1) // tiles
        multiply_panel(
            Panel(
                x + x_bytes * r, x_bytes, weight, depth, added + added_bytes * r, added_bytes, out + out_bytes * r,
                out_bytes,
            ),
            end - r,
        )  # fmt: skip


@helper
def _multiply_block(part, call, column, panels, first, depth, numbers, unpacked, scratch):
    """Multiply values `first` to `first + depth` of all rows of the input by panels, and add the products to results.

    Results of columns from `part[FloatPartField.END]` on are in `scratch`, float32 (rows, COLUMNS).
    """
    x, out, rows = call[FloatCallField.X], call[FloatCallField.OUT], call[FloatCallField.ROWS]
    columns, outputs, scales = part[FloatPartField.COLUMNS], part[FloatPartField.OUTPUTS], part[FloatPartField.SCALES]
    blocks = max(rows // _BLOCK_ROWS, 1)
    for k in range(blocks * panels):
        p, r = k % panels, rows * (k // panels) // blocks
        count = rows * (k // panels + 1) // blocks - r
        target, target_bytes = out + 4 * (outputs * r + column + COLUMNS * p), 4 * outputs
        if column + COLUMNS * (p + 1) > part[FloatPartField.END]:
            target, target_bytes = address_of_array(scratch[r]), 4 * COLUMNS
        added, added_bytes = (target, target_bytes) if first else (address_of_array(numbers[p, 2 * scales]), 0)
        _multiply(
            x + 4 * (columns * r + first), 4 * columns, count, address_of_array(unpacked[p]), depth, added, added_bytes,
            target, target_bytes,
        )  # fmt: skip


@helper
def half_of(part):
    """Number of values of the first half of a row that is packed in halves, else of the row."""
    is_packed = SIGNED4 <= part[FloatPartField.KIND] < UNPACKED
    return part[FloatPartField.ROW_BYTES] if is_packed else part[FloatPartField.COLUMNS]


@compiled("i64* i i64*")
def multiply_floats_part(part, _count, call):
    """Compute columns of the product of rows of floats with the weight. Fields: `FloatPartField` and `FloatCallField`.

    A result does not depend on the number of rows, or of parts.
    """
    part, call = carray(part, _PART_FIELDS), carray(call, _CALL_FIELDS)
    columns, outputs, end, rows = (
        part[FloatPartField.COLUMNS], part[FloatPartField.OUTPUTS], part[FloatPartField.END], call[FloatCallField.ROWS],
    )  # fmt: skip
    numbers = np.zeros((_BLOCK_PANELS, 2 * part[FloatPartField.SCALES] + 1, COLUMNS), _f)
    unpacked, scratch = np.empty((_BLOCK_PANELS, _DEPTH, COLUMNS), _f), np.empty((rows, COLUMNS), _f)
    words, of_rows = np.zeros((_DEPTH // 4, COLUMNS), np.int32), np.empty((COLUMNS, _DEPTH), np.uint8)
    half = half_of(part)
    for column in range(part[FloatPartField.FIRST], end, COLUMNS * _BLOCK_PANELS):
        width = min(COLUMNS * _BLOCK_PANELS, end - column)
        panels, first = (width + COLUMNS - 1) // COLUMNS, 0
        read_numbers(part, column, width, numbers)
        while first < columns:
            depth = min(_DEPTH, (half if first < half else columns) - first)
            for p in range(panels):
                at_numbers, at_panel = address_of_array(numbers[p]), address_of_array(unpacked[p])
                _unpack(part, column + COLUMNS * p, first, depth, at_numbers, words, of_rows, at_panel)
            _multiply_block(part, call, column, panels, first, depth, numbers, unpacked, scratch)
            first += depth
        rest = width % COLUMNS
        for r in range(rows if rest else 0):
            results = carray(floats(call[FloatCallField.OUT] + 4 * (outputs * r + column + width - rest)), rest)
            for c in range(rest):
                results[c] = scratch[r, c]
    unpacked[0, 0, 0], of_rows[0, 0], scratch[0, 0] = words[0, 0], 0, numbers[0, 0, 0]  # keeps all alive until here
