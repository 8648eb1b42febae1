"""ONNX form of padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxq.onnx.dequantized import DequantizeNode, dequantize_node
from fxq.onnx.writer import Operand, Value, Writer, refuse, writes
from fxq.ops import OPS

_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


@writes("pad")
def pad(w: Writer, x: Value, *, pad: Sequence[int], mode: str, value: float | None) -> Value:
    return padded(w, x, pad, mode, value or 0.0)


def padded(w: Writer, x: Value, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Value:
    """Write padding as `F.pad` does. A dequantized value is padded as integers.

    (OpenVINO is wrong if it fuses a Pad of a dequantized value with the layer after it.)
    """
    like = OPS["pad"].target(x.like, pad=tuple(pad), mode=mode, value=value)
    source = dequantize_node(w, x)
    if source is None or source.scale.dim() != 0:
        return Value(_write_pad(w, x, x.shape, pad, mode, w.number(value, x)), like)
    fill = _fill_integer(value if mode == "constant" else 0.0, source)
    if fill is None:
        return Value(_write_pad(w, x, x.shape, pad, mode, w.number(value, x)), like)
    integers = _write_pad(w, source.node.inputs[0], x.shape, pad, mode, fill)
    return Value(w.emit("DequantizeLinear", integers, source.scale, source.zero), like)


def _fill_integer(value: float, grid: DequantizeNode) -> Tensor | None:
    """Integer of a grid that dequantizes exactly to a number; None if there is none."""
    fill, limits = torch.tensor(value, dtype=torch.float32, device="cpu"), torch.iinfo(grid.zero.dtype)
    q = torch.round(fill / grid.scale) + grid.zero
    is_exact = bool(limits.min <= q <= limits.max) and bool((q - grid.zero) * grid.scale == fill)
    return q.to(grid.zero.dtype) if is_exact else None


def _write_pad(w: Writer, read: Operand, shape: Sequence[int], pad: Sequence[int], mode: str, fill: Tensor) -> str:
    refuse(mode != "constant" and min(pad) < 0, "it crops instead of padding")
    if mode == "circular":
        return _write_circular_pad(w, read, shape, pad)
    pads = w.ints(onnx_pads(pad, len(shape)))
    return w.emit("Pad", read, pads, fill if mode == "constant" else None, mode=_MODES[mode])


def _write_circular_pad(w: Writer, read: Operand, shape: Sequence[int], pad: Sequence[int]) -> str:
    """Write circular padding as slices, because OpenVINO's Pad has no such mode."""
    result = read
    for i, (left, right) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = len(shape) - 1 - i
        size = shape[axis]
        before = [w.cut(result, axis, size - left, size)] if left else []
        after = [w.cut(result, axis, 0, right)] if right else []
        if before or after:
            result = w.emit("Concat", *before, result, *after, axis=axis)
    return w.name_of(result)


def onnx_pads(pad: Sequence[int], rank: int) -> list[int]:
    """Convert padding from the order of `F.pad` to that of ONNX: all starts, then all ends, first axis first."""
    pairs = [(0, 0)] * (rank - len(pad) // 2) + list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    return [begin for begin, _ in pairs] + [end for _, end in pairs]
