"""Remedies: overrides of a recipe that remove the noise of a layer, with those of other layers where needed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice

from torch import fx

from fxq.graph.precision import Precision
from fxq.graph.query import CONVERSIONS, is_op, plan_of, submodule
from fxq.ledger.ledger import Entry


class IntegerEdges:
    """Integer edges of a qdq or lowered graph: which nodes read the integers of which, through conversions.

    Attributes:
        gm: the graph's module.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm

    @cached_property
    def read(self) -> set[fx.Node]:
        """Nodes whose integers an integer op reads, directly or through conversions and ops that move data."""
        read: set[fx.Node] = set()
        for node in reversed(self.gm.graph.nodes):
            forwards = self.converts(node) or _precision(node) == "moves"
            if node in read if forwards else _precision(node) == "int8":
                read.update(node.all_input_nodes)
        return read

    def converts(self, node: fx.Node) -> bool:
        """Whether a node is a conversion, as an op or as a kernel."""
        module = submodule(self.gm, node)
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source.op == "call_module":  # integers, or their scale
            return self.converts(source)
        converted = module is not None and getattr(module, "kind", "") == "convert"
        return converted or is_op(node, *CONVERSIONS)

    def makers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Nodes that compute the inputs of a node, conversions skipped."""
        for value in node.all_input_nodes:
            while self.converts(value):
                value = value.all_input_nodes[0]
            yield value

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Nodes that read a node's value as integers."""
        for user in node.users:
            if self.converts(user):
                yield from self.readers(user)
            elif user in self.read or _precision(user) == "int8":
                yield user


def _precision(node: fx.Node) -> Precision | None:
    """Precision of a node; for one of several values, that of the node that computes them."""
    plan = plan_of(node)
    return plan.precision if plan is not None else None


class Remedies:
    """Remedies for the nodes of a final graph: overrides that set a node and the values that it reads to float.

    Args:
        edges: the integer edges of the graph.
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
        """Return the remedy for a node that runs on integers, as Python; empty if there is none.

        It has the overrides of the node's layers; light ops of a unit follow them. If other nodes read the same
        integers, it also has the override of the node that computes them, since the node alone in float would still
        read the rounded values.
        """
        own = self._own(node)
        freed = dict.fromkeys(line for maker in self._edges.makers(node) for line in self._freeing(maker))
        lines = [*own, *(line for line in freed if line not in own)]
        return _chained(lines if len(lines) <= MAX_OVERRIDES else own)

    def _own(self, node: fx.Node) -> list[str]:
        rows = self._rows.get(node.name, [])
        return list(dict.fromkeys(e.fix for e in [e for e in rows if e.macs] or rows[:1] if e.fix))

    def _freeing(self, maker: fx.Node) -> list[str]:
        """Overrides with which a float reader of this value reads it before rounding."""
        lines: list[str] = []
        todo = [maker]
        while todo and len(lines) <= MAX_OVERRIDES:
            node = todo.pop()
            if _precision(node) in ("int8", "moves"):
                lines += self._own(node) if self._is_shared(node) else []
                todo += self._edges.makers(node) if _precision(node) == "moves" else ()
        return lines

    def _is_shared(self, node: fx.Node) -> bool:
        """Whether several nodes read a node's value as integers; cached, since each of them asks."""
        if node not in self._shared:
            self._shared[node] = len(set(islice(self._edges.readers(node), 2))) > 1
        return self._shared[node]


MAX_OVERRIDES = 8
"""Overrides in a remedy; if more would be needed, it only has those of the layer itself."""


def _chained(lines: Sequence[str]) -> str:
    """Join overrides, each a call on `recipe`, into one chained expression."""
    return "".join([*lines[:1], *(line.removeprefix("recipe") for line in lines[1:])])
