"""Loops for the product of a few rows of floats with a low-bit weight, which takes as long as reading the weight."""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code import machine_code
from fxq.backends.loops.code.arranging_loops import (
    arrange_floats,
    arrange_integers,
    in_pairs,
    pad_blocks,
    pad_bytes,
    power_for_digits,
    split_digits,
    sum_blocks,
    sum_integers,
)
from fxq.backends.loops.code.chunk_code import CHUNK, Digits4
from fxq.backends.loops.code.compiler import compiled, helper
from fxq.backends.loops.code.digit_code import HAS_DIGITS
from fxq.backends.loops.code.few_rows_code import INTEGER_SIZES, SIZES, FewRows
from fxq.backends.loops.code.few_rows_tile_loops import (
    IN_UNITS,
    OF_DIGITS,
    OF_FLOATS,
    OF_INTEGERS,
    as_read,
    run_tiles,
)
from fxq.backends.loops.code.memory_loops import bytes_, floats
from fxq.backends.loops.code.unpacking_code import SIGNED_4, unpack_row
from fxq.backends.loops.code.vectors import LANES
from fxq.backends.loops.code.weight_row_loops import (
    SIGNED4,
    SIGNED8,
    UNPACKED,
    multiply_in_floats,
    padded_block,
    row_as_floats,
    rows_in_floats,
)
from fxq.backends.loops.code.weight_row_loops import UNSIGNED4 as UNSIGNED4
from fxq.backends.loops.code.weight_row_loops import UNSIGNED8 as UNSIGNED8

MAX_INTEGER_ROWS = 16 if machine_code.KIND.dot else 4
"""Number of rows of integers up to which this loop is faster than oneDNN's product, or than that of many rows."""
_HAS_SAME_SIGNS = machine_code.KIND.unsigned_dot != ""
"""Whether integers of the input are signed if those of the weight are, instead of unsigned."""
_f = np.float32
_DIGITS, _MAX_DIGIT_ROWS = Digits4.digits, SIZES[0] - 1
_GROUP_BYTES = 1 << 14
"""Bytes of the weight that several rows of the input read in turn, from the first-level cache."""
UNPACKED_SIGNED4 = UNPACKED + SIGNED_4
"""Kind of weights of signed values of 4 bits of which rows are unpacked."""


