"""Sums of products of integers, in tiles that stay in registers: machine code for every vector unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import vectors
from fxq.backends.loops.code.machine_code import GROUP, HAS_VNNI, PIXELS, WIDE, on_addresses
from fxq.backends.loops.code.vectors import FLOATS, INT8, INT32, INT64, INTS, LANES, load, number, splat, store


def _totals(b: Any, begins: Sequence[Any], pixels: int) -> list[list[Any]]:
    """Registers for the sums of each pixel, as they begin."""
    totals = [[cgutils.alloca_once(b, INTS) for _ in begins] for _ in range(pixels)]
    for row in totals:
        for total, begin in zip(row, begins, strict=True):
            b.store(begin, total)
    return totals


def _lines(b: Any, x: Any, places: Any, pixels: int) -> list[Any]:
    """Where the pixels lie, of which `places` says how far they are from `x`."""
    return [b.add(x, b.sext(load(b, places, INT32, 4 * p), INT64)) for p in range(pixels)]


def _run(b: Any, runs: Any, index: Any) -> Any:
    """Where a run begins, from the pixel on."""
    return b.sext(load(b, b.add(runs, b.mul(index, number(4))), INT32), INT64)


def _multiplied(b: Any, total: Any, x: Any, w: Any) -> Any:
    """The sums with the products of `GROUP` unsigned integers, the same for all, and those of 16 columns added."""
    if HAS_VNNI:
        return _added_products(b, total, splat(b, x), w)
    wide = ir.VectorType(INT32, 2 * LANES)
    pairs = b.zext(b.bitcast(splat(b, x), ir.VectorType(INT8, 2 * LANES)), wide)
    made, nothing = b.mul(pairs, b.sext(w, wide)), ir.Constant(wide, ir.Undefined)
    even, odd = (b.shuffle_vector(made, nothing, ir.Constant(INTS, list(range(k, 2 * LANES, 2)))) for k in (0, 1))
    return b.add(total, b.add(even, odd))


def _added_products(b: Any, total: Any, x: Any, w: Any) -> Any:
    return vectors.intrinsic_of(b, "llvm.x86.avx512.vpdpbusd.512", INTS, [total, x, w])


def _layer_sums(
    b: Any, pixels: int, x: Any, places: Any, runs: Any, many: Any, groups: Any, weight: Any, start: Any
) -> list[Any]:
    """16 columns of a product for some pixels.

    Args:
        b: the builder of the code.
        pixels: how many.
        x: the address of integers.
        places: of each pixel, where its first integer lies, int32.
        runs: where the integers lie that it reads, from there, int32: each begins a run.
        many: how many runs there are.
        groups: how many groups of `GROUP` each run has.
        weight: int8 (runs, groups, 16, GROUP).
        start: what the sums begin with, int32 (16,).
    """
    kind = INTS if HAS_VNNI else ir.VectorType(INT8, LANES * GROUP)
    totals = _totals(b, [load(b, start, INTS)], pixels)
    bases = _lines(b, x, places, pixels)
    read = cgutils.alloca_once(b, INT64)
    b.store(weight, read)
    # The weight of the next 16 columns lies behind that of these.
    ahead = b.mul(b.mul(many, groups), number(LANES * GROUP))
    with cgutils.for_range(b, many, intp=INT64) as run:
        skip = _run(b, runs, run.index)
        lines = [b.add(base, skip) for base in bases]
        with cgutils.for_range(b, groups, intp=INT64) as group:
            at = b.load(read)
            columns = load(b, at, kind)
            b.store(b.add(at, number(LANES * GROUP)), read)
            vectors.prefetch(b, b.add(at, ahead))
            along = b.mul(group.index, number(GROUP))
            for line, (total,) in zip(lines, totals, strict=True):
                values = load(b, b.add(line, along), ir.IntType(8 * GROUP))
                b.store(_multiplied(b, b.load(total), values, columns), total)
    return [b.load(total) for (total,) in totals]


def _depthwise_sums(
    b: Any, pixels: int, x: Any, places: Any, runs: Any, many: Any, stride: Any, weight: Any, start: Any
) -> list[Any]:
    """16 channels of a depthwise convolution for some pixels: as in `_layer_sums`, but each run is of 16 channels.

    Its weight is int8 (runs, 16), each run `stride` bytes behind the one before.
    """
    kind = ir.VectorType(INT8, LANES)
    totals = _totals(b, [load(b, start, INTS)], pixels)
    bases = _lines(b, x, places, pixels)
    with cgutils.for_range(b, many, intp=INT64) as run:
        skip = _run(b, runs, run.index)
        column = b.sext(load(b, b.add(weight, b.mul(run.index, stride)), kind), INTS)
        for base, (total,) in zip(bases, totals, strict=True):
            values = b.zext(load(b, b.add(base, skip), kind), INTS)
            b.store(b.add(b.load(total), b.mul(values, column)), total)
    return [b.load(total) for (total,) in totals]


def _wide_sums(
    b: Any, pixels: int, x: Any, places: Any, runs: Any, many: Any, weight: Any, start: Any
) -> list[list[Any]]:
    """64 channels of a depthwise convolution for some pixels, four runs at once.

    What four runs have of a channel is brought side by side in two steps, each within 16 channels: so the first of four
    vectors of sums has the channels 0 to 3, 16 to 19, 32 to 35 and 48 to 51, and the others the next ones.

    Args:
        b: the builder of the code.
        pixels: how many.
        x: the address of integers.
        places: as in `_layer_sums`.
        runs: where each run of 64 channels begins, int32; a multiple of four.
        many: how many fours there are.
        weight: int8 (fours, 4, 16, 4): for each vector of sums, the four runs of its channels.
        start: what the sums begin with, int32 (4, 16).
    """
    kind = ir.VectorType(INT8, WIDE)
    totals = _totals(b, [load(b, start, INTS, 4 * LANES * v) for v in range(4)], pixels)
    bases = _lines(b, x, places, pixels)
    with cgutils.for_range(b, many, intp=INT64) as four:
        first = b.mul(four.index, number(4))
        skips = [_run(b, runs, b.add(first, number(k))) for k in range(4)]
        at = b.add(weight, b.mul(four.index, number(4 * WIDE)))
        columns = [load(b, at, INTS, WIDE * v) for v in range(4)]
        for base, row in zip(bases, totals, strict=True):
            a, c, d, e = (load(b, b.add(base, skip), kind) for skip in skips)
            pairs = [[_woven(b, one, other, 1, half) for half in (0, 1)] for one, other in ((a, c), (d, e))]
            woven = [_woven(b, pairs[0][v // 2], pairs[1][v // 2], 2, v % 2) for v in range(4)]
            for total, values, column in zip(row, woven, columns, strict=True):
                b.store(_added_products(b, b.load(total), b.bitcast(values, INTS), column), total)
    return [[b.load(total) for total in row] for row in totals]


def _woven(b: Any, one: Any, other: Any, size: int, half: int) -> Any:
    """Elements of some bytes of two vectors in turns: of each 16 bytes, those of the first half, or of the second."""
    each = 8 // size
    order: list[int] = []
    for part in range(4):
        for k in range(each):
            for which in (0, WIDE):
                first = which + 16 * part + 8 * half + size * k
                order += range(first, first + size)
    return b.shuffle_vector(one, other, ir.Constant(ir.VectorType(INT32, WIDE), order))


def _put_rounded(b: Any, sums: Sequence[Any], lines: Sequence[Any], scale: Any, bias: Any, numbers: Any) -> None:
    """Sums of 16 columns of each pixel times a scale plus a bias, rounded within two bounds, to where each belongs."""
    by, added, (low, high) = load(b, scale, FLOATS), load(b, bias, FLOATS), vectors.bounds(b, numbers)
    for total, line in zip(sums, lines, strict=True):
        y = vectors.fused(b, b.sitofp(total, FLOATS), by, added)
        store(b, vectors.rounded(b, vectors.clamped(b, y, low, high)), line)


def _put_finished(
    b: Any,
    sums: Sequence[Any],
    lines: Sequence[Any],
    scale: Any,
    bias: Any,
    numbers: Any,
    finish: Callable[[int, Any], Any],
) -> None:
    """The same, with what `finish(pixel, y)` makes of each; then the two numbers behind the bounds put it on a grid."""
    by, added, (low, high) = load(b, scale, FLOATS), load(b, bias, FLOATS), vectors.bounds(b, numbers)
    factor, zero = (splat(b, load(b, numbers, vectors.FLOAT, 4 * k)) for k in (2, 3))
    for p, (total, line) in enumerate(zip(sums, lines, strict=True)):
        y = finish(p, vectors.fused(b, b.sitofp(total, FLOATS), by, added))
        y = vectors.clamped(b, vectors.fused(b, y, factor, zero), low, high)
        store(b, vectors.rounded(b, y), line)


def _layer_tile(pixels: int) -> Any:
    def code(b, x, places, runs, many, groups, weight, start, sums):
        for p, total in enumerate(_layer_sums(b, pixels, x, places, runs, many, groups, weight, start)):
            store(b, total, b.add(sums, number(4 * LANES * p)))

    return on_addresses(code)


def _rounded_layer_tile(pixels: int) -> Any:
    def code(b, x, places, runs, many, groups, weight, start, scale, bias, numbers, out, to):
        totals = _layer_sums(b, pixels, x, places, runs, many, groups, weight, start)
        _put_rounded(b, totals, _lines(b, out, to, pixels), scale, bias, numbers)

    return on_addresses(code)


def _tile_with(function: Callable[[Any, Any], Any]) -> Any:
    """A large tile whose results go through a function before they are rounded."""

    def code(b, x, places, runs, many, groups, weight, start, scale, bias, numbers, out, to):
        totals = _layer_sums(b, PIXELS, x, places, runs, many, groups, weight, start)
        lines = _lines(b, out, to, PIXELS)
        _put_finished(b, totals, lines, scale, bias, numbers, lambda _, y: function(b, y))

    return on_addresses(code)


@on_addresses
def bend_many(b, x, places, runs, many, groups, weight, start, scale, bias, slope, numbers, out, to):
    """A large tile whose results below zero are multiplied with the slope of their column."""
    totals = _layer_sums(b, PIXELS, x, places, runs, many, groups, weight, start)
    slopes = load(b, slope, FLOATS)
    lines = _lines(b, out, to, PIXELS)
    _put_finished(b, totals, lines, scale, bias, numbers, lambda _, y: vectors.bent(b, y, slopes))


@on_addresses
def add_many(b, x, places, runs, many, groups, weight, start, scale, bias, other, others, grid, numbers, out, to):
    """A large tile to which integers are added, uint8, on the grid of two numbers at `grid`."""
    totals = _layer_sums(b, PIXELS, x, places, runs, many, groups, weight, start)
    read, lines = _lines(b, other, others, PIXELS), _lines(b, out, to, PIXELS)
    step, shift = vectors.bounds(b, grid)

    def added(p: int, y: Any) -> Any:
        real = b.uitofp(load(b, read[p], ir.VectorType(INT8, LANES)), FLOATS)
        return b.fadd(y, vectors.fused(b, real, step, shift))

    _put_finished(b, totals, lines, scale, bias, numbers, added)


def _depthwise_tile(pixels: int) -> Any:
    def code(b, x, places, runs, many, stride, weight, start, sums):
        for p, total in enumerate(_depthwise_sums(b, pixels, x, places, runs, many, stride, weight, start)):
            store(b, total, b.add(sums, number(4 * LANES * p)))

    return on_addresses(code)


def _wide_tile(pixels: int) -> Any:
    def code(b, x, places, runs, many, weight, start, scale, bias, tile):
        if not HAS_VNNI:
            return
        for p, row in enumerate(_wide_sums(b, pixels, x, places, runs, many, weight, start)):
            for v, total in enumerate(row):
                by, added = (load(b, array, FLOATS, 4 * LANES * v) for array in (scale, bias))
                y = vectors.fused(b, b.sitofp(total, FLOATS), by, added)
                store(b, y, b.add(tile, number(4 * (WIDE * p + LANES * v))))

    return on_addresses(code)


many_pixels, four_pixels, one_pixel = (_layer_tile(pixels) for pixels in (PIXELS, 4, 1))
round_many, round_four, round_one = (_rounded_layer_tile(pixels) for pixels in (PIXELS, 4, 1))
four_deep, one_deep = (_depthwise_tile(pixels) for pixels in (4, 1))
four_wide, one_wide = (_wide_tile(pixels) for pixels in (4, 1))
silu_many, hardswish_many, gelu_many = map(_tile_with, (vectors.silu, vectors.hardswish, vectors.gelu))
