"""Machine code and loops that unpack values of 2 to 6 bits to bytes, see `fxq/quant/packing.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it
from numba.core import cgutils

from fxq.backends.loops.code.compiler import helper
from fxq.backends.loops.code.machine_code import on_addresses
from fxq.backends.loops.code.memory_loops import bytes_
from fxq.backends.loops.code.vectors import INT32, INT64, load, number, store
from fxq.quant.packing import UNIT, planes_of

_WORDS = ir.VectorType(INT32, UNIT // 8)
"""Half of the values of a unit, one to a byte."""


def half_of_unit(b: Any, address: Any, bits: int, half: int) -> Any:
    """Values of the first or second half of a unit of 64 values, in the order of the row, one to a byte."""
    values, start, half_bytes = None, 0, UNIT // 2
    places = range(half * half_bytes, (half + 1) * half_bytes, 4)
    for plane in planes_of(bits):
        size = plane.size(UNIT)
        stored = load(b, address, ir.VectorType(INT32, size // 4), start)
        order = ir.Constant(_WORDS, [place % size // 4 for place in places])
        shifts = ir.Constant(_WORDS, [plane.width * (place // size) for place in places])
        words = b.lshr(b.shuffle_vector(stored, stored, order), shifts)
        words = b.and_(words, ir.Constant(_WORDS, [plane.mask * 0x01010101] * _WORDS.count))
        if plane.position:
            words = b.shl(words, ir.Constant(_WORDS, [plane.position] * _WORDS.count))
        values, start = words if values is None else b.or_(values, words), start + size
    return values


def _unpacking(bits: int) -> Any:
    """Code that unpacks units.

    Arguments of the code: `source`, the address of the units; `units`, their number; `out`, the address of the bytes.
    """

    def code(b: Any, source: Any, units: Any, out: Any) -> None:
        with cgutils.for_range(b, units, intp=INT64) as unit:
            address = b.add(source, b.mul(unit.index, number(bits * UNIT // 8)))
            target = b.add(out, b.mul(unit.index, number(UNIT)))
            for half in range(2):
                store(b, half_of_unit(b, address, bits, half), b.add(target, number(half * UNIT // 2)))

    return on_addresses(code)


_unpack2, _unpack3, _unpack5, _unpack6 = map(_unpacking, (2, 3, 5, 6))


SIGNED_4 = 12
"""In place of a number of bits: signed values of 4 bits, to which 8 is added."""


@helper
def _unpack_halves(flip, source, count, out):
    """Unpack a row of values of 4 bits, of which the first half is in the low bits, and flip some bits of each."""
    size = (count + 1) // 2
    stored, low, high = carray(bytes_(source), size), carray(bytes_(out), size), carray(bytes_(out + size), size)
    for j in range(size):
        low[j] = (stored[j] & np.uint8(15)) ^ flip
    for j in range(count - size):
        high[j] = (stored[j] >> np.uint8(4)) ^ flip


@helper
def unpack_row(bits, source, count, out):
    """Unpack a row of `count` values from the address `source` to bytes at the address `out`."""
    if bits == 4 or bits == SIGNED_4:
        _unpack_halves(np.uint8(8 if bits == SIGNED_4 else 0), source, count, out)
        return
    units = count // UNIT
    if bits == 2:
        _unpack2(source, units, out)
    elif bits == 3:
        _unpack3(source, units, out)
    elif bits == 5:
        _unpack5(source, units, out)
    else:
        _unpack6(source, units, out)
    rest, position, first = count - UNIT * units, 0, source + units * (bits * UNIT // 8)
    values = carray(bytes_(out + UNIT * units), rest)
    for j in range(rest):
        values[j] = 0
    for width in (4, 2, 1):
        if bits & width and rest:
            size = (rest * width + 7) // 8
            plane = carray(bytes_(first), size)
            for j in range(rest):
                values[j] |= ((plane[j % size] >> (width * (j // size))) & (2**width - 1)) << position
            position, first = position + width, first + size
