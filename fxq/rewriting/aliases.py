"""Traced tensors that share a storage, as a tree of views, and their current values."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from fxq.graph.analysis.memory import MemoryWatch
from fxq.graph.info import info
from fxq.graph.query import reads_only_metadata, swapped
from fxq.rewriting.cannot_trace import CannotTrace, around, cannot_change
from fxq.rewriting.view_inverse import cut_along, written_back

if TYPE_CHECKING:
    from fxq.rewriting.rewriter import Rewriter


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


class Aliases:
    """Traced tensors by the storages that they share. Nodes that regenerate outdated views are inserted when read.

    Attributes:
        rewriter: edits the graph.
        watch: which values share memory.
        blocks: storages by number.
        by_node: traced tensors in these storages, and tuples of views, by node.
        containers: nodes whose values hold several tensors, each with the versions of their storages when it ran.
        spots: first tensor with each position and layout in memory.
    """

    def __init__(self, rewriter: Rewriter, watch: MemoryWatch) -> None:
        self.rewriter, self.watch = rewriter, watch
        self.blocks: dict[int, Block] = {}
        self.by_node: dict[fx.Node, Alias] = {}
        self.containers: dict[fx.Node, dict[Block, int]] = {}
        self.spots: dict[Any, Alias] = {}

    def block(self, number: int) -> Block:
        """Return the storage with this number."""
        return self.blocks.setdefault(number, Block())

    def register(self, node: fx.Node, read: Mapping[fx.Node, Any]) -> None:
        """Register the result of a node that writes nothing."""
        about = info(node)
        cut = cut_along(node) if not about.is_tensor and about.traced.memory else None
        if not about.is_tensor and cut is None:
            if about.traced.memory:
                self.containers[node] = {b: b.version for b in map(self.block, about.traced.memory)}
        elif len(about.traced.memory) == 1:
            block = self.block(about.traced.memory[0])
            spot, parent, slot = self.watch.spot(node), None, None
            for arg, now in read.items():
                if parent is None and (alias := self.by_node.get(arg)) is not None and alias.block is block:
                    parent, slot = alias, now if isinstance(now, fx.Node) else arg
            same = parent is not None and self.watch.same(parent.node, node)
            if parent is None and spot in self.spots:
                parent, same = self.spots[spot], True
            version = block.version if slot is not None else 0
            self.by_node[node] = Alias(node, block, parent, same, node, version, slot)
            if spot is not None:
                self.spots.setdefault(spot, self.by_node[node])

    def read(self, arg: fx.Node, node: fx.Node) -> Any:
        """Node with the current value of an argument."""
        alias = self.by_node.get(arg)
        if alias is not None:
            return alias.node if reads_only_metadata(node) else self.now(alias, node)
        taken = node.target is operator.getitem and node.args[0] is arg
        for block, version in self.containers.get(arg, {}).items() if not taken else ():
            if block.version != version:
                raise self._stale(block, node, arg)
        return arg

    def now(self, alias: Alias, before: fx.Node) -> Any:
        """Current value of an alias, regenerated if its storage was written to since."""
        if alias.version != alias.block.version:
            if alias.changed is not None:
                alias.now = self._parent_value(alias.changed, alias.now, self.now(alias.changed, before), before)
            elif alias.parent is not None:
                alias.now = self._regenerated(alias, self.now(alias.parent, before), before)
            else:
                raise self._stale(alias.block, before, alias.node)
            alias.changed, alias.version = None, alias.block.version
        return alias.now

    def _regenerated(self, alias: Alias, whole: Any, before: fx.Node) -> Any:
        view, parent = alias.node, alias.parent
        assert parent is not None
        if alias.same:
            return whole
        if isinstance(whole, list):  # views of a tuple
            return whole[_place(view)]
        about, new = info(view), {alias.slot or parent.node: whole}
        args, kwargs = swapped(view.args, new), swapped(view.kwargs, new)
        typed = about.shape, about.dtype
        again = self.rewriter.node(view.op, view.target, args, kwargs, like=view, before=before, typed=typed)
        self.by_node[again] = alias
        return again

    def _stale(self, block: Block, reader: fx.Node, value: fx.Node) -> CannotTrace:
        writer = block.writer
        assert writer is not None
        return CannotTrace(
            around(writer, reader),
            f"%{writer.name} ({info(writer).source}) writes to memory in place, and %{reader.name} "
            f"({info(reader).source}) reads it through %{value.name} afterwards. Write the "
            "change out of place (x = x + y, nn.ReLU(inplace=False)).",
        )

    def set_value(self, alias: Alias, value: fx.Node, node: fx.Node) -> None:
        """Set the current value of an alias, and mark its parents as outdated."""
        alias.block.version += 1
        alias.block.writer = node
        alias.now, alias.version = value, alias.block.version
        self.by_node.setdefault(value, alias)
        while alias.parent is not None:
            alias.parent.changed = alias
            alias = alias.parent

    def _parent_value(self, alias: Alias, whole: Any, value: Any, before: fx.Node) -> Any:
        """New value of an alias's parent, from its old value and the new value of the alias."""
        view, parent = alias.node, alias.parent
        assert parent is not None
        if alias.same:
            return value
        if not info(parent.node).is_tensor:
            parts = whole if isinstance(whole, list) else self._parts(parent.node, whole, before)
            return [value if i == _place(view) % len(parts) else part for i, part in enumerate(parts)]
        if isinstance(value, list):
            name, dim = cut_along(view) or ("cat", 0)
            typed = info(parent.node).shape, info(parent.node).dtype
            return self.rewriter.call(name, value, dim=dim, like=view, before=before, typed=typed)
        result = written_back(self.rewriter, whole, view, value, before)
        if result is None:
            assert alias.block.writer is not None
            raise cannot_change(alias.block.writer, view, "fxq cannot write through this view")
        return result

    def _parts(self, cut: fx.Node, whole: fx.Node, before: fx.Node) -> list[Any]:
        """Nodes for the single views of a tuple."""
        make, shapes = self.rewriter.node, self.watch.parts[cut]
        return [
            make("call_function", operator.getitem, (whole, i), like=cut, before=before, typed=typed)
            for i, typed in enumerate(shapes)
        ]


def _place(part: fx.Node) -> int:
    """Index of the tuple item that a node takes."""
    place: Any = part.args[1]
    return int(place)
