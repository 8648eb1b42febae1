"""ONNX of padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxq.onnx.dequantized import Dequantized, dequantized
from fxq.onnx.writer import Operand, Value, Writer, refuse, writes
from fxq.ops import OPS

_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


@writes("pad")
def pad(w: Writer, x: Value, *, pad: Sequence[int], mode: str, value: float | None) -> Value:
    return padded(w, x, pad, mode, value or 0.0)


def padded(w: Writer, x: Value, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Value:
    """A value with entries around it, as `F.pad` makes them. Of integers, these get the entries.

    (OpenVINO computes a Pad of a dequantized value wrongly, where it joins it with the layer behind.)
    """
    like = OPS["pad"].target(x.like, pad=tuple(pad), mode=mode, value=value)
    found = dequantized(w, x)
    if found is None or found.scale.dim() != 0:
        return Value(_written(w, x, x.shape, pad, mode, w.number(value, x)), like)
    fill = _on_grid(value if mode == "constant" else 0.0, found)
    if fill is None:
        return Value(_written(w, x, x.shape, pad, mode, w.number(value, x)), like)
    made = _written(w, found.node.reads[0], x.shape, pad, mode, fill)
    return Value(w.emit("DequantizeLinear", made, found.scale, found.zero), like)


def _on_grid(value: float, grid: Dequantized) -> Tensor | None:
    """The integer that stands for a number; None where none does."""
    real, limits = torch.tensor(value, dtype=torch.float32, device="cpu"), torch.iinfo(grid.zero.dtype)
    q = torch.round(real / grid.scale) + grid.zero
    stands = bool(limits.min <= q <= limits.max) and bool((q - grid.zero) * grid.scale == real)
    return q.to(grid.zero.dtype) if stands else None


def _written(w: Writer, read: Operand, shape: Sequence[int], pad: Sequence[int], mode: str, fill: Tensor) -> str:
    refuse(mode != "constant" and min(pad) < 0, "it cuts instead of padding")
    if mode == "circular":
        return _wrapped(w, read, shape, pad)
    pads = w.ints(onnx_pads(pad, len(shape)))
    return w.emit("Pad", read, pads, fill if mode == "constant" else None, mode=_MODES[mode])


def _wrapped(w: Writer, read: Operand, shape: Sequence[int], pad: Sequence[int]) -> str:
    """Circular padding, by slices: OpenVINO has no such mode of Pad."""
    made = read
    for i, (left, right) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = len(shape) - 1 - i
        size = shape[axis]
        before = [w.cut(made, axis, size - left, size)] if left else []
        behind = [w.cut(made, axis, 0, right)] if right else []
        if before or behind:
            made = w.emit("Concat", *before, made, *behind, axis=axis)
    return w.name_of(made)


def onnx_pads(pad: Sequence[int], rank: int) -> list[int]:
    """Numbers in `F.pad`'s order as ONNX has them: all beginnings, then all ends, first axis first."""
    pairs = [(0, 0)] * (rank - len(pad) // 2) + list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    return [begin for begin, _ in pairs] + [end for _, end in pairs]
