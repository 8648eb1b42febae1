"""Traced tensors that share a storage, as a tree of views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(eq=False)
class Block:
    """Storage that traced values share.

    Attributes:
        version: number of writes to it so far.
        writer: last node that wrote to it.
    """

    version: int = 0
    writer: fx.Node | None = None


@dataclass(eq=False)
class Alias:
    """Traced tensor, or tuple of views, with its position in the tree of views of a storage.

    Attributes:
        node: node that returned it.
        block: its storage.
        parent: alias that it is a view of; None for the owner of the storage.
        same: whether it is the whole parent in the same shape.
        now: current value: a node; for a tuple of views, a node for the tuple or a list with a node per view.
        version: version of the block when `now` was computed.
        slot: argument of `node` that it is a view of.
        changed: child view that was written to last, if `now` does not include that write yet.
    """

    node: fx.Node
    block: Block
    parent: Alias | None
    same: bool
    now: Any
    version: int = 0
    slot: fx.Node | None = None
    changed: Alias | None = None
