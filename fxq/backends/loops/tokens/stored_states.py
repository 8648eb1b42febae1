"""States that a graph stores as integers, in the form that the pass `store-states` writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from fxq.graph.query import argument, is_op, options_of


class StoredState(NamedTuple):
    """State that is appended to in integers, with a scale and a zero point for each row.

    Attributes:
        past: node of the state before.
        new: node of the new entries, float32.
        dim: axis that they are appended along.
        steps: steps that the range of a row covers, see `choose_scale`.
        qmax: largest integer.
        appends: nodes of the integers, scales and zero points with the new entries.
        inner: these, and the nodes that compute what they read.
    """

    past: fx.Node
    new: fx.Node
    dim: int
    steps: int
    qmax: int
    appends: tuple[fx.Node, fx.Node, fx.Node]
    inner: tuple[fx.Node, ...]


def stored_state(node: fx.Node) -> StoredState | None:
    """State that a node `quantized_rows` returns; None for other nodes, and if it is computed in another way."""
    appends: Any = node.args
    if not is_op(node, "quantized_rows") or not all(is_op(part, "append") for part in appends):
        return None
    (past_q, new_q), (past_scale, new_scale), (past_zero, new_zero) = (part.args for part in appends)
    past, new = argument(past_scale, "state"), argument(new_q, "x")
    calls = {
        past_scale: ("state_scale", past), past_zero: ("state_zero_point", past, past_scale),
        past_q: ("state_integers", past, past_scale, past_zero), new_scale: ("choose_scale", new),
        new_zero: ("state_zero_point", new, new_scale), new_q: ("quantize", new),
    }  # fmt: skip
    if not all(is_op(part, name) and part.args == tuple(reads) for part, (name, *reads) in calls.items()):
        return None
    grid, rounding, dims = options_of(new_scale), options_of(new_q), {options_of(part)["dim"] for part in appends}
    wanted = {"scale": new_scale, "zero_point": new_zero, "qmin": 0, "dtype": torch.uint8, "axis": None, "block": None}
    is_affine = (grid["axis"], grid["symmetric"]) == (-1, False) and rounding == wanted | {"qmax": rounding["qmax"]}
    if not is_affine or len(dims) > 1 or not isinstance(past, fx.Node) or not isinstance(new, fx.Node):
        return None
    return StoredState(past, new, dims.pop(), grid["steps"], rounding["qmax"], appends, (*appends, *calls))


def state_node(read: Any) -> Any:
    """Node of the state that an attention reads: for `dequantize`, the `quantized_rows` of the same integers.

    Any other argument is returned as it is.
    """
    if not is_op(read, "dequantize"):
        return read
    options = options_of(read)
    parts = argument(read, "x"), options["scale"], options["zero_point"]
    is_by_row = options["axis"] is None and options["block"] is None and options["packed"] is None
    states = (user for user in parts[0].users if is_op(user, "quantized_rows") and user.args == parts)
    return next(states, read) if is_by_row else read
