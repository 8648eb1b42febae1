"""Index of rules by the op of a node and the ops of its inputs, so that only rules that may match are tried."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxq.common.trees import leaves
from fxq.graph.query import op_of
from fxq.ops.table import Op
from fxq.rewriting.pattern import AnyOp, Each, PatternNode, Rule

Place = tuple[Op, frozenset["Op | None"]]


class Dispatch:
    """Lookup of the rules that may match at a node, in the order of the rules.

    Rules with another root op are left out, and rules whose root needs ops as inputs, such as conv2d, of which the node
    reads none. They would fail at the first op. A rule whose root is a trait wildcard is tried at all such ops.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._by_root: dict[Op | None, list[_Entry]] = {}
        self._wildcards: list[_Entry] = []
        for order, rule in enumerate(rules):
            op = rule.root.op
            entries = self._wildcards if isinstance(op, AnyOp) else self._by_root.setdefault(op, [])
            entries.append((order, rule, _ops_read(rule)))
        self._by_op: dict[Op, list[_Entry]] = {}
        self._cache: dict[Place, tuple[Rule, ...]] = {}

    def at(self, node: fx.Node) -> tuple[Rule, ...]:
        """Rules to try with their root at `node`."""
        op = op_of(node)
        if op is None:
            return ()
        entries = self._by_op.get(op)
        if entries is None:
            wild = [entry for entry in self._wildcards if entry[1].root.accepts(op)]
            entries = self._by_op[op] = sorted((*self._by_root.get(op, ()), *wild), key=lambda entry: entry[0])
        if not entries:
            return ()
        place = op, frozenset(map(op_of, node.all_input_nodes))
        candidates = self._cache.get(place)
        if candidates is None:
            candidates = tuple(rule for _, rule, wanted in entries if not wanted or wanted & place[1])
            self._cache[place] = candidates
        return candidates


_Entry = tuple[int, Rule, "frozenset[Op | None]"]
"""Position of a rule, the rule, and the ops of which its root reads at least one; no ops: it may read any."""


def _ops_read(rule: Rule) -> frozenset[Op | None]:
    read = leaves(rule.root.inputs, lambda value: isinstance(value, (PatternNode, Each)))
    nodes = [value.pattern if isinstance(value, Each) else value for value in read]
    ops = [node.op for node in nodes if isinstance(node, PatternNode)]
    if any(isinstance(op, AnyOp) for op in ops):
        return frozenset()
    return frozenset(op for op in ops if isinstance(op, Op))
