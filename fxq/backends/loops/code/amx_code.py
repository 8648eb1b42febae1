"""Machine code of integer products with AMX, whose registers are tiles: 16 rows of 64 bytes.

One instruction adds the products of a tile with 16 pixels, uint8 (16, 64), and a tile with 16 columns of a weight, int8
(16, 16, GROUP), to a tile of sums, int32 (16, 16). Both may have fewer groups than 16; a layer chooses the number that
divides its runs. Two tiles of pixels and two of columns give four tiles of sums::

                            block k    block k + 1
                           tile 6       tile 7          from the weight, once for each tile of integers of a pixel
    pixels  0 .. 15       +----------+----------+
              tile 4      |  tile 0  |  tile 1  |
                          +----------+----------+
    pixels 16 .. 31       |  tile 2  |  tile 3  |
              tile 5      +----------+----------+

Where a CPU without AMX plays the kind, other code computes what the instructions compute. The tiles are in memory then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import machine_code, products, vectors
from fxq.backends.loops.code.amx_probe import CONFIG
from fxq.backends.loops.code.epilogue_code import (
    VECTORS_PACKED,
    ByteCode,
    EpilogueCode,
    Residual,
    TileOutput,
    pixel_address,
    quantizing,
    scaling,
    with_prelu,
    with_residual,
)
from fxq.backends.loops.code.machine_code import GROUP, choose, on_addresses
from fxq.backends.loops.code.vectors import FLOATS, INT8, INT16, INT32, INT64, INTS, LANES, load, number, store

TILE_ROWS, ROW_BYTES = 16, 64
"""Size of a tile."""
TILE_BYTES = TILE_ROWS * ROW_BYTES
PIXELS_AT_ONCE, BLOCKS_AT_ONCE = 2 * TILE_ROWS, 2
"""Pixels and blocks of 16 columns whose sums are in tiles at once."""
STATE_BYTES = len(CONFIG) + 8 * TILE_BYTES
"""Bytes of memory for the configuration of tiles, and for tiles that are emulated."""
PIXEL_TILE, WEIGHT_TILE = 4, 6
"""Numbers of the first tiles of pixels and of weights. Tiles of sums are before."""
_PAIR_BYTES = 4
"""Bytes of two bfloat16."""
_SIZES_OF_ROWS, _COUNTS_OF_ROWS = 16, 48
"""Offsets in the configuration: bytes of the rows of each tile, int16; number of rows of each, int8."""


# ---- instructions


def _call(b: Any, name: str, *values: Any) -> None:
    """Call an intrinsic of AMX. Python's integers are numbers of tiles, which are part of the instruction."""
    arguments = [ir.Constant(INT8, value) if isinstance(value, int) else value for value in values]
    vectors.call_intrinsic(b, f"llvm.x86.{name}", ir.VoidType(), arguments)


def _pointer(b: Any, address: Any) -> Any:
    return b.inttoptr(address, INT8.as_pointer())


def _is_emulated() -> bool:
    return machine_code.KIND.is_played


@on_addresses
def configure(b, state, size):
    """Set the sizes of tiles, until `release`: rows of pixels have `size` bytes, a multiple of `GROUP` up to 64.

    `state` is the address of `STATE_BYTES` of memory.
    """
    if not machine_code.KIND.has_amx:
        return
    store(b, ir.Constant(ir.ArrayType(INT8, len(CONFIG)), bytearray(CONFIG)), state)
    for tile in (PIXEL_TILE, PIXEL_TILE + 1):
        store(b, b.trunc(size, INT8), b.add(state, number(_SIZES_OF_ROWS + 2 * tile)))
    for tile in (WEIGHT_TILE, WEIGHT_TILE + 1):
        store(b, b.trunc(b.udiv(size, number(GROUP)), INT8), b.add(state, number(_COUNTS_OF_ROWS + tile)))
    if not _is_emulated():
        _call(b, "ldtilecfg", _pointer(b, state))


