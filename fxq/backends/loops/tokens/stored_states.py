"""States that a graph stores as integers, in the form that the pass `store-states` writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from fxq.graph.query import argument, is_op, options_of
from fxq.quant.packing import Packing


class StoredState(NamedTuple):
    """State that is appended to in integers, with a scale and a zero point for each row or block of a row.

    Attributes:
        past: node of the state before.
        new: node of the new entries, float32.
        dim: axis that they are appended along.
        steps: steps that the range of a row covers, see `choose_scale`.
        qmax: largest integer.
        block: number of values of a block; None: there is one scale for a row.
        packing: how a row of integers is packed into bytes; None: each takes a byte.
        appends: nodes of the integers, scales and zero points with the new entries.
        inner: these, and the nodes that compute what they read.
    """

    past: fx.Node
    new: fx.Node
    dim: int
    steps: int
    qmax: int
    block: int | None
    packing: Packing | None
    appends: tuple[fx.Node, fx.Node, fx.Node]
    inner: tuple[fx.Node, ...]

    @property
    def bits(self) -> int:
        """Width of a stored integer."""
        return 8 if self.packing is None else self.packing.bits


def stored_state(node: fx.Node) -> StoredState | None:
    """State that a node `quantized_rows` returns; None for other nodes, and if it is computed in another way."""
    appends: Any = node.args
    if not is_op(node, "quantized_rows") or not all(is_op(part, "append") for part in appends):
        return None
    (past_q, stored), (past_scale, new_scale), (past_zero, new_zero) = (part.args for part in appends)
    packed = (stored,) if is_op(stored, "pack_rows") else ()
    new_q = argument(stored, "x") if packed else stored
    past, new = argument(past_scale, "state"), argument(new_q, "x")
    calls = {
        past_scale: ("state_scale", past), past_zero: ("state_zero_point", past, past_scale),
        past_q: ("state_integers", past, past_scale, past_zero), new_scale: ("choose_scale", new),
        new_zero: ("state_zero_point", new, new_scale), new_q: ("quantize", new),
    }  # fmt: skip
    if not all(is_op(part, name) and part.args == tuple(reads) for part, (name, *reads) in calls.items()):
        return None
    grid, rounding, dims = options_of(new_scale), options_of(new_q), {options_of(part)["dim"] for part in appends}
    block, form = grid["block"], options_of(node)
    wanted = {"scale": new_scale, "zero_point": new_zero, "qmin": 0, "dtype": torch.uint8, "block": block}
    wanted |= {"axis": None if block is None else -1, "qmax": rounding["qmax"]}
    is_affine = (grid["axis"], grid["symmetric"]) == (-1, False) and rounding == wanted
    is_alike = all(_form(part) == (block, form["bits"]) for part in (past_scale, past_zero, past_q, new_zero))
    is_packed = bool(packed) == (form["size"] is not None) and all(_bits(part) == form["bits"] for part in packed)
    if not (is_affine and is_alike and is_packed) or len(dims) > 1:
        return None
    if not isinstance(past, fx.Node) or not isinstance(new, fx.Node):
        return None
    packing = Packing((form["size"],), form["bits"], signed=False) if packed else None
    inner = *appends, *calls, *packed
    return StoredState(past, new, dims.pop(), grid["steps"], rounding["qmax"], block, packing, appends, inner)


def _form(part: fx.Node) -> tuple[int | None, int]:
    """Block size and bits among the options of an op on a state."""
    options = options_of(part)
    return options["block"], options["bits"]


def _bits(part: fx.Node) -> int:
    bits: int = options_of(part)["bits"]
    return bits


def state_node(read: Any) -> Any:
    """Node of the state that an attention reads: for `dequantize`, the `quantized_rows` of the same integers.

    Any other argument is returned as it is.
    """
    if not is_op(read, "dequantize"):
        return read
    options = options_of(read)
    values = argument(read, "x")
    stored = argument(values, "x") if is_op(values, "unpack_rows") else values
    unpacking = options_of(values) if stored is not values else {"size": None, "bits": 8}
    parts = stored, options["scale"], options["zero_point"]
    states = (user for user in parts[0].users if is_op(user, "quantized_rows") and user.args == parts)
    node = next(states, None)
    if node is None or options["packed"] is not None or options_of(node) != unpacking:
        return read
    state = stored_state(node)
    block = None if state is None else state.block
    axis = None if block is None else -1
    return node if (options["axis"], options["block"]) == (axis, block) else read
