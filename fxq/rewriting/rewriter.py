"""Rewriter: applies rewrite rules to a fixpoint and replaces the matches of fusions by units."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from fxq.errors import PassError, PatternError
from fxq.graph.info import info
from fxq.graph.query import read_attribute
from fxq.ops import OPS
from fxq.rewriting.computed import TrainableConstant, depends_on_parameters, record_trainable
from fxq.rewriting.editor import ContextT, Editor
from fxq.rewriting.match import Capture, Match
from fxq.rewriting.near_miss import Refusal
from fxq.rewriting.pattern import Family, Rule
from fxq.rewriting.rule_index import Dispatch
from fxq.rewriting.unit_edits import make_unit

Refuse = Callable[[Match], "str | None"]
"""Function of a match that returns the reason why a pass refuses it, as users read it; None to accept it."""


class Rewriter(Editor[ContextT]):
    """Editor of a graph that also applies rules. Passes get one."""

    def apply(self, *rules: Rule | Family, refuse: Refuse | None = None) -> int:
        """Apply rewrite rules everywhere until none matches, larger patterns first. Returns the number of rewrites.

        A worklist holds the nodes to try: at first all nodes, then the neighbours of each rewrite.

        Args:
            *rules: the rules.
            refuse: function that may refuse a match, with a reason.

        Raises:
            PassError: the rewrites do not end. The message names the rules that undo each other.
            PatternError: the replacement of a rule does not return one value for each output.
        """
        flat = [r for rule in rules for r in (rule if isinstance(rule, Family) else (rule,))]
        table = Dispatch(sorted(flat, key=lambda r: -r.size))
        todo = deque(self.graph.nodes)
        waiting = set(todo)
        budget = 100 + 10 * len(todo)
        done: list[Rule] = []
        while todo:
            node = todo.popleft()
            waiting.discard(node)
            rules = table.at(node) if not node._erased else ()
            match = self._first_match(rules, node, refuse) if rules else None
            if match is None:
                continue
            done.append(match.rule)
            if len(done) > budget:
                raise PassError(_endless(self.name, done))
            for near in _neighbours(self.rewrite(match)):
                if near not in waiting:
                    waiting.add(near)
                    todo.append(near)
        return len(done)

    def match_at(self, rule: Rule | Family, node: fx.Node) -> Match | None:
        """Match a rule with its root at `node`, for `rewrite`; None, and a near miss, if it does not match."""
        return self._match(rule[0] if isinstance(rule, Family) else rule, node)

    def rewrite(self, match: Match) -> list[fx.Node]:
        """Replace a match by the replacement of its rule, as one edit. Returns the new nodes.

        Raises:
            PatternError: the rule has no replacement, or it does not return one value for each output.
        """
        self.near_misses.discard_matched(match.rule, match.nodes)
        with self.attributed(match.rule.name, match.rule.source):
            return replace_match(self, match)

    def _first_match(self, rules: Sequence[Rule], node: fx.Node, refuse: Refuse | None) -> Match | None:
        for rule in rules:
            match = self._match(rule, node)
            if match is not None and not self._turned_down(match, refuse):
                return match
        return None

    def _match(self, rule: Rule, node: fx.Node) -> Match | None:
        """Match a rule at a node, or record the near miss."""
        refusal = Refusal()
        match = self.matcher.match(rule, node, refusal)
        if match is None:
            self.near_misses.record(rule, node, refusal)
        return match

    def _turned_down(self, match: Match, refuse: Refuse | None) -> bool:
        reason = refuse(match) if refuse is not None else None
        if reason is not None:
            refusal = Refusal()
            refusal.record(match.rule.size + 1, str, reason)
            self.near_misses.record(match.rule, match.root.node, refusal)
        return reason is not None

    def fuse(self, rules: Sequence[Rule], refuse: Refuse | None = None) -> int:
        """Replace the matches of fusion rules by units, in the order of the rules. Returns the number of units.

        A node belongs to at most one unit. All matches are found before the first edit, so that no rule matches a unit.

        Args:
            rules: the fusions.
            refuse: function that may refuse a match, with a reason.
        """
        chosen = self._choose(rules, refuse)
        moved: dict[fx.Node, fx.Node] = {}
        for match in sorted(chosen, key=lambda match: match.root.node):
            with self.attributed(match.rule.name, match.rule.source):
                make_unit(self, match, moved)
        return len(chosen)

    def _choose(self, rules: Sequence[Rule], refuse: Refuse | None) -> list[Match]:
        """Choose the matches that become units: rule by rule, each in the order of the graph.

        A rule is matched again at a node if an earlier rule took some of its nodes. A rule with several outputs always
        is, since its outputs must be found among nodes that are not taken yet.
        """
        chosen: list[Match] = []
        taken = self.matcher.taken
        for rule, places in self._match_everywhere(rules).items():
            for node, match in places:
                if match is None or len(rule.outputs) > 1 or not taken.isdisjoint(match.nodes):
                    match = self.matcher.match(rule, node)
                if match is not None and not self._turned_down(match, refuse):
                    taken.update(match.nodes)
                    chosen.append(match)
        taken.clear()
        for match in chosen:
            self.near_misses.discard_matched(match.rule, match.nodes)
        return chosen

    def _match_everywhere(self, rules: Sequence[Rule]) -> dict[Rule, list[tuple[fx.Node, Match | None]]]:
        """Match all rules at all nodes: for each rule, the nodes with their matches, in one pass over the graph.

        Nodes without a match are left out, except for rules with several outputs.
        """
        table = Dispatch(rules)
        places: dict[Rule, list[tuple[fx.Node, Match | None]]] = {rule: [] for rule in rules}
        for node in self.graph.nodes:
            for rule in table.at(node):
                match = self._match(rule, node)
                if match is not None or len(rule.outputs) > 1:
                    places[rule].append((node, match))
        return places


def _neighbours(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    near = [n for node in nodes for n in (node, *node.users, *node.all_input_nodes)]
    return [n for n in dict.fromkeys(near) if not n._erased]


def _endless(name: str, done: list[Rule]) -> str:
    recent = list(dict.fromkeys(reversed(done[-50:])))
    names = " and ".join(f"{r.name!r} ({r.source})" for r in recent)
    cause = "undo each other" if len(recent) > 1 else "matches its own result"
    return f"{name}: the rewrites do not end (stopped after {len(done)}): {names} {cause}. Add a guard with .unless."


class Builder:
    """The `op` argument of a replacement: `op.relu(x)` adds a node, `op.constant(tensor, "w")` adds a weight.

    A replacement may also change a matched node with `op.rewriter` and return it, or a value that reads it.
    """

    def __init__(self, rewriter: Rewriter, match: Match) -> None:
        self.rewriter = rewriter
        self.match = match
        self.nodes: list[fx.Node] = []

    def __getitem__(self, name: str) -> Callable[..., fx.Node]:
        OPS[name]

        def add(*args: Any, **options: Any) -> fx.Node:
            plain = [_value(a) for a in args]
            node = self.rewriter.call(name, *plain, like=self.match.nodes, before=max(self.match.nodes), **options)
            self.nodes.append(node)
            return node

        return add

    def __getattr__(self, name: str) -> Callable[..., fx.Node]:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def describe(self, node: fx.Node, **changes: Any) -> None:
        """Change fields of a new node's metadata."""
        self.rewriter.describe(node, **changes)

    def constant(self, tensor: Tensor, name: str) -> fx.Node:
        """Add a weight."""
        return self.rewriter.constant(tensor, name, before=max(self.match.nodes), like=self.match.nodes)

    def computed(self, function: Callable[..., Tensor], name: str, *reads: Any) -> fx.Node:
        """Add a weight that is a function of other weights, and is trained with them."""
        nodes: list[fx.Node] = [_value(read) for read in reads]
        weight = self.constant(function(*(read_attribute(self.rewriter.gm, str(n.target)) for n in nodes)), name)
        if any(depends_on_parameters(self.rewriter, str(n.target)) for n in nodes):
            record_trainable(self.rewriter, weight, TrainableConstant(function, [str(n.target) for n in nodes]))
        return weight


