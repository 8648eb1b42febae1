"""Loop of large integer layers on CPUs with AMX; see `amx_code.py` for the tiles, and `layer_loops.py` for the layers.

A tile has 16 pixels at equal distances, and reads up to 64 integers of each. The pixels are chosen by `amx_tiles.py`::

    convolution of an image with a border, 3 x 3, stride 1:      |  results  | b |  results  | b |
    tiles cross the ends of rows, where results are left out     [  tile 0  ][  tile 1  ][  tile 2

Then a run that a pixel reads has whole tiles, whose weights are zero for integers beyond the run. Or the runs of each
pixel are copied side by side first, for as many tiles as the second-level cache has room for. Bytes between the end of
a pixel's runs and that of its last tile have weights of zero.
"""

from __future__ import annotations

from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.amx_code import (
    BLOCKS_AT_ONCE,
    PIXELS_AT_ONCE,
    ROW_BYTES,
    STATE_BYTES,
    TILE_ROWS,
    TilesInput,
    configure,
    copy_run,
    float_sums,
    gelu_sums,
    hardswish_sums,
    one_by_one,
    one_by_two,
    prelu_sums,
    release,
    residual_sums,
    round_sums,
    silu_sums,
    two_by_one,
    two_by_two,
)
from fxq.backends.loops.code.compiler import helper, inlined
from fxq.backends.loops.code.epilogue_code import Residual, TileOutput
from fxq.backends.loops.code.layer_loops import (
    ADD_RESIDUAL,
    APPLY_PRELU,
    ROUND,
    STORE_FLOATS,
    STORE_SUMS,
    TileEpilogue,
    finish,
)
from fxq.backends.loops.code.machine_code import GROUP
from fxq.backends.loops.code.memory_loops import HARDSWISH, SILU, address_of, ints, scratch_of
from fxq.backends.loops.code.step_fields import AmxField
from fxq.backends.loops.code.vectors import LANES

_INT_BYTES = 4
_SUMS_BYTES = PIXELS_AT_ONCE * BLOCKS_AT_ONCE * LANES * _INT_BYTES
_SUMS = STATE_BYTES + ROW_BYTES
_FLOATS = _SUMS + _SUMS_BYTES
_COPIES = _FLOATS + _SUMS_BYTES // BLOCKS_AT_ONCE
"""Offsets in the scratch memory: sums, floats and copied pixels. The configuration of tiles, and the offset of the only
run of copied pixels, are before them."""


def pixel_bytes(tiles: int) -> int:
    """Bytes from a copied pixel of so many tiles to the next: an odd number of their rows.

    Pixels at a distance that is a power of two would share few places in the caches.
    """
    return ROW_BYTES * (tiles | 1)


def amx_scratch(tiles: int, depth: int) -> int:
    """Bytes of scratch memory for copies of so many tiles of pixels, each with `depth` tiles."""
    return _COPIES + tiles * TILE_ROWS * pixel_bytes(depth) + ROW_BYTES


@inlined
def _multiply(rows, columns, tiles, sums, state):
    """Store the sums of one or two tiles of pixels, times one or two blocks. Arguments: see `sums_of_tiles`."""
    if rows == 2 and columns == 2:
        two_by_two(tiles, sums, state)
    elif rows == 2:
        two_by_one(tiles, sums, state)
    elif columns == 2:
        one_by_two(tiles, sums, state)
    else:
        one_by_one(tiles, sums, state)


@helper
def _finish_pixels(step, k, pixels, sums, floats, result, residual):
    """Write the results of block k for those pixels, of a multiple of 16, that their tiles have."""
    function, spread, to_floats = step[AmxField.FUNCTION], step[AmxField.SPREAD], step[AmxField.TO_FLOATS]
    offset, count = ROW_BYTES * k, min(LANES, step[AmxField.CHANNELS] - LANES * k)
    epilogue = TileEpilogue(
        function, step[AmxField.SLOPE] + offset, to_floats, count, spread + offset if spread else 0
    )  # fmt: skip
    places, first = carray(ints(result.places), pixels), 0
    while first < pixels:
        last = first
        while last < pixels and places[last] >= 0:
            last += 1
        here = _INT_BYTES * first
        if last > first:
            finish(
                sums + ROW_BYTES * first, floats, last - first,
                TileOutput(result.scale, result.bias, result.numbers, result.out, result.places + here), epilogue,
                Residual(residual.x, residual.places + here, residual.grid),
            )  # fmt: skip
        first = last + 1


@inlined
def _finish_bytes(code, function, sums, pixels, columns, result, slope, residual):
    """Write the bytes of one or two blocks. `code`: see `layer_loops.py`."""
    if code == ROUND:
        round_sums(sums, pixels, columns, result)
    elif code == ADD_RESIDUAL:
        residual_sums(sums, pixels, columns, result, residual)
    elif code == APPLY_PRELU:
        prelu_sums(sums, pixels, columns, result, slope)
    elif function == SILU:
        silu_sums(sums, pixels, columns, result)
    elif function == HARDSWISH:
        hardswish_sums(sums, pixels, columns, result)
    else:
        gelu_sums(sums, pixels, columns, result)


