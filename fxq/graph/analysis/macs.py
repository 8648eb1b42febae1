"""Multiply-accumulates of a call, computed from shapes. `ledger.coverage` weighs ops by them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor, fx, nn

from fxq.graph.info import info
from fxq.graph.query import flat_nodes, op_of, submodule
from fxq.ops import OPS
from fxq.ops.table import Shape


def macs_of(gm: fx.GraphModule, node: fx.Node) -> int:
    """Multiply-accumulates of one call, for the example batch; 0 for ops without `macs`, such as norms and additions.

    an op                as given by `macs` of its row
    an unknown module    for each weight inside: number of its values x positions of the input. This is exact for
                         recurrent layers and for layers that keep the positions, and an estimate for others.
    """
    if node.op == "call_module":
        return _module_macs(node, submodule(gm, node))
    spelled = OPS.of_call(node.target) if node.op in ("call_function", "call_method") else None
    op = op_of(node) or (spelled[0] if spelled is not None else None)  # `spelled`: a call that is not canonical
    shapes = [info(a).shape if isinstance(a, fx.Node) else None for a in node.args]
    out = info(node).shape
    if op is None or op.macs is None or out is None:
        return 0
    try:
        return int(op.macs(out, *shapes))
    except (TypeError, IndexError):  # an unknown shape, or a call with its arguments in another order
        return 0


def _module_macs(node: fx.Node, module: nn.Module | None) -> int:
    if module is None:
        return 0
    shape = _nearest_shape(node)
    if shape is None:
        return 0
    return sum(w.numel() * _positions(shape, w.dim()) for w in _weights(module))


def _nearest_shape(node: fx.Node) -> Shape | None:
    """Shape of a value, or of the nearest tensor before it, since a packed sequence has no shape."""
    nodes = [node]
    for near in nodes:
        shape = info(near).shape
        if shape is not None:
            return shape
        nodes += [n for n in flat_nodes((near.args, near.kwargs)) if n not in nodes]
    return None


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """Matrices and filters of a module, without embedding tables, which are not multiplied."""
    tables = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    looked_up = {id(p) for table in tables for p in table.parameters(recurse=False)}
    return (p for p in module.parameters() if p.dim() >= 2 and id(p) not in looked_up)


def _positions(shape: Shape, weight_dim: int) -> int:
    """Number of positions that a weight is applied to: channels are axis 1 for a filter, the last axis for a matrix."""
    channels = 1 if weight_dim > 2 and len(shape) > 1 else len(shape) - 1
    return math.prod(shape[:channels] + shape[channels + 1 :])