def _value(value: object) -> Any:
    return value.value if isinstance(value, Capture) else value


def replace_match(rewriter: Rewriter, match: Match) -> list[fx.Node]:
    """Replace a match by the rule's replacement. Returns the new nodes."""
    rule = match.rule
    if rule.replacement is None:
        raise PatternError(f"rule {rule.name!r} ({rule.source}) has no replacement; add one with @{rule.name}.becomes.")
    builder = Builder(rewriter, match)
    result = rule.replacement(builder, match)
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    values = [_value(v) for v in values]
    if len(values) != len(rule.outputs):
        raise PatternError(
            f"rule {rule.name!r} ({rule.source}): the pattern has {len(rule.outputs)} outputs, but its replacement "
            f"returned {len(values)}; return one value for each output."
        )
    outputs = match.outputs
    for old, new in zip(outputs, values, strict=True):
        if old is not new:
            _inherit(rewriter, old, new)
            rewriter.reroute(old, new)
    erased = []
    for node in reversed(match.nodes):
        if not node.users:
            rewriter.erase(node)
            erased.append(node)
    for node in builder.nodes:  # a folded conv1 is still conv1
        before = [old for old in erased if old.target is node.target]
        if len(before) == 1 and sum(new.target is node.target for new in builder.nodes) == 1:
            rewriter.rename(node, before[0].name)
    return [v for v in values if isinstance(v, fx.Node)]


def _inherit(rewriter: Rewriter, old: fx.Node, new: Any) -> None:
    """Copy shape and dtype of a replaced value to a new one for which they could not be inferred.

    A new value that is computed from the old one, such as its quantize, may have another dtype.
    """
    if isinstance(new, fx.Node) and info(new).shape is None and old not in new.all_input_nodes:
        rewriter.describe(new, shape=info(old).shape, dtype=info(old).dtype)
