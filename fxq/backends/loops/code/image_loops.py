"""Loops of the steps of a program except layers and attention."""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.compiler import helper, inlined
from fxq.backends.loops.code.finish_code import normalize, sum_floats, sum_squares
from fxq.backends.loops.code.image_code import (
    WindowRow,
    max_of_2,
    max_of_3,
    max_of_any,
    mean_of_floats,
    mean_of_integers,
    quantize_1,
    quantize_1_apart,
    quantize_2,
    quantize_3,
    quantize_4,
    quantize_4_apart,
)
from fxq.backends.loops.code.memory_loops import (
    NO_FUNCTION,
    address_of,
    apply_function,
    bytes_,
    floats,
    four_at,
    pair_at,
    read,
    scratch_of,
    triple_at,
    write,
)
from fxq.backends.loops.code.step_fields import MoveField, NormField, PointwiseField, PoolField, QuantizeField
from fxq.backends.loops.code.vectors import LANES

_f, _i = np.float32, np.int32
CHUNK = 512
"""Elements that all loops of a step compute before the next ones, so that they stay in the first-level cache."""


@helper
def _quantize(x, out, count, factor, zero, low, high):
    """Quantize contiguous floats. NaN becomes the lowest integer."""
    x, out = carray(floats(x), count), carray(bytes_(out), count)
    for j in range(count):
        value = x[j] * factor
        value = low if not value > low else value
        value = high if value > high else value
        out[j] = np.uint8(_i(np.rint(value)) + zero)


@helper
def _quantize_strided(x, x_stride, out, out_stride, count, factor, zero, low, high):
    """Quantize floats that are `x_stride` floats apart to bytes that are `out_stride` bytes apart."""
    x, out = carray(floats(x), x_stride * count), carray(bytes_(out), out_stride * count)
    for j in range(count):
        value = x[j * x_stride] * factor
        value = low if not value > low else value
        value = high if value > high else value
        out[j * out_stride] = np.uint8(_i(np.rint(value)) + zero)


@helper
def _quantize_packed(x, channel_step, out, channels, pixels, grid):
    """Quantize pixels of 1 to 4 channels that are first, to integers without gaps; see `image_code.py`."""
    for j in range(0, pixels, LANES):
        first = min(j, pixels - LANES)
        source, target = x + 4 * first, out + first * channels
        if channels == 1:
            quantize_1(source, channel_step, target, grid)
        elif channels == 2:
            quantize_2(source, channel_step, target, grid)
        elif channels == 3:
            quantize_3(source, channel_step, target, grid)
        else:
            quantize_4(source, channel_step, target, grid)


@helper
def _quantize_apart(x, channel_step, out, pixel_step, channels, pixels, grid):
    """Quantize pixels of channels that are first, to integers `pixel_step` bytes apart, four channels at once."""
    at_once = 4 if channels >= 4 else 1
    for k in range(0, channels, at_once):
        channel = min(k, channels - at_once)
        for j in range(0, pixels, LANES):
            first = min(j, pixels - LANES)
            source, target = x + channel * channel_step + 4 * first, out + channel + first * pixel_step
            if at_once == 4:
                quantize_4_apart(source, channel_step, target, pixel_step, grid)
            else:
                quantize_1_apart(source, channel_step, target, pixel_step, grid)


@helper
def _quantize_row(x, of_channel, of_pixel, out, out_of_pixel, pixels, channels, grid):
    """Quantize pixels. Strides of floats are in elements, and that of integers is in bytes."""
    numbers = carray(floats(grid), 4)
    factor, zero, low, high = numbers[0], _i(numbers[1]), numbers[2], numbers[3]
    if of_channel == 1 and of_pixel == channels and out_of_pixel == channels:
        _quantize(x, out, pixels * channels, factor, zero, low, high)
    elif of_channel == 1:
        for j in range(pixels):
            _quantize(x + 4 * j * of_pixel, out + j * out_of_pixel, channels, factor, zero, low, high)
    elif of_pixel != 1 or pixels < LANES:
        for c in range(channels):
            _quantize_strided(
                x + 4 * c * of_channel, of_pixel, out + c, out_of_pixel, pixels, factor, zero, low, high
            )  # fmt: skip
    elif out_of_pixel == channels and channels <= 4:
        _quantize_packed(x, 4 * of_channel, out, channels, pixels, grid)
    else:
        _quantize_apart(x, 4 * of_channel, out, out_of_pixel, channels, pixels, grid)


@helper
def quantize(step, bases):
    """Quantize an input. Fields: `QuantizeField`."""
    x, out = address_of(bases, step, QuantizeField.X), address_of(bases, step, QuantizeField.OUT)
    of_sample, of_channel, of_row, of_pixel = four_at(step, QuantizeField.X_STRIDES)
    samples, rows, columns, channels = four_at(step, QuantizeField.SHAPE)
    out_of_sample, out_of_row, out_of_pixel = triple_at(step, QuantizeField.OUT_STRIDES)
    if of_row == columns * of_pixel and out_of_row == columns * out_of_pixel:  # all rows are one
        rows, columns = 1, rows * columns
    for n in range(samples):
        for i in range(rows):
            _quantize_row(
                x + 4 * (n * of_sample + i * of_row), of_channel, of_pixel, out + n * out_of_sample + i * out_of_row,
                out_of_pixel, columns, channels, step[QuantizeField.GRID],
            )  # fmt: skip


