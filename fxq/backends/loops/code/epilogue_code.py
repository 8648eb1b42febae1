"""Machine code of epilogues: how the sums of an integer layer become the bytes, or the floats, of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from fxq.backends.loops.code import machine_code, vectors
from fxq.backends.loops.code.vectors import FLOATS, INT8, INT16, INT32, INT64, INTS, LANES, load, number, splat

VECTORS_PACKED = 4
"""Vectors of floats that become bytes together."""


class TileOutput(NamedTuple):
    """Results of a tile, and how its sums become results.

    Attributes:
        scale: Address of float32 (16,), by column.
        bias: Address of float32 (16,), by column.
        numbers: Address of float32: lower bound and upper bound, of floats or of integers, factor, zero point.
        out: Address of the results of the 16 columns.
        places: Address of int32: elements from `out` to the results of each pixel.
    """

    scale: Any
    bias: Any
    numbers: Any
    out: Any
    places: Any


class Residual(NamedTuple):
    """Integers or floats that are added to the scaled sums of a tile.

    Attributes:
        x: Address of uint8 or float32; 0: nothing is added.
        places: Address of int32: elements from `x` to the 16 columns of each pixel.
        grid: Address of float32: scale, shift; 0 for floats.
    """

    x: Any
    places: Any
    grid: Any


EpilogueCode = Callable[[Any, Any], Any]
"""Function of a pixel, a number or an LLVM value, and its 16 sums, that returns 16 floats on the grid of the result,
before they are clamped and rounded."""


def pixel_address(b: Any, x: Any, places: Any, pixel: Any, size: int = 1) -> Any:
    """Address of a pixel, a number or an LLVM value, from its distance to `x`, int32, at `places`."""
    offset = b.mul(number(pixel) if isinstance(pixel, int) else pixel, number(4))
    return b.add(x, b.mul(b.sext(load(b, b.add(places, offset), INT32), INT64), number(size)))


def scaling(b: Any, result: TileOutput) -> EpilogueCode:
    """Code that scales sums and adds the bias: it is complete if these include the grid of the result."""
    scales, bias = load(b, result.scale, FLOATS), load(b, result.bias, FLOATS)
    return lambda _, total: vectors.multiply_add(b, b.sitofp(total, FLOATS), scales, bias)


def quantizing(b: Any, result: TileOutput, function: Callable[[Any, Any], Any]) -> EpilogueCode:
    """Code that scales sums, adds the bias, and applies `function(pixel, y)`, then the grid of the result."""
    scaled = scaling(b, result)
    factor, zero = (splat(b, load(b, result.numbers, vectors.FLOAT32, 4 * k)) for k in (2, 3))
    return lambda pixel, total: vectors.multiply_add(b, function(pixel, scaled(pixel, total)), factor, zero)


def with_prelu(b: Any, result: TileOutput, slope: Any) -> EpilogueCode:
    """Code that also applies PReLU; `slope` is the address of float32 (16,), by column."""
    slopes = load(b, slope, FLOATS)
    return quantizing(b, result, lambda _, y: vectors.scale_negative(b, y, slopes))


def with_residual(b: Any, result: TileOutput, residual: Residual) -> EpilogueCode:
    """Code that also adds a `Residual`."""
    step, shift = vectors.bounds(b, residual.grid)

    def added(pixel: Any, y: Any) -> Any:
        address = pixel_address(b, residual.x, residual.places, pixel)
        real = b.uitofp(load(b, address, ir.VectorType(INT8, LANES)), FLOATS)
        return b.fadd(y, vectors.multiply_add(b, real, step, shift))

    return quantizing(b, result, added)


class ByteCode:
    """Code that clamps and rounds vectors of floats to bytes. NaN becomes the lower bound.

    Args:
        b: LLVM builder.
        numbers: Address of float32: lower and upper bound, whole numbers from 0 to 255.
        lanes: Floats of a vector.
    """

    def __init__(self, b: Any, numbers: Any, lanes: int = LANES) -> None:
        self._b = b
        self._bounds = vectors.bounds(b, numbers, lanes)
        lowest = b.fptoui(load(b, numbers, vectors.FLOAT32), INT8)
        self._lowest = splat(b, lowest, VECTORS_PACKED * lanes)

    def one(self, y: Any) -> Any:
        """16 bytes of a vector of 16 floats."""
        return vectors.rounded(self._b, vectors.clamp(self._b, y, *self._bounds))

    def four(self, floats: Sequence[Any]) -> list[Any]:
        """16 bytes of each of four vectors of 16 floats."""
        if not machine_code.KIND.has_avx512:
            return [self.one(y) for y in floats]
        packed = self.together(floats)
        parts = [range(first, first + LANES) for first in range(0, VECTORS_PACKED * LANES, LANES)]
        return [vectors.lanes_of(self._b, packed, packed, part) for part in parts]

    def together(self, floats: Sequence[Any]) -> Any:
        """64 bytes of four vectors of 16 floats, one after the other. For CPUs with AVX512."""
        fours = self._b.bitcast(self.interleaved(floats), INTS)
        order = [VECTORS_PACKED * part + vector for vector in range(VECTORS_PACKED) for part in range(4)]
        return self._b.bitcast(vectors.lanes_of(self._b, fours, fours, order), ir.VectorType(INT8, 4 * LANES))

    def interleaved(self, floats: Sequence[Any]) -> Any:
        """Bytes of four vectors that fill registers: four of each vector, then the next four. For AVX2 and AVX512.

        The instructions join two vectors within each 16 bytes, and make 0 of what is below.
        """
        b, high = self._b, self._bounds[1]
        values = [_nearest(b, b.select(b.fcmp_ordered("<", high, y), high, y)) for y in floats]
        words, sizes = 2 * high.type.count, ("avx512", ".512") if machine_code.KIND.bits == 512 else ("avx2", "")
        for name, kind in (("packusdw", ir.VectorType(INT16, words)), ("packuswb", ir.VectorType(INT8, 2 * words))):
            intrinsic = name.join(("llvm.x86.{}.", "{}")).format(*sizes)
            pairs = [values[k : k + 2] for k in range(0, len(values), 2)]
            values = [vectors.call_intrinsic(b, intrinsic, kind, pair) for pair in pairs]
        return b.select(b.icmp_unsigned(">", values[0], self._lowest), values[0], self._lowest)


def _nearest(b: Any, y: Any) -> Any:
    """Nearest int32 of floats below 2**31; of floats below -2**31 and of NaN it is -2**31."""
    result = ir.VectorType(INT32, y.type.count)
    if machine_code.KIND.bits == 256:
        return vectors.call_intrinsic(b, "llvm.x86.avx.cvt.ps2dq.256", result, [y])
    all_lanes, mode = ir.Constant(INT16, -1), ir.Constant(INT32, 4)  # current rounding mode
    values = [y, ir.Constant(result, None), all_lanes, mode]
    return vectors.call_intrinsic(b, "llvm.x86.avx512.mask.cvtps2dq.512", result, values)
