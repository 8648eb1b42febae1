"""Machine code of epilogues: how the sums of an integer layer become the bytes, or the floats, of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from fxq.backends.loops.code import machine_code, vectors
from fxq.backends.loops.code.vectors import FLOATS, INT8, INT16, INT32, INT64, INTS, LANES, load, number, splat

VECTORS_PACKED = 4
"""Vectors of 16 results that become 64 bytes together."""
_ABOVE_BYTES = 4096.0
"""Float that is larger than all bytes, and fits into int16 like all smaller ones."""


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
    """Integers that are added to the scaled sums of a tile.

    Attributes:
        x: Address of uint8; 0: nothing is added.
        places: Address of int32: bytes from `x` to the 16 integers of each pixel.
        grid: Address of float32: scale, shift.
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
    """Code that clamps and rounds floats to bytes.

    Args:
        b: LLVM builder.
        numbers: Address of float32: lower and upper bound, whole numbers from 0 to 255.
    """

    def __init__(self, b: Any, numbers: Any) -> None:
        self._b = b
        self._bounds = vectors.bounds(b, numbers)
        bounds = [b.fptoui(load(b, numbers, vectors.FLOAT32, 4 * k), INT8) for k in (0, 1)]
        self._byte_bounds = [splat(b, bound, LANES * VECTORS_PACKED) for bound in bounds]

    def one(self, y: Any) -> Any:
        """16 bytes of a vector of floats. NaN becomes the lower bound."""
        return vectors.rounded(self._b, vectors.clamp(self._b, y, *self._bounds))

    def four(self, floats: Sequence[Any]) -> list[Any]:
        """16 bytes of each of four vectors of floats. NaN becomes the lower bound."""
        if not machine_code.KIND.has_avx512:
            return [self.one(y) for y in floats]
        packed = self.together(floats)
        return [
            vectors.lanes_of(self._b, packed, packed, range(LANES * k, LANES * (k + 1))) for k in range(len(floats))
        ]

    def together(self, floats: Sequence[Any]) -> Any:
        """64 bytes of four vectors of floats, one after the other. For CPUs with AVX512."""
        b, call = self._b, vectors.call_intrinsic
        integers = [self._integers(y) for y in floats]
        words, packed = ir.VectorType(INT16, 2 * LANES), ir.VectorType(INT8, 4 * LANES)
        pairs = [call(b, "llvm.x86.avx512.packssdw.512", words, integers[k : k + 2]) for k in (0, 2)]
        x = b.bitcast(call(b, "llvm.x86.avx512.packuswb.512", packed, pairs), INTS)
        # Both instructions join two vectors within each 16 bytes: these have four bytes of each of the four vectors.
        order = [VECTORS_PACKED * part + vector for vector in range(VECTORS_PACKED) for part in range(4)]
        x, (low, high) = b.bitcast(vectors.lanes_of(b, x, x, order), packed), self._byte_bounds
        x = b.select(b.icmp_unsigned(">", x, low), x, low)
        return b.select(b.icmp_unsigned("<", x, high), x, high)

    def _integers(self, y: Any) -> Any:
        """Nearest int32 of 16 floats. Too large ones become a number above 255; too small ones and NaN one below 0."""
        b, limit = self._b, splat(self._b, _ABOVE_BYTES)
        y = b.select(b.fcmp_ordered(">", y, limit), limit, y)
        arguments = [y, ir.Constant(INTS, None), ir.Constant(INT16, -1), ir.Constant(INT32, 4)]
        return vectors.call_intrinsic(b, "llvm.x86.avx512.mask.cvtps2dq.512", INTS, arguments)
