"""Rows of the op table: states that grow from call to call, such as key-value caches."""

from __future__ import annotations

import torch
from torch import Tensor

from fxq.common.appending import appended
from fxq.ops.conversions import choose_scale, choose_zero_point, quantize
from fxq.ops.registry import row
from fxq.ops.traits import float_only
from fxq.quant.quantized_rows import QuantizedRows


@row(traits=float_only("past", "new", view=True, grows=True))
def append(past: Tensor, new: Tensor, *, dim: int) -> Tensor:
    """Concatenate `new`, of any length, to the state `past` along `dim`; see `appended` for the memory of the result.

    `past` is an input of the model, and the result is one of its outputs. It stays in float unless the recipe has a
    spec for it (role "state").
    """
    return appended(past, new, dim)


@row(traits=float_only("state"))
def state_scale(state: Tensor, *, steps: int) -> Tensor:
    """Scale of each row of a state, float32[..., 1]: stored in `QuantizedRows`, computed by `choose_scale` for floats.

    Args:
        state: the state that a model is called with: `QuantizedRows`, or float32[..., N].
        steps: number of steps that the range of a row, including zero, covers.
    """
    return (
        state.scale if isinstance(state, QuantizedRows) else choose_scale(state, steps=steps, axis=-1, symmetric=False)
    )


@row(traits=float_only("state", "scale"))
def state_zero_point(state: Tensor, scale: Tensor) -> Tensor:
    """Zero point of each row of a state, uint8[..., 1], for its `state_scale`."""
    if isinstance(state, QuantizedRows):
        return state.zero_point
    return choose_zero_point(state, scale=scale, axis=-1).to(torch.uint8)


@row(traits=float_only("state", "scale", "zero_point"))
def state_integers(state: Tensor, scale: Tensor, zero_point: Tensor, *, qmax: int = 255) -> Tensor:
    """Integers of a state, uint8[..., N], for its `state_scale` and `state_zero_point`."""
    if isinstance(state, QuantizedRows):
        return state.integers
    return quantize(state, scale=scale, zero_point=zero_point, qmax=qmax)


@row(traits=float_only("integers", "scale", "zero_point"))
def quantized_rows(integers: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Join integers, uint8[..., N], with their scales and zero points, [..., 1], to a state that the model returns."""
    return QuantizedRows(integers, scale, zero_point)
