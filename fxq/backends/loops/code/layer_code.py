"""Machine code for integer products, in tiles whose sums stay in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import machine_code, products, vectors
from fxq.backends.loops.code.epilogue_code import (
    VECTORS_PACKED,
    ByteCode,
    EpilogueCode,
    TileOutput,
    pixel_address,
    quantizing,
    scaling,
    with_prelu,
    with_residual,
)
from fxq.backends.loops.code.machine_code import GROUP, TILE_PIXELS, on_addresses
from fxq.backends.loops.code.vectors import INT8, INT32, INT64, INTS, LANES, load, number, splat, store


class TileInput(NamedTuple):
    """Input of a tile: 16 columns of some pixels. See the figure in `layer_loops.py`.

    In loops, all are int64; in the code here, LLVM values.

    Attributes:
        x: Address of integers, uint8. Tiles that are not depthwise read integers of `CpuKind.x_bytes`.
        places: Address of int32: integers from `x` to the first integer of each pixel.
        runs: Address of int32: integers from there to each run of integers that a pixel reads.
        run_count: Number of runs.
        groups: Groups of `GROUP` integers in a run. Depthwise tiles have none: their runs have an integer per channel.
        weight: int8 (runs, groups, 16, GROUP); of depthwise tiles (runs, 16).
        start: Address of int32 (16,): initial sums; with `CpuKind.x_offset`, that times the weights is among them.
        own: Address of int32: number that is subtracted from the sums of each pixel, see `sum_own_products`; read by
            kinds without `CpuKind.dot`.
    """

    x: Any
    places: Any
    runs: Any
    run_count: Any
    groups: Any
    weight: Any
    start: Any
    own: Any


def accumulators(b: Any, initial_values: Sequence[Any], pixels: int) -> list[list[Any]]:
    """Registers for the sums of each pixel, with their initial values."""
    return [[_register(b, initial) for initial in initial_values] for _ in range(pixels)]


def _register(b: Any, initial: Any) -> Any:
    """Register with an initial value."""
    register = cgutils.alloca_once(b, initial.type)
    b.store(initial, register)
    return register


def pixel_addresses(b: Any, x: Any, places: Any, pixels: int, size: int = 1) -> list[Any]:
    """Addresses of pixels, from their distances to `x`, int32, at `places`. Integers have `size` bytes."""
    return [b.add(x, b.mul(b.sext(load(b, places, INT32, 4 * p), INT64), number(size))) for p in range(pixels)]


def offset_of_run(b: Any, runs: Any, index: Any, size: int = 1) -> Any:
    """Bytes from a pixel to the begin of a run that it reads. Integers have `size` bytes."""
    return b.mul(b.sext(load(b, b.add(runs, b.mul(index, number(4))), INT32), INT64), number(size))


def _layer_sums(b: Any, pixels: int, tile: TileInput) -> list[Any]:
    """Sums of 16 columns of a product, for each of some pixels.

    Integers of pixels have `CpuKind.x_bytes`, and those of the weight in a large tile.
    """
    size = machine_code.KIND.x_bytes
    weight_size = size if pixels == machine_code.KIND.tile_pixels else 1
    start = load(b, tile.start, INTS)
    own = [load(b, tile.own, INT32, 4 * p) for p in range(pixels)] if size == 2 else []
    totals = [_register(b, b.sub(start, splat(b, x))) for x in own] or [_register(b, start) for _ in range(pixels)]
    bases = pixel_addresses(b, tile.x, tile.places, pixels, size)
    weight_address = cgutils.alloca_once(b, INT64)
    b.store(tile.weight, weight_address)
    # The weight of the next 16 columns is stored after the weight of these.
    next_columns = b.mul(b.mul(tile.run_count, tile.groups), number(LANES * GROUP))
    with cgutils.for_range(b, tile.run_count, intp=INT64) as run:
        run_offset = offset_of_run(b, tile.runs, run.index, size)
        lines = [b.add(base, run_offset) for base in bases]
        with cgutils.for_range(b, tile.groups, intp=INT64) as group:
            address = b.load(weight_address)
            columns = products.group_of_weight(b, address, weight_size)
            b.store(b.add(address, number(LANES * GROUP * weight_size)), weight_address)
            if weight_size == 1:
                vectors.prefetch(b, b.add(address, next_columns))
            offset = b.mul(group.index, number(GROUP * size))
            for line, total in zip(lines, totals, strict=True):
                values = products.group_of_pixel(b, b.add(line, offset))
                b.store(products.add_products(b, b.load(total), values, columns), total)
    return [b.load(total) for total in totals]


@on_addresses
def sum_own_products(b, tile, pixels):
    """Store the sum of the products within the groups of each pixel (`add_own_products`) at `tile.own`.

    Up to 64 bytes after a run are read.
    """
    at_once = LANES // 2
    with cgutils.for_range(b, pixels, intp=INT64) as pixel:
        base = pixel_address(b, tile.x, tile.places, pixel.index, 2)
        total = _register(b, ir.Constant(INTS, None))
        with cgutils.for_range(b, tile.run_count, intp=INT64) as run:
            line = b.add(base, offset_of_run(b, tile.runs, run.index, 2))
            whole = b.udiv(tile.groups, number(at_once))
            with cgutils.for_range(b, whole, intp=INT64) as part:
                address = b.add(line, b.mul(part.index, number(2 * GROUP * at_once)))
                b.store(products.add_own_products(b, b.load(total), address), total)
            left = b.urem(tile.groups, number(at_once))
            with b.if_then(b.icmp_signed(">", left, number(0))):
                address = b.add(line, b.mul(whole, number(2 * GROUP * at_once)))
                b.store(products.add_own_products(b, b.load(total), address, left), total)
        result = vectors.call_intrinsic(b, f"llvm.vector.reduce.add.v{LANES}i32", INT32, [b.load(total)])
        store(b, result, b.add(tile.own, b.mul(pixel.index, number(4))))


def _depthwise_sums(b: Any, pixels: int, tile: TileInput, stride: Any) -> list[Any]:
    """Sums of 16 channels of a depthwise convolution, for each of some pixels, two runs at once.

    The weight has `stride` bytes from run to run. An odd last run is read twice, the second time with a weight of 0.
    """
    vector_type = ir.VectorType(INT8, LANES)
    totals = accumulators(b, [load(b, tile.start, INTS)], pixels)
    bases = pixel_addresses(b, tile.x, tile.places, pixels)
    last = b.sub(tile.run_count, number(1))
    with cgutils.for_range(b, b.lshr(b.add(tile.run_count, number(1)), number(1)), intp=INT64) as pair:
        first = b.shl(pair.index, number(1))
        is_whole = b.icmp_signed("<", first, last)
        runs = [first, b.select(is_whole, b.add(first, number(1)), first)]
        columns = [load(b, b.add(tile.weight, b.mul(run, stride)), vector_type) for run in runs]
        columns[1] = b.select(is_whole, columns[1], ir.Constant(vector_type, None))
        weight = products.side_by_side(b, columns, signed=True)
        run_offsets = [offset_of_run(b, tile.runs, run) for run in runs]
        for base, (total,) in zip(bases, totals, strict=True):
            values = [load(b, b.add(base, run_offset), vector_type) for run_offset in run_offsets]
            x = products.side_by_side(b, values, signed=False)
            b.store(b.add(b.load(total), products.add_pairs(b, x, weight)), total)
    return [b.load(total) for (total,) in totals]


def _store_bytes(b: Any, sums: Sequence[Any], result: TileOutput, epilogue: EpilogueCode) -> None:
    """Store the bytes of the sums of each pixel, whose floats `epilogue` returns."""
    lines, code = pixel_addresses(b, result.out, result.places, len(sums)), ByteCode(b, result.numbers)
    floats = [epilogue(p, total) for p, total in enumerate(sums)]
    whole = len(sums) // VECTORS_PACKED * VECTORS_PACKED
    values = [value for k in range(0, whole, VECTORS_PACKED) for value in code.four(floats[k : k + VECTORS_PACKED])]
    for value, line in zip([*values, *map(code.one, floats[whole:])], lines, strict=True):
        store(b, value, line)


def layer_tile(pixels: int) -> Any:
    """Code that stores the sums of a tile."""

    def code(b, tile, sums):
        for p, total in enumerate(_layer_sums(b, pixels, tile)):
            store(b, total, b.add(sums, number(4 * LANES * p)))

    return on_addresses(code, is_called=pixels == TILE_PIXELS)


def rounded_layer_tile(pixels: int) -> Any:
    """Code of a tile that is rounded at once: scale and bias include the grid of the result."""

    def code(b, tile, result):
        sums = _layer_sums(b, pixels, tile)
        _store_bytes(b, sums, result, scaling(b, result))

    return on_addresses(code, is_called=pixels == TILE_PIXELS)


def activation_tile(function: Callable[[Any, Any], Any]) -> Any:
    """Code of a large tile with an activation function before the rounding."""

    def code(b, tile, result):
        sums = _layer_sums(b, machine_code.KIND.tile_pixels, tile)
        _store_bytes(b, sums, result, quantizing(b, result, lambda _, y: function(b, y)))

    return on_addresses(code, is_called=True)


@partial(on_addresses, is_called=True)
def prelu_many(b, tile, result, slope):
    """Compute a large tile with PReLU before the rounding; `slope` is the address of float32 (16,), by column."""
    sums = _layer_sums(b, machine_code.KIND.tile_pixels, tile)
    _store_bytes(b, sums, result, with_prelu(b, result, slope))


@partial(on_addresses, is_called=True)
def residual_many(b, tile, result, residual):
    """Compute a large tile, and add a `Residual` before the rounding."""
    sums = _layer_sums(b, machine_code.KIND.tile_pixels, tile)
    _store_bytes(b, sums, result, with_residual(b, result, residual))


def depthwise_tile(pixels: int) -> Any:
    """Code that stores the sums of a tile of 16 channels of a depthwise convolution."""

    def code(b, tile, stride, sums):
        for p, total in enumerate(_depthwise_sums(b, pixels, tile, stride)):
            store(b, total, b.add(sums, number(4 * LANES * p)))

    return on_addresses(code)


many_pixels, four_pixels, one_pixel = (layer_tile(pixels) for pixels in (TILE_PIXELS, 4, 1))
round_many, round_four, round_one = (rounded_layer_tile(pixels) for pixels in (TILE_PIXELS, 4, 1))
four_depthwise, one_depthwise = (depthwise_tile(pixels) for pixels in (4, 1))
silu_many, hardswish_many, gelu_many = map(activation_tile, vectors.LAYER_FUNCTIONS)
