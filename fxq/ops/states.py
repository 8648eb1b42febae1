"""Rows of the op table: states that grow from call to call, such as key-value caches."""

from __future__ import annotations

from torch import Tensor

from fxq.common.appending import appended
from fxq.ops.registry import row
from fxq.ops.traits import float_only


@row(traits=float_only("past", "new", view=True, grows=True))
def append(past: Tensor, new: Tensor, *, dim: int) -> Tensor:
    """Concatenate `new`, of any length, to the state `past` along `dim`; see `appended` for the memory of the result.

    `past` is an input of the model, and the result is one of its outputs. It stays in float unless the recipe has a
    spec for it (role "state").
    """
    return appended(past, new, dim)
