"""Detection of nodes that write to memory that other nodes read, as `fxq/graph/analysis/memory.py` observed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from fxq.graph.info import info
from fxq.graph.query import op_of


def changes(node: fx.Node) -> tuple[int, ...]:
    """Memory blocks that a node changes in place; none for a canonical op, even if traced from an in-place op."""
    return info(node).traced.changes if op_of(node) is None else ()


class MemoryWriters:
    """Nodes that write to the memory of values. Call `note(node)` after an edit that created or changed a node."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._by_block: dict[int, list[fx.Node]] = {}
        for node in nodes:
            self.note(node)

    def note(self, node: fx.Node) -> None:
        """Record the memory blocks that a node changes."""
        for block in changes(node):
            self._by_block.setdefault(block, []).append(node)

    def of(self, value: fx.Node) -> fx.Node | None:
        """A node that changes the memory of `value`, or None."""
        return next(self._changers(value), None)

    def _changers(self, value: fx.Node) -> Iterator[fx.Node]:
        for block in info(value).traced.memory:
            writers = self._by_block.get(block, [])
            while writers and (writers[-1]._erased or block not in changes(writers[-1])):
                writers.pop()
            yield from writers[-1:]
