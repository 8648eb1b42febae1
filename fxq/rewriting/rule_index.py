"""Index of rules by the op of a node and the ops of its inputs, so that only rules that may match are tried."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxq.common.trees import leaves
from fxq.graph.query import op_of
from fxq.ops.table import Op
from fxq.rewriting.pattern import PatternNode, Rule

Place = tuple[Op, frozenset["Op | None"]]


class Dispatch:
    """Lookup of the rules that may match at a node, in the order of the rules.

    Rules with another root op are left out, and rules whose root needs ops as inputs, such as conv2d, of which the node
    reads none. They would fail at the first op.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._by_root: dict[Op | None, list[tuple[Rule, frozenset[Op | None]]]] = {}
        for rule in rules:
            read = leaves(rule.root.inputs, lambda value: isinstance(value, PatternNode))
            ops = frozenset(value.op for value in read if isinstance(value, PatternNode) and value.op is not None)
            self._by_root.setdefault(rule.root.op, []).append((rule, ops))
        self._cache: dict[Place, tuple[Rule, ...]] = {}

    def at(self, node: fx.Node) -> tuple[Rule, ...]:
        """Rules to try with their root at `node`."""
        op = op_of(node)
        if op is None or op not in self._by_root:
            return ()
        place = op, frozenset(map(op_of, node.all_input_nodes))
        candidates = self._cache.get(place)
        if candidates is None:
            fit = (rule for rule, wanted in self._by_root[op] if not wanted or wanted & place[1])
            candidates = self._cache[place] = tuple(fit)
        return candidates
