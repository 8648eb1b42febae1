"""Multiply-accumulates of a call, from shapes: what `ledger.coverage` weighs ops by."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor, fx, nn

from fxq.graph.info import info
from fxq.graph.query import flat_nodes, op_of, submodule
from fxq.ops import OPS
from fxq.ops.table import Shape


def macs_of(gm: fx.GraphModule, node: fx.Node) -> int:
    """Multiply-accumulates of one call, for the batch that the shapes were found with; 0 where there are none.

    an op                what the `macs` of its row says
    an unknown module    for each weight inside: its values x the positions that the module works on. This is exact for
                         recurrent layers and for layers that keep the positions, and an estimate for others.

    Ops that say nothing (norms, activations, additions) count as 0: beside the others they are small, and it is these
    that integer kernels are for.
    """
    if node.op == "call_module":
        return _module_macs(node, submodule(gm, node))
    spelled = OPS.of_call(node.target) if node.op in ("call_function", "call_method") else None
    op = op_of(node) or (spelled[0] if spelled is not None else None)  # a call that stays as it is written
    shapes = [info(a).shape if isinstance(a, fx.Node) else None for a in node.args]
    out = info(node).shape
    if op is None or op.macs is None or out is None:
        return 0
    try:
        return int(op.macs(out, *shapes))
    except (TypeError, IndexError):  # a shape that is not known, or a call that is written in a way of its own
        return 0


def _module_macs(node: fx.Node, module: nn.Module | None) -> int:
    if module is None:
        return 0
    shape = _nearest_shape(node)
    if shape is None:
        return 0
    return sum(w.numel() * _positions(shape, w.dim()) for w in _weights(module))


def _nearest_shape(node: fx.Node) -> Shape | None:
    """The shape of a value, or of what it reads; of a packed sequence, which has none, that of what was packed."""
    found = [node]
    for near in found:
        shape = info(near).shape
        if shape is not None:
            return shape
        found += [n for n in flat_nodes((near.args, near.kwargs)) if n not in found]
    return None


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """The weights inside that are multiplied with: matrices and filters, not tables that are looked up in."""
    tables = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    looked_up = {id(p) for table in tables for p in table.parameters(recurse=False)}
    return (p for p in module.parameters() if p.dim() >= 2 and id(p) not in looked_up)


def _positions(shape: Shape, weight_dim: int) -> int:
    """How often a weight is used: (N, C, ...) has channels second for a filter, (..., C) last for a matrix."""
    channels = 1 if weight_dim > 2 and len(shape) > 1 else len(shape) - 1
    return math.prod(shape[:channels] + shape[channels + 1 :])
