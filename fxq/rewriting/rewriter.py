"""The rewriter: edits a graph by rules. Rewrite rules run to a fixpoint; fusions become units."""

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
from fxq.rewriting.editor import Editor
from fxq.rewriting.match import Captured, Match
from fxq.rewriting.near_miss import Refusal
from fxq.rewriting.pattern import Family, Rule
from fxq.rewriting.rule_index import Dispatch
from fxq.rewriting.unit_edits import make_unit

Refuse = Callable[[Match], "str | None"]
"""Why a pass wants matched nodes left as they are, in the words that users read; None where it does not mind."""


class Rewriter(Editor):
    """What a pass gets: the editor of its graph, and rules."""

    def apply(self, *rules: Rule | Family, refuse: Refuse | None = None) -> int:
        """Apply rewrite rules everywhere until none matches; the number of rewrites.

        At a node, larger patterns come first. A worklist holds the nodes to look at: all of them at first, then the
        neighbours of what was rewritten. `refuse(match)` may turn down a match, with a reason.

        Raises:
            PassError: the rules do not come to an end; names those that keep undoing each other.
            PatternError: a replacement returned another number of values than its pattern has outputs.
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
            match = self._first_match(table, node, refuse) if not node._erased else None
            if match is None:
                continue
            done.append(match.rule)
            if len(done) > budget:
                raise PassError(_endless(self.name, done))
            self.near_misses.took(match.rule, match.nodes)
            with self.attributed(match.rule.name, match.rule.source):
                new = replace_match(self, match)
            for near in _neighbours(new):
                if near not in waiting:
                    waiting.add(near)
                    todo.append(near)
        return len(done)

    def _first_match(self, table: Dispatch, node: fx.Node, refuse: Refuse | None) -> Match | None:
        for rule in table.at(node):
            match = self._match(rule, node)
            if match is not None and not self._turned_down(match, refuse):
                return match
        return None

    def _match(self, rule: Rule, node: fx.Node) -> Match | None:
        """A match; where there is none, how near it came is noted."""
        refusal = Refusal()
        match = self.matcher.match(rule, node, refusal)
        if match is None:
            self.near_misses.note(rule, node, refusal)
        return match

    def _turned_down(self, match: Match, refuse: Refuse | None) -> bool:
        reason = refuse(match) if refuse is not None else None
        if reason is not None:
            refusal = Refusal()
            refusal.record(match.rule.size + 1, str, reason)
            self.near_misses.note(match.rule, match.root.node, refusal)
        return reason is not None

    def fuse(self, rules: Sequence[Rule], refuse: Refuse | None = None) -> int:
        """Turn what the fusion rules match into units, in the order of the rules; a node belongs to one unit.

        All matches are found before the first edit, so a rule cannot match what another one made.
        `refuse(match)` may turn down a match, with a reason. The number of units.
        """
        chosen = self._choose(rules, refuse)
        moved: dict[fx.Node, fx.Node] = {}
        for match in sorted(chosen, key=lambda match: match.root.node):
            with self.attributed(match.rule.name, match.rule.source):
                make_unit(self, match, moved)
        return len(chosen)

    def _choose(self, rules: Sequence[Rule], refuse: Refuse | None) -> list[Match]:
        """The matches that become units: rule by rule, each in the order of the graph.

        A rule is matched again, in another way, where one before it has taken some of the nodes; and always where it
        has several outputs: they are looked for among the readers of a value that nobody has taken.
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
            self.near_misses.took(match.rule, match.nodes)
        return chosen

    def _match_everywhere(self, rules: Sequence[Rule]) -> dict[Rule, list[tuple[fx.Node, Match | None]]]:
        """For each rule, the nodes to try it at, and how it matches there. All are tried at a node while it is at hand.

        Nodes without a match are left out, but for rules of several outputs.
        """
        table = Dispatch(rules)
        found: dict[Rule, list[tuple[fx.Node, Match | None]]] = {rule: [] for rule in rules}
        for node in self.graph.nodes:
            for rule in table.at(node):
                match = self._match(rule, node)
                if match is not None or len(rule.outputs) > 1:
                    found[rule].append((node, match))
        return found


def _neighbours(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    near = [n for node in nodes for n in (node, *node.users, *node.all_input_nodes)]
    return [n for n in dict.fromkeys(near) if not n._erased]


def _endless(name: str, done: list[Rule]) -> str:
    recent = list(dict.fromkeys(reversed(done[-50:])))
    names = " and ".join(f"{r.name!r} ({r.source})" for r in recent)
    what = "undo each other" if len(recent) > 1 else "matches its own result"
    return (
        f"{name}: the rules do not come to an end after {len(done)} rewrites: {names} {what}. Add a guard with .unless."
    )


class Builder:
    """The `op` argument of a replacement: `op.relu(x)` adds a node, `op.constant(tensor, "w")` a weight."""

    def __init__(self, rewriter: Rewriter, match: Match) -> None:
        self.rewriter = rewriter
        self.match = match
        self.made: list[fx.Node] = []

    def __getitem__(self, name: str) -> Callable[..., fx.Node]:
        OPS[name]

        def add(*args: Any, **options: Any) -> fx.Node:
            plain = [_value(a) for a in args]
            node = self.rewriter.call(name, *plain, like=self.match.nodes, before=max(self.match.nodes), **options)
            self.made.append(node)
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
        """A new weight."""
        return self.rewriter.constant(tensor, name, before=max(self.match.nodes), like=self.match.nodes)

    def computed(self, function: Callable[..., Tensor], name: str, *reads: Any) -> fx.Node:
        """A new weight that is a function of others; it is trained with these."""
        nodes: list[fx.Node] = [_value(read) for read in reads]
        made = self.constant(function(*(read_attribute(self.rewriter.gm, str(n.target)) for n in nodes)), name)
        if any(depends_on_parameters(self.rewriter, str(n.target)) for n in nodes):
            record_trainable(self.rewriter, made, TrainableConstant(function, [str(n.target) for n in nodes]))
        return made


def _value(value: object) -> Any:
    return value.value if isinstance(value, Captured) else value


def replace_match(rewriter: Rewriter, match: Match) -> list[fx.Node]:
    """Build the rule's replacement and put it in the match's place; the new nodes."""
    rule = match.rule
    if rule.replacement is None:
        raise PatternError(f"rule {rule.name!r} ({rule.source}) has no replacement; add one with @{rule.name}.becomes.")
    builder = Builder(rewriter, match)
    result = rule.replacement(builder, match)
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    values = [_value(v) for v in values]
    if len(values) != len(rule.outputs):
        raise PatternError(
            f"rule {rule.name!r} ({rule.source}): the pattern has {len(rule.outputs)} outputs, its replacement "
            f"returned {len(values)}; return one value for each output."
        )
    outputs = match.outputs
    for old, new in zip(outputs, values, strict=True):
        _inherit(rewriter, old, new)
        rewriter.reroute(old, new)
    gone = []
    for node in reversed(match.nodes):
        if not node.users:
            rewriter.erase(node)
            gone.append(node)
    for node in builder.made:  # a folded conv1 is still conv1
        before = [old for old in gone if old.target is node.target]
        if len(before) == 1 and sum(other.target is node.target for other in builder.made) == 1:
            rewriter.rename(node, before[0].name)
    return [v for v in values if isinstance(v, fx.Node)]


def _inherit(rewriter: Rewriter, old: fx.Node, new: Any) -> None:
    """Shape and dtype that could not be inferred are those of the value replaced."""
    if isinstance(new, fx.Node) and info(new).shape is None:
        rewriter.describe(new, shape=info(old).shape, dtype=info(old).dtype)
