"""The loop of attention."""

from __future__ import annotations

import math

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.attention_code import (
    TILE_COLUMNS,
    TILE_ROWS,
    exponentials,
    four_rows,
    many_rows,
    one_row,
    transpose_floats,
)
from fxq.backends.loops.code.compiler import helper
from fxq.backends.loops.code.memory_loops import at, bytes_, floats, scratch_of, write

_f = np.float32
_MASKED = _f(-math.inf)
NO_MASK, CAUSAL, FLOAT_MASK, BOOL_MASK = range(4)
"""Which keys count for a query: all; those up to its own place; all, with floats added to their scores; those where a
byte is not 0."""


def attention_scratch(keys: int, depth: int) -> int:
    """Bytes of memory that attention needs while it runs: sums, keys, values, scores and results of some queries."""
    padded_keys, padded_depth = (-(-n // TILE_COLUMNS) * TILE_COLUMNS for n in (keys, depth))
    return 64 + 4 * (depth * padded_keys + keys * padded_depth + TILE_ROWS * (padded_keys + padded_depth))


@helper
def _transpose(x, by_row, rows, columns, factor, out, wide):
    """float32 (rows, columns), rows `by_row` bytes apart, to (columns, rows), rows `wide` floats apart.

    All are multiplied with the float at `factor`.
    """
    whole_rows, whole_columns = rows // 16 * 16, columns // 16 * 16
    for i in range(0, whole_rows, 16):
        for j in range(0, whole_columns, 16):
            transpose_floats(x + i * by_row + 4 * j, by_row, factor, out + 4 * (j * wide + i), 4 * wide)
    by, made = carray(floats(factor), 1)[0], carray(floats(out), columns * wide)
    for i in range(rows):
        row = carray(floats(x + i * by_row), columns)
        for j in range(0 if i >= whole_rows else whole_columns, columns):
            made[j * wide + i] = row[j] * by


@helper
def _copy(x, by_row, rows, columns, out, wide):
    """float32 (rows, columns), rows `by_row` bytes apart, to rows `wide` floats apart."""
    for i in range(rows):
        row, made = carray(floats(x + i * by_row), columns), carray(floats(out + 4 * i * wide), columns)
        for j in range(columns):
            made[j] = row[j]


@helper
def _multiply(rows, x, by_row, weight, wide, columns, depth, out):
    """float32 (rows, depth), rows `by_row` bytes apart, times (depth, columns), whose rows are `wide` floats apart.

    So are those of results. Columns are a multiple of those of a tile, rows one of its sizes.
    """
    for j in range(0, columns, TILE_COLUMNS):
        w, made = weight + 4 * j, out + 4 * j
        if rows == TILE_ROWS:
            many_rows(x, by_row, w, 4 * wide, depth, made, 4 * wide)
        elif rows == 4:
            four_rows(x, by_row, w, 4 * wide, depth, made, 4 * wide)
        else:
            one_row(x, by_row, w, 4 * wide, depth, made, 4 * wide)


@helper
def attention(step, bases):
    """softmax(query @ key.T * scale + mask) @ value, of each head. Heads lie side by side among the channels.

    Fields: query, key, value, out, mask, the strides of the first four by sample and pixel, those of the mask by
    sample, head, query and key, all in bytes, then as they are named here. `factor` is the address of the scale.
    """
    query, key, value, out = at(bases, step, 1), at(bases, step, 3), at(bases, step, 5), at(bases, step, 7)
    mask = at(bases, step, 9)
    by_query, by_key, by_value, by_out = step[12], step[14], step[16], step[18]
    samples, queries, keys, heads, depth = step[23], step[24], step[25], step[26], step[27]
    which, factor, numbers, to_floats = step[28], step[29], step[30], step[31]
    size = 4 if to_floats else 1
    wide, wide_value = -(-keys // TILE_COLUMNS) * TILE_COLUMNS, -(-depth // TILE_COLUMNS) * TILE_COLUMNS
    sums = scratch_of(bases)
    all_keys = sums + 64
    all_values = all_keys + 4 * depth * wide
    scores = all_values + 4 * keys * wide_value
    made = scores + 4 * TILE_ROWS * wide
    for n in range(samples):
        for head in range(heads):
            q, skip = query + n * step[11] + 4 * head * depth, 4 * head * depth
            _transpose(key + n * step[13] + skip, by_key, keys, depth, factor, all_keys, wide)
            _copy(value + n * step[15] + skip, by_value, keys, depth, all_values, wide_value)
            i = 0
            while i < queries:
                rows = TILE_ROWS if queries - i >= TILE_ROWS else 4 if queries - i >= 4 else 1
                seen = min(i + rows, keys) if which == CAUSAL else keys
                columns = -(-seen // TILE_COLUMNS) * TILE_COLUMNS
                _multiply(rows, q + i * by_query, by_query, all_keys, wide, columns, depth, scores)
                for r in range(rows):
                    masked = mask + n * step[19] + head * step[20] + (i + r) * step[21]
                    count = min(i + r + 1, seen) if which == CAUSAL else seen
                    _mask(scores + 4 * r * wide, count, columns, which, masked, step[22])
                    exponentials(scores + 4 * r * wide, columns // 16, sums + 4 * r)
                _multiply(rows, scores, 4 * wide, all_values, wide_value, wide_value, seen, made)
                for r in range(rows):
                    _divide(made + 4 * r * wide_value, depth, sums + 4 * r)
                    to = out + n * step[17] + (i + r) * by_out + size * head * depth
                    write(made + 4 * r * wide_value, to_floats, numbers, to, depth)
                i += rows


@helper
def _mask(scores, count, columns, which, mask, between):
    """Apply a mask, whose numbers are `between` bytes apart, to `count` scores of a query. No others count."""
    scores = carray(floats(scores), columns)
    if which == FLOAT_MASK:
        for j in range(count):
            scores[j] += carray(floats(mask + j * between), 1)[0]
    elif which == BOOL_MASK:
        for j in range(count):
            if carray(bytes_(mask + j * between), 1)[0] == 0:
                scores[j] = _MASKED
    for j in range(count, columns):
        scores[j] = _MASKED


@helper
def _divide(x, count, total):
    """Floats in place, by the float at `total`; by 0, where no key counts, they become 0."""
    x, by = carray(floats(x), count), carray(floats(total), 1)[0]
    by = _f(0) if by == 0 else _f(1) / by
    for j in range(count):
        x[j] *= by
