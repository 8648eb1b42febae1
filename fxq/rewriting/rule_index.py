"""Which rules are worth trying at a node: looked up by its op and by those of the values that it reads."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxq.common.trees import leaves
from fxq.graph.query import op_of
from fxq.ops.table import Op
from fxq.rewriting.pattern import PatternNode, Rule

Place = tuple[Op, frozenset["Op | None"]]


class Dispatch:
    """The rules that may match at a node, in the order given.

    Left out are those of another root op, and those of whose root none of the inputs can be matched: a pattern wants
    conv2d there, and the node reads none. They would stop at the first op.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._by_root: dict[Op | None, list[tuple[Rule, frozenset[Op | None]]]] = {}
        for rule in rules:
            read = leaves(rule.root.inputs, lambda value: isinstance(value, PatternNode))
            ops = frozenset(value.op for value in read if isinstance(value, PatternNode) and value.op is not None)
            self._by_root.setdefault(rule.root.op, []).append((rule, ops))
        self._known: dict[Place, tuple[Rule, ...]] = {}

    def at(self, node: fx.Node) -> tuple[Rule, ...]:
        """The rules to try with their root at `node`."""
        op = op_of(node)
        if op is None or op not in self._by_root:
            return ()
        place = op, frozenset(map(op_of, node.all_input_nodes))
        known = self._known.get(place)
        if known is None:
            fit = (rule for rule, wanted in self._by_root[op] if not wanted or wanted & place[1])
            known = self._known[place] = tuple(fit)
        return known
