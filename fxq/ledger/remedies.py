"""Which lines of a recipe take away the noise of a layer, where its own line alone would not."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice

from torch import fx

from fxq.graph.query import CONVERSIONS, is_op, plan_of, submodule
from fxq.ledger.ledger import Entry


class IntegerEdges:
    """Who reads whose integers in a qdq graph or a lowered one, seen through conversions.

    Attributes:
        gm: the graph's module.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm

    @cached_property
    def read(self) -> set[fx.Node]:
        """The nodes whose integers an integer op reads, through conversions and what moves data."""
        found: set[fx.Node] = set()
        for node in reversed(self.gm.graph.nodes):
            passes_on = self.converts(node) or _fate(node) == "moves"
            if node in found if passes_on else _fate(node) == "int8":
                found.update(node.all_input_nodes)
        return found

    def converts(self, node: fx.Node) -> bool:
        """Whether a node is a conversion, as an op or as a kernel."""
        module = submodule(self.gm, node)
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source.op == "call_module":  # integers, or their scale
            return self.converts(source)
        converted = module is not None and getattr(module, "kind", "") == "convert"
        return converted or is_op(node, *CONVERSIONS)

    def makers(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes that make what a node reads."""
        for value in node.all_input_nodes:
            while self.converts(value):
                value = value.all_input_nodes[0]
            yield value

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes that read a node's value as integers."""
        for user in node.users:
            if self.converts(user):
                yield from self.readers(user)
            elif user in self.read or _fate(user) == "int8":
                yield user


def _fate(node: fx.Node) -> str:
    plan = plan_of(node)
    return plan.precision if plan is not None else ""


class Remedies:
    """The lines that put nodes of a final graph into float together with the values that they read.

    Args:
        edges: who reads whose integers.
        entries: the rows of the ledger.
    """

    def __init__(self, edges: IntegerEdges, entries: Iterable[Entry]) -> None:
        self._edges = edges
        self._rows: dict[str, list[Entry]] = {}
        for entry in entries:
            if entry.precision in ("int8", "weight-only", "moves"):
                self._rows.setdefault(entry.into, []).append(entry)
        self._shared: dict[fx.Node, bool] = {}

    def line(self, node: fx.Node) -> str:
        """The line for a node that runs on integers, as Python; empty where there is none.

        It has the node's own override: where the node is a unit, those of its layers, since what is light follows them.
        And where others read the same integers, the override of who makes them: alone in float, the node would read
        the same rounded values.
        """
        own = self._own(node)
        freed = dict.fromkeys(line for maker in self._edges.makers(node) for line in self._freeing(maker))
        lines = [*own, *(line for line in freed if line not in own)]
        return _chained(lines if len(lines) <= _MOST else own)

    def _own(self, node: fx.Node) -> list[str]:
        rows = self._rows.get(node.name, [])
        return list(dict.fromkeys(e.fix for e in [e for e in rows if e.macs] or rows[:1] if e.fix))

    def _freeing(self, maker: fx.Node) -> list[str]:
        """The lines that let a float reader of this value read it as floats."""
        lines: list[str] = []
        todo = [maker]
        while todo and len(lines) <= _MOST:
            node = todo.pop()
            if _fate(node) in ("int8", "moves"):
                lines += self._own(node) if self._is_shared(node) else []
                todo += self._edges.makers(node) if _fate(node) == "moves" else ()
        return lines

    def _is_shared(self, node: fx.Node) -> bool:
        """Whether several nodes read a node's value as integers; asked by each of them, and found out once."""
        if node not in self._shared:
            self._shared[node] = len(set(islice(self._edges.readers(node), 2))) > 1
        return self._shared[node]


_MOST = 8
"""Overrides in a line that a person reads; where more are needed, the line has those of the layer alone."""


def _chained(lines: Sequence[str]) -> str:
    """One expression of several: each line is a call on `recipe`."""
    return "".join([*lines[:1], *(line.removeprefix("recipe") for line in lines[1:])])
