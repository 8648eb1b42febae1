"""Removal of views that undo each other, such as the entry 0 of a stack of one tensor.

Recurrent layers and cells read and return states with an axis of layers, which their ops do not have.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxq.graph.info import info
from fxq.graph.query import flat_nodes, is_op, op_of, options_of
from fxq.rewriting.rewriter import Rewriter


def drop_undone_views(rewriter: Rewriter) -> list[fx.Node]:
    """Let the readers of a view that undoes the op before it read the input of that op. Returns the dropped nodes.

    Values that the model returns keep memory of their own where they had it.
    """
    dropped = []
    for node in rewriter.nodes():
        source = _undone(node)
        if source is None or info(source).shape != info(node).shape:
            continue
        if is_op(node.args[0], "stack") and _would_share(rewriter.graph, node, source):
            continue
        with rewriter.attributed("drop_undone_views", drop_undone_views):
            rewriter.replace(node, source)
        dropped.append(node)
    return dropped


def _undone(node: fx.Node) -> fx.Node | None:
    """The value that a view restores; None if it restores none."""
    inner: Any = node.args[0] if is_op(node, "getitem", "squeeze") else None
    if not is_op(inner, "stack", "unsqueeze") or info(node).shape is None:
        return None
    dim, values = options_of(inner)["dim"], inner.args[0]
    parts = list(values) if isinstance(values, (tuple, list)) else [values]
    rank = len(info(inner).shape or ())
    dim = dim % rank if rank else 0
    if is_op(node, "squeeze"):
        read = options_of(node)["dim"]
        index = 0 if isinstance(read, int) and read % max(rank, 1) == dim and len(parts) == 1 else None
    else:
        index = _only_number(options_of(node)["index"], dim)
    part = parts[index] if index is not None and -len(parts) <= index < len(parts) else None
    return part if isinstance(part, fx.Node) else None


def _only_number(index: Any, dim: int) -> int | None:
    """Number in an index that selects one entry of the axis `dim` and all of the others; None for another index."""
    if not isinstance(index, tuple) or len(index) != dim + 1 or type(index[dim]) is not int:
        return None
    return index[dim] if all(part == slice(None) for part in index[:dim]) else None


def _would_share(graph: fx.Graph, node: fx.Node, source: fx.Node) -> bool:
    """Whether a result that has memory of its own would share it with an input, a constant or another result."""
    returned = list(flat_nodes(graph.output_node().args))
    owners = {_owner(value) for value in returned}
    if not any(_owner(value) is node.args[0] for value in returned):
        return False
    owner = _owner(source)
    return owner in owners or owner.op in ("placeholder", "get_attr")


def _owner(node: Any) -> Any:
    """The node whose memory a value may share."""
    while (op := op_of(node)) is not None and op.traits.view:
        node = node.args[0]
    return node
