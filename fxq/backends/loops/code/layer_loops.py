"""Loops of layers: integer products, depthwise convolutions, and float layers."""

from __future__ import annotations

from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.compiler import helper
from fxq.backends.loops.code.finish_code import add_integers, pack_wide, round_floats, scale_sums
from fxq.backends.loops.code.layer_code import (
    four_depthwise,
    four_pixels,
    four_wide,
    gelu_many,
    hardswish_many,
    many_pixels,
    one_depthwise,
    one_pixel,
    one_wide,
    prelu_many,
    residual_many,
    round_four,
    round_many,
    round_one,
    silu_many,
)
from fxq.backends.loops.code.machine_code import TILE_PIXELS
from fxq.backends.loops.code.memory_loops import (
    CLAMP,
    HARDSWISH,
    NO_FUNCTION,
    PRELU,
    SILU,
    address_of,
    apply_function,
    floats,
    ints,
    scratch_of,
    write,
)
from fxq.backends.loops.code.step_fields import DepthwiseField, LinearField, ProductField

STORE_SUMS, ROUND, ADD_RESIDUAL, APPLY_PRELU, APPLY_FUNCTION = range(5)
"""Epilogues of a tile: its sums are stored, and `_finish` completes them; or the code of the tile quantizes them, at
once, after adding a residual, after PReLU, or after another function. Only ROUND has code for small tiles."""


@helper
def _write_floats(x, out, count):
    """Copy the first `count` of 16 floats."""
    x, out = carray(floats(x), 16), carray(floats(out), count)
    for j in range(count):
        out[j] = x[j]


@helper
def _scatter(x, to_floats, numbers, out, first, spread, count):
    """Write the first `count` of 16 floats, or their integers, to the places `first + spread[j]` of `out`."""
    places = carray(ints(spread), count)
    size = 4 if to_floats else 1
    for j in range(count):
        write(x + 4 * j, to_floats, numbers, out + size * (first + places[j]), 1)


@helper
def _finish(sums, tile, pixels, function, scale, bias, slope, numbers, to_floats, out, places, count, spread, residual):
    """Scale the sums of a tile, add bias and residual, apply the function, and write the results.

    Args:
        sums: Address of int32 (pixels, 16).
        tile: Address of memory for as many floats.
        pixels: Number of pixels.
        function: Index in `FUNCTION_NAMES`.
        scale: Address of float32 (16,), by column.
        bias: Address of float32 (16,), by column.
        slope: Address of float32 (16,), by column.
        numbers: Address of float32: lower bound and upper bound, of floats or of integers, factor, zero point.
        to_floats: Whether the result is float32, and not uint8.
        out: Address of the result.
        places: Address of int32 (pixels,): elements from `out` to the results of each pixel.
        count: Columns of a float result. Of integers, all 16 are written.
        spread: Address of int32 (count,): elements from there to each column; 0 if columns are side by side.
        residual: Addresses of the 16 columns, of int32 (pixels,) with the place of each pixel, and of scale and shift.
            The first is 0 if there is no residual.
    """
    places = carray(ints(places), pixels)
    for p in range(pixels):
        scale_sums(sums + 64 * p, scale, bias, tile + 64 * p)
    if residual[0]:
        residual_places = carray(ints(residual[1]), pixels)
        for p in range(pixels):
            add_integers(tile + 64 * p, residual[0] + residual_places[p], residual[2])
    if function != CLAMP or to_floats:
        apply_function(function, tile, 16 * pixels, slope, numbers)
    for p in range(pixels):
        if spread:
            _scatter(tile + 64 * p, to_floats, numbers, out, places[p], spread, count)
        elif to_floats:
            _write_floats(tile + 64 * p, out + 4 * places[p], count)
        else:
            round_floats(tile + 64 * p, numbers + 8, numbers, out + places[p])


@helper
def _sum_depthwise(size, x, places, runs, run_count, stride, weight, start, sums):
    """Store the sums of 16 channels of a depthwise layer, for four pixels or one."""
    if size == 4:
        four_depthwise(x, places, runs, run_count, stride, weight, start, sums)
    else:
        one_depthwise(x, places, runs, run_count, stride, weight, start, sums)


