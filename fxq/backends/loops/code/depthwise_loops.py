"""Loop of depthwise convolutions whose tiles fill registers with channels; see `depthwise_code.py`."""

from __future__ import annotations

from fxq.backends.loops.code.compiler import helper
from fxq.backends.loops.code.depthwise_code import (
    PARTS,
    WideTiles,
    hardswish_wide,
    pack_wide,
    registers_of,
    round_wide,
    silu_wide,
    tile_pixels,
    wide_floats,
)
from fxq.backends.loops.code.machine_code import KIND, WIDE_CHANNELS
from fxq.backends.loops.code.memory_loops import CLAMP, HARDSWISH, PRELU, SILU, address_of, apply_function, scratch_of
from fxq.backends.loops.code.step_fields import DepthwiseField
from fxq.backends.loops.code.vectors import LANES

_BLOCK_BYTES = 4 * WIDE_CHANNELS
"""Bytes of a number of each channel of a register."""
_VECTORS = WIDE_CHANNELS // LANES
"""Vectors of 16 floats of the channels of a register."""
WIDE_TILE_PIXELS = tuple(tile_pixels(KIND, parts) for parts in PARTS)
"""Pixels of a tile, for registers of 1, 2 and 4 parts."""
_APPLIES_SILU = KIND.bits == 512
"""Whether tiles apply SiLU themselves: with 16 registers, it is as fast on stored floats."""
_REGISTERS = tuple(registers_of(KIND, parts) for parts in PARTS)
_PIXELS_1, _PIXELS_2, _PIXELS_4 = WIDE_TILE_PIXELS
_REGISTERS_1, _REGISTERS_2, _REGISTERS_4 = _REGISTERS


@helper
def _sizes(parts):
    """Pixels and registers of a tile."""
    if parts == 1:
        return _PIXELS_1, _REGISTERS_1
    return (_PIXELS_2, _REGISTERS_2) if parts == 2 else (_PIXELS_4, _REGISTERS_4)


@helper
def _apply(parts, tiles, function, slope, floats):
    """Compute tiles with any function. `slope` is the address of the slope of each channel, in the order of sums."""
    pixels, registers = _sizes(parts)
    for k in range(tiles.count):
        here = 4 * pixels * k
        tile = WideTiles(
            tiles.x, tiles.places + here, tiles.out, tiles.out_places + here, 1, tiles.runs, tiles.fours, tiles.last,
            tiles.weight, tiles.start, tiles.scale, tiles.bias, tiles.numbers,
        )  # fmt: skip
        wide_floats(parts, tile, floats)
        if function == PRELU:
            for v in range(_VECTORS * registers):
                apply_function(function, floats + 64 * v, LANES, slope + 64 * (v % _VECTORS), tiles.numbers)
        else:
            apply_function(function, floats, WIDE_CHANNELS * registers, slope, tiles.numbers)
        pack_wide(parts, tile, floats)


@helper
def depthwise(step, bases):
    """Compute a depthwise layer of a multiple of 16 channels. Fields: `DepthwiseField`."""
    x, out = address_of(bases, step, DepthwiseField.X), address_of(bases, step, DepthwiseField.OUT)
    parts, function = step[DepthwiseField.PARTS], step[DepthwiseField.FUNCTION]
    fours, last, weight = step[DepthwiseField.FOURS], step[DepthwiseField.LAST], step[DepthwiseField.WEIGHT]
    runs, count = step[DepthwiseField.RUNS], step[DepthwiseField.PIXELS] // _sizes(parts)[0]
    for k in range(step[DepthwiseField.BLOCKS]):
        offset, first = _BLOCK_BYTES * k, WIDE_CHANNELS // parts * k
        tiles = WideTiles(
            x + first, step[DepthwiseField.X_PLACES], out + first, step[DepthwiseField.OUT_PLACES], count, runs,
            fours, last, weight + (fours + last) * offset, step[DepthwiseField.START] + offset,
            step[DepthwiseField.SCALE] + offset, step[DepthwiseField.BIAS] + offset, step[DepthwiseField.NUMBERS],
        )  # fmt: skip
        if function == CLAMP:
            round_wide(parts, tiles)
        elif function == SILU and _APPLIES_SILU:
            silu_wide(parts, tiles)
        elif function == HARDSWISH:
            hardswish_wide(parts, tiles)
        else:
            _apply(parts, tiles, function, step[DepthwiseField.SLOPE] + offset, scratch_of(bases))
