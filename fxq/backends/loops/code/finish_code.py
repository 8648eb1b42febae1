"""What becomes of sums and other floats, 16 at a time: machine code for every vector unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import vectors
from fxq.backends.loops.code.machine_code import HAS_VNNI, WIDE, on_addresses
from fxq.backends.loops.code.vectors import FLOATS, INT8, INT64, INTS, LANES, load, number, splat, store


def _packed(b: Any, floats: Sequence[Any], low: Any, high: Any) -> Any:
    """Four vectors of floats, of channels as in `_wide_sums`, as 64 bytes in order."""
    whole = [vectors.nearest(b, vectors.clamped(b, y, low, high)) for y in floats]
    kind, name = ir.VectorType(ir.IntType(16), 32), "llvm.x86.avx512.packusdw.512"
    halves = [vectors.intrinsic_of(b, name, kind, whole[k : k + 2]) for k in (0, 2)]
    return vectors.intrinsic_of(b, "llvm.x86.avx512.packuswb.512", ir.VectorType(INT8, WIDE), halves)


@on_addresses
def pack_wide(b, tile, factor, numbers, out):
    """64 floats of channels as in `_wide_sums` times a number plus another, those at `factor`, as bytes in order."""
    if not HAS_VNNI:
        return
    step, zero = (splat(b, load(b, factor, vectors.FLOAT, 4 * k)) for k in (0, 1))
    floats = [vectors.fused(b, load(b, tile, FLOATS, 4 * LANES * v), step, zero) for v in range(4)]
    store(b, _packed(b, floats, *vectors.bounds(b, numbers)), out)


@on_addresses
def scale_sums(b, sums, scale, bias, out):
    """16 sums, int32, times a scale plus a bias, float32 (16,)."""
    y = vectors.fused(b, b.sitofp(load(b, sums, INTS), FLOATS), load(b, scale, FLOATS), load(b, bias, FLOATS))
    store(b, y, out)


@on_addresses
def add_integers(b, x, integers, grid):
    """To 16 floats, in place, 16 integers, uint8, times a number plus another, those at `grid`."""
    step, shift = (splat(b, load(b, grid, vectors.FLOAT, 4 * k)) for k in (0, 1))
    real = b.uitofp(load(b, integers, ir.VectorType(INT8, LANES)), FLOATS)
    store(b, b.fadd(load(b, x, FLOATS), vectors.fused(b, real, step, shift)), x)


@on_addresses
def round_floats(b, x, factor, numbers, out):
    """16 floats times a number plus another, those at `factor`, to uint8 within the two bounds at `numbers`."""
    step, zero = (splat(b, load(b, factor, vectors.FLOAT, 4 * k)) for k in (0, 1))
    y = vectors.clamped(b, vectors.fused(b, load(b, x, FLOATS), step, zero), *vectors.bounds(b, numbers))
    store(b, vectors.rounded(b, y), out)


@on_addresses
def bend(b, x, slope):
    """16 floats in place: those below zero times the slope of each."""
    store(b, vectors.bent(b, load(b, x, FLOATS), load(b, slope, FLOATS)), x)


@on_addresses
def bound(b, x, numbers):
    """16 floats in place, within two bounds."""
    store(b, vectors.within(b, load(b, x, FLOATS), *vectors.bounds(b, numbers)), x)


def _applied(function: Callable[..., Any]) -> Any:
    def code(b, x):
        store(b, function(b, load(b, x, FLOATS)), x)

    return on_addresses(code)


silu, hardswish, gelu, sigmoid, tanh, hardsigmoid = map(
    _applied, (vectors.silu, vectors.hardswish, vectors.gelu, vectors.sigmoid, vectors.tanh, vectors.hardsigmoid)
)


def _summed(b: Any, blocks: Any, about: Any, term: Callable[[Any], Any]) -> None:
    """The sum of a term of 16 floats, of all blocks, to `about`."""
    totals = cgutils.alloca_once(b, FLOATS)
    b.store(splat(b, 0.0), totals)
    with cgutils.for_range(b, blocks, intp=INT64) as block:
        b.store(b.fadd(b.load(totals), term(b.mul(block.index, number(4 * LANES)))), totals)
    store(b, vectors.reduced(b, b.load(totals), b.fadd), about)


@on_addresses
def add_up(b, x, blocks, about):
    """The sum of floats, 16 in each block, as the first float at `about`."""
    _summed(b, blocks, about, lambda at: load(b, b.add(x, at), FLOATS))


@on_addresses
def add_squares(b, x, blocks, about):
    """The sum of the squares of floats, less the second float at `about`, as the first one there."""
    middle = splat(b, load(b, about, vectors.FLOAT, 4))

    def square(at: Any) -> Any:
        y = b.fsub(load(b, b.add(x, at), FLOATS), middle)
        return b.fmul(y, y)

    _summed(b, blocks, about, square)


@on_addresses
def normalize(b, x, about, weight, bias):
    """16 floats in place: less the second float at `about`, times the first, times a weight plus a bias."""
    factor, middle = (splat(b, load(b, about, vectors.FLOAT, 4 * k)) for k in (0, 1))
    y = b.fmul(b.fsub(load(b, x, FLOATS), middle), factor)
    store(b, vectors.fused(b, y, load(b, weight, FLOATS), load(b, bias, FLOATS)), x)
