"""Positions of the fields in the row of a step, for the code that writes rows and for the loops that read them.

Field 0 is the code of the step. A field may have several numbers: a place in memory has a base and an offset, strides
and shapes have one number for each axis. The comments name them where the field has more than one.
"""

from __future__ import annotations

from enum import IntEnum


class QuantizeField(IntEnum):
    """Fields of the step that quantizes an input."""

    X = 1  # base, offset
    X_STRIDES = 3  # sample, channel, row, pixel; in elements
    SHAPE = 7  # N, H, W, C
    OUT = 11  # base, offset
    OUT_STRIDES = 13  # sample, row, pixel; in bytes
    GRID = 16  # address of float32: factor, zero point, qmin - zero point, qmax - zero point


class ProductField(IntEnum):
    """Fields of the step of an integer layer."""

    X = 1  # base, offset
    OUT = 3  # base, offset
    X_PLACES = 5  # address of int32: bytes from X to the first integer of each pixel
    OUT_PLACES = 6  # address of int32: elements from OUT to the results of each pixel
    PIXELS = 7
    RUNS = 8  # address of int32: bytes from a pixel to each run of integers that it reads
    RUN_COUNT = 9
    GROUPS = 10  # groups of `machine_code.GROUP` integers in a run
    WEIGHT = 11  # address of int8
    BLOCKS = 12  # number of blocks of 16 columns
    START = 13  # address of int32: initial sum of each column
    SCALE = 14  # address of float32, by column
    BIAS = 15  # address of float32, by column
    SLOPE = 16  # address of float32, by column
    NUMBERS = 17  # address of float32: lower bound, upper bound, factor, zero point
    FUNCTION = 18  # index in `memory_loops.FUNCTION_NAMES`
    TO_FLOATS = 19
    CHANNELS = 20  # number of columns
    BLOCK_BYTES = 21  # bytes of the weight of a block
    PIXELS_AT_ONCE = 22  # pixels that all columns are computed for, before further pixels
    IS_DEPTHWISE = 23
    BLOCK_STEP = 24  # bytes of input from a block to the next; 0: all blocks read the same channels
    SPREAD = 25  # address of int32: elements from the place of a pixel to each column; 0: columns are side by side
    RESIDUAL = 26  # base, offset
    RESIDUAL_PLACES = 28  # address of int32: elements from RESIDUAL to each pixel; 0: no residual
    RESIDUAL_GRID = 29  # address of float32: scale, shift; 0: the residual is float32
    EPILOGUE = 30  # STORE_SUMS, ROUND, ADD_RESIDUAL, APPLY_PRELU, APPLY_FUNCTION or STORE_FLOATS


class AmxField(IntEnum):
    """Fields of the step of an integer layer whose products are computed by AMX, for tiles of 16 pixels."""

    X = 1  # base, offset
    OUT = 3  # base, offset
    X_PLACES = 5  # address of int32: bytes from X to the first pixel of each tile; if pixels are copied, to each pixel
    OUT_PLACES = 6  # address of int32 (tiles, 16): elements from OUT to the results of each pixel; -1: it has none
    TILES = 7
    X_STEP = 8  # bytes from each pixel of a tile to the next; 0 if pixels are copied
    RUNS = 9  # address of int32: bytes from a pixel to each run of integers that it reads
    RUN_COUNT = 10
    DEPTH = 11  # tiles of a run; if pixels are copied, those of all runs
    GROUPS = 12  # groups of `machine_code.GROUP` integers of a run that are copied; 0 if pixels are not copied
    WEIGHT = 13  # as in `ProductField`, like further fields without a comment
    BLOCKS = 14
    START = 15
    SCALE = 16
    BIAS = 17
    SLOPE = 18
    NUMBERS = 19
    FUNCTION = 20
    TO_FLOATS = 21
    CHANNELS = 22
    BLOCK_BYTES = 23
    TILES_AT_ONCE = 24  # tiles that all columns are computed for, before further tiles
    SPREAD = 25
    RESIDUAL = 26
    RESIDUAL_PLACES = 28  # address of int32 (tiles, 16); 0: no residual
    RESIDUAL_GRID = 29
    EPILOGUE = 30
    SIZE = 31  # integers of a pixel in a tile


class DepthwiseField(IntEnum):
    """Fields of the step of a depthwise layer whose tiles fill registers with channels, see `depthwise_code.py`."""

    X = 1  # base, offset
    OUT = 3  # base, offset
    X_PLACES = 5  # as in `ProductField`, like further fields without a comment
    OUT_PLACES = 6
    PIXELS = 7  # a multiple of those of a tile
    RUNS = 8
    FOURS = 9  # number of fours of runs
    LAST = 10  # 1 if there is a run after the last four, else 0
    WEIGHT = 11
    BLOCKS = 12  # number of blocks of `machine_code.WIDE_CHANNELS` // PARTS channels
    START = 13
    SCALE = 14
    BIAS = 15
    SLOPE = 16
    NUMBERS = 17
    FUNCTION = 18  # with CLAMP, SCALE and BIAS include the grid of the result
    PARTS = 19  # pixels that share a register: 1, 2 or 4