@helper
def _finish_blocks(step, bases, k, columns, tile, rows, sums, floats):
    """Write the results of one or two blocks, from block k on.

    Args:
        step: `AmxField`.
        bases: Base addresses.
        k: Index of the first block.
        columns: Number of blocks.
        tile: Index of the first tile of pixels.
        rows: Number of tiles of pixels.
        sums: Address of the sums, int32 (columns, 32, 16).
        floats: Address of memory for float32 (32, 16).
    """
    code, function, spread = step[AmxField.EPILOGUE], step[AmxField.FUNCTION], step[AmxField.SPREAD]
    offset, here, pixels = ROW_BYTES * k, ROW_BYTES * tile, TILE_ROWS * rows
    out_step = 0 if spread else ROW_BYTES if step[AmxField.TO_FLOATS] else LANES
    residual_places, residual_grid = step[AmxField.RESIDUAL_PLACES], step[AmxField.RESIDUAL_GRID]
    residual_step = LANES if residual_grid else ROW_BYTES
    residual = Residual(
        address_of(bases, step, AmxField.RESIDUAL) + residual_step * k if residual_places else 0,
        residual_places + here, residual_grid,
    )  # fmt: skip
    result = TileOutput(
        step[AmxField.SCALE] + offset, step[AmxField.BIAS] + offset, step[AmxField.NUMBERS],
        address_of(bases, step, AmxField.OUT) + out_step * k, step[AmxField.OUT_PLACES] + here,
    )  # fmt: skip
    if code == STORE_SUMS:
        for c in range(columns):
            of_block = TileOutput(
                result.scale + ROW_BYTES * c, result.bias + ROW_BYTES * c, result.numbers, result.out + out_step * c,
                result.places,
            )  # fmt: skip
            added = Residual(residual.x + residual_step * c if residual_places else 0, residual.places, residual.grid)
            _finish_pixels(step, k + c, pixels, sums + PIXELS_AT_ONCE * ROW_BYTES * c, floats, of_block, added)
    elif code == STORE_FLOATS:
        float_sums(sums, pixels, columns, result, step[AmxField.CHANNELS] - LANES * k, residual)
    else:
        _finish_bytes(code, function, sums, pixels, columns, result, step[AmxField.SLOPE] + offset, residual)


@helper
def _copy_pixels(step, bases, first, last, copies, copy_step):
    """Copy the runs of the pixels of some tiles side by side, `copy_step` bytes from a pixel to the next."""
    x, tiles, run_count = address_of(bases, step, AmxField.X), step[AmxField.TILES], step[AmxField.RUN_COUNT]
    groups = step[AmxField.GROUPS]
    places = carray(ints(step[AmxField.X_PLACES]), TILE_ROWS * tiles)
    runs = carray(ints(step[AmxField.RUNS]), run_count)
    for p in range(TILE_ROWS * first, TILE_ROWS * last):
        line, out = x + places[p], copies + copy_step * (p - TILE_ROWS * first)
        for r in range(run_count):
            copy_run(line + runs[r], groups, out)
            out += GROUP * groups


@helper
def amx_product(step, bases):
    """Compute an integer layer with AMX. Fields: `AmxField`."""
    x, x_step, is_copied = address_of(bases, step, AmxField.X), step[AmxField.X_STEP], step[AmxField.GROUPS] > 0
    count, tiles_at_once, depth = step[AmxField.TILES], step[AmxField.TILES_AT_ONCE], step[AmxField.DEPTH]
    weight, block_bytes, blocks = step[AmxField.WEIGHT], step[AmxField.BLOCK_BYTES], step[AmxField.BLOCKS]
    size, places, runs, run_count = (
        step[AmxField.SIZE],
        step[AmxField.X_PLACES],
        step[AmxField.RUNS],
        step[AmxField.RUN_COUNT],
    )
    state = scratch_of(bases)
    sums, floats, copies = state + _SUMS, state + _FLOATS, state + _COPIES
    if is_copied:
        x_step = ROW_BYTES * (depth | 1)
        runs, run_count = state + STATE_BYTES, 1
        carray(ints(runs), 1)[0] = 0
    tile_places = carray(ints(places), count)
    configure(state, size)
    for first in range(0, count, tiles_at_once):
        last = min(first + tiles_at_once, count)
        if is_copied:
            _copy_pixels(step, bases, first, last, copies, x_step)
        for k in range(0, blocks, BLOCKS_AT_ONCE):
            columns = min(BLOCKS_AT_ONCE, blocks - k)
            for t in range(first, last, 2):
                rows = min(2, last - t)
                if is_copied:
                    a = copies + TILE_ROWS * x_step * (t - first)
                    c = a + TILE_ROWS * x_step
                else:
                    a = x + tile_places[t]
                    c = x + tile_places[t + rows - 1]
                tiles = TilesInput(
                    a, c, x_step, runs, run_count, depth, size, weight + k * block_bytes, block_bytes,
                    step[AmxField.START] + ROW_BYTES * k,
                )  # fmt: skip
                _multiply(rows, columns, tiles, sums, state)
                _finish_blocks(step, bases, k, columns, t, rows, sums, floats)
    release(state)
