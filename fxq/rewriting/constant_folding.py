"""Constant folding: calls that read only constants, such as standardized weights, position tables and masks."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxq.graph.info import info
from fxq.graph.query import called_name, constant, flat_nodes, is_check, reads_only_metadata
from fxq.graph.run import value_of
from fxq.rewriting.computed import as_trainable, record_trainable
from fxq.rewriting.editor import DATA
from fxq.rewriting.rewriter import Rewriter

_MAX_ELEMENTS, _MAX_GROWTH = 1 << 20, 16
"""Elements up to which any call is folded; above, the result may have this many times the elements of its operands."""


def fold_constant(rewriter: Rewriter, node: fx.Node) -> bool:
    """Replace a call that reads only constants by its value. Returns whether it was replaced.

    Before: conv2d(x, batch_norm(w, training=True))    After: conv2d(x, w')
    Not folded: calls that draw random numbers, that change a tensor in place or whose value is changed later, that do
    not return one tensor, and that expand a small constant to a large one. A view stays a view.
    """
    read = list(dict.fromkeys(flat_nodes((node.args, node.kwargs))))
    tensors = [constant(rewriter.gm, r) for r in read]
    if node.op not in ("call_function", "call_method") or not info(node).is_tensor or is_check(node):
        return False
    if not read or any(t is None for t in tensors) or reads_only_metadata(node):
        return False
    changes = rewriter.matcher.changes
    if info(node).traced.changes or any(changes.of(n) is not None for n in (*read, node)):
        return False
    value = _value(rewriter.gm, node, dict(zip(read, tensors, strict=True)))
    if value is None or value.numel() > max(
        _MAX_ELEMENTS, _MAX_GROWTH * sum(t.numel() for t in tensors if t is not None)
    ):
        return False
    with rewriter.attributed("fold_constant", fold_constant):
        name = f"{str(read[0].target).removeprefix(f'{DATA}.')}_{called_name(node)}"
        folded = rewriter.constant(value, name, before=node, like=node)
        record_trainable(rewriter, folded, as_trainable(rewriter, node))
        rewriter.replace(node, folded)
    return True


def _value(gm: fx.GraphModule, node: fx.Node, operands: dict[fx.Node, Tensor | None]) -> Tensor | None:
    """Value of a call; None if it is not a tensor, or is random."""
    device = next((t.device for t in operands.values() if t is not None), torch.device("cpu"))
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        state = _state(device)
        value = value_of(gm, node, operands)
        is_random = not torch.equal(state, _state(device))
    return value.detach() if isinstance(value, Tensor) and not is_random else None


def _state(device: torch.device) -> Tensor:
    """State of a device's random number generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
