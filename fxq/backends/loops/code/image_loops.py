"""The loops of a program but those of layers."""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.compiler import helper
from fxq.backends.loops.code.finish_code import add_squares, add_up, normalize
from fxq.backends.loops.code.memory_loops import NOTHING, apply, at, bytes_, floats, ints, read, scratch_of, write

_f, _i = np.float32, np.int32
CHUNK = 512
"""How many numbers are computed at once where several loops do it: they stay in the first cache."""


@helper
def _quantize(x, out, count, factor, zero, low, high):
    """Round floats to integers; all that are not numbers become the lowest."""
    x, out = carray(floats(x), count), carray(bytes_(out), count)
    for j in range(count):
        value = x[j] * factor
        value = low if not value > low else value
        value = high if value > high else value
        out[j] = np.uint8(_i(np.rint(value)) + zero)


@helper
def _quantize_spread(x, between, out, beside, count, factor, zero, low, high):
    """The same of floats that lie some apart, to integers that do."""
    x, out = carray(floats(x), between * count), carray(bytes_(out), beside * count)
    for j in range(count):
        value = x[j * between] * factor
        value = low if not value > low else value
        value = high if value > high else value
        out[j * beside] = np.uint8(_i(np.rint(value)) + zero)


@helper
def quantize(step, bases):
    """An input rounded.

    Fields: x, its strides (n, c, h, w) in elements, (n, h, w, c), out, its strides (n, h, w) in bytes, four floats.
    """
    x, out = at(bases, step, 1), at(bases, step, 11)
    by_sample, by_channel, by_row, by_pixel = step[3], step[4], step[5], step[6]
    samples, rows, columns, channels = step[7], step[8], step[9], step[10]
    to_sample, to_row, to_pixel = step[13], step[14], step[15]
    numbers = carray(floats(step[16]), 4)
    factor, zero, low, high = numbers[0], _i(numbers[1]), numbers[2], numbers[3]
    whole = by_channel == 1 and by_pixel == channels and to_pixel == channels
    for n in range(samples):
        for i in range(rows):
            read, written = x + 4 * (n * by_sample + i * by_row), out + n * to_sample + i * to_row
            if whole:
                _quantize(read, written, columns * channels, factor, zero, low, high)
            elif by_channel == 1:
                for j in range(columns):
                    _quantize(read + 4 * j * by_pixel, written + j * to_pixel, channels, factor, zero, low, high)
            else:
                for c in range(channels):
                    _quantize_spread(
                        read + 4 * c * by_channel, by_pixel, written + c, to_pixel, columns, factor, zero, low, high
                    )


@helper
def _combined(x, y, multiplies, count):
    """The sum of floats, or the product, in place of the first."""
    x, y = carray(floats(x), count), carray(floats(y), count)
    if multiplies:
        for j in range(count):
            x[j] = x[j] * y[j]
    else:
        for j in range(count):
            x[j] = x[j] + y[j]


@helper
def pointwise(step, bases):
    """A function of each element of a value, or of two.

    Fields: of the first and the second (base, offset, strides by sample, row and pixel in bytes, whether it is float,
    the address of scale and shift), of the result (base, offset, strides), then as they are named here. `count` says
    how many are read, 3 that they are multiplied; `period`, of how many elements the second one is, if it is a pixel
    for all of a sample, and the elements of others are in runs of whole rows.
    """
    x, y, out = at(bases, step, 1), at(bases, step, 8), at(bases, step, 15)
    samples, rows, columns, run = step[20], step[21], step[22], step[23]
    count, kind, slope, numbers, to_floats = (
        step[24],
        step[25],
        step[26],
        step[27],
        step[28],
    )  # count: how many are read
    x_grid, y_grid = carray(floats(step[7]), 2), carray(floats(step[14]), 2)
    scratch = scratch_of(bases)
    period, second, chunk = step[29], scratch + 4 * CHUNK, CHUNK
    if period:
        chunk = CHUNK // period * period
    x_size, y_size, out_size = 4 if step[6] else 1, 4 if step[13] else 1, 4 if to_floats else 1
    for n in range(samples):
        if period:
            for first in range(0, chunk, period):
                read(y + n * step[10], step[13], y_grid[0], y_grid[1], second + 4 * first, period)
        for i in range(rows):
            for c in range(columns):
                a = x + n * step[3] + i * step[4] + c * step[5]
                b = y + n * step[10] + i * step[11] + c * step[12]
                made = out + n * step[17] + i * step[18] + c * step[19]
                for first in range(0, run, chunk):
                    size = min(chunk, run - first)
                    read(a + x_size * first, step[6], x_grid[0], x_grid[1], scratch, size)
                    if count > 1:
                        if not period:
                            read(b + y_size * first, step[13], y_grid[0], y_grid[1], second, size)
                        _combined(scratch, second, count == 3, size)
                    if kind != NOTHING:
                        apply(kind, scratch, size, slope, numbers)
                    write(scratch, to_floats, numbers, made + out_size * first, size)


