"""Loops over caches of keys and values: attention of a few queries, and new rows of a cache in integers.

A cache in integers has a scale and a zero point for each row, of a token and a head. Rows are rounded as by the ops
`choose_scale`, `state_zero_point` and `quantize`, bit by bit. Attention multiplies with the integers as floats, and
applies scales and zero points to the sums: query @ key = scale * (query @ integers - zero point * sum(query)).
Rows of 4 bits, which are packed as in `fxq/quant/packing.py`, and rows with several scales are converted to floats,
a few at a time, for all queries of a head.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.attention_code import (
    QUERIES_AT_ONCE,
    TILE_COLUMNS,
    exponentials,
    four_rows,
    one_row,
    rows_of_integers,
)
from fxq.backends.loops.code.compiler import helper
from fxq.backends.loops.code.memory_loops import bytes_, floats
from fxq.backends.loops.code.row_loops import ends_of_row
from fxq.backends.loops.code.token_code import (
    KEY_QUERIES,
    bytes_as_floats,
    integer_key_products,
    key_products,
    pairs_as_floats,
)
from fxq.backends.loops.code.vectors import LANES
from fxq.quant.dynamic_grid import MIN_SCALE

_f, _i, _exact = np.float32, np.int32, np.float64


ATTEND_FIELDS = 23
"""Number of integers that describe an attention, see `token_loops.attend`."""
GRID_FIELDS = 8
"""Number of further integers for keys in integers, and for values: address of the scales, float32 (samples, heads,
keys, blocks), and strides of their first three axes; and so for the zero points, uint8. Those of a row are
side by side, and with one block also those of a head."""
FORM_FIELDS = 2
"""Number of further integers for keys and values in integers: bits of an integer, 8 or 4, and blocks of a row."""
_FORM = ATTEND_FIELDS + 2 * GRID_FIELDS
_ROWS_AT_ONCE = 32
"""Rows of a cache that are converted to floats at once. They stay in the first-level cache."""


@helper
def _exponentials_of_scores(fields, n, h, i, scores, total):
    """Turn the scores of a query into exponentials, and write their sum to `total`. Masked keys get 0.

    Args:
        fields: Those of `token_loops.attend`.
        n: Number of the sample.
        h: Number of the head.
        i: Number of the query.
        scores: float32, as many as keys, and more up to a multiple of `LANES`, which get 0.
        total: float32 (1,), written.
    """
    mask, strides, keys = fields[3], fields[14:18], fields[20]
    if mask:
        mask += n * strides[0] + h * strides[1] + i * strides[2]
        for j in range(keys):
            if carray(bytes_(mask + j * strides[3]), 1)[0] == 0:
                scores[j] = -np.inf
    scores[keys:] = -np.inf
    exponentials(scores.ctypes.data, len(scores) // LANES, total.ctypes.data)


@helper
def _scale(query, scale, scaled):
    """Write a query, from its address, times a number."""
    values = carray(floats(query), len(scaled))
    for j in range(len(scaled)):
        scaled[j] = values[j] * scale


@helper
def attend_heads(first, end, fields):
    """Compute some heads of an attention, see `token_loops.attend`. Heads of all samples are numbered in order."""
    query, key, value, out = fields[0], fields[1], fields[2], fields[4]
    strides, heads, queries, keys, depth = fields[5:14], fields[18], fields[19], fields[20], fields[21]
    scale = carray(floats(fields[22]), 1)[0]
    padded = (keys + LANES - 1) // LANES * LANES
    scores, scaled, total = np.empty(padded, _f), np.empty(depth, _f), np.empty(1, _f)
    for head in range(first, end):
        n, h = head // heads, head % heads
        k, v = key + 4 * (n * strides[3] + h * strides[4]), value + 4 * (n * strides[6] + h * strides[7])
        for i in range(queries):
            _scale(query + 4 * (n * strides[0] + h * strides[1] + i * strides[2]), scale, scaled)
            key_products(scaled.ctypes.data, k, 4 * strides[5], keys, depth // LANES, scores.ctypes.data)
            _exponentials_of_scores(fields, n, h, i, scores, total)
            factor = _f(0) if total[0] == 0 else _f(1) / total[0]
            for j in range(keys):
                scores[j] *= factor
            target = out + 4 * depth * ((n * heads + h) * queries + i)
            for j in range(0, depth, TILE_COLUMNS):
                one_row(scores.ctypes.data, 0, v + 4 * j, 4 * strides[8], keys, target + 4 * j, 0)
    scores[0] = scaled[0] + total[0]  # keeps the arrays alive until here, as only their addresses are used


@helper
def _grid_of(fields, at, n, h):
    """Addresses of the scales and of the zero points of a head, see `GRID_FIELDS`."""
    scale = fields[at] + 4 * (n * fields[at + 1] + h * fields[at + 2])
    return scale, fields[at + 4] + n * fields[at + 5] + h * fields[at + 6]


@helper
def _weights_of_rows(scores, keys, scale, zero, total):
    """Turn exponentials, whose sum is `total`, into factors of integers. Return what zero points add to the sums."""
    steps, zeros, shift = carray(floats(scale), keys), carray(bytes_(zero), keys), _f(0)
    factor = _f(0) if total == 0 else _f(1) / total
    for j in range(keys):
        scores[j] *= factor * steps[j]
    for j in range(keys):
        shift += scores[j] * _f(zeros[j])
    return shift


@helper
def _convert_rows(fields, grid, stored, stride, places, first, count, out):
    """Write some rows of keys or values of a head as float32 (count, depth) to the address `out`.

    Args:
        fields: Those of `attend_heads_of_integers`.
        grid: Index of the `GRID_FIELDS` of the keys or values.
        stored: Address of the integers of the head.
        stride: Bytes between rows.
        places: Addresses of the scales and of the zero points of the head.
        first: Number of the first row.
        count: Number of rows.
        out: Address of the result.
    """
    depth, bits, blocks = fields[21], fields[_FORM], fields[_FORM + 1]
    size, half = depth // blocks, depth // 2
    scale, zero = places[0] + 4 * fields[grid + 3] * first, places[1] + fields[grid + 7] * first
    if size % LANES == 0 and (bits == 8 or half % LANES == 0):
        source, of_grid = stored + stride * first, 4 * fields[grid + 3]
        if bits == 8:
            bytes_as_floats(source, stride, scale, of_grid, zero, fields[grid + 7], count, blocks, size // LANES, out)
        else:
            pairs_as_floats(source, stride, scale, of_grid, zero, fields[grid + 7], count, blocks, size // LANES, out)
        return
    for i in range(count):
        row, source = carray(floats(out + 4 * depth * i), depth), stored + stride * (first + i)
        if bits == 8:
            integers = carray(bytes_(source), depth)
            for j in range(depth):
                row[j] = _f(integers[j])
        else:
            pairs = carray(bytes_(source), half)
            for j in range(half):
                row[j] = _f(_i(pairs[j] & 15))
            for j in range(half):
                row[half + j] = _f(_i(pairs[j] >> 4))
        steps = carray(floats(scale + 4 * fields[grid + 3] * i), blocks)
        zeros = carray(bytes_(zero + fields[grid + 7] * i), blocks)
        for block in range(blocks):
            step, middle, values = steps[block], _f(zeros[block]), row[size * block : size * (block + 1)]
            for j in range(size):
                values[j] = (values[j] - middle) * step


@helper
def _scores_of_rows(fields, key, places, scaled, rows, scores):
    """Write the products of scaled queries with all keys of a head, which are converted to floats in `rows`."""
    keys, depth, padded = fields[20], fields[21], scores.shape[1]
    for j in range(0, keys, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, keys - j)
        _convert_rows(fields, ATTEND_FIELDS, key, fields[10], places, j, count, rows.ctypes.data)
        for r in range(len(scaled)):
            x, y = scaled.ctypes.data + 4 * depth * r, scores.ctypes.data + 4 * (padded * r + j)
            key_products(x, rows.ctypes.data, 4 * depth, count, depth // LANES, y)


@helper
def _sums_of_rows(fields, value, places, scores, rows, sums, out):
    """Write the sums of the values of a head, weighted by rows of scores, to the address `out`."""
    keys, depth, padded = fields[20], fields[21], scores.shape[1]
    result = carray(floats(out), (len(sums), depth))
    result[:] = _f(0)
    for j in range(0, keys, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, keys - j)
        _convert_rows(fields, ATTEND_FIELDS + GRID_FIELDS, value, fields[13], places, j, count, rows.ctypes.data)
        for c in range(0, depth, TILE_COLUMNS):
            four_rows(
                scores.ctypes.data + 4 * j, 4 * padded, rows.ctypes.data + 4 * c, 4 * depth, count,
                sums.ctypes.data + 4 * c, 4 * depth,
            )  # fmt: skip
        result += sums


@helper
def _attend_heads_of_blocks(first, end, fields):
    """Compute some heads of an attention to keys and values with few bits or several scales in a row."""
    strides, heads, queries, keys, depth = fields[5:14], fields[18], fields[19], fields[20], fields[21]
    scale = carray(floats(fields[22]), 1)[0]
    padded = (keys + LANES - 1) // LANES * LANES
    scores, scaled = np.zeros((QUERIES_AT_ONCE, padded), _f), np.empty((QUERIES_AT_ONCE, depth), _f)
    rows, sums = np.empty((_ROWS_AT_ONCE, depth), _f), np.empty((QUERIES_AT_ONCE, depth), _f)
    total = np.empty(1, _f)
    for head in range(first, end):
        n, h = head // heads, head % heads
        key, value = fields[1] + n * strides[3] + h * strides[4], fields[2] + n * strides[6] + h * strides[7]
        of_keys, of_values = _grid_of(fields, ATTEND_FIELDS, n, h), _grid_of(fields, ATTEND_FIELDS + GRID_FIELDS, n, h)
        for i in range(0, queries, QUERIES_AT_ONCE):
            count = min(QUERIES_AT_ONCE, queries - i)
            for r in range(count):
                _scale(fields[0] + 4 * (n * strides[0] + h * strides[1] + (i + r) * strides[2]), scale, scaled[r])
            _scores_of_rows(fields, key, of_keys, scaled[:count], rows, scores)
            for r in range(count):
                row = scores[r]
                _exponentials_of_scores(fields, n, h, i + r, row, total)
                row *= _f(0) if total[0] == 0 else _f(1) / total[0]
            target = fields[4] + 4 * depth * ((n * heads + h) * queries + i)
            _sums_of_rows(fields, value, of_values, scores, rows, sums[:count], target)
    scores[0, 0] = scaled[0, 0] + sums[0, 0] + total[0] + rows[0, 0]  # keeps the arrays alive


@helper
def attend_heads_of_integers(first, end, fields):
    """Compute some heads of an attention to keys and values in integers.

    `fields` are those of `token_loops.attend`, for key and value in uint8, and then twice `GRID_FIELDS`, and
    `FORM_FIELDS`.
    """
    if fields[_FORM] != 8 or fields[_FORM + 1] != 1:
        _attend_heads_of_blocks(first, end, fields)
        return
    query, key, value, out = fields[0], fields[1], fields[2], fields[4]
    strides, heads, queries, keys, depth = fields[5:14], fields[18], fields[19], fields[20], fields[21]
    scale = carray(floats(fields[22]), 1)[0]
    padded = (keys + LANES - 1) // LANES * LANES
    scores, scaled = np.empty((QUERIES_AT_ONCE, padded), _f), np.empty((QUERIES_AT_ONCE, depth), _f)
    sums, total, shifts = np.empty(QUERIES_AT_ONCE, _f), np.empty(1, _f), np.empty(QUERIES_AT_ONCE, _f)
    for head in range(first, end):
        n, h = head // heads, head % heads
        k, v = key + n * strides[3] + h * strides[4], value + n * strides[6] + h * strides[7]
        key_scale, key_zero = _grid_of(fields, ATTEND_FIELDS, n, h)
        value_scale, value_zero = _grid_of(fields, ATTEND_FIELDS + GRID_FIELDS, n, h)
        for i in range(0, queries, QUERIES_AT_ONCE):
            count = min(QUERIES_AT_ONCE, queries - i)
            for r in range(count):
                _scale(query + 4 * (n * strides[0] + h * strides[1] + (i + r) * strides[2]), scale, scaled[r])
                sums[r] = scaled[r].sum()
            for r in range(0, count, KEY_QUERIES):
                integer_key_products(
                    min(KEY_QUERIES, count - r), scaled.ctypes.data + 4 * depth * r, sums.ctypes.data + 4 * r, k,
                    strides[5], key_scale, key_zero, keys, depth // LANES, scores.ctypes.data + 4 * padded * r,
                    4 * padded,
                )  # fmt: skip
            for r in range(count):
                row = scores[r]
                _exponentials_of_scores(fields, n, h, i + r, row, total)
                shifts[r] = _weights_of_rows(row, keys, value_scale, value_zero, total[0])
            target = out + 4 * depth * ((n * heads + h) * queries + i)
            for j in range(0, depth, TILE_COLUMNS):
                rows_of_integers(
                    count, scores.ctypes.data, 4 * padded, v + j, strides[8], keys, target + 4 * j, 4 * depth
                )
            for r in range(count):
                result = carray(floats(target + 4 * depth * r), depth)
                result -= shifts[r]
    scores[0, 0] = scaled[0, 0] + sums[0] + total[0]  # keeps the arrays alive, as only their addresses are used


@helper
def store_row(x, depth, steps, qmax, integers, scale, zero):
    """Round a row of floats to its own affine grid: `depth` values at the address `x` to uint8 at `integers`.

    The scale is written to the address `scale`, the zero point to `zero`. Rows with NaN or infinity have no grid: their
    scale is NaN or infinity, and all else 0.
    """
    values, target, ends = carray(floats(x), depth), carray(bytes_(integers), depth), np.empty(2, _i)
    ends[0], ends[1] = ends_of_row(values.view(_i))
    low, high = ends.view(_f)
    inverse = _f(_exact(1) / _exact(steps))
    # PyTorch rounds the product and the sum once. In float64 the product is exact, with and without such instructions.
    step = _f(_exact(high / _f(steps)) - _exact(low) * _exact(inverse))
    step = _f(MIN_SCALE) if step < _f(MIN_SCALE) else step
    middle = -np.floor(low / step)
    middle = middle if middle == middle else _f(0)
    for j in range(depth):
        value = np.rint(values[j] / step) + middle
        value = value if value > _f(0) else _f(0)  # NaN becomes 0
        target[j] = np.uint8(_i(_f(qmax) if value > _f(qmax) else value))
    carray(floats(scale), 1)[0], carray(bytes_(zero), 1)[0] = step, np.uint8(_i(middle))


@helper
def store_blocks(x, depth, blocks, bits, steps, qmax, integers, scale, zero):
    """Round each block of a row of floats as `store_row` does a row, and pack integers of 4 bits.

    `integers` is the address of `depth` bytes, or half as many for 4 bits; the scales and zero points of the blocks are
    side by side at `scale` and `zero`.
    """
    size, half = depth // blocks, depth // 2
    if bits == 8:
        for block in range(blocks):
            at = size * block
            store_row(x + 4 * at, size, steps, qmax, integers + at, scale + 4 * block, zero + block)
        return
    values, target = np.empty(depth, np.uint8), carray(bytes_(integers), half)
    for block in range(blocks):
        at = size * block
        store_row(x + 4 * at, size, steps, qmax, values.ctypes.data + at, scale + 4 * block, zero + block)
    for j in range(half):
        target[j] = values[j] | (values[half + j] << 4)
