"""Loops that choose the integers of weights one column after the other, and the ranges of blocks of weights.

Weights are stored by column: (columns, rows) float32, where the weights of a row share a scale. All loops run over
neighbouring rows innermost, for a few rows at a time, so that a block of columns stays in the first-level cache.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.compiler import compiled, helper
from fxq.quant.least_error import FITS

_f = np.float32
_TILE = 64
"""Rows at a time."""
_COLUMNS = 4
"""Columns at a time, in the search for ranges: sums are read and written once for all of them."""
_MIN_SCALE = _f(np.finfo(np.float32).tiny)


@helper
def _round(real, target, scale, low, high, steps, errors):
    """Round some rows of a column, see `round_columns`."""
    for r in range(len(target)):
        step = np.rint(real[r] / scale[r])
        step = low[r] if step < low[r] else step
        step = high[r] if step > high[r] else step
        steps[r] = step
        errors[r] = target[r] - step * scale[r]


@compiled("f* f* f* f* f* f* f* f* i i")
def round_columns(target, real, scale, low, high, ahead, steps, errors, columns, rows):
    """Round columns one after the other; each column compensates the errors of the columns before it.

    Args:
        target: Float weights, (columns, rows).
        real: These weights, moved to compensate the errors of earlier blocks and of the inputs.
        scale: Scales, (columns, rows).
        low: Smallest integers minus zero points, (columns, rows).
        high: Largest integers minus zero points, (columns, rows).
        ahead: How much a column (first axis) compensates the error of an earlier one, (columns, columns).
        steps: Integers minus zero points, (columns, rows), written.
        errors: Weights minus what the integers represent, (columns, rows), written.
        columns: Number of columns.
        rows: Number of rows.
    """
    size = (columns, rows)
    target, real, steps, errors = carray(target, size), carray(real, size), carray(steps, size), carray(errors, size)
    scale, low, high = carray(scale, size), carray(low, size), carray(high, size)
    ahead, sums = carray(ahead, (columns, columns)), np.empty(_TILE, _f)
    for first in range(0, rows, _TILE):
        tile = slice(first, min(first + _TILE, rows))
        count = tile.stop - first
        for i in range(columns):
            sums[:count] = real[i, tile]
            for j in range(0, i - i % 4, 4):  # four at a time, since the sums are in memory
                a, b, c, d = errors[j, tile], errors[j + 1, tile], errors[j + 2, tile], errors[j + 3, tile]
                p, q, s, t = ahead[i, j], ahead[i, j + 1], ahead[i, j + 2], ahead[i, j + 3]
                for r in range(count):
                    sums[r] += (p * a[r] + q * b[r]) + (s * c[r] + t * d[r])
            for j in range(i - i % 4, i):
                a, p = errors[j, tile], ahead[i, j]
                for r in range(count):
                    sums[r] += p * a[r]
            _round(sums, target[i, tile], scale[i, tile], low[i, tile], high[i, tile], steps[i, tile], errors[i, tile])


@helper
def _grid(low, high, qmin, qmax, symmetric, scale, smallest, largest):
    """Grids of ranges: scales, and smallest and largest integers minus zero points, as `choose_qparams` has them."""
    zero = _f((qmin + qmax + 1) // 2)
    below, above, span = zero - _f(qmin), _f(qmax) - zero, _f(qmax - qmin)
    for r in range(_TILE):
        step = max(-low[r] / below, high[r] / above) if symmetric else (high[r] - low[r]) / span
        scale[r], zero_point = _MIN_SCALE if step < _MIN_SCALE else step, zero
        if not symmetric:
            zero_point = _f(qmin) - np.rint(low[r] / scale[r])
            zero_point = _f(qmin) if zero_point < qmin else _f(qmax) if zero_point > qmax else zero_point
        smallest[r], largest[r] = _f(qmin) - zero_point, _f(qmax) - zero_point


@helper
def _tile_of(values, tile, own):
    """Copy some rows next to each other; further rows and columns of `own` stay 0."""
    own[:, :] = _f(0)
    for i in range(len(values)):
        own[i, : tile.stop - tile.start] = values[i, tile]


@helper
def _factors(values, weights, emphasis, gains, factors):
    """How much the error of each value x of the rows counts: weight * (1 + (gain * x)**2); `gains` is memory."""
    gains[:], factors[:, :] = _f(0), _f(0)
    for i in range(len(weights)):
        column = values[i]
        for r in range(_TILE):
            gains[r] += column[r] * column[r]
    for r in range(_TILE):
        mean = gains[r] / _f(len(weights))
        gains[r] = np.sqrt(emphasis / mean) if mean >= _MIN_SCALE else _f(0)
    for i in range(len(weights)):
        weight, column, factor = weights[i], values[i], factors[i]
        for r in range(_TILE):
            large = gains[r] * column[r]
            factor[r] = weight + weight * (large * large)


@helper
def _step(exact, smallest, largest):
    """Nearest integer of a grid."""
    step = np.rint(exact)
    step = smallest if step < smallest else step
    return largest if step > largest else step


@helper
def _error(value, factor, inverse, scale, smallest, largest):
    """Weighted squared error of a value."""
    error = _step(value * inverse, smallest, largest) * scale - value
    return factor * (error * error)


@helper
def _add_errors(values, factors, scale, smallest, largest, errors, inverse):
    """Weighted squared errors of rows with their grids; `inverse` is memory for a number of each row.

    Values are multiplied by the inverse of their scale, which is faster than a division. Where that rounds to another
    integer, the value is in the middle between both, whose errors are equal up to float32.
    """
    errors[:] = _f(0)
    for r in range(_TILE):
        inverse[r] = _f(1) / scale[r]
    for i in range(0, len(values), _COLUMNS):
        a, b, c, d = values[i], values[i + 1], values[i + 2], values[i + 3]
        p, q, s, t = factors[i], factors[i + 1], factors[i + 2], factors[i + 3]
        for r in range(_TILE):
            own, unit, least, most = inverse[r], scale[r], smallest[r], largest[r]
            first = _error(a[r], p[r], own, unit, least, most) + _error(b[r], q[r], own, unit, least, most)
            second = _error(c[r], s[r], own, unit, least, most) + _error(d[r], t[r], own, unit, least, most)
            errors[r] += first + second


@helper
def _fit(values, factors, scale, smallest, largest, low, high, sums):
    """Ranges of the scales of least weighted error for the integers of the nearest values; written to low and high.

    `sums` is memory for two numbers of each row.
    """
    sums[:] = _f(0)
    products, powers = sums[0], sums[1]
    for i in range(len(values)):
        column, factor = values[i], factors[i]
        for r in range(_TILE):
            exact = column[r] / scale[r]
            step = _step(exact, smallest[r], largest[r])
            products[r] += factor[r] * (exact * step)
            powers[r] += factor[r] * (step * step)
    for r in range(_TILE):
        ratio = products[r] / powers[r] if powers[r] > _f(0) else _f(1)
        ratio = _f(0) if ratio < _f(0) else ratio
        low[r], high[r] = smallest[r] * (ratio * scale[r]), largest[r] * (ratio * scale[r])


@helper
def _ends(values, low, high):
    """Smallest and largest values of rows, and 0."""
    low[:], high[:] = _f(0), _f(0)
    for i in range(len(values)):
        column = values[i]
        for r in range(_TILE):
            low[r] = column[r] if column[r] < low[r] else low[r]
            high[r] = column[r] if column[r] > high[r] else high[r]


@helper
def _keep_better(low, high, errors, best_low, best_high, least):
    """Ranges with smaller errors replace the best ones so far."""
    for r in range(_TILE):
        if errors[r] < least[r]:
            least[r], best_low[r], best_high[r] = errors[r], low[r], high[r]


@helper
def _shrink(ends, start, direction, factor, is_finer, tried):
    """Ranges that are tried: both ends shrink (direction 0), only the upper one (1) or only the lower one (2).

    A coarse search shrinks the ends of the values, a finer one changes the best ends so far, up to those of the values.
    """
    for r in range(_TILE):
        low, high = (start[0, r], start[1, r]) if is_finer else (ends[0, r], ends[1, r])
        tried[0, r] = start[0, r] if direction == 1 else max(low * factor, ends[0, r])
        tried[1, r] = start[1, r] if direction == 2 else min(high * factor, ends[1, r])


@helper
def _search(values, weights, tile, zooms, qmin, qmax, symmetric, emphasis, best):
    """Range of each row of a tile with the least error; written to `best`."""
    directions = 1 if symmetric else 3
    ends, start, tried = np.zeros((2, _TILE), _f), np.zeros((2, _TILE), _f), np.zeros((2, _TILE), _f)
    scale, smallest, largest = np.empty(_TILE, _f), np.empty(_TILE, _f), np.empty(_TILE, _f)
    least, errors, sums = np.empty(_TILE, _f), np.empty(_TILE, _f), np.empty((2, _TILE), _f)
    size = (-(-len(values) // _COLUMNS) * _COLUMNS, _TILE)
    own, factors, inverse = np.empty(size, _f), np.empty(size, _f), np.empty(_TILE, _f)
    _tile_of(values, tile, own)
    _factors(own, weights, emphasis, inverse, factors)
    _ends(own, ends[0], ends[1])
    tried[:, :], best[:, :], least[:] = ends, ends, _f(np.inf)
    for z in range(-1, len(zooms) + FITS):
        is_zoom = 0 <= z < len(zooms)
        points = int(zooms[z, 2]) if is_zoom else 1
        for k in range(points * directions if is_zoom else 1):
            if k % points == 0:
                start[:, :] = best
            if is_zoom:
                first, last = zooms[z, 0], zooms[z, 1]
                factor = np.exp2(first + (last - first) * _f(k % points) / _f(max(points - 1, 1)))
                _shrink(ends, start, k // points, factor, last != 0, tried)
            elif z >= 0:
                _grid(best[0], best[1], qmin, qmax, symmetric, scale, smallest, largest)
                _fit(own, factors, scale, smallest, largest, tried[0], tried[1], sums)
            _grid(tried[0], tried[1], qmin, qmax, symmetric, scale, smallest, largest)
            _add_errors(own, factors, scale, smallest, largest, errors, inverse)
            _keep_better(tried[0], tried[1], errors, best[0], best[1], least)


@compiled("f* f* f* i f* f* i i i i i f")
def least_ranges(values, weights, zooms, zoom_count, low, high, columns, rows, qmin, qmax, symmetric, emphasis):
    """Range of each row whose grid has the least weighted squared error, as `fxq.quant.least_error.least_range`.

    Args:
        values: Values of the rows, (columns, rows).
        weights: Weights of the columns in the error, (columns,).
        zooms: Passes of the search: first and last factor of an end in octaves, and number of factors, (zoom_count, 3).
        zoom_count: Number of passes.
        low: Lower end of each row, (rows,), written.
        high: Upper end of each row, (rows,), written.
        columns: Number of columns.
        rows: Number of rows.
        qmin: Smallest integer.
        qmax: Largest integer.
        symmetric: 1 if zero points are in the middle of the integers.
        emphasis: How much more the errors of large values count.
    """
    values, weights = carray(values, (columns, rows)), carray(weights, columns)
    zooms, low, high = carray(zooms, (zoom_count, 3)), carray(low, rows), carray(high, rows)
    best = np.empty((2, _TILE), _f)
    for at in range(0, rows, _TILE):
        tile = slice(at, min(at + _TILE, rows))
        _search(values, weights, tile, zooms, qmin, qmax, symmetric, emphasis, best)
        low[tile], high[tile] = best[0, : tile.stop - at], best[1, : tile.stop - at]