@on_addresses
def release(b, state):
    """Free the tiles, so that the operating system need not save them."""
    if not machine_code.KIND.has_amx:
        return
    if not _is_emulated():
        _call(b, "tilerelease")
        return
    with cgutils.for_range(b, number(STATE_BYTES // ROW_BYTES), intp=INT64) as line:
        store(b, ir.Constant(INTS, None), b.add(state, b.mul(line.index, number(ROW_BYTES))))


def load_tile(b: Any, state: Any, tile: int, address: Any, stride: Any) -> None:
    """Load the rows of a tile, which are `stride` bytes apart."""
    if _is_emulated():
        _emulate(b, _load_tile, state, number(tile), address, stride)
    else:
        _call(b, "tileloadd64", tile, _pointer(b, address), stride)


def store_tile(b: Any, state: Any, tile: int, address: Any) -> None:
    """Store the rows of a tile, one after the other."""
    if _is_emulated():
        _emulate(b, _store_tile, state, number(tile), address)
    else:
        _call(b, "tilestored64", tile, _pointer(b, address), number(ROW_BYTES))


def multiply_tiles(b: Any, state: Any, sums: int, pixels: int, weight: int) -> None:
    """Add the products of uint8 in a tile of pixels and int8 in one of a weight to a tile of sums."""
    if _is_emulated():
        _emulate(b, _multiply_tiles, state, *map(number, (sums, pixels, weight)))
    else:
        _call(b, "tdpbusd", sums, pixels, weight)


def multiply_float_tiles(b: Any, state: Any, sums: int, rows: int, weight: int) -> None:
    """Add the products of bfloat16 in a tile of rows and in one of a weight to a tile of float32 sums.

    A tile of rows is bfloat16 (16, 32), one of a weight bfloat16 (16, 16, 2): pairs of adjacent numbers of 16 columns.
    """
    if _is_emulated():
        _emulate(b, _multiply_float_tiles, state, *map(number, (sums, rows, weight)))
    else:
        _call(b, "tdpbf16ps", sums, rows, weight)


# ---- emulated instructions


def _emulate(b: Any, instruction: Callable[..., None], *values: Any) -> None:
    """Call a function that computes what an instruction computes. Values are int64."""
    kind = ir.FunctionType(ir.VoidType(), [INT64] * len(values))
    function = cgutils.get_or_insert_function(b.module, kind, f"fxq{instruction.__name__}")
    if function.is_declaration:
        function.linkage = "internal"
        function.attributes.add("noinline")
        body = ir.IRBuilder(function.append_basic_block())
        instruction(body, *function.args)
        body.ret_void()
    b.call(function, values)


def _load_tile(b: Any, state: Any, tile: Any, address: Any, stride: Any) -> None:
    with cgutils.for_range(b, number(TILE_ROWS), intp=INT64) as row:
        place, mask = b.add(address, b.mul(row.index, stride)), _lanes_of_row(b, state, tile, row.index)
        store(b, load_lanes(b, place, mask), _row_of_tile(b, state, tile, row.index))


def _store_tile(b: Any, state: Any, tile: Any, address: Any) -> None:
    with cgutils.for_range(b, number(TILE_ROWS), intp=INT64) as row:
        place = b.add(address, b.mul(row.index, number(ROW_BYTES)))
        values = load(b, _row_of_tile(b, state, tile, row.index), INTS)
        store_lanes(b, values, place, _lanes_of_row(b, state, tile, row.index))


def _multiply_tiles(b: Any, state: Any, sums: Any, pixels: Any, weight: Any) -> None:
    with cgutils.for_range(b, _rows(b, state, sums), intp=INT64) as row:
        place, x = (_row_of_tile(b, state, tile, row.index) for tile in (sums, pixels))
        total = cgutils.alloca_once(b, INTS)
        b.store(load(b, place, INTS), total)
        with cgutils.for_range(b, b.udiv(_bytes_of_row(b, state, pixels), number(GROUP)), intp=INT64) as group:
            values = products.group_of_pixel(b, b.add(x, b.mul(group.index, number(GROUP))))
            columns = products.group_of_weight(b, _row_of_tile(b, state, weight, group.index))
            b.store(products.add_products(b, b.load(total), values, columns), total)
        store(b, b.load(total), place)


def _multiply_float_tiles(b: Any, state: Any, sums: Any, rows: Any, weight: Any) -> None:
    with cgutils.for_range(b, _rows(b, state, sums), intp=INT64) as row:
        place, x = (_row_of_tile(b, state, tile, row.index) for tile in (sums, rows))
        total = cgutils.alloca_once(b, FLOATS)
        b.store(load(b, place, FLOATS), total)
        with cgutils.for_range(b, b.udiv(_bytes_of_row(b, state, rows), number(_PAIR_BYTES)), intp=INT64) as pair:
            numbers = vectors.splat(b, load(b, b.add(x, b.mul(pair.index, number(_PAIR_BYTES))), INT32))
            columns = load(b, _row_of_tile(b, state, weight, pair.index), INTS)
            for of_x, of_columns in zip(_floats_of_pairs(b, numbers), _floats_of_pairs(b, columns), strict=True):
                b.store(vectors.multiply_add(b, of_x, of_columns, b.load(total)), total)
        store(b, b.load(total), place)


def _floats_of_pairs(b: Any, pairs: Any) -> tuple[Any, Any]:
    """First and second bfloat16 of each of 16 pairs, as float32."""
    low, high = (ir.Constant(INTS, [value] * LANES) for value in (16, 0xFFFF0000))
    return b.bitcast(b.shl(pairs, low), FLOATS), b.bitcast(b.and_(pairs, high), FLOATS)


def _row_of_tile(b: Any, state: Any, tile: Any, row: Any) -> Any:
    """Address of a row of an emulated tile."""
    first = b.add(b.add(state, number(len(CONFIG))), b.mul(tile, number(TILE_BYTES)))
    return b.add(first, b.mul(row, number(ROW_BYTES)))


def _rows(b: Any, state: Any, tile: Any) -> Any:
    """Number of rows of an emulated tile, from its configuration."""
    return b.zext(load(b, b.add(state, tile), INT8, _COUNTS_OF_ROWS), INT64)


def _bytes_of_row(b: Any, state: Any, tile: Any) -> Any:
    """Bytes of the rows of an emulated tile, from its configuration."""
    return b.zext(load(b, b.add(state, b.add(tile, tile)), INT16, _SIZES_OF_ROWS), INT64)


def _lanes_of_row(b: Any, state: Any, tile: Any, row: Any) -> Any:
    """Mask of those of 16 numbers that a row of an emulated tile has: none beyond its rows."""
    lanes = b.udiv(_bytes_of_row(b, state, tile), number(4))
    return _first_lanes(b, b.select(b.icmp_unsigned("<", row, _rows(b, state, tile)), lanes, number(0)))


def _first_lanes(b: Any, count: Any) -> Any:
    """Mask of the first `count` of 16 numbers."""
    return b.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), vectors.splat(b, b.trunc(count, INT32)))


