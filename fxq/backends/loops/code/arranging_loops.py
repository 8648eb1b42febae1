"""Loops that write rows of the input in the order in which tiles of `few_rows_code.py` read them, and sum them."""

from __future__ import annotations

import math

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code import machine_code
from fxq.backends.loops.code.chunk_code import CHUNK, input_factors, word_bytes
from fxq.backends.loops.code.compiler import helper
from fxq.backends.loops.code.memory_loops import bytes_, words
from fxq.backends.loops.code.vectors import LANES

_f, _i = np.float32, np.int32
_MIN_EXPONENT_BITS, _EXPONENT_BITS_OF_INFINITY = 27, 255
"""Exponents in the bits of float32: the least from which the power of two of a row is finite; that of infinity."""
_ONE, _ONE_AS_DIGITS = 127, 149
"""Exponent in the bits of 1; and its sum with that of the power of two that makes 1 an integer of three digits."""
_LARGEST_TO_MEAN = 64
"""Largest value of a row relative to the mean of the magnitudes: sums have a few times the error of float32 there."""
_LARGEST_MANTISSA = 2 * (127 * (256**2 + 256 + 1) - 2**22)
"""Largest mantissa with which the highest of three digits stays below 128."""
_WORD_BYTES, _FACTORS = word_bytes(), tuple(map(np.float32, input_factors()))
"""Bytes of the words of 4-bit values, and the factors of the input for each value of a word, see `Chunk4`."""
_WORD = 8
"""Bytes that `pad_bytes` writes at once."""
_HAS_PAIRS = machine_code.KIND.pair_dot != ""
"""Whether tiles of several rows multiply pairs of rows of integers."""


@helper
def arrange8(x, columns, out):
    """Write a row of the input in the order of chunks of 8-bit values.

    The last chunk of a row may overlap the one before: values that have been multiplied already are 0 there.
    """
    done = (columns - 1) // CHUNK * CHUNK
    for j in range(done):
        out[j] = x[j]
    for i in range(CHUNK):
        j = columns - CHUNK + i
        out[done + i] = x[j] if j >= done else _f(0)


@helper
def arrange4(x, columns, row_bytes, out):
    """Write a row of the input in the order of chunks of 4-bit values, `Chunk4`; with zeros as in `arrange8`."""
    done, size = (row_bytes - 1) // CHUNK * CHUNK, CHUNK // _WORD_BYTES
    for first in range(0, done, CHUNK):
        for i in range(size):
            for byte in range(_WORD_BYTES):
                j, place = first + _WORD_BYTES * i + byte, 2 * first + 2 * byte * size + i
                out[place] = x[j] * _FACTORS[2 * byte]
                out[place + size] = x[row_bytes + j] * _FACTORS[2 * byte + 1]
    for i in range(CHUNK):
        j, byte = row_bytes - CHUNK + i, i % _WORD_BYTES
        place = 2 * (done + byte * size) + i // _WORD_BYTES
        out[place] = x[j] * _FACTORS[2 * byte] if j >= done else _f(0)
        is_high = j >= done and row_bytes + j < columns
        out[place + size] = x[row_bytes + j] * _FACTORS[2 * byte + 1] if is_high else _f(0)