@helper
def pool(step, bases):
    """The largest value of windows, or their mean, which is rounded to a grid, or float.

    Fields: x, its strides by sample, row and pixel in bytes, out, its strides, then as they are named here.
    """
    x, out = at(bases, step, 1), at(bases, step, 6)
    samples, rows, columns, channels = step[11], step[12], step[13], step[14]
    tall, wide, down, right, top, left, high, broad = (
        step[15], step[16], step[17], step[18], step[19], step[20], step[21], step[22]
    )  # fmt: skip
    takes_mean, counts_padding, numbers, to_floats, is_float = step[23], step[24], step[25], step[26], step[27]
    about = carray(floats(numbers), 6)
    means = scratch_of(bases)
    sums, reals = carray(ints(means + 4 * channels), channels), carray(floats(means), channels)
    for n in range(samples):
        for i in range(rows):
            for j in range(columns):
                y0, x0 = i * down - top, j * right - left
                y1, x1 = min(y0 + tall, high), min(x0 + wide, broad)
                size = tall * wide
                y0, x0 = max(y0, 0), max(x0, 0)
                if not counts_padding:
                    size = (y1 - y0) * (x1 - x0)
                made = out + n * step[8] + i * step[9] + j * step[10]
                if takes_mean:
                    sums[:] = 0
                    reals[:] = _f(0)
                    for row in range(y0, y1):
                        for column in range(x0, x1):
                            place = x + n * step[3] + row * step[4] + column * step[5]
                            if is_float:
                                real = carray(floats(place), channels)
                                for c in range(channels):
                                    reals[c] += real[c]
                            else:
                                line = carray(bytes_(place), channels)
                                for c in range(channels):
                                    sums[c] += line[c]
                    inside = (y1 - y0) * (x1 - x0)
                    for c in range(channels):
                        value = reals[c] if is_float else _f(sums[c] - _i(inside) * _i(about[5])) * about[4]
                        reals[c] = value / _f(size)
                    write(means, to_floats, numbers, made, channels)
                else:
                    best = carray(bytes_(made), channels)
                    for c in range(channels):
                        best[c] = np.uint8(0)
                    for row in range(y0, y1):
                        for column in range(x0, x1):
                            line = carray(bytes_(x + n * step[3] + row * step[4] + column * step[5]), channels)
                            for c in range(channels):
                                best[c] = max(best[c], line[c])


@helper
def norm(step, bases):
    """Each pixel normalized.

    Fields: x, its strides by sample, row and pixel in bytes, whether it is float, its grid, out, its strides, then as
    they are named here.
    """
    x, out = at(bases, step, 1), at(bases, step, 8)
    grid = carray(floats(step[7]), 2)
    samples, rows, columns, channels = step[13], step[14], step[15], step[16]
    weight, bias, eps, numbers, to_floats = step[17], step[18], step[19], step[20], step[21]
    scratch = scratch_of(bases)
    line, about = scratch + 64, carray(floats(scratch), 2)
    for n in range(samples):
        for i in range(rows):
            for j in range(columns):
                read(x + n * step[3] + i * step[4] + j * step[5], step[6], grid[0], grid[1], line, channels)
                blocks = (channels + 15) // 16
                real = carray(floats(line), 16 * blocks)
                for c in range(channels, 16 * blocks):
                    real[c] = _f(0)
                add_up(line, blocks, scratch)
                mean = about[0] / _f(channels)
                for c in range(channels, 16 * blocks):
                    real[c] = mean
                about[1] = mean
                add_squares(line, blocks, scratch)
                about[0] = _f(1) / np.sqrt(about[0] / _f(channels) + carray(floats(eps), 1)[0])
                for c in range(blocks):
                    normalize(line + 64 * c, scratch, weight + 64 * c, bias + 64 * c)
                write(line, to_floats, numbers, out + n * step[10] + i * step[11] + j * step[12], channels)


@helper
def move(step, bases):
    """Values one by one.

    Fields: x, its strides by sample, row and pixel, out, its strides by sample, row, pixel and channel, in elements,
    then as they are named here.
    """
    x, out = at(bases, step, 1), at(bases, step, 6)
    samples, rows, columns, channels, size = step[12], step[13], step[14], step[15], step[16]
    for n in range(samples):
        for i in range(rows):
            for j in range(columns):
                read = x + size * (n * step[3] + i * step[4] + j * step[5])
                made = out + size * (n * step[8] + i * step[9] + j * step[10])
                if size == 1:
                    for c in range(channels):
                        carray(bytes_(made + c * step[11]), 1)[0] = carray(bytes_(read + c), 1)[0]
                else:
                    for c in range(channels):
                        carray(floats(made + 4 * c * step[11]), 1)[0] = carray(floats(read + 4 * c), 1)[0]