@helper
def _combine(x, y, multiplies, count):
    """Add floats y to x in place, or multiply x by them."""
    x, y = carray(floats(x), count), carray(floats(y), count)
    if multiplies:
        for j in range(count):
            x[j] = x[j] * y[j]
    else:
        for j in range(count):
            x[j] = x[j] + y[j]


@helper
def _read_second(y, is_float, grid, out, count, is_one):
    """Read a second value like `read`; with `is_one`, it is one number, which is written `count` times."""
    read(y, is_float, grid[0], grid[1], out, 1 if is_one else count)
    numbers = carray(floats(out), count)
    if is_one:
        for j in range(1, count):
            numbers[j] = numbers[0]


@helper
def _compute(x, y, count, operation, function, slope, numbers):
    """Compute an operation and a function of floats x in place. Arguments: see `PointwiseField`."""
    if operation == 2 or operation == 3:
        _combine(x, y, operation == 3, count)
    if function != NO_FUNCTION:
        apply_function(function, x, count, slope, numbers)
    if operation == 4:
        _combine(x, y, False, count)


@helper
def pointwise(step, bases):
    """Compute a function of each element of one value, or of two. Fields: `PointwiseField`."""
    x, y = address_of(bases, step, PointwiseField.X), address_of(bases, step, PointwiseField.Y)
    out = address_of(bases, step, PointwiseField.OUT)
    x_of_sample, x_of_row, x_of_pixel = triple_at(step, PointwiseField.X_STRIDES)
    y_of_sample, y_of_row, y_of_pixel = triple_at(step, PointwiseField.Y_STRIDES)
    out_of_sample, out_of_row, out_of_pixel = triple_at(step, PointwiseField.OUT_STRIDES)
    samples, rows, columns, run = four_at(step, PointwiseField.RUNS)
    operation, function, slope = (
        step[PointwiseField.OPERATION], step[PointwiseField.FUNCTION], step[PointwiseField.SLOPE]
    )  # fmt: skip
    numbers, to_floats = step[PointwiseField.NUMBERS], step[PointwiseField.TO_FLOATS]
    x_is_float, y_is_float = step[PointwiseField.X_IS_FLOAT], step[PointwiseField.Y_IS_FLOAT]
    x_grid, y_grid = carray(floats(step[PointwiseField.X_GRID]), 2), carray(floats(step[PointwiseField.Y_GRID]), 2)
    scratch = scratch_of(bases)
    period, second, y_is_one = step[PointwiseField.PERIOD], scratch + 4 * CHUNK, step[PointwiseField.Y_IS_ONE]
    chunk = CHUNK // period * period if period else CHUNK
    x_size, out_size = 4 if x_is_float else 1, 4 if to_floats else 1
    y_size = 0 if y_is_one else 4 if y_is_float else 1
    for n in range(samples):
        if period:
            for first in range(0, chunk, period):
                read(y + n * y_of_sample, y_is_float, y_grid[0], y_grid[1], second + 4 * first, period)
        for i in range(rows):
            for c in range(columns):
                a = x + n * x_of_sample + i * x_of_row + c * x_of_pixel
                b = y + n * y_of_sample + i * y_of_row + c * y_of_pixel
                target = out + n * out_of_sample + i * out_of_row + c * out_of_pixel
                for first in range(0, run, chunk):
                    size = min(chunk, run - first)
                    read(a + x_size * first, x_is_float, x_grid[0], x_grid[1], scratch, size)
                    if operation > 1 and not period:
                        _read_second(b + y_size * first, y_is_float, y_grid, second, size, y_is_one)
                    _compute(scratch, second, size, operation, function, slope, numbers)
                    write(scratch, to_floats, numbers, target + out_size * first, size)


@inlined
def _max_of(windows):
    """Write the maximum of each channel of windows, uint8."""
    if windows.columns == 3:
        max_of_3(windows)
    elif windows.columns == 2:
        max_of_2(windows)
    else:
        max_of_any(windows)


