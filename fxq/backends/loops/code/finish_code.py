"""Machine code that works on 16 floats at a time: scaling of sums, activations, rounding, normalization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import vectors
from fxq.backends.loops.code.machine_code import on_addresses
from fxq.backends.loops.code.vectors import FLOATS, INT8, INT64, INTS, LANES, load, number, splat, store


@on_addresses
def scale_sums(b, sums, scale, bias, out):
    """Write 16 sums, int32, times a scale plus a bias, both float32 (16,)."""
    y = vectors.multiply_add(b, b.sitofp(load(b, sums, INTS), FLOATS), load(b, scale, FLOATS), load(b, bias, FLOATS))
    store(b, y, out)


@on_addresses
def add_integers(b, x, integers, grid):
    """Add 16 dequantized integers, uint8, to 16 floats in place. `grid` is the address of the scale and the shift."""
    step, shift = (splat(b, load(b, grid, vectors.FLOAT32, 4 * k)) for k in (0, 1))
    real = b.uitofp(load(b, integers, ir.VectorType(INT8, LANES)), FLOATS)
    store(b, b.fadd(load(b, x, FLOATS), vectors.multiply_add(b, real, step, shift)), x)


@on_addresses
def round_floats(b, x, factor, numbers, out):
    """Quantize 16 floats to uint8.

    `factor` is the address of the factor and the zero point, `numbers` that of the two bounds.
    """
    step, zero = (splat(b, load(b, factor, vectors.FLOAT32, 4 * k)) for k in (0, 1))
    y = vectors.clamp(b, vectors.multiply_add(b, load(b, x, FLOATS), step, zero), *vectors.bounds(b, numbers))
    store(b, vectors.rounded(b, y), out)


@on_addresses
def scale_negative(b, x, slope):
    """Multiply those of 16 floats that are below zero by their slopes, in place."""
    store(b, vectors.scale_negative(b, load(b, x, FLOATS), load(b, slope, FLOATS)), x)


@on_addresses
def clamp(b, x, numbers):
    """Clamp 16 floats in place to the two bounds at `numbers`. NaN stays."""
    store(b, vectors.clamp_keep_nan(b, load(b, x, FLOATS), *vectors.bounds(b, numbers)), x)


def _in_place(function: Callable[..., Any]) -> Any:
    """Code that replaces 16 floats by a function of them."""

    def code(b, x):
        store(b, function(b, load(b, x, FLOATS)), x)

    return on_addresses(code)


silu, hardswish, gelu, sigmoid, tanh, hardsigmoid = map(
    _in_place, (vectors.silu, vectors.hardswish, vectors.gelu, vectors.sigmoid, vectors.tanh, vectors.hardsigmoid)
)


_SUMS = 4
"""Number of sums to which blocks are added in turn: none waits for the addition before it."""


def _sum_blocks(b: Any, blocks: Any, result: Any, term: Callable[[Any], Any]) -> None:
    """Write the sum over all blocks of `term`, which returns 16 floats for the byte offset of a block, to `result`."""
    totals = [cgutils.alloca_once_value(b, splat(b, 0.0)) for _ in range(_SUMS)]
    rounds = b.udiv(blocks, number(_SUMS))
    with cgutils.for_range(b, rounds, intp=INT64) as some:
        first = b.mul(some.index, number(4 * LANES * _SUMS))
        for k, total in enumerate(totals):
            b.store(b.fadd(b.load(total), term(b.add(first, number(4 * LANES * k)))), total)
    done = b.mul(rounds, number(_SUMS))
    with cgutils.for_range(b, b.sub(blocks, done), intp=INT64) as block:
        offset = b.mul(b.add(done, block.index), number(4 * LANES))
        b.store(b.fadd(b.load(totals[0]), term(offset)), totals[0])
    sums = [b.load(total) for total in totals]
    while len(sums) > 1:
        sums = [b.fadd(*sums[k : k + 2]) for k in range(0, len(sums), 2)]
    store(b, vectors.reduced(b, sums[0], b.fadd), result)


@on_addresses
def sum_floats(b, x, blocks, result):
    """Write the sum of floats, 16 in each block, to the first float at `result`."""
    _sum_blocks(b, blocks, result, lambda offset: load(b, b.add(x, offset), FLOATS))


@on_addresses
def sum_squares(b, x, blocks, stats):
    """Write the sum of squared differences from a mean. `stats` holds the result and the mean."""
    mean = splat(b, load(b, stats, vectors.FLOAT32, 4))

    def square(offset: Any) -> Any:
        y = b.fsub(load(b, b.add(x, offset), FLOATS), mean)
        return b.fmul(y, y)

    _sum_blocks(b, blocks, stats, square)


@on_addresses
def normalize(b, x, stats, weight, bias):
    """Normalize 16 floats in place: subtract the mean, multiply by the reciprocal deviation, apply weight and bias.

    `stats` is the address of the reciprocal deviation and the mean.
    """
    factor, mean = (splat(b, load(b, stats, vectors.FLOAT32, 4 * k)) for k in (0, 1))
    y = b.fmul(b.fsub(load(b, x, FLOATS), mean), factor)
    store(b, vectors.multiply_add(b, y, load(b, weight, FLOATS), load(b, bias, FLOATS)), x)
