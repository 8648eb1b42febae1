"""Machine code for products of many rows of floats with a low-bit weight, which is unpacked in panels that stay in L1.

Source: Goto and van de Geijn (2008), "Anatomy of high-performance matrix multiplication".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import machine_code, vectors
from fxq.backends.loops.code.machine_code import on_addresses
from fxq.backends.loops.code.vectors import FLOAT32, FLOATS, INT32, INT64, INTS, LANES, load, number, splat, store

ROWS, VECTORS = (12, 2) if machine_code.KIND.has_avx512 else (5 if machine_code.KIND.is_arm else 6, 1)
"""Rows of the input, and vectors of 16 columns of the result, of the largest tile: all its sums stay in registers."""
COLUMNS = LANES * VECTORS
"""Columns of the result of a tile, which are rows of the weight."""
_SMALLEST = 2 * ROWS // 3
"""Rows of the smallest tile."""
MIN_ROWS = 2 * _SMALLEST
"""Number of rows from which on the fewest tiles of about equal size have at least `_SMALLEST` rows each."""


_REGISTER_FLOATS = 4
"""Numbers of a register of ARM, by any of which an instruction can multiply a vector."""


class Panel(NamedTuple):
    """Operands of a product of a tile with a panel of the weight.

    Fields are int64 in loops and LLVM values in the code here.

    Attributes:
        x: Address of the first row of the input, float32.
        x_bytes: Bytes from a row to the next.
        weight: Address of the panel, float32 (depth, COLUMNS).
        depth: Number of products of a sum.
        added: Address of float32 (COLUMNS,), added to the sums of the first row.
        added_bytes: Bytes from there to what is added to those of the next row.
        out: Address of the first results, which may be what is added.
        out_bytes: Bytes from a row of results to the next.
    """

    x: Any
    x_bytes: Any
    weight: Any
    depth: Any
    added: Any
    added_bytes: Any
    out: Any
    out_bytes: Any


def _multiply_panel(b: Any, panel: Any, rows: Any) -> None:
    """Compute x @ panel + added for a tile of `rows` rows, from `_SMALLEST` to `ROWS`."""
    for size in range(_SMALLEST, ROWS + 1):
        with b.if_then(b.icmp_signed("==", rows, number(size))):
            _multiply_tile(b, panel, size)


multiply_panel = on_addresses(_multiply_panel, is_called=True)


def _multiply_tile(b: Any, panel: Any, rows: int) -> None:
    """Compute x @ panel + added for a tile of `rows` rows."""
    totals = [[cgutils.alloca_once(b, FLOATS) for _ in range(VECTORS)] for _ in range(rows)]
    for total in (total for row in totals for total in row):
        b.store(splat(b, 0.0), total)
    lines = [b.add(panel.x, b.mul(panel.x_bytes, number(r))) for r in range(rows)]
    depth, first = panel.depth, number(0)
    if machine_code.KIND.is_arm:
        runs = b.udiv(depth, number(_REGISTER_FLOATS))
        with cgutils.for_range(b, runs, intp=INT64) as run:
            _add_products(b, panel, b.mul(run.index, number(_REGISTER_FLOATS)), _REGISTER_FLOATS, lines, totals)
        first, depth = b.mul(runs, number(_REGISTER_FLOATS)), b.urem(depth, number(_REGISTER_FLOATS))
    with cgutils.for_range(b, depth, intp=INT64) as step:
        index = b.add(first, step.index) if machine_code.KIND.is_arm else step.index
        _add_products(b, panel, index, 1, lines, totals)
    for r, row in enumerate(totals):
        added = b.add(panel.added, b.mul(panel.added_bytes, number(r)))
        out = b.add(panel.out, b.mul(panel.out_bytes, number(r)))
        for v, total in enumerate(row):
            y = b.fadd(b.load(total), load(b, added, FLOATS, 4 * LANES * v))
            store(b, y, b.add(out, number(4 * LANES * v)))


def _add_products(b: Any, panel: Any, index: Any, count: int, lines: Sequence[Any], totals: Any) -> None:
    """Add products `index` to `index + count` of each sum."""
    place = b.add(panel.weight, b.mul(index, number(4 * COLUMNS)))
    kind = ir.VectorType(FLOAT32, count)
    loaded = [] if count == 1 else [load(b, b.add(line, b.mul(index, number(4))), kind) for line in lines]
    for k in range(count):
        weights = [load(b, place, FLOATS, 4 * (COLUMNS * k + LANES * v)) for v in range(VECTORS)]
        offset = b.mul(index, number(4))
        for r, row in enumerate(totals):
            if loaded:
                x = vectors.lanes_of(b, loaded[r], loaded[r], [k] * LANES)
            else:
                x = splat(b, load(b, b.add(lines[r], offset), FLOAT32))
            for total, weight in zip(row, weights, strict=True):
                b.store(vectors.multiply_add(b, x, weight, b.load(total)), total)


class Words(NamedTuple):
    """Integers of 8 bits that become floats of a panel.

    Attributes:
        source: Address of int32 (words, COLUMNS): four adjacent integers of each row of the weight.
        words: Number of words of a row.
        shift: Shift to the right of each word before integers are read.
        mask: Bits of a word that are read, after the shift.
        factor: Address of float32 (COLUMNS,), by which integers are multiplied.
        offset: Address of float32 (COLUMNS,), which is added then.
        out: Address of the panel, float32 (4 * words, COLUMNS), written.
    """

    source: Any
    words: Any
    shift: Any
    mask: Any
    factor: Any
    offset: Any
    out: Any


def _words_to_floats(signed: bool) -> Any:
    """Code that writes integers * factor + offset. Signed integers are neither shifted nor masked."""

    def code(b: Any, read: Any) -> None:
        shift, mask = (splat(b, b.trunc(value, INT32)) for value in (read.shift, read.mask))
        for v in range(VECTORS):
            factor, offset = (load(b, address, FLOATS, 4 * LANES * v) for address in (read.factor, read.offset))
            with cgutils.for_range(b, read.words, intp=INT64) as word:
                word_bytes = b.mul(word.index, number(4 * COLUMNS))
                values = load(b, b.add(read.source, word_bytes), INTS, 4 * LANES * v)
                values = values if signed else b.and_(b.lshr(values, shift), mask)
                out = b.add(read.out, b.mul(word_bytes, number(4)))
                for k in range(4):
                    y = vectors.multiply_add(b, b.sitofp(byte_of_words(b, values, k, signed), FLOATS), factor, offset)
                    store(b, y, b.add(out, number(4 * (COLUMNS * k + LANES * v))))

    return on_addresses(code)


def byte_of_words(b: Any, words: Any, k: int, signed: bool) -> Any:
    """Byte k of each of 16 words, as int32."""
    above, below = (ir.Constant(INTS, [bits] * LANES) for bits in (24 - 8 * k, 24))
    return (b.ashr if signed else b.lshr)(b.shl(words, above), below)


signed_to_floats, unsigned_to_floats = _words_to_floats(True), _words_to_floats(False)
