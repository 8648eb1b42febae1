"""ONNX form of states that are stored as integers.

A state is float at both ends of a model, and is quantized again in each call. So its integers are not packed.
"""

from __future__ import annotations

from typing import Any

import torch

from fxq.onnx.conversion_nodes import choose_scale, choose_zero_point, dequantize, in_blocks, quantize
from fxq.onnx.writer import Value, Writer, writes
from fxq.quant.rotation import hadamard, rotation_size


@writes("state_scale")
def state_scale(w: Writer, state: Value, *, steps: int, block: int | None, bits: int) -> str:
    return choose_scale(w, state, steps=steps, axis=-1, symmetric=False, block=block)


@writes("state_zero_point")
def state_zero_point(w: Writer, state: Value, scale: Value, *, block: int | None, bits: int) -> str:
    if block is None:
        return w.cast(choose_zero_point(w, state, scale=scale, qmin=0, axis=-1), torch.uint8)
    of_blocks = choose_zero_point(w, in_blocks(w, state, block), scale=in_blocks(w, scale, 1), qmin=0, axis=-1)
    return w.reshaped(w.cast(of_blocks, torch.uint8), scale.shape)


@writes("state_integers")
def state_integers(
    w: Writer, state: Value, scale: Value, zero_point: Value, *, qmax: int, block: int | None, bits: int
) -> Value:
    grid: dict[str, Any] = {"scale": scale, "zero_point": zero_point, "qmin": 0, "qmax": qmax, "dtype": torch.uint8}
    integers = quantize(w, state, axis=None if block is None else -1, block=block, **grid)
    return Value(integers, torch.empty_like(state.like, dtype=torch.float32 if w.floats else torch.uint8))


@writes("rotate_rows")
def rotate_rows(w: Writer, x: Value, *, size: int | None) -> str:
    size = size or rotation_size(x.shape[-1])
    pieces = w.reshaped(x, (*x.shape[:-1], x.shape[-1] // size, size))
    return w.reshaped(w.emit("MatMul", pieces, hadamard(size)), x.shape)


@writes("pack_rows")
def pack_rows(w: Writer, x: Value, *, bits: int) -> Value:
    return x


@writes("unpack_rows")
def unpack_rows(w: Writer, x: Value, *, size: int, bits: int) -> Value:
    return x


@writes("quantized_rows")
def quantized_rows(
    w: Writer, integers: Value, scale: Value, zero_point: Value, *, size: int | None, bits: int
) -> Value:
    """Write a state that the model returns, which is float in ONNX."""
    blocks = scale.shape[-1]
    block = None if blocks == 1 else integers.shape[-1] // blocks
    grid: dict[str, Any] = {"scale": scale, "zero_point": zero_point, "qmin": 0, "qmax": 255}
    return dequantize(w, integers, axis=None if block is None else -1, block=block, packed=None, **grid)
