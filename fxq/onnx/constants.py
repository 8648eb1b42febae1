"""Nodes whose value does not depend on the inputs of a model: what they compute becomes a constant of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxq.common.trees import mapped
from fxq.graph.query import CONVERSIONS, MEASURES, called_name, is_op, op_of
from fxq.onnx.varying_sizes import varies
from fxq.onnx.writer import Value, Writer

LARGEST = 2**16
"""Entries of the largest tensor that is computed here; of larger ones, ONNX nodes keep the file small."""
UNDEFINED = ("empty", "new_empty", "empty_like", "empty_strided")
"""Calls whose values are whatever the memory holds."""
UNKNOWN: Any = object()
"""In the place of a value that is no constant."""


def constant_value(w: Writer, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The value of a node that computes with numbers and constants alone, such as a grid of anchors, or a fixed shape.

    `UNKNOWN` for others. Parameters of the model are written as they are, and read by what computes with them.

    Args:
        w: the model.
        node: the node.
        args: its arguments, with values of the model.
        kwargs: those by name.
    """
    if node.op not in ("call_function", "call_method") or is_op(node, *CONVERSIONS, *MEASURES):
        return UNKNOWN
    leaves = _leaves((args, kwargs))
    values = [leaf for leaf in leaves if isinstance(leaf, Value)]
    if called_name(node) in UNDEFINED or any(map(varies, leaves)) or not all(_is_constant(w, v) for v in values):
        return UNKNOWN
    if not values and not str(getattr(node.target, "__module__", "")).startswith("torch"):
        return UNKNOWN  # numbers are computed where they are read
    result = _computed(node, *mapped((args, kwargs), lambda leaf: _real(w, leaf)))
    if result is UNKNOWN or any(isinstance(part, Tensor) and part.numel() > LARGEST for part in _leaves(result)):
        return UNKNOWN
    return mapped(result, lambda leaf: _written(w, leaf) if isinstance(leaf, Tensor) else leaf)


def _leaves(value: Any) -> list[Any]:
    """What is in nested containers."""
    leaves: list[Any] = []

    def take(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    mapped(value, take)
    return leaves


def _is_constant(w: Writer, value: Value) -> bool:
    """Whether a value was computed of numbers alone, or is a small table of places or truths."""
    content = w.value_of(value.name)
    is_table = content is not None and not content.dtype.is_floating_point and content.numel() <= LARGEST
    return value.name in w.computed or is_table


def _real(w: Writer, leaf: Any) -> Any:
    """A value of the model as a tensor, which may be changed; in the place of the device of others, the CPU."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    content = w.value_of(leaf.name) if isinstance(leaf, Value) else None
    return leaf if content is None else content.clone()


def _computed(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What a call gives; `UNKNOWN` where that is left to chance."""
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
    """A tensor as a constant of the model."""
    own = tensor.detach().cpu().contiguous()
    name = w.constant(own)
    w.computed.add(name)
    return Value(name, torch.empty_like(own, device="meta"))
