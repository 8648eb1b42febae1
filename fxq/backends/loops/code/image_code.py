"""Machine code that reads images: quantization of images whose channels are first, and windows of pooling.

Memory beyond what is asked for is neither read nor written. So a run of 16 pixels or 64 channels that does not fit at
the end begins earlier, and computes a few results twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from fxq.backends.loops.code import vectors
from fxq.backends.loops.code.machine_code import on_addresses
from fxq.backends.loops.code.vectors import FLOAT32, FLOATS, INT8, INT16, INT32, INT64, INTS, LANES, load, number, store

# ---- quantization


def quantize_packed(channels: int) -> Any:
    """Code that quantizes 16 pixels of 1 to 4 channels, whose integers are written without gaps.

    The code takes the address of the first float, the bytes from a channel to the next, the address of the integers,
    and that of four float32: factor, zero point, lower and upper bound relative to the zero point.
    """
    kinds = {1: INT8, 2: INT16}

    def code(b, x, channel_step, out, grid):
        words = _quantized(b, channels, x, channel_step, grid)
        if channels in kinds:
            words = b.trunc(words, ir.VectorType(kinds[channels], LANES))
        elif channels == 3:
            integers = b.bitcast(words, ir.VectorType(INT8, 4 * LANES))
            order = [k for k in range(4 * LANES) if k % 4 < 3]
            words = b.shuffle_vector(integers, integers, ir.Constant(ir.VectorType(INT32, len(order)), order))
        store(b, words, out)

    return on_addresses(code)


def quantize_apart(channels: int) -> Any:
    """Code that quantizes 16 pixels of 1 or 4 channels, whose integers are `pixel_step` bytes apart.

    Other arguments: see `quantize_packed`.
    """

    def code(b, x, channel_step, out, pixel_step, grid):
        words = _quantized(b, channels, x, channel_step, grid)
        kind = {1: INT8, 4: INT32}[channels]
        for p in range(LANES):
            integers = b.extract_element(words, ir.Constant(INT32, p))
            store(b, b.trunc(integers, kind) if kind != INT32 else integers, b.add(out, b.mul(pixel_step, number(p))))

    return on_addresses(code)


def _quantized(b: Any, channels: int, x: Any, channel_step: Any, grid: Any) -> Any:
    """Integers of 16 pixels, as one int32 for each pixel: its lowest byte is the first channel."""
    factor, zero, low, high = (load(b, grid, FLOAT32, 4 * k) for k in range(4))
    factor, zero, low, high = (vectors.splat(b, value) for value in (factor, b.fptosi(zero, INT32), low, high))
    words = None
    for channel in range(channels):
        address = b.add(x, b.mul(channel_step, number(channel)))
        value = vectors.clamp(b, b.fmul(load(b, address, FLOATS), factor), low, high)
        integers = b.add(vectors.nearest(b, value), zero)
        if channel < 3:
            integers = b.and_(integers, ir.Constant(INTS, [0xFF] * LANES))
        shifted = b.shl(integers, ir.Constant(INTS, [8 * channel] * LANES))
        words = shifted if words is None else b.or_(words, shifted)
    return words


# ---- windows


class WindowRow(NamedTuple):
    """Windows of one size side by side in an image, for one row of results.

    In loops, all are int64; in the code here, LLVM values.

    Attributes:
        x: Address of the first pixel of the first window.
        rows: Rows of a window.
        columns: Columns of a window.
        row_stride: Bytes from a row to the next.
        pixel_stride: Bytes from a pixel to the next.
        channels: Number of channels.
        step: Bytes from a window to the next.
        count: Number of windows.
        out: Address of the first result.
        out_step: Bytes from a result to the next.
    """

    x: Any
    rows: Any
    columns: Any
    row_stride: Any
    pixel_stride: Any
    channels: Any
    step: Any
    count: Any
    out: Any
    out_step: Any


_RUNS = (64, 32, 16, 1)
"""Numbers of channels that are computed at once, in registers."""
UNROLLED_COLUMNS = (2, 3)
"""Columns of windows with code of their own."""


def max_of_windows(columns: int = 0) -> Any:
    """Code that writes the maximum of each channel of windows, uint8. It is 0 for an empty window.

    With `columns`, windows have so many columns, whatever `WindowRow.columns` is.
    """

    def larger(b: Any, total: Any, pixel: Any) -> Any:
        return b.select(b.icmp_unsigned(">", total, pixel), total, pixel)

    def code(b, windows):
        _join_windows(b, windows, (INT8, INT8, INT8), larger, lambda total: total, columns)

    return on_addresses(code, is_called=True)


def mean_of_windows(of_floats: bool) -> Any:
    """Code that writes the sum of each channel of windows over `size`, float32.

    `windows` are of float32, or of uint8, which are dequantized: `grid` is the address of their scale and zero point.
    """

    def code(b, windows, grid, size):
        scale, zero = (load(b, grid, FLOAT32, 4 * k) for k in (0, 1))
        pixels = b.trunc(b.mul(windows.rows, windows.columns), INT32)
        zeros, divisor = b.mul(b.fptosi(zero, INT32), pixels), b.sitofp(size, FLOAT32)

        def add(b: Any, total: Any, pixel: Any) -> Any:
            return b.fadd(total, pixel) if of_floats else b.add(total, b.zext(pixel, total.type))

        def mean(total: Any) -> Any:
            lanes = total.type.count
            if not of_floats:
                total = b.sitofp(b.sub(total, vectors.splat(b, zeros, lanes)), ir.VectorType(FLOAT32, lanes))
                total = b.fmul(total, vectors.splat(b, scale, lanes))
            return b.fdiv(total, vectors.splat(b, divisor, lanes))

        kinds = (FLOAT32, FLOAT32, FLOAT32) if of_floats else (INT8, INT32, FLOAT32)
        _join_windows(b, windows, kinds, add, mean)

    return on_addresses(code, is_called=True)


def _join_windows(
    b: Any,
    windows: Any,
    kinds: tuple[Any, Any, Any],
    join: Callable[[Any, Any, Any], Any],
    finish: Callable[[Any], Any],
    unrolled: int = 0,
) -> None:
    """Write what `join` makes of 0 and the pixels of each window, in order.

    Args:
        b: Builder.
        windows: `WindowRow`.
        kinds: Types of elements of pixels, of what they are joined to, and of results.
        join: Function of a builder, a vector of joined elements, and one of further elements.
        finish: Function of joined elements that returns results.
        unrolled: Columns of the windows; 0: as `windows` says.
    """
    kind, joined, result = kinds

    def columns_joined(address: Any, lanes: int, total: Any) -> None:
        def pixel(place: Any) -> None:
            b.store(join(b, b.load(total), load(b, place, ir.VectorType(kind, lanes))), total)

        if unrolled:
            for column in range(unrolled):
                pixel(b.add(address, b.mul(windows.pixel_stride, number(column))))
            return
        with cgutils.for_range(b, windows.columns, intp=INT64) as column:
            pixel(b.add(address, b.mul(windows.pixel_stride, column.index)))

    def run(first: Any, lanes: int) -> None:
        total = cgutils.alloca_once(b, ir.VectorType(joined, lanes))
        x = b.add(windows.x, b.mul(first, number(_bytes_of(kind))))
        out = b.add(windows.out, b.mul(first, number(_bytes_of(result))))
        with cgutils.for_range(b, windows.count, intp=INT64) as window:
            b.store(ir.Constant(ir.VectorType(joined, lanes), None), total)
            begin = b.add(x, b.mul(window.index, windows.step))
            with cgutils.for_range(b, windows.rows, intp=INT64) as row:
                columns_joined(b.add(begin, b.mul(row.index, windows.row_stride)), lanes, total)
            store(b, finish(b.load(total)), b.add(out, b.mul(window.index, windows.out_step)))

    _in_runs(b, windows.channels, run, _RUNS)


def _bytes_of(kind: Any) -> int:
    """Bytes of a type of numbers."""
    return 4 if kind == FLOAT32 else int(kind.width) // 8


def _in_runs(b: Any, count: Any, run: Callable[[Any, int], None], sizes: Sequence[int]) -> None:
    """Emit code for runs of elements, `run(first, size)`, of the first size that is not above their count.

    The last run begins earlier where the count is no multiple of the size.
    """
    size, *smaller = sizes

    def runs() -> None:
        last = b.sub(count, number(size))
        with cgutils.for_range_slice(b, number(0), count, number(size), intp=INT64) as (index, _):
            run(b.select(b.icmp_signed("<", index, last), index, last), size)

    if not smaller:
        runs()
        return
    with b.if_else(b.icmp_signed(">=", count, number(size))) as (enough, fewer):
        with enough:
            runs()
        with fewer:
            _in_runs(b, count, run, smaller)


max_of_any, max_of_2, max_of_3 = (max_of_windows(columns) for columns in (0, *UNROLLED_COLUMNS))
mean_of_integers, mean_of_floats = map(mean_of_windows, (False, True))
quantize_1, quantize_2, quantize_3, quantize_4 = map(quantize_packed, (1, 2, 3, 4))
quantize_1_apart, quantize_4_apart = map(quantize_apart, (1, 4))