def store_lanes(b: Any, values: Any, address: Any, mask: Any) -> None:
    """Store those of 16 int32 that a mask has."""
    arguments = [values, b.inttoptr(address, INTS.as_pointer()), ir.Constant(INT32, 4), mask]
    vectors.call_intrinsic(b, "llvm.masked.store.v16i32.p0v16i32", ir.VoidType(), arguments)


def load_lanes(b: Any, address: Any, mask: Any) -> Any:
    """Load those of 16 int32 that a mask has; the others are 0, and are not read."""
    place = b.inttoptr(address, INTS.as_pointer())
    values = [place, ir.Constant(INT32, 4), mask, ir.Constant(INTS, None)]
    return vectors.call_intrinsic(b, "llvm.masked.load.v16i32.p0v16i32", INTS, values)


# ---- products


class TilesInput(NamedTuple):
    """Input of one or two tiles of pixels, times one or two tiles of columns.

    In loops, all are int64; in the code here, LLVM values.

    Attributes:
        first: Address of the first pixel of the first tile, uint8.
        second: Address of the first pixel of the second tile.
        x_step: Bytes from a pixel to the next.
        runs: Address of int32: bytes from there to each run of integers that a pixel reads.
        run_count: Number of runs.
        depth: Number of tiles of a run.
        size: Integers of a pixel in a tile, see `configure`.
        weight: Address of the first block.
        block_bytes: Bytes from a block to the next.
        start: Address of int32 (columns, 16): initial sums.
    """

    first: Any
    second: Any
    x_step: Any
    runs: Any
    run_count: Any
    depth: Any
    size: Any
    weight: Any
    block_bytes: Any
    start: Any


