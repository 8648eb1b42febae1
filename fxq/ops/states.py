"""Rows of the op table: states that grow from call to call, such as key-value caches."""

from __future__ import annotations

import torch
from torch import Tensor

from fxq.common.appending import appended
from fxq.ops.registry import row
from fxq.ops.traits import float_only
from fxq.quant.dynamic_grid import dynamic_range, dynamic_scale
from fxq.quant.quantized_rows import QuantizedRows


@row(traits=float_only("past", "new", view=True, grows=True))
def append(past: Tensor, new: Tensor, *, dim: int) -> Tensor:
    """Concatenate `new`, of any length, to the state `past` along `dim`; see `appended` for the memory of the result.

    `past` is an input of the model, and the result is one of its outputs. It stays in float unless the recipe has a
    spec for it (role "state").
    """
    return appended(past, new, dim)


@row(traits=float_only("state"))
def state_scale(state: Tensor, *, qmax: int) -> Tensor:
    """Scales of a state, float32[..., 1]: those of `QuantizedRows`; for floats, computed from each row.

    Args:
        state: the state that a model is called with: `QuantizedRows`, or float32[..., N].
        qmax: largest integer.
    """
    return state.scale if isinstance(state, QuantizedRows) else dynamic_scale(*dynamic_range(state, -1), qmax)


@row(traits=float_only("state", "scale"))
def state_integers(state: Tensor, scale: Tensor, *, qmax: int) -> Tensor:
    """Integers of a state, int8[..., N], whose scales are `scale`; see `state_scale`."""
    if isinstance(state, QuantizedRows):
        return state.integers
    zero_point = torch.zeros((), dtype=torch.int32, device=state.device)
    return torch.ops.fxq.quantize.tensor(state, scale, zero_point, None, None, -qmax, qmax, torch.int8)


@row(traits=float_only("integers", "scale"))
def quantized_rows(integers: Tensor, scale: Tensor) -> Tensor:
    """Join integers, int8[..., N], and their scales, float32[..., 1], to a state that the model returns."""
    return QuantizedRows(integers, scale)
