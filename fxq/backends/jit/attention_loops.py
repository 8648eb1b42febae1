"""The loop of attention."""

from __future__ import annotations

import math

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.jit.attention_code import (
    COLUMNS,
    ROWS,
    exponentials,
    four_rows,
    many_rows,
    one_row,
    transpose_floats,
)
from fxq.backends.jit.compiler import helper
from fxq.backends.jit.memory_loops import at, bytes_, floats, scratch_of, write
from fxq.backends.jit.vectors import LOG2E

_f, _ROWS = np.float32, ROWS
_LOG2E, _NOTHING = _f(LOG2E), _f(-math.inf)
NO_MASK, CAUSAL, FLOAT_MASK, BOOL_MASK = range(4)
"""Which scores count: all; those up to the place of the query; all, with floats added; those where a byte is not 0."""


@helper
def _transpose(x, by_row, rows, columns, factor, out, wide):
    """Rows of floats, `by_row` bytes from one to the next, as columns of a matrix whose rows have `wide` floats.

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
    """Rows of floats, to rows of `wide` floats."""
    for i in range(rows):
        row, made = carray(floats(x + i * by_row), columns), carray(floats(out + 4 * i * wide), columns)
        for j in range(columns):
            made[j] = row[j]


@helper
def _multiply(rows, x, by_row, weight, wide, depth, out):
    """Some rows of floats times a matrix of rows of `wide` floats."""
    for j in range(0, wide, COLUMNS):
        w, made = weight + 4 * j, out + 4 * j
        if rows == _ROWS:
            many_rows(x, by_row, w, 4 * wide, depth, made, 4 * wide)
        elif rows == 4:
            four_rows(x, by_row, w, 4 * wide, depth, made, 4 * wide)
        else:
            one_row(x, by_row, w, 4 * wide, depth, made, 4 * wide)


@helper
def attention(step, bases):
    """softmax(query @ key.T * scale + mask) @ value, of each head.

    Fields: query, key, value, out, the mask, the strides of the first four by sample and row, those of the mask by
    sample, head, query and key, all in bytes, then as they are named here. Heads lie side by side in a row. `factor` is
    the address of the scale, for powers of two.
    """
    query, key, value, out = at(bases, step, 1), at(bases, step, 3), at(bases, step, 5), at(bases, step, 7)
    mask = at(bases, step, 9)
    by_query, by_key, by_value, by_out = step[12], step[14], step[16], step[18]
    samples, length, others, heads, depth = step[23], step[24], step[25], step[26], step[27]
    which, factor, numbers, to_floats = step[28], step[29], step[30], step[31]
    size = 4 if to_floats else 1
    scored, wide = -(-others // COLUMNS) * COLUMNS, -(-depth // COLUMNS) * COLUMNS
    total = scratch_of(bases)
    keys = total + 64
    values = keys + 4 * depth * scored
    scores = values + 4 * others * wide
    mixed = scores + 4 * _ROWS * scored
    for n in range(samples):
        for head in range(heads):
            q, skip = query + n * step[11] + 4 * head * depth, 4 * head * depth
            _transpose(key + n * step[13] + skip, by_key, others, depth, factor, keys, scored)
            _copy(value + n * step[15] + skip, by_value, others, depth, values, wide)
            i = 0
            while i < length:
                rows = _ROWS if length - i >= _ROWS else 4 if length - i >= 4 else 1
                _multiply(rows, q + i * by_query, by_query, keys, scored, depth, scores)
                for r in range(rows):
                    masked = mask + n * step[19] + head * step[20] + (i + r) * step[21]
                    count = min(i + r + 1, others) if which == CAUSAL else others
                    _mask(scores + 4 * r * scored, count, scored, which, masked, step[22])
                _mix(rows, scores, scored, others, values, wide, mixed, total)
                for r in range(rows):
                    made = out + n * step[17] + (i + r) * by_out + size * head * depth
                    write(mixed + 4 * r * wide, to_floats, numbers, made, depth)
                i += rows


@helper
def _mask(scores, count, wide, which, mask, between):
    """Apply a mask, whose numbers are `between` bytes apart, to `count` scores of a query. No others count."""
    scores = carray(floats(scores), wide)
    if which == FLOAT_MASK:
        for j in range(count):
            scores[j] += carray(floats(mask + j * between), 1)[0] * _LOG2E
    elif which == BOOL_MASK:
        for j in range(count):
            if carray(bytes_(mask + j * between), 1)[0] == 0:
                scores[j] = _NOTHING
    for j in range(count, wide):
        scores[j] = _NOTHING


@helper
def _mix(rows, scores, scored, others, values, wide, mixed, total):
    """Rows of values, each the mean by the powers of two of its scores; of no scores 0."""
    sums = carray(floats(total), _ROWS)
    for r in range(rows):
        exponentials(scores + 4 * r * scored, scored // 16, total + 4 * r)
    _multiply(rows, scores, 4 * scored, values, wide, others, mixed)
    for r in range(rows):
        row, by = carray(floats(mixed + 4 * r * wide), wide), _f(0) if sums[r] == 0 else _f(1) / sums[r]
        for j in range(wide):
            row[j] *= by
