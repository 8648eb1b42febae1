"""The loops of layers: products of integers, depthwise ones, and layers in float."""

from __future__ import annotations

from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.compiler import helper
from fxq.backends.loops.code.finish_code import add_integers, pack_wide, round_floats, scale_sums
from fxq.backends.loops.code.layer_code import (
    add_many,
    bend_many,
    four_deep,
    four_pixels,
    four_wide,
    gelu_many,
    hardswish_many,
    many_pixels,
    one_deep,
    one_pixel,
    one_wide,
    round_four,
    round_many,
    round_one,
    silu_many,
)
from fxq.backends.loops.code.machine_code import PIXELS
from fxq.backends.loops.code.memory_loops import (
    CLAMP,
    HARDSWISH,
    NOTHING,
    PRELU,
    SILU,
    apply,
    at,
    floats,
    ints,
    scratch_of,
    write,
)

_MOST = PIXELS
BY_SUMS, ROUNDED, ADDED, BENT, FUSED = range(5)
"""What becomes of the sums of a tile: they are stored, and `_finish` does it; they are clamped and rounded; a residual
is added before, or another function computed. Small tiles are stored where there is more to do than to round."""


@helper
def _put_floats(x, out, count):
    """The first of 16 floats."""
    x, out = carray(floats(x), 16), carray(floats(out), count)
    for j in range(count):
        out[j] = x[j]


@helper
def _scatter(x, to_floats, numbers, out, first, spread, count):
    """The first of 16 floats, each to a place of its own."""
    to = carray(ints(spread), count)
    size = 4 if to_floats else 1
    for j in range(count):
        write(x + 4 * j, to_floats, numbers, out + size * (first + to[j]), 1)


@helper
def _finish(sums, tile, pixels, kind, scale, bias, slope, numbers, to_floats, out, places, count, spread, kept):
    """What becomes of the sums of a tile, int32 (pixels, 16).

    Args:
        sums: their address.
        tile: memory for as many floats.
        pixels: how many.
        kind: the number of a function.
        scale: float32 (16,), of each column.
        bias: likewise.
        slope: likewise.
        numbers: float32: two bounds of a clamp that stays float, or of integers; what floats are multiplied with before
            they are rounded; the zero point.
        to_floats: whether the result is float32, and not uint8.
        out: where it is written.
        places: of each pixel, where its results begin, in elements, int32.
        count: how many of the 16 columns a float result has; of integers, 16 are written.
        spread: where each column is written from there, in elements, int32 (count,); 0: side by side.
        kept: of a residual, (its 16 columns, the place of each pixel there, its grid); the first is 0 if there is none.
    """
    places = carray(ints(places), pixels)
    for p in range(pixels):
        scale_sums(sums + 64 * p, scale, bias, tile + 64 * p)
    if kept[0]:
        where = carray(ints(kept[1]), pixels)
        for p in range(pixels):
            add_integers(tile + 64 * p, kept[0] + where[p], kept[2])
    if kind != CLAMP or to_floats:
        apply(kind, tile, 16 * pixels, slope, numbers)
    for p in range(pixels):
        if spread:
            _scatter(tile + 64 * p, to_floats, numbers, out, places[p], spread, count)
        elif to_floats:
            _put_floats(tile + 64 * p, out + 4 * places[p], count)
        else:
            round_floats(tile + 64 * p, numbers + 8, numbers, out + places[p])


@helper
def _sum_depthwise(size, line, here, runs, many, stride, weight, begin, sums):
    """A tile of four pixels, or of one, of 16 channels."""
    if size == 4:
        four_deep(line, here, runs, many, stride, weight, begin, sums)
    else:
        one_deep(line, here, runs, many, stride, weight, begin, sums)


@helper
def _sum_small(size, line, here, runs, many, groups, weight, begin, sums):
    """The same of 16 columns."""
    if size == 4:
        four_pixels(line, here, runs, many, groups, weight, begin, sums)
    else:
        one_pixel(line, here, runs, many, groups, weight, begin, sums)


@helper
def _round_small(size, line, here, runs, many, groups, weight, begin, scale, bias, numbers, out, there):
    """The same, rounded at once."""
    if size == 4:
        round_four(line, here, runs, many, groups, weight, begin, scale, bias, numbers, out, there)
    else:
        round_one(line, here, runs, many, groups, weight, begin, scale, bias, numbers, out, there)


