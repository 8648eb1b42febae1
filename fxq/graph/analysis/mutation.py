"""Detection of nodes that write to memory that other nodes read, as `fxq/graph/analysis/memory.py` observed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from fxq.graph.info import info
from fxq.graph.query import op_of


def changes(node: fx.Node) -> tuple[int, ...]:
    """The blocks of memory that a node changes in place. A canonical op changes nothing, whatever it was before."""
    return info(node).changes if op_of(node) is None else ()


class MemoryWriters:
    """Who changes the memory that a value lies in. `note(node)` after an edit that made or changed a node."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._by_block: dict[int, list[fx.Node]] = {}
        for node in nodes:
            self.note(node)

    def note(self, node: fx.Node) -> None:
        """Learn what a node changes."""
        for block in changes(node):
            self._by_block.setdefault(block, []).append(node)

    def of(self, value: fx.Node) -> fx.Node | None:
        """A node that changes memory which `value` shares, or None."""
        return next(self._changers(value), None)

    def _changers(self, value: fx.Node) -> Iterator[fx.Node]:
        for block in info(value).memory:
            known = self._by_block.get(block, [])
            while known and (known[-1]._erased or block not in changes(known[-1])):
                known.pop()
            yield from known[-1:]
