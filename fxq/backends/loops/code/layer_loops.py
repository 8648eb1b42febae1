"""Loops of layers: integer products, depthwise convolutions, and float layers.

An integer layer multiplies pixels by columns, which are its output channels. Sixteen columns are a block. Machine code
(`layer_code.py`) computes one tile at a time, the 16 columns of a block for `TILE_PIXELS` pixels, 4 or 1, with
its sums in registers::

                      block 0      block 1
    columns          0 .. 15      16 .. 31   ...
                   +------------+------------+
    pixels  0..11  |   tile     |   tile     |        The weight of a block is int8 (runs, groups, 64).
                   +------------+------------+
           12..15  |   tile     |   tile     |        Numbers by column (start, scale, bias, slope) are 64 bytes
                   +------------+------------+        for each block: 16 of int32 or float32.
               16  |   tile     |   tile     |
                   +------------+------------+

A pixel of the result reads `run_count` runs of contiguous integers, such as the rows of its window. Run r of pixel p
begins at the address ``x + places[p] + runs[r]``::

    x:  . . . . . . . . . . . .       a 3 x 3 window of an image with C channels, in memory (H, W, C):
        . [run 0    ] . . . . .       places[p]  bytes from x to the window
        . [run 1    ] . . . . .       runs       0, 1 and 2 rows of the image, in bytes
        . [run 2    ] . . . . .       groups     3 * C / GROUP
        . . . . . . . . . . . .

All blocks of `PIXELS_AT_ONCE` pixels are computed before further pixels, while their input is in the cache. Kinds of
CPU that multiply integers of 16 bits (`products.py`) convert it before, and the weight of a block for its large tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.compiler import helper, inlined
from fxq.backends.loops.code.epilogue_code import Residual, TileOutput
from fxq.backends.loops.code.finish_code import add_integers, round_floats, scale_sums
from fxq.backends.loops.code.layer_code import (
    TileInput,
    four_depthwise,
    four_pixels,
    gelu_many,
    hardswish_many,
    many_pixels,
    one_depthwise,
    one_pixel,
    prelu_many,
    residual_many,
    round_four,
    round_many,
    round_one,
    silu_many,
    sum_own_products,
)
from fxq.backends.loops.code.machine_code import GROUP, TILE_PIXELS, X_BYTES
from fxq.backends.loops.code.memory_loops import (
    CLAMP,
    HARDSWISH,
    NO_FUNCTION,
    SILU,
    address_of,
    apply_function,
    bytes_,
    floats,
    ints,
    scratch_of,
    shorts,
    signed_bytes,
    write,
)
from fxq.backends.loops.code.step_fields import LinearField, ProductField
from fxq.backends.loops.code.vectors import LANES

_INT_BYTES = 4
"""Bytes of an int32 or a float32."""
_BLOCK_BYTES = _INT_BYTES * LANES
"""Bytes of a number of each column of a block: its start, scale, bias or slope; also of the sums of a pixel."""
_CONVERTS = X_BYTES == 2
"""Whether integers are converted to int16."""
CONVERTED_AT = 2 * _BLOCK_BYTES * TILE_PIXELS
"""Bytes from the scratch memory, which begins with sums and results of a tile, to what is computed for int16."""
_ROWS_AT_ONCE = 8
"""Rows for which a float layer reads its weight once."""
STORE_SUMS, ROUND, ADD_RESIDUAL, APPLY_PRELU, APPLY_FUNCTION, STORE_FLOATS = range(6)
"""Epilogues of a tile: its sums are stored, and `finish` completes them; or the code of the tile quantizes them, at
once, after adding a residual, after PReLU, or after another function; or it stores them as clamped floats. Only ROUND
has code for small tiles."""


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
        write(x + _INT_BYTES * j, to_floats, numbers, out + size * (first + places[j]), 1)


class TileEpilogue(NamedTuple):
    """How the stored sums of a tile become results: scale, bias and residual, function, and places.

    Attributes:
        function: Index in `FUNCTION_NAMES`.
        slope: Address of float32 (16,), by column.
        to_floats: Whether results are float32, and not uint8.
        count: Columns of a float result. Of integers, all 16 are written.
        spread: Address of int32 (count,): elements from the place of a pixel to each column; 0: columns are side by
            side.
    """

    function: Any
    slope: Any
    to_floats: Any
    count: Any
    spread: Any


@helper
def _add_floats(x, y, count):
    """Add `count` floats to others in place."""
    x, y = carray(floats(x), count), carray(floats(y), count)
    for j in range(count):
        x[j] += y[j]


@helper
def finish(sums, tile, pixels, result, epilogue, residual):
    """Scale the sums of a tile, add bias and residual, apply the function, and write the results.

    Args:
        sums: Address of int32 (pixels, 16).
        tile: Address of memory for float32 (pixels, 16).
        pixels: Number of pixels.
        result: `TileOutput`.
        epilogue: `TileEpilogue`.
        residual: `Residual`.
    """
    places = carray(ints(result.places), pixels)
    for p in range(pixels):
        scale_sums(sums + _BLOCK_BYTES * p, result.scale, result.bias, tile + _BLOCK_BYTES * p)
    if residual.x:
        residual_places = carray(ints(residual.places), pixels)
        for p in range(pixels):
            if residual.grid:
                add_integers(tile + _BLOCK_BYTES * p, residual.x + residual_places[p], residual.grid)
            else:
                _add_floats(tile + _BLOCK_BYTES * p, residual.x + _INT_BYTES * residual_places[p], epilogue.count)
    if epilogue.function != CLAMP or epilogue.to_floats:
        apply_function(epilogue.function, tile, LANES * pixels, epilogue.slope, result.numbers)
    factor = result.numbers + 2 * _INT_BYTES
    for p in range(pixels):
        line = tile + _BLOCK_BYTES * p
        if epilogue.spread:
            _scatter(line, epilogue.to_floats, result.numbers, result.out, places[p], epilogue.spread, epilogue.count)
        elif epilogue.to_floats:
            _write_floats(line, result.out + _INT_BYTES * places[p], epilogue.count)
        else:
            round_floats(line, factor, result.numbers, result.out + places[p])


@helper
def _store_small_tile(size, tile, is_depthwise, stride, sums):
    """Store the sums of a tile of four pixels or one. All tiles of depthwise layers are small."""
    if is_depthwise:
        if size == 4:
            four_depthwise(tile, stride, sums)
        else:
            one_depthwise(tile, stride, sums)
    elif size == 4:
        four_pixels(tile, sums)
    else:
        one_pixel(tile, sums)


@helper
def _round_small_tile(size, tile, result):
    """Write the integers of a tile of four pixels or one."""
    if size == 4:
        round_four(tile, result)
    else:
        round_one(tile, result)


@inlined
def _store_tile(size, tile, is_depthwise, stride, sums):
    """Store the sums of a tile of `size` pixels. `stride` is that of the weight of a depthwise layer, in bytes."""
    if size == TILE_PIXELS and not is_depthwise:
        many_pixels(tile, sums)
    else:
        _store_small_tile(size, tile, is_depthwise, stride, sums)


@inlined
def _round_tile(size, tile, result):
    """Write the integers of a tile of `size` pixels."""
    if size == TILE_PIXELS:
        round_many(tile, result)
    else:
        _round_small_tile(size, tile, result)


@inlined
def _finish_large_tile(code, function, tile, result, slope, residual):
    """Write the integers of a large tile, with the epilogue `code`: ADD_RESIDUAL, APPLY_PRELU or APPLY_FUNCTION."""
    if code == ADD_RESIDUAL:
        residual_many(tile, result, residual)
    elif code == APPLY_PRELU:
        prelu_many(tile, result, slope)
    elif function == SILU:
        silu_many(tile, result)
    elif function == HARDSWISH:
        hardswish_many(tile, result)
    else:
        gelu_many(tile, result)


@helper
def _convert_pixels(x, places, pixels, runs, run_count, groups, own, wide):
    """Copy the memory that some pixels read as int16, and store the sums of their own products.

    Args:
        x: Address of integers, uint8.
        places: See `TileInput`.
        pixels: Number of pixels.
        runs: See `TileInput`.
        run_count: See `TileInput`.
        groups: See `TileInput`.
        own: See `TileInput`; written.
        wide: Address of the copy.

    Returns:
        The address from which the places of the pixels count in the copy.
    """
    x_places, x_runs = carray(ints(places), pixels), carray(ints(runs), run_count)
    first = x_places.min() + x_runs.min()
    count = x_places.max() + x_runs.max() + GROUP * groups - first
    source, target = carray(bytes_(x + first), count), carray(shorts(wide), count)
    for k in range(count):
        target[k] = source[k]
    converted = wide - X_BYTES * first
    sum_own_products(TileInput(converted, places, runs, run_count, groups, 0, 0, own), pixels)
    return converted


@helper
def _convert_weight(weight, count, wide):
    """Copy a weight as int16."""
    source, target = carray(signed_bytes(weight), count), carray(shorts(wide), count)
    for k in range(count):
        target[k] = source[k]


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
    residual_step = LANES if residual_grid else _BLOCK_BYTES
    code, sums = step[ProductField.EPILOGUE], scratch_of(bases)
    own = sums + CONVERTED_AT
    wide_weight = own + _BLOCK_BYTES * ((min(pixels, pixels_at_once) + LANES - 1) // LANES)  # cache lines
    out_step = 0 if spread else _BLOCK_BYTES if to_floats else LANES
    for first in range(0, pixels, pixels_at_once):
        last = min(first + pixels_at_once, pixels)
        x_read = x
        if _CONVERTS and not is_depthwise:
            x_read = _convert_pixels(
                x, x_places + _INT_BYTES * first, last - first, runs, run_count, groups, own,
                wide_weight + X_BYTES * block_bytes,
            )  # fmt: skip
        for k in range(blocks):
            large_weight = weight + k * block_bytes
            if _CONVERTS and not is_depthwise and last - first >= TILE_PIXELS:
                _convert_weight(large_weight, block_bytes, wide_weight)
                large_weight = wide_weight
            offset, p = _BLOCK_BYTES * k, first
            epilogue = TileEpilogue(
                function, slope + offset, to_floats, min(LANES, channels - LANES * k), spread + offset if spread else 0
            )
            while p < last:
                left, here = last - p, _INT_BYTES * p
                size = TILE_PIXELS if left >= TILE_PIXELS and not is_depthwise else 4 if left >= 4 else 1
                tile = TileInput(
                    x_read + k * block_step, x_places + here, runs, run_count, groups,
                    large_weight if size == TILE_PIXELS else weight + k * block_bytes, start + offset,
                    own + _INT_BYTES * (p - first),
                )  # fmt: skip
                result = TileOutput(scale + offset, bias + offset, numbers, out + k * out_step, out_places + here)
                added = Residual(
                    residual + residual_step * k if residual_places else 0, residual_places + here, residual_grid
                )  # fmt: skip
                if code == ROUND:
                    _round_tile(size, tile, result)
                elif code in (STORE_SUMS, STORE_FLOATS) or size < TILE_PIXELS:
                    _store_tile(size, tile, is_depthwise, LANES * blocks, sums)
                    finish(sums, sums + _BLOCK_BYTES * TILE_PIXELS, size, result, epilogue, added)
                else:
                    _finish_large_tile(code, function, tile, result, epilogue.slope, added)
                p += size


@helper
def linear(step, bases):
    """Compute a float layer of few rows. Fields: `LinearField`."""
    x, out = address_of(bases, step, LinearField.X), address_of(bases, step, LinearField.OUT)
    x_stride, out_stride = step[LinearField.X_STRIDE], step[LinearField.OUT_STRIDE]
    rows, depth, columns = step[LinearField.ROWS], step[LinearField.DEPTH], step[LinearField.COLUMNS]
    weight, weight_stride = step[LinearField.WEIGHT], step[LinearField.WEIGHT_STRIDE]
    bias = carray(floats(step[LinearField.BIAS]), columns)
    function, slope, numbers = step[LinearField.FUNCTION], step[LinearField.SLOPE], step[LinearField.NUMBERS]
    for first in range(0, rows, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, rows)
        for n in range(first, last):
            y = carray(floats(out + n * out_stride), columns)
            for j in range(columns):
                y[j] = bias[j]
        for k in range(depth):
            line = carray(floats(weight + 4 * k * weight_stride), columns)
            for n in range(first, last):
                value, y = carray(floats(x + n * x_stride), depth)[k], carray(floats(out + n * out_stride), columns)
                for j in range(columns):
                    y[j] += value * line[j]
    for n in range(rows):
        if function != NO_FUNCTION:
            apply_function(function, out + n * out_stride, columns, slope, numbers)
