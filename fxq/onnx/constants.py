"""Constant folding: nodes that do not depend on the model's inputs become constants of the ONNX model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxq.common.trees import mapped
from fxq.graph.query import CONVERSIONS, DYNAMIC_GRID_OPS, called_name, is_op, op_of
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Value, Writer

MAX_FOLDED_ENTRIES = 2**16
"""Entries of the largest tensor that is folded. Larger ones stay ONNX nodes, to keep the file small."""
UNDEFINED = ("empty", "new_empty", "empty_like", "empty_strided")
"""Calls that return uninitialized memory."""
UNKNOWN: Any = object()
"""Marker for a value that is not a constant."""


def constant_value(w: Writer, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Return the value of a node that computes only with numbers and constants, such as an anchor grid, else `UNKNOWN`.

    Ops on float parameters are not folded; they are written as nodes.

    Args:
        w: writer of the model.
        node: node of the graph.
        args: positional arguments of the node, with a `Value` for each value of the model.
        kwargs: keyword arguments of the node.
    """
    if node.op not in ("call_function", "call_method") or is_op(node, *CONVERSIONS, *DYNAMIC_GRID_OPS):
        return UNKNOWN
    leaves = _leaves((args, kwargs))
    values = [leaf for leaf in leaves if isinstance(leaf, Value)]
    if called_name(node) in UNDEFINED or any(map(varies, leaves)) or not all(_is_constant(w, v) for v in values):
        return UNKNOWN
    if not values and not str(getattr(node.target, "__module__", "")).startswith("torch"):
        return UNKNOWN  # numbers are computed by the node that reads them
    result = _computed(node, *mapped((args, kwargs), lambda leaf: _real(w, leaf)))
    if result is UNKNOWN or any(
        isinstance(part, Tensor) and part.numel() > MAX_FOLDED_ENTRIES for part in _leaves(result)
    ):
        return UNKNOWN
    return mapped(result, lambda leaf: _written(w, leaf) if isinstance(leaf, Tensor) else leaf)


def _leaves(value: Any) -> list[Any]:
    """Leaves of nested containers."""
    leaves: list[Any] = []

    def take(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    mapped(value, take)
    return leaves


def _is_constant(w: Writer, value: Value) -> bool:
    """Whether a value was folded before, or is a small integer or bool tensor."""
    content = w.constant_of(value.name)
    is_table = content is not None and not content.dtype.is_floating_point and content.numel() <= MAX_FOLDED_ENTRIES
    return value.name in w.computed or is_table


def _real(w: Writer, leaf: Any) -> Any:
    """Copy of a constant as a tensor; other arguments stay unchanged, except that any device becomes the CPU."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    content = w.constant_of(leaf.name) if isinstance(leaf, Value) else None
    return leaf if content is None else content.clone()


def _computed(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Result of a call; `UNKNOWN` if it draws random numbers."""
    op, target = op_of(node), node.target
    with torch.no_grad(), torch.random.fork_rng([]):
        state = torch.get_rng_state()
        if op is not None:
            result = op.target(*args, **{**op.options, **kwargs})
        elif isinstance(target, str):
            result = getattr(args[0], target)(*args[1:], **kwargs)
        else:
            result = target(*args, **kwargs)
        return result if torch.equal(state, torch.get_rng_state()) else UNKNOWN


def _written(w: Writer, tensor: Tensor) -> Value:
    """Write a tensor as a constant of the model."""
    copy = tensor.detach().cpu().contiguous()
    name = w.constant(copy)
    w.computed.add(name)
    return Value(name, torch.empty_like(copy, device="meta"))
