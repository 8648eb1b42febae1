"""ONNX form of pooling and reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxq.graph.analysis.integer_sums import MAX_8BIT_REACH, MAX_INT32
from fxq.onnx.padding_nodes import padded
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Value, Writer, refuse, writes
from fxq.ops import OPS


def _end_padding(x: Value, out: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[int]:
    """Padding at the end of each axis for which ONNX has as many windows as torch."""
    sizes = zip(x.shape[2:], out[2:], kernel, stride, padding, dilation, strict=True)
    return [max((o - 1) * s + d * (k - 1) + 1 - i - p, 0) for i, o, k, s, p, d in sizes]


@writes(*OPS.family("max_pool"))
def max_pool(
    w: Writer, x: Value, *, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> str:
    refuse(x.rank != len(kernel_size) + 2, "its input has no batch axis")
    ends = list(padding)
    if ceil_mode:
        out = OPS[f"max_pool{len(kernel_size)}d"].target(
            x.like.float(), kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation, ceil_mode=True
        )
        ends = _end_padding(x, out.shape, kernel_size, stride, padding, dilation)
        leaves_input = any(end >= k for end, k in zip(ends, kernel_size, strict=True))
        refuse(leaves_input, "its last windows lie outside of the input")
    return w.emit(
        "MaxPool", x, kernel_shape=list(kernel_size), strides=list(stride), pads=[*padding, *ends],
        dilations=list(dilation),
    )  # fmt: skip


@writes(*OPS.family("avg_pool"))
def avg_pool(
    w: Writer,
    x: Value,
    *,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> str:
    refuse(x.rank != len(kernel_size) + 2, "its input has no batch axis")
    ends = list(padding)
    if ceil_mode:
        out = OPS[f"avg_pool{len(kernel_size)}d"].target(
            x.like, kernel_size=kernel_size, stride=stride, padding=padding, ceil_mode=True
        )
        ends = _end_padding(x, out.shape, kernel_size, stride, padding, [1] * len(kernel_size))
    begins = list(padding)
    counts_padding = divisor_override is not None or (count_include_pad and any(padding))
    if counts_padding:  # explicit padding: engines disagree on what counts, and on the zero of quantized inputs
        beyond = any(end > p for end, p in zip(ends, padding, strict=True))
        refuse(beyond and divisor_override is None, "its last windows reach beyond the padding")
        pairs = list(zip(begins, ends, strict=True))[::-1]
        x = padded(w, x, [p for pair in pairs for p in pair])
        begins = ends = [0] * len(padding)
    result = w.emit("AveragePool", x, kernel_shape=list(kernel_size), strides=list(stride), pads=[*begins, *ends])
    if divisor_override is None:
        return result
    return w.emit("Mul", result, w.number(math.prod(kernel_size) / divisor_override, x))


@writes(*OPS.family("adaptive_avg_pool"))
def adaptive_avg_pool(w: Writer, x: Value, *, output_size: Any) -> str:
    return adaptive_pool(w, x, output_size, "Average", "ReduceMean")


@writes(*OPS.family("adaptive_max_pool"))
def adaptive_max_pool(w: Writer, x: Value, *, output_size: Any) -> str:
    return adaptive_pool(w, x, output_size, "Max", "ReduceMax")


def adaptive_pool(w: Writer, x: Value, output_size: Sequence[int | None], pool: str, reduction: str) -> str:
    """Write a pooling to an output size; if it does not divide the input's size, each window is sliced and reduced."""
    refuse(x.rank != len(output_size) + 2, "its input has no batch axis")
    sizes = x.shape[2:]
    wanted = [size if out is None else out for size, out in zip(sizes, output_size, strict=True)]
    if all(out == 1 for out in wanted) and x.dtype.is_floating_point:
        return w.emit(f"Global{pool}Pool", x)
    if not any(size % out for size, out in zip(sizes, wanted, strict=True)):
        kernel = [size // out for size, out in zip(sizes, wanted, strict=True)]
        return w.emit(f"{pool}Pool", x, kernel_shape=kernel, strides=kernel)
    result = x.name
    for axis, (size, out) in enumerate(zip(sizes, wanted, strict=True), 2):
        windows = [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]
        parts = [w.emit(reduction, w.cut(result, axis, *window), w.ints([axis]), keepdims=1) for window in windows]
        result = w.joined(parts, axis) if size != out else result
    return result


def _reduction(op_type: str) -> Any:
    def reduce(w: Writer, x: Value, *, dim: Any, keepdim: bool) -> str:
        axes = sorted(axis % x.rank for axis in ([dim] if isinstance(dim, int) else dim))
        large = not any(map(varies, x.shape[2:])) and math.prod(x.shape[2:]) * MAX_8BIT_REACH > MAX_INT32
        if op_type == "ReduceMean" and x.rank > 2 and axes == list(range(2, x.rank)) and not large:
            pooled = w.emit("GlobalAveragePool", x)  # engines run it on integers
            return pooled if keepdim else w.reshaped(pooled, x.shape[:2])
        refuse(x.dtype is torch.bool and op_type != "ReduceSum", "its input is bool")
        sums_integers = op_type == "ReduceSum" and not x.dtype.is_floating_point
        return w.emit(op_type, w.cast(x, torch.int64) if sums_integers else x, w.ints(axes), keepdims=int(keepdim))

    return reduce


for _name, _kind in {"mean": "ReduceMean", "sum": "ReduceSum", "amax": "ReduceMax", "amin": "ReduceMin"}.items():
    writes(_name)(_reduction(_kind))


@writes("cumsum")
def cumsum(w: Writer, x: Value, *, dim: int) -> str:
    read = x if x.dtype.is_floating_point else w.cast(x, torch.int64)
    return w.emit("CumSum", read, torch.tensor(dim, device="cpu"))
