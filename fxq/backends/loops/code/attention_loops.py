"""Loop of attention."""

from __future__ import annotations

import math

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.attention_code import (
    ROWS_AT_ONCE,
    TILE_COLUMNS,
    TILE_ROWS,
    exponentials,
    exponentials_of_rows,
    four_rows,
    many_rows,
    one_row,
    transpose_floats,
)
from fxq.backends.loops.code.compiler import helper
from fxq.backends.loops.code.memory_loops import (
    address_of,
    bytes_,
    floats,
    four_at,
    pair_at,
    scratch_of,
    write,
)
from fxq.backends.loops.code.step_fields import AttentionField

_f = np.float32
_MASKED_SCORE = _f(-math.inf)
NO_MASK, CAUSAL, FLOAT_MASK, BOOL_MASK = range(4)
"""Masks: none; keys up to the query's own position count; floats are added to the scores; bytes, where 0 means that a
key does not count."""


def attention_scratch(keys: int, depth: int) -> int:
    """Bytes of scratch memory of attention: sums, keys, values, and the scores and results of one tile of queries."""
    padded_keys, padded_depth = (-(-n // TILE_COLUMNS) * TILE_COLUMNS for n in (keys, depth))
    return 64 + 4 * (depth * padded_keys + keys * padded_depth + TILE_ROWS * (padded_keys + padded_depth))


@helper
def _transpose(x, row_stride, rows, columns, factor, out, out_width):
    """Write float32 (rows, columns), rows `row_stride` bytes apart, as (columns, rows), rows `out_width` floats apart.

    All values are multiplied by the float at `factor`.
    """
    whole_rows, whole_columns = rows // 16 * 16, columns // 16 * 16
    for i in range(0, whole_rows, 16):
        for j in range(0, whole_columns, 16):
            transpose_floats(
                x + i * row_stride + 4 * j, row_stride, factor, out + 4 * (j * out_width + i), 4 * out_width
            )
    scale, target = carray(floats(factor), 1)[0], carray(floats(out), columns * out_width)
    for i in range(rows):
        row = carray(floats(x + i * row_stride), columns)
        for j in range(0 if i >= whole_rows else whole_columns, columns):
            target[j * out_width + i] = row[j] * scale


@helper
def _copy(x, row_stride, rows, columns, out, out_width):
    """Copy float32 (rows, columns), rows `row_stride` bytes apart, to rows `out_width` floats apart."""
    for i in range(rows):
        row, target = carray(floats(x + i * row_stride), columns), carray(floats(out + 4 * i * out_width), columns)
        for j in range(columns):
            target[j] = row[j]


@helper
def _multiply(rows, x, row_stride, weight, width, columns, depth, out):
    """Multiply float32 (rows, depth), rows `row_stride` bytes apart, by (depth, columns).

    Rows of `weight` and `out` are `width` floats apart. `columns` is a multiple of `TILE_COLUMNS`, and `rows` is 1, 4
    or `TILE_ROWS`.
    """
    for j in range(0, columns, TILE_COLUMNS):
        tile_weight, target = weight + 4 * j, out + 4 * j
        if rows == TILE_ROWS:
            many_rows(x, row_stride, tile_weight, 4 * width, depth, target, 4 * width)
        elif rows == 4:
            four_rows(x, row_stride, tile_weight, 4 * width, depth, target, 4 * width)
        else:
            one_row(x, row_stride, tile_weight, 4 * width, depth, target, 4 * width)


@helper
def _exponentials(rows, scores, row_stride, blocks, sums):
    """Replace rows of scores by their exponentials, and write the sum of each row. `rows` is as in `_multiply`."""
    if rows >= ROWS_AT_ONCE:
        for r in range(0, rows, ROWS_AT_ONCE):
            exponentials_of_rows(scores + r * row_stride, row_stride, blocks, sums + 4 * r)
    else:
        exponentials(scores, blocks, sums)


@helper
def attention(step, bases):
    """Compute softmax(query @ key.T * scale + mask) @ value for each head. Heads are side by side among the channels.

    Fields: `AttentionField`.
    """
    query, key = address_of(bases, step, AttentionField.QUERY), address_of(bases, step, AttentionField.KEY)
    value, out = address_of(bases, step, AttentionField.VALUE), address_of(bases, step, AttentionField.OUT)
    query_of_sample, query_stride = pair_at(step, AttentionField.QUERY_STRIDES)
    key_of_sample, key_stride = pair_at(step, AttentionField.KEY_STRIDES)
    value_of_sample, value_stride = pair_at(step, AttentionField.VALUE_STRIDES)
    out_of_sample, out_stride = pair_at(step, AttentionField.OUT_STRIDES)
    mask, mask_kind = address_of(bases, step, AttentionField.MASK), step[AttentionField.MASK_KIND]
    mask_of_sample, mask_of_head, mask_of_query, mask_of_key = four_at(step, AttentionField.MASK_STRIDES)
    samples, queries, keys = step[AttentionField.SAMPLES], step[AttentionField.QUERIES], step[AttentionField.KEYS]
    heads, depth, factor = step[AttentionField.HEADS], step[AttentionField.DEPTH], step[AttentionField.SCALE]
    numbers, to_floats = step[AttentionField.NUMBERS], step[AttentionField.TO_FLOATS]
    item_size = 4 if to_floats else 1
    score_width, value_width = -(-keys // TILE_COLUMNS) * TILE_COLUMNS, -(-depth // TILE_COLUMNS) * TILE_COLUMNS
    sums = scratch_of(bases)
    all_keys = sums + 64
    all_values = all_keys + 4 * depth * score_width
    scores = all_values + 4 * keys * value_width
    results = scores + 4 * TILE_ROWS * score_width
    for n in range(samples):
        for head in range(heads):
            q, head_offset = query + n * query_of_sample + 4 * head * depth, 4 * head * depth
            _transpose(key + n * key_of_sample + head_offset, key_stride, keys, depth, factor, all_keys, score_width)
            _copy(value + n * value_of_sample + head_offset, value_stride, keys, depth, all_values, value_width)
            i = 0
            while i < queries:
                rows = TILE_ROWS if queries - i >= TILE_ROWS else 4 if queries - i >= 4 else 1
                key_count = min(i + rows, keys) if mask_kind == CAUSAL else keys
                columns = -(-key_count // TILE_COLUMNS) * TILE_COLUMNS
                _multiply(rows, q + i * query_stride, query_stride, all_keys, score_width, columns, depth, scores)
                for r in range(rows):
                    mask_row = mask + n * mask_of_sample + head * mask_of_head + (i + r) * mask_of_query
                    count = min(i + r + 1, key_count) if mask_kind == CAUSAL else key_count
                    _apply_mask(scores + 4 * r * score_width, count, columns, mask_kind, mask_row, mask_of_key)
                _exponentials(rows, scores, 4 * score_width, columns // 16, sums)
                _multiply(rows, scores, 4 * score_width, all_values, value_width, value_width, key_count, results)
                for r in range(rows):
                    _divide(results + 4 * r * value_width, depth, sums + 4 * r)
                    target = out + n * out_of_sample + (i + r) * out_stride + item_size * head * depth
                    write(results + 4 * r * value_width, to_floats, numbers, target, depth)
                i += rows


@helper
def _apply_mask(scores, count, columns, mask_kind, mask, key_stride):
    """Apply a mask to the first `count` scores of a query, and mask all further ones.

    Values of the mask are `key_stride` bytes apart.
    """
    scores = carray(floats(scores), columns)
    if mask_kind == FLOAT_MASK:
        for j in range(count):
            scores[j] += carray(floats(mask + j * key_stride), 1)[0]
    elif mask_kind == BOOL_MASK:
        for j in range(count):
            if carray(bytes_(mask + j * key_stride), 1)[0] == 0:
                scores[j] = _MASKED_SCORE
    for j in range(count, columns):
        scores[j] = _MASKED_SCORE


@helper
def _divide(x, count, total):
    """Divide floats in place by the float at `total`. A sum of 0, where no key counts, makes them 0."""
    x, reciprocal = carray(floats(x), count), carray(floats(total), 1)[0]
    reciprocal = _f(0) if reciprocal == 0 else _f(1) / reciprocal
    for j in range(count):
        x[j] *= reciprocal