def sums_of_tiles(rows: int, columns: int) -> Any:
    """Code that stores the sums of one or two tiles of pixels, times one or two tiles of columns.

    The sums are int32 (columns, 32, 16) at the address `sums`; `state` is that of the configuration.
    """

    def code(b, tiles, sums, state):
        if not machine_code.KIND.has_amx:
            return
        pairs = [(r, c) for r in range(rows) for c in range(columns)]
        for r, c in pairs:
            load_tile(b, state, columns * r + c, b.add(tiles.start, number(ROW_BYTES * c)), number(0))
        weight = cgutils.alloca_once(b, INT64)
        b.store(tiles.weight, weight)
        with cgutils.for_range(b, tiles.run_count, intp=INT64) as run:
            offset = b.sext(load(b, b.add(tiles.runs, b.mul(run.index, number(4))), INT32), INT64)
            lines = [b.add(x, offset) for x in (tiles.first, tiles.second)[:rows]]
            with cgutils.for_range(b, tiles.depth, intp=INT64) as step:
                block = b.load(weight)
                for c in range(columns):
                    place = b.add(block, b.mul(tiles.block_bytes, number(c)))
                    load_tile(b, state, WEIGHT_TILE + c, place, number(ROW_BYTES))
                b.store(b.add(block, b.mul(tiles.size, number(LANES))), weight)
                for r, line in enumerate(lines):
                    place = b.add(line, b.mul(step.index, tiles.size))
                    load_tile(b, state, PIXEL_TILE + r, place, tiles.x_step)
                for r, c in pairs:
                    multiply_tiles(b, state, columns * r + c, PIXEL_TILE + r, WEIGHT_TILE + c)
        for r, c in pairs:
            store_tile(b, state, columns * r + c, b.add(sums, number(TILE_BYTES * (BLOCKS_AT_ONCE * c + r))))

    return on_addresses(code)


@on_addresses
def copy_run(b, x, groups, out):
    """Copy groups of integers. Up to 60 bytes after the copy become 0."""
    with cgutils.for_range(b, b.lshr(groups, number(4)), intp=INT64) as line:
        offset = b.mul(line.index, number(ROW_BYTES))
        store(b, load(b, b.add(x, offset), INTS), b.add(out, offset))
    rest = b.and_(groups, number(15))
    with b.if_then(b.icmp_unsigned("!=", rest, number(0))):
        offset = b.mul(b.sub(groups, rest), number(GROUP))
        store(b, load_lanes(b, b.add(x, offset), _first_lanes(b, rest)), b.add(out, offset))


# ---- results


MakeEpilogue = Callable[[Any, TileOutput, int], EpilogueCode]
"""Function that returns the epilogue of a block, which is told by its number, 0 or 1, for code of one or two blocks."""


def _of_block(result: TileOutput, b: Any, block: int) -> TileOutput:
    """Addresses of the second block of two, if `block` is 1."""
    offset = number(4 * LANES * block)
    return result._replace(scale=b.add(result.scale, offset), bias=b.add(result.bias, offset))


def _store_at(b: Any, value: Any, result: TileOutput, pixel: Any) -> None:
    """Store the bytes of a pixel, unless its place is negative: then the tile does not have the pixel."""
    place = b.sext(load(b, b.add(result.places, b.mul(pixel, number(4))), INT32), INT64)
    with b.if_then(b.icmp_signed(">=", place, number(0)), likely=True):
        store(b, value, b.add(result.out, place))


def _store_bytes(b: Any, sums: Any, pixels: Any, columns: int, result: TileOutput, make: MakeEpilogue) -> None:
    """Store the bytes of the stored sums of a multiple of 16 pixels, int32 (columns, 32, 16).

    Four vectors are packed at once: those of four pixels, or of two with two blocks.
    """
    epilogues = [make(b, _of_block(result, b, c), c) for c in range(columns)]
    code, at_once = ByteCode(b, result.numbers), VECTORS_PACKED // columns
    with cgutils.for_range(b, b.udiv(pixels, number(at_once)), intp=INT64) as part:
        first = b.mul(part.index, number(at_once))
        of_part = [b.add(first, number(k)) for k in range(at_once)]
        floats = []
        for pixel in of_part:
            place = b.add(sums, b.mul(pixel, number(ROW_BYTES)))
            for c, epilogue in enumerate(epilogues):
                total = load(b, place, INTS, BLOCKS_AT_ONCE * TILE_BYTES * c)
                floats.append(epilogue(pixel, total))
        packed, size = code.together(floats), LANES * columns
        for k, pixel in enumerate(of_part):
            _store_at(b, vectors.lanes_of(b, packed, packed, range(size * k, size * (k + 1))), result, pixel)


