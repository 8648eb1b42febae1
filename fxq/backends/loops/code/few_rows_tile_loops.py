"""The choice of the tile that multiplies a few rows with a low-bit weight of a kind, and of how it reads the weight."""

from __future__ import annotations

from fxq.backends.loops.code import digit_code
from fxq.backends.loops.code import few_rows_code as code
from fxq.backends.loops.code.chunk_code import CHUNK
from fxq.backends.loops.code.compiler import helper
from fxq.backends.loops.code.few_rows_code import INTEGER_SIZES, SIZES, UNIT_BITS
from fxq.backends.loops.code.weight_row_loops import SIGNED4, SIGNED8, UNPACKED, UNSIGNED8, padded_block, unpacked
from fxq.quant.packing import UNIT

IN_UNITS = 8
"""IN_UNITS + bits is the kind of packed weights that tiles unpack in registers."""
_TWO, _THREE, _SIX = UNIT_BITS


def _by_kind(name, signed8, unsigned8, signed4, unsigned4):
    """Loop function that runs the tile of a kind of weight."""

    def tile(kind, few):
        if kind == SIGNED8:
            signed8(few)
        elif kind == UNSIGNED8:
            unsigned8(few)
        elif kind == SIGNED4:
            signed4(few)
        else:
            unsigned4(few)

    return helper(tile, name)


def _of_4_bits(name, signed4, unsigned4):
    """Loop function that runs the tile of a kind of weight with 4 bits."""

    def tile(kind, few):
        if kind == SIGNED4:
            signed4(few)
        else:
            unsigned4(few)

    return helper(tile, name)


def _by_bits(name, two, three, six):
    """Loop function that runs the tile of a kind of weight in units."""

    def tile(kind, few):
        if kind == IN_UNITS + _TWO:
            two(few)
        elif kind == IN_UNITS + _THREE:
            three(few)
        else:
            six(few)

    return helper(tile, name)


def _tiles(names, by_kind, chunks, *sizes):
    """Loop functions of several sizes of tiles."""
    of_sizes = zip(*(code.tiles(chunk, *sizes) for chunk in chunks), strict=True)
    return [by_kind(name, *tiles) for name, tiles in zip(names, of_sizes, strict=True)]


def _sizes(many_rows, many_columns, some_columns):
    """Sizes of tiles: one by one, one row by many columns, and many rows by some columns."""
    return (1, 1), (1, many_columns), (many_rows, some_columns)


_one, _row, _rows = _tiles(("one", "row", "rows"), _by_kind, code.CHUNKS, *_sizes(*SIZES))
_one_int, _row_int, _rows_int = _tiles(
    ("one_int", "row_int", "rows_int"), _by_kind, code.INTEGER_CHUNKS, *_sizes(*INTEGER_SIZES)
)
_one_unit, _row_unit = _tiles(("one_unit", "row_unit"), _by_bits, code.UNITS, *_sizes(*SIZES)[:2])
_one_int_unit, _row_int_unit = _tiles(
    ("one_int_unit", "row_int_unit"), _by_bits, code.INTEGER_UNITS, *_sizes(*INTEGER_SIZES)[:2]
)
_one_digits, _row_digits, _one_digit_unit, _row_digit_unit = _one, _row, _one_unit, _row_unit
if digit_code.HAS_DIGITS:
    (_one4, _row4), (_one_unsigned4, _row_unsigned4) = map(digit_code.tiles, digit_code.DIGIT_CHUNKS)
    _one_digits = _of_4_bits("one_digits", _one4, _one_unsigned4)
    _row_digits = _of_4_bits("row_digits", _row4, _row_unsigned4)
    _one_digit_unit, _row_digit_unit = (
        _by_bits(name, *of_size)
        for name, of_size in zip(
            ("one_digit_unit", "row_digit_unit"), zip(*map(digit_code.tiles, digit_code.DIGIT_UNITS), strict=True),
            strict=True,
        )
    )  # fmt: skip
OF_FLOATS, OF_INTEGERS, OF_DIGITS = range(3)
"""Inputs of tiles: floats, integers, and floats as digits."""


@helper
def as_read(kind, row_bytes, columns, rows, block, scales, span):
    """How tiles read the weight: the values of `unpacked`, chunks per row, and chunks per scale.

    With one row of the input, tiles unpack whole units themselves.
    """
    bits, is_whole = kind - UNPACKED, columns % UNIT == 0 and (scales == 1 or block % UNIT == 0)
    if rows == 1 and is_whole and bits in (_TWO, _THREE, _SIX):
        return 0, IN_UNITS + bits, row_bytes, columns // UNIT, span * CHUNK // UNIT
    padded = padded_block(kind, block, scales)
    bits, kind, row_bytes = unpacked(kind, row_bytes, scales * padded if padded else columns)
    return bits, kind, row_bytes, (row_bytes + CHUNK - 1) // CHUNK, span


@helper
def _run_unit_tiles(kind, few, many_columns, form):
    """Compute the results of some tiles that unpack values of 2, 3 or 6 bits."""
    if form == OF_INTEGERS:
        if many_columns:
            _row_int_unit(kind, few)
        else:
            _one_int_unit(kind, few)
    elif form == OF_DIGITS:
        if many_columns:
            _row_digit_unit(kind, few)
        else:
            _one_digit_unit(kind, few)
    elif many_columns:
        _row_unit(kind, few)
    else:
        _one_unit(kind, few)


@helper
def run_tiles(kind, few, many_rows, many_columns, form):
    """Compute the results of some tiles. `form` is that of the input, `OF_FLOATS` for example."""
    if kind >= IN_UNITS:
        _run_unit_tiles(kind, few, many_columns, form)
    elif form == OF_INTEGERS:
        if many_rows:
            _rows_int(kind, few)
        elif many_columns:
            _row_int(kind, few)
        else:
            _one_int(kind, few)
    elif form == OF_DIGITS:
        if many_columns:
            _row_digits(kind, few)
        else:
            _one_digits(kind, few)
    elif many_rows:
        _rows(kind, few)
    elif many_columns:
        _row(kind, few)
    else:
        _one(kind, few)