@inlined
def _inside(size, window, stride, padding, count):
    """First result whose window is inside of an image along one axis, and end of these results, within `count`."""
    first = min((padding + stride - 1) // stride, count)
    return first, max(min((size - window + padding) // stride + 1, count), first)


@helper
def pool(step, bases):
    """Compute the maximum of windows of integers, or the mean of windows. Fields: `PoolField`."""
    x, out = address_of(bases, step, PoolField.X), address_of(bases, step, PoolField.OUT)
    x_of_sample, x_of_row, x_of_pixel = triple_at(step, PoolField.X_STRIDES)
    out_of_sample, out_of_row, out_of_pixel = triple_at(step, PoolField.OUT_STRIDES)
    samples, rows, columns, channels = four_at(step, PoolField.SHAPE)
    kernel_rows, kernel_columns = pair_at(step, PoolField.KERNEL)
    down, right = pair_at(step, PoolField.STRIDE)
    top, left = pair_at(step, PoolField.PADDING)
    x_rows, x_columns = pair_at(step, PoolField.X_SIZE)
    takes_mean, counts_padding = step[PoolField.TAKES_MEAN], step[PoolField.COUNTS_PADDING]
    numbers, to_floats, x_is_float = (
        step[PoolField.NUMBERS], step[PoolField.TO_FLOATS], step[PoolField.X_IS_FLOAT]
    )  # fmt: skip
    means = scratch_of(bases)
    first, end = _inside(x_columns, kernel_columns, right, left, columns)
    for n in range(samples):
        for i in range(rows):
            y0 = i * down - top
            y0, y1 = max(y0, 0), min(y0 + kernel_rows, x_rows)
            j = 0
            while j < columns:
                x0 = j * right - left
                x0, x1 = max(x0, 0), min(x0 + kernel_columns, x_columns)
                count = end - j if not takes_mean and first <= j < end else 1
                target = out + n * out_of_sample + i * out_of_row + j * out_of_pixel
                windows = WindowRow(
                    x + n * x_of_sample + y0 * x_of_row + x0 * x_of_pixel, max(y1 - y0, 0), max(x1 - x0, 0), x_of_row,
                    x_of_pixel, channels, right * x_of_pixel, count,
                    means if takes_mean else target, out_of_pixel,
                )  # fmt: skip
                if takes_mean:
                    size = kernel_rows * kernel_columns if counts_padding else windows.rows * windows.columns
                    if x_is_float:
                        mean_of_floats(windows, numbers + 16, size)
                    else:
                        mean_of_integers(windows, numbers + 16, size)
                    write(means, to_floats, numbers, target, channels)
                else:
                    _max_of(windows)
                j += count


@helper
def norm(step, bases):
    """Normalize the channels of each pixel. Fields: `NormField`."""
    x, out = address_of(bases, step, NormField.X), address_of(bases, step, NormField.OUT)
    x_of_sample, x_of_row, x_of_pixel = triple_at(step, NormField.X_STRIDES)
    out_of_sample, out_of_row, out_of_pixel = triple_at(step, NormField.OUT_STRIDES)
    grid, x_is_float = carray(floats(step[NormField.X_GRID]), 2), step[NormField.X_IS_FLOAT]
    samples, rows, columns, channels = four_at(step, NormField.SHAPE)
    weight, bias, eps = step[NormField.WEIGHT], step[NormField.BIAS], step[NormField.EPS]
    numbers, to_floats = step[NormField.NUMBERS], step[NormField.TO_FLOATS]
    scratch = scratch_of(bases)
    line, stats = scratch + 64, carray(floats(scratch), 2)
    for n in range(samples):
        for i in range(rows):
            for j in range(columns):
                pixel = x + n * x_of_sample + i * x_of_row + j * x_of_pixel
                read(pixel, x_is_float, grid[0], grid[1], line, channels)
                blocks = (channels + 15) // 16
                real = carray(floats(line), 16 * blocks)
                for c in range(channels, 16 * blocks):
                    real[c] = _f(0)
                sum_floats(line, blocks, scratch)
                mean = stats[0] / _f(channels)
                for c in range(channels, 16 * blocks):
                    real[c] = mean
                stats[1] = mean
                sum_squares(line, blocks, scratch)
                stats[0] = _f(1) / np.sqrt(stats[0] / _f(channels) + carray(floats(eps), 1)[0])
                for c in range(blocks):
                    normalize(line + 64 * c, scratch, weight + 64 * c, bias + 64 * c)
                target = out + n * out_of_sample + i * out_of_row + j * out_of_pixel
                write(line, to_floats, numbers, target, channels)


@helper
def move(step, bases):
    """Copy elements to other places. Fields: `MoveField`."""
    x, out = address_of(bases, step, MoveField.X), address_of(bases, step, MoveField.OUT)
    x_of_sample, x_of_row, x_of_pixel = triple_at(step, MoveField.X_STRIDES)
    out_of_sample, out_of_row, out_of_pixel, out_of_channel = four_at(step, MoveField.OUT_STRIDES)
    samples, rows, columns, channels = four_at(step, MoveField.SHAPE)
    size = step[MoveField.ITEM_SIZE]
    for n in range(samples):
        for i in range(rows):
            for j in range(columns):
                source = x + size * (n * x_of_sample + i * x_of_row + j * x_of_pixel)
                target = out + size * (n * out_of_sample + i * out_of_row + j * out_of_pixel)
                if size == 1:
                    for c in range(channels):
                        carray(bytes_(target + c * out_of_channel), 1)[0] = carray(bytes_(source + c), 1)[0]
                else:
                    for c in range(channels):
                        carray(floats(target + 4 * c * out_of_channel), 1)[0] = carray(floats(source + 4 * c), 1)[0]