def _store_floats(
    b: Any, sums: Any, pixels: Any, columns: int, result: TileOutput, count: Any, residual: Residual | None
) -> None:
    """Store floats of the stored sums of some pixels, clamped: `count` of the 16 or 32 columns, plus other floats."""
    epilogues = [scaling(b, _of_block(result, b, c)) for c in range(columns)]
    low, high = vectors.bounds(b, result.numbers)
    masks = [_first_lanes(b, b.sub(count, number(LANES * c))) for c in range(columns)]
    with cgutils.for_range(b, pixels, intp=INT64) as pixel:
        place = b.sext(load(b, b.add(result.places, b.mul(pixel.index, number(4))), INT32), INT64)
        with b.if_then(b.icmp_signed(">=", place, number(0)), likely=True):
            line, out = (
                b.add(sums, b.mul(pixel.index, number(ROW_BYTES))), b.add(result.out, b.mul(place, number(4)))
            )  # fmt: skip
            for c, (epilogue, mask) in enumerate(zip(epilogues, masks, strict=True)):
                y = epilogue(pixel.index, load(b, line, INTS, BLOCKS_AT_ONCE * TILE_BYTES * c))
                if residual is not None:
                    added = pixel_address(b, residual.x, residual.places, pixel.index, 4)
                    lanes = load_lanes(b, b.add(added, number(4 * LANES * c)), mask)
                    y = b.fadd(y, b.bitcast(lanes, FLOATS))
                y = vectors.clamp_keep_nan(b, y, low, high)
                store_lanes(b, b.bitcast(y, INTS), b.add(out, number(4 * LANES * c)), mask)


def _of_columns(b: Any, columns: Any, code: Callable[[int], None]) -> None:
    """Emit code for one block and for two, and choose between them when it runs."""
    if machine_code.KIND.has_amx:
        choose(b, columns, (1, BLOCKS_AT_ONCE), code)


@on_addresses
def round_sums(b, sums, pixels, columns, result):
    """Round sums of some blocks, 1 or 2, that are stored: scale and bias include the grid of the result."""
    _of_columns(b, columns, lambda n: _store_bytes(b, sums, pixels, n, result, lambda b, block, _: scaling(b, block)))


@on_addresses
def prelu_sums(b, sums, pixels, columns, result, slope):
    """Apply PReLU to sums that are stored, and quantize them."""

    def make(b: Any, block: TileOutput, c: int) -> EpilogueCode:
        return with_prelu(b, block, b.add(slope, number(4 * LANES * c)))

    _of_columns(b, columns, lambda n: _store_bytes(b, sums, pixels, n, result, make))


@on_addresses
def residual_sums(b, sums, pixels, columns, result, residual):
    """Add a `Residual` to sums that are stored, and quantize them."""

    def make(b: Any, block: TileOutput, c: int) -> EpilogueCode:
        return with_residual(b, block, residual._replace(x=b.add(residual.x, number(LANES * c))))

    _of_columns(b, columns, lambda n: _store_bytes(b, sums, pixels, n, result, make))


def activation_of_sums(function: Callable[[Any, Any], Any]) -> Any:
    """Code that applies an activation function to sums that are stored, and quantizes them."""

    def code(b, sums, pixels, columns, result):
        def make(b: Any, block: TileOutput, _: int) -> EpilogueCode:
            return quantizing(b, block, lambda _, y: function(b, y))

        _of_columns(b, columns, lambda n: _store_bytes(b, sums, pixels, n, result, make))

    return on_addresses(code)


@on_addresses
def float_sums(b, sums, pixels, columns, result, count, residual):
    """Scale sums that are stored, add a `Residual` of floats, if there is one, and clamp them.

    `count` of the 16 or 32 columns are written.
    """

    def code(n: int) -> None:
        adds = b.zext(b.icmp_unsigned("!=", residual.x, number(0)), INT64)
        kinds = (None, residual)
        choose(b, adds, range(2), lambda k: _store_floats(b, sums, pixels, n, result, count, kinds[k]))

    _of_columns(b, columns, code)


one_by_one, one_by_two, two_by_one, two_by_two = (sums_of_tiles(r, c) for r in (1, 2) for c in (1, 2))
silu_sums, hardswish_sums, gelu_sums = map(activation_of_sums, vectors.LAYER_FUNCTIONS)