@helper
def _sum_small(size, x, places, runs, run_count, groups, weight, start, sums):
    """Store the sums of 16 columns, for four pixels or one."""
    if size == 4:
        four_pixels(x, places, runs, run_count, groups, weight, start, sums)
    else:
        one_pixel(x, places, runs, run_count, groups, weight, start, sums)


@helper
def _round_small(size, x, places, runs, run_count, groups, weight, start, scale, bias, numbers, out, out_places):
    """Write the integers of 16 columns, for four pixels or one."""
    if size == 4:
        round_four(x, places, runs, run_count, groups, weight, start, scale, bias, numbers, out, out_places)
    else:
        round_one(x, places, runs, run_count, groups, weight, start, scale, bias, numbers, out, out_places)


@helper
def product(step, bases):
    """Compute an integer layer. Fields: `ProductField`.

    With the epilogue ROUND, scale and bias include the grid of the result.
    """
    x, out = address_of(bases, step, ProductField.X), address_of(bases, step, ProductField.OUT)
    x_places, out_places = step[ProductField.X_PLACES], step[ProductField.OUT_PLACES]
    pixels, runs, run_count = step[ProductField.PIXELS], step[ProductField.RUNS], step[ProductField.RUN_COUNT]
    groups, weight, blocks = step[ProductField.GROUPS], step[ProductField.WEIGHT], step[ProductField.BLOCKS]
    start, scale, bias = step[ProductField.START], step[ProductField.SCALE], step[ProductField.BIAS]
    slope, numbers, function = step[ProductField.SLOPE], step[ProductField.NUMBERS], step[ProductField.FUNCTION]
    to_floats, channels = step[ProductField.TO_FLOATS], step[ProductField.CHANNELS]
    block_bytes, pixels_at_once = step[ProductField.BLOCK_BYTES], step[ProductField.PIXELS_AT_ONCE]
    is_depthwise, block_step = step[ProductField.IS_DEPTHWISE], step[ProductField.BLOCK_STEP]
    spread, residual = step[ProductField.SPREAD], address_of(bases, step, ProductField.RESIDUAL)
    residual_places, residual_grid = step[ProductField.RESIDUAL_PLACES], step[ProductField.RESIDUAL_GRID]
    epilogue = step[ProductField.EPILOGUE]
    sums = scratch_of(bases)
    tile = sums + 64 * TILE_PIXELS
    for first in range(0, pixels, pixels_at_once):
        last = min(first + pixels_at_once, pixels)
        for k in range(blocks):
            w, begin, read, offset = weight + k * block_bytes, start + 64 * k, x + k * block_step, 64 * k
            written = out if spread else out + (64 * k if to_floats else 16 * k)
            count, p = min(16, channels - 16 * k), first
            s, b = scale + offset, bias + offset
            while p < last:
                here, there, left = x_places + 4 * p, out_places + 4 * p, last - p
                size = TILE_PIXELS if left >= TILE_PIXELS and not is_depthwise else 4 if left >= 4 else 1
                if is_depthwise:
                    _sum_depthwise(size, read, here, runs, run_count, 16 * blocks, w, begin, sums)
                elif size == TILE_PIXELS:
                    if epilogue == ROUND:
                        round_many(read, here, runs, run_count, groups, w, begin, s, b, numbers, written, there)
                    elif epilogue == ADD_RESIDUAL:
                        added, added_places = residual + 16 * k, residual_places + 4 * p
                        residual_many(
                            read, here, runs, run_count, groups, w, begin, s, b, added, added_places, residual_grid,
                            numbers, written, there,
                        )  # fmt: skip
                    elif epilogue == APPLY_PRELU:
                        slopes = slope + offset
                        prelu_many(read, here, runs, run_count, groups, w, begin, s, b, slopes, numbers, written, there)
                    elif epilogue == APPLY_FUNCTION and function == SILU:
                        silu_many(read, here, runs, run_count, groups, w, begin, s, b, numbers, written, there)
                    elif epilogue == APPLY_FUNCTION and function == HARDSWISH:
                        hardswish_many(read, here, runs, run_count, groups, w, begin, s, b, numbers, written, there)
                    elif epilogue == APPLY_FUNCTION:
                        gelu_many(read, here, runs, run_count, groups, w, begin, s, b, numbers, written, there)
                    else:
                        many_pixels(read, here, runs, run_count, groups, w, begin, sums)
                elif epilogue == ROUND:
                    _round_small(size, read, here, runs, run_count, groups, w, begin, s, b, numbers, written, there)
                else:
                    _sum_small(size, read, here, runs, run_count, groups, w, begin, sums)
                if epilogue == STORE_SUMS or (epilogue != ROUND and size < TILE_PIXELS):
                    of_block = (residual + 16 * k if residual_places else 0, residual_places + 4 * p, residual_grid)
                    column_places = spread + offset if spread else 0
                    _finish(
                        sums, tile, size, function, s, b, slope + offset, numbers, to_floats, written, there, count,
                        column_places, of_block,
                    )  # fmt: skip
                p += size


