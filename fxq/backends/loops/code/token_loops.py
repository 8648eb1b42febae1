"""Loops over the values of a few tokens: the steps of a decoder, attention to its cache included.

A step is a row of integers, see `TokenField`. A place in memory is (base, offset): the index of a base address, and the
distance from it in bytes. Base 0 is the address 0, so that its offsets are addresses. Base 1 is the workspace; inputs
and outputs follow, and then what differs from call to call: the address and strides of masks, and the address, length
and strides of states. Sizes and strides are numbers of elements: float32, or bytes of masks and of integers.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.attention_code import TILE_COLUMNS as TILE_COLUMNS
from fxq.backends.loops.code.cache_loops import ATTEND_FIELDS as ATTEND_FIELDS
from fxq.backends.loops.code.cache_loops import (
    FORM_FIELDS,
    GRID_FIELDS,
    attend_heads,
    attend_heads_of_integers,
    store_blocks,
)
from fxq.backends.loops.code.compiler import compiled, helper
from fxq.backends.loops.code.few_rows_loops import multiply, multiply_integers
from fxq.backends.loops.code.memory_loops import FUNCTION_NAMES as FUNCTION_NAMES
from fxq.backends.loops.code.memory_loops import FUNCTIONS_OF_X as FUNCTIONS_OF_X
from fxq.backends.loops.code.memory_loops import address_of, apply_function, bytes_, floats
from fxq.backends.loops.code.row_loops import quantize
from fxq.backends.loops.code.vectors import LANES

_f = np.float32
LINEAR, ADD, SUBTRACT, MULTIPLY, COPY, NEGATE, RSQRT, MEAN, FUNCTION, ROUNDED_LINEAR = range(10)
"""Codes of steps."""
APPEND, ATTEND, APPEND_INTEGERS, ATTEND_TO_INTEGERS = range(10, 14)
"""Codes of steps on states, in float and in integers."""
VARYING = 5
"""Integers that describe a state (samples, heads, length, depth): its address, its length, and the strides of the first
three axes; or a mask: its address and four strides. A state in integers has them for its integers, then for its scales
and for its zero points, whose depth is the number of blocks of a row."""


class TokenField(IntEnum):
    """Fields of a step."""

    CODE = 0
    OUT = 1  # base, offset
    X = 3  # base, offset
    Y = 5  # base, offset
    SIZES = 7  # of three axes
    OUT_STRIDES = 10  # of the three axes
    X_STRIDES = 13  # of the three axes; 0 where the operand is repeated
    Y_STRIDES = 16
    ARGUMENT = 19  # of FUNCTION: index in `FUNCTION_NAMES`; of steps on states: depth
    STATE = 16  # of steps on states: index among the bases of the first integer of a state, see `VARYING`
    VALUES = 17  # of attentions: likewise, of the state with the values; `STATE` has the keys
    MASK = 18  # of attentions: likewise, of the mask; 0: none
    FACTOR = 20  # of attentions: address of the factor of the products, float32
    WEIGHT = 7  # of LINEAR: the arguments of `few_rows_loops.few_rows` but x and out, in order
    COLUMNS = 21  # of LINEAR: the first of the columns that it computes, and their end
    ONES = 23  # of ROUNDED_LINEAR: address of the sums of the rows of the weight
    GRID = 24  # of ROUNDED_LINEAR: kind, steps, qmin and qmax of `row_loops.quantize_rows`
    BITS = 23  # of steps on states in integers: width of a stored integer, 8 or 4
    BLOCKS = 24  # of steps on states in integers: number of scales of a row
    LEVELS = 25  # of APPEND_INTEGERS: steps of the grid between the ends of a range, and the largest integer


MAX_FIELDS = 28
"""Integers in the row of a step. Unused ones are 0."""


@helper
def _linear(step, bases):
    x, out, f = address_of(bases, step, TokenField.X), address_of(bases, step, TokenField.OUT), TokenField.WEIGHT
    multiply(
        floats(x), step[f], step[f + 1], step[f + 2], _f(step[f + 3]), step[f + 4], step[f + 5], out, step[f + 6],
        step[f + 7], step[f + 8], step[f + 9], step[f + 10], step[f + 11], step[f + 12], step[f + 13],
        step[TokenField.COLUMNS], step[TokenField.COLUMNS + 1],
    )  # fmt: skip


@helper
def _rounded_linear(step, bases):
    """Round each row of the input to integers, and multiply them."""
    x, out, f, g = (
        address_of(bases, step, TokenField.X),
        address_of(bases, step, TokenField.OUT),
        TokenField.WEIGHT,
        TokenField.GRID,
    )
    rows, columns, outputs = step[f + 7], step[f + 8], step[f + 9]
    integers, grid = np.empty((rows, columns), np.uint8), np.empty((2, rows), _f)
    scale, zero = grid.ctypes.data, grid.ctypes.data + 4 * rows
    quantize(
        floats(x), floats(scale), floats(zero), bytes_(integers.ctypes.data), rows, columns, step[g], _f(step[g + 1]),
        step[g + 2], step[g + 3],
    )  # fmt: skip
    multiply_integers(
        integers.ctypes.data, scale, zero, (1, 1), step[f], step[f + 1], step[f + 2], _f(step[f + 3]), step[f + 4],
        step[f + 5], out, step[f + 6], rows, columns, outputs, step[f + 10], step[f + 11], step[f + 12], step[f + 13],
        step[TokenField.COLUMNS], step[TokenField.COLUMNS + 1], step[TokenField.ONES],
    )  # fmt: skip
    integers[0, 0] = np.uint8(grid[0, 0] > 0)  # keeps both arrays alive until here, as only their addresses are used


@helper
def _combine(code, x, x_step, y, y_step, out, count):
    """Combine two runs of values; a step of 0 repeats the first value."""
    a, b, target = carray(floats(x), count), carray(floats(y), count), carray(floats(out), count)
    if x_step and y_step:
        if code == ADD:
            for j in range(count):
                target[j] = a[j] + b[j]
        elif code == SUBTRACT:
            for j in range(count):
                target[j] = a[j] - b[j]
        else:
            for j in range(count):
                target[j] = a[j] * b[j]
        return
    for j in range(count):
        left, right = a[j * x_step], b[j * y_step]
        target[j] = left + right if code == ADD else left - right if code == SUBTRACT else left * right


@helper
def _transform(code, x, out, count):
    """Compute a function of each value of a run."""
    a, target = carray(floats(x), count), carray(floats(out), count)
    if code == COPY:
        for j in range(count):
            target[j] = a[j]
    elif code == NEGATE:
        for j in range(count):
            target[j] = -a[j]
    else:
        for j in range(count):
            target[j] = _f(1) / np.sqrt(a[j])


@helper
def _average(x, out, count):
    """Compute the mean of a run of values."""
    a, total, lanes = carray(floats(x), count), _f(0), np.zeros(LANES, _f)
    whole = count // LANES * LANES
    for first in range(0, whole, LANES):
        for i in range(LANES):
            lanes[i] += a[first + i]
    for j in range(whole, count):
        total += a[j]
    for i in range(LANES):
        total += lanes[i]
    carray(floats(out), 1)[0] = total / _f(count)


@helper
def _pointwise(step, bases):
    """Run a step on all rows of its last axis."""
    f, code = TokenField.SIZES, step[TokenField.CODE]
    x, y = address_of(bases, step, TokenField.X), address_of(bases, step, TokenField.Y)
    out = address_of(bases, step, TokenField.OUT)
    o, p, q = TokenField.OUT_STRIDES, TokenField.X_STRIDES, TokenField.Y_STRIDES
    count = step[f + 2]
    for i in range(step[f]):
        for j in range(step[f + 1]):
            target = out + 4 * (i * step[o] + j * step[o + 1])
            a = x + 4 * (i * step[p] + j * step[p + 1])
            if code <= MULTIPLY:
                b = y + 4 * (i * step[q] + j * step[q + 1])
                _combine(code, a, step[p + 2], b, step[q + 2], target, count)
            elif code == MEAN:
                _average(a, target, count)
            elif code == FUNCTION:
                _transform(COPY, a, target, count)
                apply_function(step[TokenField.ARGUMENT], target, count, 0, 0)
            else:
                _transform(code, a, target, count)


@compiled("i64* i i64*")
def attend(parts, count, fields):
    """Compute softmax(query @ key.T * scale) @ value, where the mask is not 0, for some heads.

    Args:
        parts: int64 (count, 2): first head and end of each part. The heads of all samples are numbered in order.
        count: Number of parts.
        fields: In order:
            * address of the query, float32 (samples, heads, queries, depth);
            * addresses of key and value, float32 (samples, heads, keys, depth);
            * address of the mask, bool (samples, heads, queries, keys); 0: none;
            * address of the result, float32 (samples, heads, queries, depth), contiguous, written;
            * strides of the first three axes of query, key and value, and of all axes of the mask, in elements;
            * numbers of heads, of queries and of keys, at least one;
            * depth, a multiple of `TILE_COLUMNS`;
            * address of the factor of the products, float32.
    """
    parts, fields = carray(parts, (count, 2)), carray(fields, ATTEND_FIELDS)
    for p in range(count):
        attend_heads(parts[p, 0], parts[p, 1], fields)


@helper
def _attend_step(step, bases):
    """Compute the heads of an attention from `COLUMNS` on, for queries (samples, heads, queries, depth)."""
    fields, sizes = np.empty(ATTEND_FIELDS + 2 * GRID_FIELDS + FORM_FIELDS, np.int64), TokenField.SIZES
    key, value, mask = step[TokenField.STATE], step[TokenField.VALUES], step[TokenField.MASK]
    fields[0], fields[4] = address_of(bases, step, TokenField.X), address_of(bases, step, TokenField.OUT)
    fields[1], fields[2], fields[3] = bases[key], bases[value], bases[mask] if mask else 0
    for k in range(3):
        fields[5 + k] = step[TokenField.X_STRIDES + k]
        fields[8 + k], fields[11 + k] = bases[key + 2 + k], bases[value + 2 + k]
    for k in range(4):
        fields[14 + k] = bases[mask + 1 + k] if mask else 0
    fields[18], fields[19], fields[20] = step[sizes + 1], step[sizes + 2], bases[key + 1]
    fields[21], fields[22] = step[TokenField.ARGUMENT], step[TokenField.FACTOR]
    if step[TokenField.CODE] == ATTEND:
        attend_heads(step[TokenField.COLUMNS], step[TokenField.COLUMNS + 1], fields)
        return
    at = ATTEND_FIELDS
    for first in (key, value):
        for part in range(first + VARYING, first + 3 * VARYING, VARYING):
            fields[at], fields[at + 1], fields[at + 2] = bases[part], bases[part + 2], bases[part + 3]
            fields[at + 3] = bases[part + 4]
            at += 4
    fields[at], fields[at + 1] = step[TokenField.BITS], step[TokenField.BLOCKS]
    attend_heads_of_integers(step[TokenField.COLUMNS], step[TokenField.COLUMNS + 1], fields)


@helper
def _entry(bases, state, n, h, j):
    """Number of the row of a state for an entry, from its address on, in values."""
    return n * bases[state + 2] + h * bases[state + 3] + j * bases[state + 4]


@helper
def _append(step, bases):
    """Write values (samples, heads, count, depth) to the end of a state, as they are or rounded to integers."""
    f, g, state = TokenField.SIZES, TokenField.X_STRIDES, step[TokenField.STATE]
    x, first, depth = address_of(bases, step, TokenField.X), bases[state + 1] - step[f + 2], step[TokenField.ARGUMENT]
    for n in range(step[f]):
        for h in range(step[f + 1]):
            for j in range(step[f + 2]):
                source = x + 4 * (n * step[g] + h * step[g + 1] + j * step[g + 2])
                target = _entry(bases, state, n, h, first + j)
                if step[TokenField.CODE] == APPEND:
                    _transform(COPY, source, bases[state] + 4 * target, depth)
                    continue
                scale, zero, levels = state + VARYING, state + 2 * VARYING, TokenField.LEVELS
                store_blocks(
                    source, depth, step[TokenField.BLOCKS], step[TokenField.BITS], step[levels], step[levels + 1],
                    bases[state] + target, bases[scale] + 4 * _entry(bases, scale, n, h, first + j),
                    bases[zero] + _entry(bases, zero, n, h, first + j),
                )  # fmt: skip


@compiled("i64* i i64*")
def run(steps, count, bases):
    """Run steps, int64 (count, MAX_FIELDS), on the base addresses `bases`."""
    steps = carray(steps, (count, MAX_FIELDS))
    for k in range(count):
        step = steps[k]
        if step[0] == LINEAR:
            _linear(step, bases)
        elif step[0] == ROUNDED_LINEAR:
            _rounded_linear(step, bases)
        elif step[0] == APPEND or step[0] == APPEND_INTEGERS:
            _append(step, bases)
        elif step[0] == ATTEND or step[0] == ATTEND_TO_INTEGERS:
            _attend_step(step, bases)
        else:
            _pointwise(step, bases)