@helper
def _compute(
    x, pairs, x_bytes, x_sums, sums, grids, ones, weight, stored_bytes, bits, columns, block, padded, scale, offset,
    bias, places, out, kind, rows, outputs, row_bytes, chunks, span, scales, first, end, form,
):  # fmt: skip
    """Compute columns of a product from an arranged input, see `FewRows` and `run_tiles`.

    `pairs` is the address of the input for tiles of several rows, see `arranging_loops.in_pairs`.

    If `bits` is not 0, a row of the weight has `stored_bytes` bytes in memory, which are unpacked to `row_bytes` bytes
    before the tiles read them. See `padded_block` for `padded`.
    """
    # `base` is the address of row 0 of the weight as tiles read it, or where it would be before the unpacked rows
    column, base = first, weight
    many_rows, many_columns, some_columns = INTEGER_SIZES if form == OF_INTEGERS else SIZES
    group = end - first if rows == 1 and bits == 0 else max(_GROUP_BYTES // row_bytes, many_columns)
    sizes, of_row = (group, row_bytes) if bits else (1, 1), np.empty(columns, np.uint8)
    of_group = np.zeros(sizes, np.uint8) if padded else np.empty(sizes, np.uint8)
    while column < end:
        count = min(group, end - column)
        count -= count % many_columns if count > many_columns else 0
        if bits:
            base = of_group.ctypes.data - row_bytes * column
            for c in range(column, column + count):
                target = of_row.ctypes.data if padded else base + row_bytes * c
                unpack_row(bits, weight + stored_bytes * c, columns, target)
                if padded:
                    pad_bytes(target, columns, block, padded, base + row_bytes * c)
        r = 0
        while r < rows:
            has_many = count >= many_columns
            is_many = rows - r >= many_rows and has_many
            tiles = count // (some_columns if is_many else many_columns if has_many else 1)
            few = FewRows(
                (pairs if is_many else x) + x_bytes * r, x_sums + 4 * sums * r if x_sums else 0,
                base + row_bytes * column, row_bytes, chunks, span, places,
                scale + 4 * scales * column, scales, offset + 4 * scales * column,
                bias + 4 * column, out + 4 * (outputs * r + column), 4 * outputs, grids + 8 * r, ones + 4 * column,
                tiles,
            )  # fmt: skip
            run_tiles(kind, few, is_many, has_many, form)
            r += many_rows if is_many else 1
        column += count
    of_group[0, 0], of_row[0] = 0, 0  # keeps both arrays alive until here, as only their addresses are used


@helper
def _have_digits(x, columns, grids):
    """Whether the digits of all rows are precise enough. `grids`, float32 (rows, 2), gets their scales."""
    lanes = np.empty(LANES, _f)
    for r in range(len(x)):
        power = power_for_digits(x[r], columns, lanes)
        if power == 0:
            return False
        grids[r, 0] = _f(1) / power
    return True


@helper
def _multiply_digits(
    x, size, is_packed, grids, weight, stored_bytes, scale, offset, zero, bias, places, out, kind, rows, columns,
    outputs, row_bytes, chunks, block, span, scales, first, end,
):  # fmt: skip
    """Compute columns of a product with the digits of the rows. `size` is the number of values of a row of `chunks`."""
    sums = (scales + LANES - 1) // LANES * LANES
    arranged, digits = np.empty((rows, _DIGITS, size), np.uint8), np.empty((_DIGITS, columns), np.uint8)
    rounded, x_sums, lanes = np.empty(columns, _f), np.zeros((rows, sums), _f), np.empty(LANES, _f)
    for r in range(rows):
        split_digits(x[r], columns, _f(1) / grids[r, 0], rounded, digits)
        for d in range(_DIGITS):
            arrange_integers(
                digits[d], columns, row_bytes if is_packed else columns, is_packed, np.uint8(0), arranged[r, d]
            )
        if zero != 0:
            sum_blocks(rounded, columns, block, zero, lanes, x_sums[r])
    sums_at = np.int64(x_sums.ctypes.data) if zero != 0 else 0
    _compute(
        arranged.ctypes.data, arranged.ctypes.data, _DIGITS * size, sums_at, sums, grids.ctypes.data, 0, weight,
        stored_bytes, 0, columns, block, 0, scale, offset, bias, places, out, kind, rows, outputs, row_bytes, chunks,
        span, scales, first, end, OF_DIGITS,
    )  # fmt: skip
    arranged[0, 0, 0] = np.uint8(x_sums[0, 0])  # keeps the arrays alive until here, as only their addresses are used
    grids[0, 0] = x_sums[0, 0]


@helper
def multiply(
    x, weight, scale, offset, zero, bias, places, out, kind, rows, columns, outputs, row_bytes, block, scales, span,
    first, end
):  # fmt: skip
    """Compute the columns from `first` to `end` of x @ weight.T + bias. For other arguments see `few_rows`."""
    stored_bytes, stored_kind, padded = row_bytes, kind, padded_block(kind, block, scales)
    bits, kind, row_bytes, chunks, span = as_read(kind, row_bytes, columns, rows, block, scales, span)
    is_packed = kind in (SIGNED4, UNSIGNED4)
    size = chunks * (CHUNK if kind < SIGNED4 else 2 * CHUNK)
    sums = (scales + LANES - 1) // LANES * LANES
    x = carray(x, (rows, columns))
    in_floats, count = rows_in_floats(x, rows, columns, zero)
    if HAS_DIGITS and rows <= _MAX_DIGIT_ROWS and count == 0 and (is_packed or kind >= IN_UNITS):
        grids = np.zeros((rows, 2), _f)
        if _have_digits(x, columns, grids):
            _multiply_digits(
                x, size, is_packed, grids, weight, stored_bytes, scale, offset, zero, bias, places, out, kind, rows,
                columns, outputs, row_bytes, chunks, block, span, scales, first, end,
            )  # fmt: skip
            return
    arranged, x_sums, lanes = np.empty((rows, size), _f), np.zeros((rows, sums), _f), np.empty(LANES, _f)
    for r in range(rows):
        if in_floats[r]:
            arranged[r] = 0  # its results are replaced
            continue
        arrange_floats(x[r], columns, block, padded, row_bytes, is_packed, arranged[r])
        if zero != 0:
            sum_blocks(x[r], columns, block, zero, lanes, x_sums[r])
    sums_at = np.int64(x_sums.ctypes.data) if zero != 0 else 0
    if count < rows:
        _compute(
            arranged.ctypes.data, arranged.ctypes.data, 4 * size, sums_at, sums, 0, 0, weight, stored_bytes, bits,
            columns, block, padded, scale, offset, bias, places, out, kind, rows, outputs, row_bytes, chunks, span,
            scales, first, end, OF_FLOATS,
        )  # fmt: skip
    arranged[0, 0] = x_sums[0, 0]  # keeps both arrays alive until here, as only their addresses are used
    if count:
        multiply_in_floats(
            x, in_floats, weight, scale, offset, zero, bias, out, stored_kind, rows, columns, outputs, stored_bytes,
            block, scales, first, end,
        )  # fmt: skip


@helper
def multiply_integers(
    x, grid_scale, grid_zero, grid_steps, weight, scale, offset, zero, bias, places, out, kind, rows, columns, outputs,
    row_bytes, block, scales, span, first, end, ones
):  # fmt: skip
    """Compute columns of the product of rows of integers with the weight, of which the products are added exactly.

    `x` is the address of uint8 (rows, columns). A value of row r is (integer - grid_zero[r]) * grid_scale[r]: addresses
    of float32 (rows,), or of one number. `grid_steps` has 1 for each of the two that has a number for each row, else 0.
    The columns are those from `first` to `end`. `ones` is the address of the sums of the rows of the weight, float32.
    For other arguments see `few_rows`.
    """
    stored_bytes, padded = row_bytes, padded_block(kind, block, scales)
    bits, kind, row_bytes, chunks, span = as_read(kind, row_bytes, columns, rows, block, scales, span)
    is_packed = kind in (SIGNED4, UNSIGNED4)
    flip = np.uint8(0) if (kind == SIGNED8) != _HAS_SAME_SIGNS else np.uint8(128)
    size = chunks * (CHUNK if kind < SIGNED4 else 2 * CHUNK)
    sums = (scales + LANES - 1) // LANES * LANES
    x, scales_of_x, zeros_of_x = carray(bytes_(x), (rows, columns)), floats(grid_scale), floats(grid_zero)
    arranged, x_sums, grids = np.empty((rows, size), np.uint8), np.zeros((rows, sums), _f), np.empty((rows, 2), _f)
    for r in range(rows):
        if padded:
            pad_blocks(x[r] ^ flip, columns, block, padded, arranged[r])
        else:
            arrange_integers(x[r], columns, row_bytes if is_packed else columns, is_packed, flip, arranged[r])
        if zero != 0:
            sum_integers(x[r], columns, block, zero, flip, x_sums[r])
        grids[r, 0] = scales_of_x[r * grid_steps[0]]
        grids[r, 1] = _f(flip) - zeros_of_x[r * grid_steps[1]]
    pairs = in_pairs(arranged)
    sums_at = np.int64(x_sums.ctypes.data) if zero != 0 else 0
    _compute(
        arranged.ctypes.data, pairs.ctypes.data, size, sums_at, sums, grids.ctypes.data, ones, weight, stored_bytes,
        bits, columns, block, padded, scale, offset, bias, places, out, kind, rows, outputs, row_bytes, chunks, span,
        scales, first, end, OF_INTEGERS,
    )  # fmt: skip
    # These keep the arrays alive until here, since only their addresses are used.
    grids[0, 0] = x_sums[0, 0]
    arranged[0, 0] = 0
    pairs[0, 0] = 0


@compiled("f* i i i f i i i i i i i i i i i")
def few_rows(
    x, weight, scale, offset, zero, bias, places, out, kind, rows, columns, outputs, row_bytes, block, scales, span
):
    """Compute x @ weight.T + bias for a weight (outputs, columns) that is stored in integers.

    A value of the weight is integer * scale - zero * offset. Integers of SIGNED4 are read with 8 added, so that none
    is negative, and zero * offset includes 8 * scale.

    Args:
        x: float32 (rows, columns).
        weight: Address of the stored weight, (outputs, row_bytes).
        scale: Address of float32 (outputs, scales).
        offset: Address of float32 (outputs, scales).
        zero: Factor of all offsets.
        bias: Address of float32 (outputs,).
        places: Address of int32: bytes to the scale of each span, see `FewRows`.
        out: Address of float32 (rows, outputs), written.
        kind: SIGNED8, UNSIGNED8, SIGNED4, UNSIGNED4, UNPACKED_SIGNED4, or UNPACKED + bits.
        rows: Number of rows of the input, at least one.
        columns: Values of a row of the weight.
        outputs: Rows of the weight.
        row_bytes: Bytes of a row of the weight, at least `CHUNK` unless they are unpacked.
        block: Number of values of a row with the same scale.
        scales: Scales of a row of the weight.
        span: Number of chunks with the same scales.
    """
    multiply(
        x, weight, scale, offset, zero, bias, places, out, kind, rows, columns, outputs, row_bytes, block, scales, span,
        0, outputs,
    )  # fmt: skip


PART_FIELDS = 16
"""Number of integers that describe a part of a product: the arguments of `few_rows` in order, without x, out and rows,
then the first of the columns that it computes, their end, and the address of the sums of the rows of the weight."""


@compiled("i64* i i64*")
def few_rows_part(part, _count, bases):
    """Compute a part of a product. `bases` holds the addresses of x and out, and the number of rows."""
    part, bases = carray(part, PART_FIELDS), carray(bases, 3)
    multiply(
        floats(bases[0]), part[0], part[1], part[2], _f(part[3]), part[4], part[5], bases[1], part[6], bases[2],
        part[7], part[8], part[9], part[10], part[11], part[12], part[13], part[14],
    )  # fmt: skip


@compiled("i64* i i64*")
def few_integers_part(part, _count, bases):
    """Compute a part of a product of integers.

    `bases` holds the addresses of x and out, the number of rows, the addresses of scales and zero points of x, and for
    both of them 1 if each row has its own, else 0.
    """
    part, bases = carray(part, PART_FIELDS), carray(bases, 7)
    multiply_integers(
        bases[0], bases[3], bases[4], (bases[5], bases[6]), part[0], part[1], part[2], _f(part[3]), part[4], part[5],
        bases[1], part[6], bases[2], part[7], part[8], part[9], part[10], part[11], part[12], part[13], part[14],
        part[15],
    )  # fmt: skip


@compiled("i f* f* f i i i i i i i i")
def floats_of(weight, scale, offset, zero, out, kind, first, count, columns, row_bytes, block, scales):
    """Write rows of a weight as floats.

    Args:
        weight: Address of the stored weight.
        scale: float32 (outputs, scales).
        offset: float32 (outputs, scales).
        zero: Factor of all offsets.
        out: Address of float32 (count, columns), written.
        kind: SIGNED8, UNSIGNED8, SIGNED4, UNSIGNED4, UNPACKED_SIGNED4, or UNPACKED + bits.
        first: First row.
        count: Number of rows.
        columns: Values of a row.
        row_bytes: Bytes of a row.
        block: Number of values of a row with the same scale.
        scales: Scales of a row.
    """
    scale, offset = carray(scale, (first + count, scales)), carray(offset, (first + count, scales))
    for r in range(first, first + count):
        row_as_floats(
            weight + row_bytes * r, scale[r], offset[r], zero, kind, columns, row_bytes, block,
            out + 4 * (r - first) * columns,
        )  # fmt: skip