@helper
def product(step, bases):
    """A layer. Fields: x, out, then as they are named here.

    `way` says what becomes of the sums of a tile. Where it is rounded at once, scale and bias have the grid of the
    result.
    """
    x, out = at(bases, step, 1), at(bases, step, 3)
    places, to, pixels, runs, many = step[5], step[6], step[7], step[8], step[9]
    groups, weight, blocks, start = step[10], step[11], step[12], step[13]
    scale, bias, slope, numbers = step[14], step[15], step[16], step[17]
    kind, to_floats, channels, block_bytes, at_once = step[18], step[19], step[20], step[21], step[22]
    is_depthwise, skip, spread = step[23], step[24], step[25]  # of a depthwise layer, a block reads its 16 channels
    residual, residual_places, residual_grid = at(bases, step, 26), step[28], step[29]
    way = step[30]
    s = scratch_of(bases)
    t = s + 64 * _MOST
    for first in range(0, pixels, at_once):
        last = min(first + at_once, pixels)
        for k in range(blocks):
            w, begin, line, skipped = weight + k * block_bytes, start + 64 * k, x + k * skip, 64 * k
            written = out if spread else out + (64 * k if to_floats else 16 * k)
            count, p = min(16, channels - 16 * k), first
            by, added = scale + skipped, bias + skipped
            while p < last:
                here, there, left = places + 4 * p, to + 4 * p, last - p
                size = _MOST if left >= _MOST and not is_depthwise else 4 if left >= 4 else 1
                if is_depthwise:
                    _sum_depthwise(size, line, here, runs, many, 16 * blocks, w, begin, s)
                elif size == _MOST:
                    if way == ROUNDED:
                        round_many(line, here, runs, many, groups, w, begin, by, added, numbers, written, there)
                    elif way == ADDED:
                        other, others = residual + 16 * k, residual_places + 4 * p
                        add_many(
                            line, here, runs, many, groups, w, begin, by, added, other, others, residual_grid, numbers,
                            written, there,
                        )  # fmt: skip
                    elif way == BENT:
                        bends = slope + skipped
                        bend_many(line, here, runs, many, groups, w, begin, by, added, bends, numbers, written, there)
                    elif way == FUSED and kind == SILU:
                        silu_many(line, here, runs, many, groups, w, begin, by, added, numbers, written, there)
                    elif way == FUSED and kind == HARDSWISH:
                        hardswish_many(line, here, runs, many, groups, w, begin, by, added, numbers, written, there)
                    elif way == FUSED:
                        gelu_many(line, here, runs, many, groups, w, begin, by, added, numbers, written, there)
                    else:
                        many_pixels(line, here, runs, many, groups, w, begin, s)
                elif way == ROUNDED:
                    _round_small(size, line, here, runs, many, groups, w, begin, by, added, numbers, written, there)
                else:
                    _sum_small(size, line, here, runs, many, groups, w, begin, s)
                if way == BY_SUMS or (way != ROUNDED and size < _MOST):
                    kept = (residual + 16 * k if residual_places else 0, residual_places + 4 * p, residual_grid)
                    aside = spread + skipped if spread else 0
                    _finish(
                        s, t, size, kind, by, added, slope + skipped, numbers, to_floats, written, there, count, aside,
                        kept,
                    )  # fmt: skip
                p += size


@helper
def depthwise(step, bases):
    """A depthwise layer of a multiple of 64 channels. Fields: x, out, then as they are named here."""
    x, out = at(bases, step, 1), at(bases, step, 3)
    places, to, pixels, runs, many = step[5], step[6], step[7], step[8], step[9]
    weight, blocks, start, scale, bias, slope, numbers = (
        step[10], step[11], step[12], step[13], step[14], step[15], step[16],
    )  # fmt: skip
    kind = step[17]
    t = scratch_of(bases)
    where = carray(ints(to), pixels)
    for k in range(blocks):
        w, begin, by, added = weight + 256 * many * k, start + 256 * k, scale + 256 * k, bias + 256 * k
        p = 0
        while p < pixels:
            size = 4 if pixels - p >= 4 else 1
            if size == 4:
                four_wide(x + 64 * k, places + 4 * p, runs, many, w, begin, by, added, t)
            else:
                one_wide(x + 64 * k, places + 4 * p, runs, many, w, begin, by, added, t)
            if kind == PRELU:
                for v in range(4 * size):
                    apply(kind, t + 64 * v, 16, slope + 256 * k + 64 * (v % 4), numbers)
            elif kind != CLAMP:
                apply(kind, t, 64 * size, slope, numbers)
            for q in range(size):
                pack_wide(t + 256 * q, numbers + 8, numbers, out + 64 * k + where[p + q])
            p += size


@helper
def linear(step, bases):
    """A layer in float, of few rows. Fields: x, its stride by row in bytes, out, its stride, then as they are named."""
    x, out = at(bases, step, 1), at(bases, step, 4)
    rows, depth, columns, weight, bias = step[7], step[8], step[9], step[10], step[11]
    kind, slope, numbers = step[12], step[13], step[14]
    by, added = carray(floats(weight), (depth, columns)), carray(floats(bias), columns)
    for first in range(0, rows, 8):  # the weight is read once for some
        last = min(first + 8, rows)
        for n in range(first, last):
            y = carray(floats(out + n * step[6]), columns)
            for j in range(columns):
                y[j] = added[j]
        for k in range(depth):
            line = by[k]
            for n in range(first, last):
                value, y = carray(floats(x + n * step[3]), depth)[k], carray(floats(out + n * step[6]), columns)
                for j in range(columns):
                    y[j] += value * line[j]
    for n in range(rows):
        if kind != NOTHING:
            apply(kind, out + n * step[6], columns, slope, numbers)
