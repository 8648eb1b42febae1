"""What a model computes of its weights alone, computed once: standardized weights, tables of positions, masks."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxq.graph.info import info
from fxq.graph.query import called_name, constant, flat_nodes, is_check, reads_only_metadata
from fxq.graph.run import value_of
from fxq.rewriting.computed import as_trainable, record_trainable
from fxq.rewriting.editor import DATA
from fxq.rewriting.rewriter import Rewriter

_LARGEST, _GROWTH = 1 << 20, 16
"""Elements that a constant may always have, and times the elements that it is made of."""


def fold_constant(rewriter: Rewriter, node: fx.Node) -> bool:
    """Replace a call that reads nothing but constants by its value, and whether that was done.

    Before: conv2d(x, batch_norm(w, training=True))    After: conv2d(x, w')
    Kept as they are: calls that draw random numbers, that change something in place or whose value is changed later,
    that give anything but one tensor, and that make a small constant into a large one. A view stays a view.
    """
    read = list(dict.fromkeys(flat_nodes((node.args, node.kwargs))))
    tensors = [constant(rewriter.gm, r) for r in read]
    if node.op not in ("call_function", "call_method") or not info(node).is_tensor or is_check(node):
        return False
    if not read or any(t is None for t in tensors) or reads_only_metadata(node):
        return False
    changes = rewriter.matcher.changes
    if info(node).changes or any(changes.of(n) is not None for n in (*read, node)):
        return False
    value = _value(rewriter.gm, node, dict(zip(read, tensors, strict=True)))
    if value is None or value.numel() > max(_LARGEST, _GROWTH * sum(t.numel() for t in tensors if t is not None)):
        return False
    with rewriter.attributed("fold_constant", fold_constant):
        name = f"{str(read[0].target).removeprefix(f'{DATA}.')}_{called_name(node)}"
        made = rewriter.constant(value, name, before=node, like=node)
        record_trainable(rewriter, made, as_trainable(rewriter, node))
        rewriter.replace(node, made)
    return True


def _value(gm: fx.GraphModule, node: fx.Node, given: dict[fx.Node, Tensor | None]) -> Tensor | None:
    """What the call gives; None where that is no tensor, or is left to chance."""
    device = next((t.device for t in given.values() if t is not None), torch.device("cpu"))
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        state = _state(device)
        value = value_of(gm, node, given)
        chance = not torch.equal(state, _state(device))
    return value.detach() if isinstance(value, Tensor) and not chance else None


def _state(device: torch.device) -> Tensor:
    """The state of a device's random numbers."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