@helper
def depthwise(step, bases):
    """Compute a depthwise layer of a multiple of 64 channels. Fields: `DepthwiseField`."""
    x, out = address_of(bases, step, DepthwiseField.X), address_of(bases, step, DepthwiseField.OUT)
    x_places, out_places = step[DepthwiseField.X_PLACES], step[DepthwiseField.OUT_PLACES]
    pixels, runs, fours = step[DepthwiseField.PIXELS], step[DepthwiseField.RUNS], step[DepthwiseField.FOURS]
    weight, blocks, start = step[DepthwiseField.WEIGHT], step[DepthwiseField.BLOCKS], step[DepthwiseField.START]
    scale, bias, slope = step[DepthwiseField.SCALE], step[DepthwiseField.BIAS], step[DepthwiseField.SLOPE]
    numbers, function = step[DepthwiseField.NUMBERS], step[DepthwiseField.FUNCTION]
    tile = scratch_of(bases)
    places = carray(ints(out_places), pixels)
    for k in range(blocks):
        w, begin, s, b = weight + 256 * fours * k, start + 256 * k, scale + 256 * k, bias + 256 * k
        p = 0
        while p < pixels:
            size = 4 if pixels - p >= 4 else 1
            if size == 4:
                four_wide(x + 64 * k, x_places + 4 * p, runs, fours, w, begin, s, b, tile)
            else:
                one_wide(x + 64 * k, x_places + 4 * p, runs, fours, w, begin, s, b, tile)
            if function == PRELU:
                for v in range(4 * size):
                    apply_function(function, tile + 64 * v, 16, slope + 256 * k + 64 * (v % 4), numbers)
            elif function != CLAMP:
                apply_function(function, tile, 64 * size, slope, numbers)
            for q in range(size):
                pack_wide(tile + 256 * q, numbers + 8, numbers, out + 64 * k + places[p + q])
            p += size


@helper
def linear(step, bases):
    """Compute a float layer of few rows. Fields: `LinearField`."""
    x, out = address_of(bases, step, LinearField.X), address_of(bases, step, LinearField.OUT)
    x_stride, out_stride = step[LinearField.X_STRIDE], step[LinearField.OUT_STRIDE]
    rows, depth, columns = step[LinearField.ROWS], step[LinearField.DEPTH], step[LinearField.COLUMNS]
    weight = carray(floats(step[LinearField.WEIGHT]), (depth, columns))
    bias = carray(floats(step[LinearField.BIAS]), columns)
    function, slope, numbers = step[LinearField.FUNCTION], step[LinearField.SLOPE], step[LinearField.NUMBERS]
    for first in range(0, rows, 8):  # the weight is read once for eight rows
        last = min(first + 8, rows)
        for n in range(first, last):
            y = carray(floats(out + n * out_stride), columns)
            for j in range(columns):
                y[j] = bias[j]
        for k in range(depth):
            line = weight[k]
            for n in range(first, last):
                value, y = carray(floats(x + n * x_stride), depth)[k], carray(floats(out + n * out_stride), columns)
                for j in range(columns):
                    y[j] += value * line[j]
    for n in range(rows):
        if function != NO_FUNCTION:
            apply_function(function, out + n * out_stride, columns, slope, numbers)
