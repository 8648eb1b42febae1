"""Rows of the op table: states that grow from call to call, such as key-value caches.

Integers of 6 bits or fewer are packed into bytes along the last axis, see `fxq/quant/packing.py`. `bits` is then their
width; 8 stands for integers that take a byte each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxq.common.appending import appended
from fxq.ops.conversions import choose_scale, quantize
from fxq.ops.registry import row
from fxq.ops.traits import float_only
from fxq.quant.dynamic_grid import dynamic_range, dynamic_zero_point
from fxq.quant.packing import Packing
from fxq.quant.quantized_rows import QuantizedRows
from fxq.quant.rotation import rotated


@row(traits=float_only("past", "new", view=True, grows=True))
def append(past: Tensor, new: Tensor, *, dim: int) -> Tensor:
    """Concatenate `new`, of any length, to the state `past` along `dim`; see `appended` for the memory of the result.

    `past` is an input of the model, and the result is one of its outputs. It stays in float unless the recipe has a
    spec for it (role "state").
    """
    return appended(past, new, dim)


@row(traits=float_only("state"))
def state_scale(state: Tensor, *, steps: int, block: int | None = None, bits: int = 8) -> Tensor:
    """Scale of each row of a state, float32[..., 1]: stored in `QuantizedRows`, computed by `choose_scale` for floats.

    Args:
        state: the state that a model is called with: `QuantizedRows`, or float32[..., N]. If it is stored with other
            blocks or bits, it is quantized again.
        steps: number of steps that the range of a row, including zero, covers.
        block: number of values of a block, for a scale per block, float32[..., N / block]; None: one per row.
        bits: width of a stored integer.
    """
    if isinstance(state, QuantizedRows) and state.is_stored_as(block, bits):
        return state.scale
    return choose_scale(_floats(state), steps=steps, axis=-1, symmetric=False, block=block)


@row(traits=float_only("state", "scale"))
def state_zero_point(state: Tensor, scale: Tensor, *, block: int | None = None, bits: int = 8) -> Tensor:
    """Zero point of each row or block of a state, uint8 in the shape of its `state_scale`."""
    if isinstance(state, QuantizedRows) and state.is_stored_as(block, bits):
        return state.zero_point
    return dynamic_zero_point(dynamic_range(_floats(state), -1, block)[0], scale, 0).to(torch.uint8)


@row(traits=float_only("state", "scale", "zero_point"))
def state_integers(
    state: Tensor, scale: Tensor, zero_point: Tensor, *, qmax: int = 255, block: int | None = None, bits: int = 8
) -> Tensor:
    """Integers of a state, uint8[..., N], or packed, for its `state_scale` and `state_zero_point`."""
    if isinstance(state, QuantizedRows) and state.is_stored_as(block, bits):
        return state.parts[0]
    axis = None if block is None else -1
    integers = quantize(_floats(state), scale=scale, zero_point=zero_point, qmax=qmax, axis=axis, block=block)
    return integers if bits == 8 else pack_rows(integers, bits=bits)


def _floats(state: Tensor) -> Tensor:
    return state.dequantize() if isinstance(state, QuantizedRows) else state


@row(traits=float_only("x"))
def rotate_rows(x: Tensor, *, size: int | None = None) -> Tensor:
    """Rotate the rows of x, float32[..., N], by a Hadamard matrix, see `fxq/quant/rotation.py`; its own inverse.

    Rows that are stored as integers keep them: the result stands for their rotation.

    Args:
        x: the rows.
        size: number of values that are rotated together; default: `rotation_size(N)`.
    """
    return x.rotated() if isinstance(x, QuantizedRows) and size is None else rotated(_floats(x), size)


@row(traits=float_only("x"))
def pack_rows(x: Tensor, *, bits: int) -> Tensor:
    """Pack integers of few bits, uint8[..., N], into bytes along the last axis."""
    return Packing((x.shape[-1],), bits, signed=False).pack_last(x)


@row(traits=float_only("x"))
def unpack_rows(x: Tensor, *, size: int, bits: int) -> Tensor:
    """Inverse of `pack_rows`, for rows of `size` values."""
    return Packing((size,), bits, signed=False).unpack_last(x)


@row(traits=float_only("integers", "scale", "zero_point"))
def quantized_rows(
    integers: Tensor, scale: Tensor, zero_point: Tensor, *, size: int | None = None, bits: int = 8
) -> Tensor:
    """Join integers, their scales and their zero points to a state that the model returns.

    Args:
        integers: uint8[..., N], or packed.
        scale: float32[..., 1], or one per block.
        zero_point: uint8, same shape.
        size: number of values of a row, if they are packed.
        bits: width of a stored integer.
    """
    packing = None if size is None else Packing((size,), bits, signed=False)
    return QuantizedRows(integers, scale, zero_point, packing)
