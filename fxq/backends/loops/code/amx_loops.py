"""Loop of large integer layers on CPUs with AMX; see `amx_code.py` for the tiles, and `layer_loops.py` for the layers.

A tile reads 64 integers of 16 pixels. Where pixels are at equal distances and have one run of whole tiles, tiles are
loaded from the input. Otherwise the runs of each pixel are copied side by side first, for as many pixels as the
second-level cache has room for. Bytes between the end of a pixel's runs and that of its last tile have weights of zero.
"""

from __future__ import annotations

from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.amx_code import (
    BLOCKS_AT_ONCE,
    PIXELS_AT_ONCE,
    ROW_BYTES,
    STATE_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    configure,
    copy_run,
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
from fxq.backends.loops.code.layer_code import Residual, TileOutput
from fxq.backends.loops.code.layer_loops import ADD_RESIDUAL, APPLY_PRELU, ROUND, STORE_SUMS, TileEpilogue, finish
from fxq.backends.loops.code.machine_code import GROUP
from fxq.backends.loops.code.memory_loops import HARDSWISH, SILU, address_of, ints, scratch_of
from fxq.backends.loops.code.step_fields import ProductField
from fxq.backends.loops.code.vectors import LANES

_INT_BYTES = 4
_SUMS_BYTES = PIXELS_AT_ONCE * BLOCKS_AT_ONCE * LANES * _INT_BYTES
_COPIES = STATE_BYTES + _SUMS_BYTES + _SUMS_BYTES // BLOCKS_AT_ONCE
"""Offset of copied pixels in the scratch memory: the configuration of tiles, sums and floats are before them."""


def pixel_bytes(groups: int) -> int:
    """Bytes from a copied pixel of so many groups to the next: whole rows of tiles, an odd number of them.

    Pixels at a distance that is a power of two would share few places in the caches.
    """
    return ROW_BYTES * (-(-groups * GROUP // ROW_BYTES) | 1)


def amx_scratch(pixels: int, groups: int) -> int:
    """Bytes of scratch memory for copies of so many pixels of so many groups. The last copy may reach beyond it."""
    return _COPIES + -(-pixels // PIXELS_AT_ONCE) * PIXELS_AT_ONCE * pixel_bytes(groups) + ROW_BYTES


@inlined
def _multiply(rows, columns, x, x_step, weight, block_bytes, count, start, sums, state):
    """Store the sums of one or two tiles of pixels, times one or two blocks. Arguments: see `sums_of_tiles`."""
    if rows == 2 and columns == 2:
        two_by_two(x, x_step, weight, block_bytes, count, start, sums, state)
    elif rows == 2:
        two_by_one(x, x_step, weight, block_bytes, count, start, sums, state)
    elif columns == 2:
        one_by_two(x, x_step, weight, block_bytes, count, start, sums, state)
    else:
        one_by_one(x, x_step, weight, block_bytes, count, start, sums, state)


@helper
def _finish_block(step, bases, k, p, pixels, sums, floats):
    """Write the results of block k for pixels from p on.

    Args:
        step: `ProductField`.
        bases: Base addresses.
        k: Index of the block.
        p: Index of the first pixel.
        pixels: Number of pixels.
        sums: Address of the sums, int32 (pixels, 16).
        floats: Address of memory for float32 (pixels, 16).
    """
    code, function, spread = step[ProductField.EPILOGUE], step[ProductField.FUNCTION], step[ProductField.SPREAD]
    numbers, to_floats = step[ProductField.NUMBERS], step[ProductField.TO_FLOATS]
    offset, here = ROW_BYTES * k, _INT_BYTES * p
    out = address_of(bases, step, ProductField.OUT) + (0 if spread else ROW_BYTES * k if to_floats else LANES * k)
    slope, residual_places = step[ProductField.SLOPE] + offset, step[ProductField.RESIDUAL_PLACES]
    result = TileOutput(
        step[ProductField.SCALE] + offset, step[ProductField.BIAS] + offset, numbers, out,
        step[ProductField.OUT_PLACES] + here,
    )  # fmt: skip
    residual = Residual(
        address_of(bases, step, ProductField.RESIDUAL) + LANES * k if residual_places else 0, residual_places + here,
        step[ProductField.RESIDUAL_GRID],
    )  # fmt: skip
    if code == ROUND:
        round_sums(sums, pixels, result)
    elif code == ADD_RESIDUAL:
        residual_sums(sums, pixels, result, residual)
    elif code == APPLY_PRELU:
        prelu_sums(sums, pixels, result, slope)
    elif code == STORE_SUMS:
        count = min(LANES, step[ProductField.CHANNELS] - LANES * k)
        epilogue = TileEpilogue(function, slope, to_floats, count, spread + offset if spread else 0)
        finish(sums, floats, pixels, result, epilogue, residual)
    elif function == SILU:
        silu_sums(sums, pixels, result)
    elif function == HARDSWISH:
        hardswish_sums(sums, pixels, result)
    else:
        gelu_sums(sums, pixels, result)


@helper
def _copy_pixels(step, bases, first, last, copies, copy_step):
    """Copy the runs of pixels from `first` to `last` side by side, `copy_step` bytes from a pixel to the next."""
    x, pixels = address_of(bases, step, ProductField.X), step[ProductField.PIXELS]
    run_count, groups = step[ProductField.RUN_COUNT], step[ProductField.GROUPS]
    places, runs = carray(ints(step[ProductField.X_PLACES]), pixels), carray(ints(step[ProductField.RUNS]), run_count)
    for p in range(first, last):
        line, out = x + places[p], copies + copy_step * (p - first)
        for r in range(run_count):
            copy_run(line + runs[r], groups, out)
            out += GROUP * groups


@helper
def amx_product(step, bases):
    """Compute an integer layer with AMX. Fields: `ProductField`; weights are padded to whole tiles."""
    x, x_step = address_of(bases, step, ProductField.X), step[ProductField.X_STEP]
    pixels, pixels_at_once = step[ProductField.PIXELS], step[ProductField.PIXELS_AT_ONCE]
    weight, block_bytes, blocks = step[ProductField.WEIGHT], step[ProductField.BLOCK_BYTES], step[ProductField.BLOCKS]
    places, first_run = carray(ints(step[ProductField.X_PLACES]), pixels), carray(ints(step[ProductField.RUNS]), 1)[0]
    state = scratch_of(bases)
    sums = state + STATE_BYTES
    floats, copies = sums + _SUMS_BYTES, state + _COPIES
    count = block_bytes // TILE_BYTES
    copy_step = ROW_BYTES * (count | 1)
    configure(state)
    for first in range(0, pixels, pixels_at_once):
        last = min(first + pixels_at_once, pixels)
        first_copied = last - (last - first) % PIXELS_AT_ONCE if x_step else first
        _copy_pixels(step, bases, first_copied, last, copies, copy_step)
        for k in range(0, blocks, BLOCKS_AT_ONCE):
            columns = min(BLOCKS_AT_ONCE, blocks - k)
            for p in range(first, last, PIXELS_AT_ONCE):
                here = min(PIXELS_AT_ONCE, last - p)
                rows = 2 if here > TILE_ROWS else 1
                is_copied = p >= first_copied
                a = copies + copy_step * (p - first_copied) if is_copied else x + places[p] + first_run
                _multiply(
                    rows, columns, a, copy_step if is_copied else x_step, weight + k * block_bytes, block_bytes, count,
                    step[ProductField.START] + ROW_BYTES * k, sums, state,
                )  # fmt: skip
                for c in range(columns):
                    _finish_block(step, bases, k + c, p, here, sums + c * PIXELS_AT_ONCE * ROW_BYTES, floats)
    release(state)