class LinearField(IntEnum):
    """Fields of the step of a float layer."""

    X = 1  # base, offset
    X_STRIDE = 3  # bytes from row to row
    OUT = 4  # base, offset
    OUT_STRIDE = 6  # bytes from row to row
    ROWS = 7
    DEPTH = 8
    COLUMNS = 9
    WEIGHT = 10  # address of float32 (depth, columns)
    WEIGHT_STRIDE = 11  # floats from row to row of the weight
    BIAS = 12  # address of float32 (columns,)
    FUNCTION = 13  # index in `memory_loops.FUNCTION_NAMES`, or NO_FUNCTION
    SLOPE = 14  # address of float32 (16,)
    NUMBERS = 15  # address of float32: lower bound, upper bound, factor, zero point


class PointwiseField(IntEnum):
    """Fields of the step that computes a function of each element of one or two values."""

    X = 1  # base, offset
    X_STRIDES = 3  # sample, row, pixel; in bytes
    X_IS_FLOAT = 6
    X_GRID = 7  # address of float32: scale, shift
    Y = 8  # base, offset
    Y_STRIDES = 10  # sample, row, pixel; in bytes
    Y_IS_FLOAT = 13
    Y_GRID = 14  # address of float32: scale, shift
    OUT = 15  # base, offset
    OUT_STRIDES = 17  # sample, row, pixel; in bytes
    RUNS = 20  # samples, rows, runs in a row, elements of a run
    OPERATION = 24  # 1: reads x only; 2: adds y; 3: multiplies by y; 4: adds y to the function of x
    FUNCTION = 25  # index in `memory_loops.FUNCTION_NAMES`, or NO_FUNCTION
    SLOPE = 26  # address of float32 (16,)
    NUMBERS = 27  # address of float32: lower bound, upper bound, factor, zero point
    TO_FLOATS = 28
    PERIOD = 29  # elements of y if y is one pixel for all of a sample and runs are whole rows; else 0
    Y_IS_ONE = 30  # 1 if y has one number for all elements of a run


class PoolField(IntEnum):
    """Fields of the step that pools windows."""

    X = 1  # base, offset
    X_STRIDES = 3  # sample, row, pixel; in bytes
    OUT = 6  # base, offset
    OUT_STRIDES = 8  # sample, row, pixel; in bytes
    SHAPE = 11  # N, H, W, C of the result
    KERNEL = 15  # rows, columns
    STRIDE = 17  # rows, columns
    PADDING = 19  # rows, columns
    X_SIZE = 21  # rows, columns
    TAKES_MEAN = 23
    COUNTS_PADDING = 24
    NUMBERS = 25  # address of float32: lower bound, upper bound, factor, zero point, then scale and zero point of x
    TO_FLOATS = 26
    X_IS_FLOAT = 27


class NormField(IntEnum):
    """Fields of the step that normalizes the channels of each pixel."""

    X = 1  # base, offset
    X_STRIDES = 3  # sample, row, pixel; in bytes
    X_IS_FLOAT = 6
    X_GRID = 7  # address of float32: scale, shift
    OUT = 8  # base, offset
    OUT_STRIDES = 10  # sample, row, pixel; in bytes
    SHAPE = 13  # N, H, W, C
    WEIGHT = 17  # address of float32, by channel
    BIAS = 18  # address of float32, by channel
    EPS = 19  # address of float32
    NUMBERS = 20  # address of float32: lower bound, upper bound, factor, zero point
    TO_FLOATS = 21


class MoveField(IntEnum):
    """Fields of the step that copies elements to other places."""

    X = 1  # base, offset
    X_STRIDES = 3  # sample, row, pixel; in elements
    OUT = 6  # base, offset
    OUT_STRIDES = 8  # sample, row, pixel, channel; in elements
    SHAPE = 12  # N, H, W, C of what is read
    ITEM_SIZE = 16  # 1 or 4 bytes


class AttentionField(IntEnum):
    """Fields of the step of attention."""

    QUERY = 1  # base, offset
    KEY = 3  # base, offset
    VALUE = 5  # base, offset
    OUT = 7  # base, offset
    MASK = 9  # base, offset
    QUERY_STRIDES = 11  # sample, pixel; in bytes
    KEY_STRIDES = 13  # sample, pixel; in bytes
    VALUE_STRIDES = 15  # sample, pixel; in bytes
    OUT_STRIDES = 17  # sample, pixel; in bytes
    MASK_STRIDES = 19  # sample, head, query, key; in bytes
    SAMPLES = 23
    QUERIES = 24
    KEYS = 25
    HEADS = 26
    DEPTH = 27  # channels of a head
    MASK_KIND = 28  # NO_MASK, CAUSAL, FLOAT_MASK or BOOL_MASK
    SCALE = 29  # address of float32: the scale of the scores
    NUMBERS = 30  # address of float32: lower bound, upper bound, factor, zero point
    TO_FLOATS = 31