@helper
def pad_blocks(x, columns, block, padded, out):
    """Write a row with zeros after each block of `block` values, so that each has `padded` values."""
    out[:] = 0
    for k in range((columns + block - 1) // block):
        first, place = k * block, k * padded
        for j in range(min(block, columns - first)):
            out[place + j] = x[first + j]


@helper
def pad_bytes(source, columns, block, padded, out):
    """Write bytes as `pad_blocks` does, between addresses, where the zeros are already."""
    if block % _WORD:
        x, y = carray(bytes_(source), columns), carray(bytes_(out), (columns + block - 1) // block * padded)
        for k in range((columns + block - 1) // block):
            for j in range(min(block, columns - k * block)):
                y[k * padded + j] = x[k * block + j]
        return
    full, count, step = columns // block, block // _WORD, padded // _WORD
    of_source, of_out = carray(words(source), full * count), carray(words(out), full * step)
    for k in range(full):
        for j in range(count):
            of_out[k * step + j] = of_source[k * count + j]
    rest = columns - full * block
    last, of_last = carray(bytes_(source + full * block), rest), carray(bytes_(out + full * padded), rest)
    for j in range(rest):
        of_last[j] = last[j]


@helper
def arrange_floats(x, columns, block, padded, row_bytes, is_packed, out):
    """Write a row of floats in the order in which tiles read it."""
    if padded:
        pad_blocks(x, columns, block, padded, out)
    elif is_packed:
        arrange4(x, columns, row_bytes, out)
    else:
        arrange8(x, columns, out)


@helper
def sum_blocks(x, columns, block, factor, lanes, out):
    """Write `factor` times the sum of each block of a row of the input. `lanes` is scratch memory, float32 (16,)."""
    out[:] = 0
    for k in range((columns + block - 1) // block):
        lanes[:] = 0
        first, end = k * block, min((k + 1) * block, columns)
        for j in range(first, end - LANES + 1, LANES):
            for i in range(LANES):
                lanes[i] += x[j + i]
        total = _f(0)
        for j in range(end - (end - first) % LANES, end):
            total += x[j]
        for i in range(LANES):
            total += lanes[i]
        out[k] = total * factor


@helper
def arrange_integers(x, columns, row_bytes, is_packed, flip, out):
    """Write a row of integers in the order of chunks, with zeros as in `arrange8`. `flip` are bits to flip in each."""
    done, size = (row_bytes - 1) // CHUNK * CHUNK, 2 * CHUNK if is_packed else CHUNK
    for half in range(2 if is_packed else 1):
        end, source, place = columns if half or not is_packed else row_bytes, half * row_bytes, half * CHUNK
        for first in range(source, source + done, CHUNK):
            if first + CHUNK <= end:  # without a branch in the loop
                for i in range(CHUNK):
                    out[place + i] = x[first + i] ^ flip
            else:
                for i in range(CHUNK):
                    out[place + i] = x[first + i] ^ flip if first + i < end else 0
            place += size
        for i in range(CHUNK):
            j = row_bytes - CHUNK + i
            out[place + i] = x[source + j] ^ flip if j >= done and source + j < end else 0


@helper
def power_for_digits(x, columns, lanes):
    """Power of two that makes the floats of a row integers of three digits; 0 if these would not be precise enough.

    That is the case for rows with values that are not finite, or tiny, or much larger than the mean of the magnitudes.
    `lanes` is scratch memory, float32 (16,).
    """
    bits, largest = x.view(np.int32), _i(0)
    for j in range(columns):  # the bits of positive floats are ordered as the floats
        largest = max(largest, bits[j] & _i(0x7FFFFFFF))
    if largest == 0:
        return _f(1)
    exponent = largest >> _i(23)
    if exponent < _MIN_EXPONENT_BITS or exponent == _EXPONENT_BITS_OF_INFINITY:
        return _f(0)
    lanes[:] = 0
    done = columns // LANES * LANES
    for j in range(0, done, LANES):
        for i in range(LANES):
            lanes[i] += abs(x[j + i])
    total = np.float64(0)
    for i in range(LANES):
        total += lanes[i]
    for j in range(done, columns):
        total += abs(x[j])
    if math.ldexp(1.0, exponent - _ONE) * columns > _LARGEST_TO_MEAN * total:
        return _f(0)
    power = _f(math.ldexp(1.0, _ONE_AS_DIGITS - exponent))
    return power * _f(0.5) if (largest & _i(0x7FFFFF)) > _LARGEST_MANTISSA else power


@helper
def split_digits(x, columns, power, sums, digits):
    """Write the digits of a row of floats times `power`, rounded.

    Args:
        x: float32 (columns,).
        columns: number of values.
        power: see `power_for_digits`.
        sums: float32 (columns,), written: the values rounded, times `power`.
        digits: uint8 (3, columns), written: integers of 8 bits with a sign. A value is the sum of 256**d * digits[d].
    """
    for j in range(columns):
        value = np.floor(x[j] * power + _f(0.5))
        sums[j] = value
        low = _i(value)
        digits[0, j] = np.uint8(low & _i(255))
        middle = (low + _i(128)) >> _i(8)
        digits[1, j] = np.uint8(middle & _i(255))
        digits[2, j] = np.uint8(((middle + _i(128)) >> _i(8)) & _i(255))


@helper
def in_pairs(rows):
    """Rows of integers as tiles of several rows read them: of pairs of rows, eight bytes of each in turn."""
    if not _HAS_PAIRS:
        return rows
    pairs = np.empty_like(rows)
    for r in range(len(rows) // 2 * 2):
        out, first = pairs[r // 2 * 2 : r // 2 * 2 + 2].reshape(-1), 8 * (r % 2)
        for j in range(0, rows.shape[1], 8):
            for i in range(8):
                out[2 * j + first + i] = rows[r, j + i]
    return pairs


@helper
def sum_integers(x, columns, block, factor, flip, out):
    """Write `factor` times the sum of each block of a row of integers, whose bits `flip` have been flipped."""
    out[:] = 0
    shift = np.int32(128) if flip else np.int32(0)
    for k in range((columns + block - 1) // block):
        total = np.int32(0)
        for j in range(k * block, min((k + 1) * block, columns)):
            total += np.int32(x[j]) - shift
        out[k] = _f(total) * factor
