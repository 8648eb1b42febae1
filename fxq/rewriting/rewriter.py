"""The rewriter: edits a graph by rules. Rewrite rules run to a fixpoint; fusions become units."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from fxq.errors import PassError, PatternError
from fxq.graph.info import Plan, info
from fxq.graph.query import arguments_of, op_of
from fxq.graph.unit import UNITS, Unit, unit_of
from fxq.ops import OPS
from fxq.rewriting.editor import Editor
from fxq.rewriting.match import Captured, Match
from fxq.rewriting.near_miss import Refusal
from fxq.rewriting.pattern import Family, Rule
from fxq.rewriting.rule_index import Dispatch

Refuse = Callable[[Sequence[fx.Node]], "str | None"]
"""Why a pass wants these nodes left as they are, in the words that users read; None where it does not mind."""


class Rewriter(Editor):
    """What a pass gets: the editor of its graph, and rules."""

    def apply(self, *rules: Rule | Family, refuse: Refuse | None = None) -> int:
        """Apply rewrite rules everywhere until none matches; the number of rewrites.

        At a node, larger patterns come first. A worklist holds the nodes to look at: all of them at first, then the
        neighbours of what was rewritten. `refuse(nodes)` may turn down a match, with a reason.

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
            self.near.took(match.rule, match.nodes)
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
            if match is not None and not self._turned_down(match, match.nodes, refuse):
                return match
        return None

    def _match(self, rule: Rule, node: fx.Node) -> Match | None:
        """A match; where there is none, how near it came is noted."""
        refusal = Refusal()
        match = self.matcher.match(rule, node, refusal)
        if match is None:
            self.near.note(rule, node, refusal)
        return match

    def _turned_down(self, match: Match, nodes: Sequence[fx.Node], refuse: Refuse | None) -> bool:
        reason = refuse(nodes) if refuse is not None else None
        if reason is not None:
            refusal = Refusal()
            refusal.record(match.rule.size + 1, str, reason)
            self.near.note(match.rule, match.root.node, refusal)
        return reason is not None

    def fuse(self, rules: Sequence[Rule], refuse: Refuse | None = None) -> int:
        """Turn what the fusion rules match into units, in the order of the rules; a node belongs to one unit.

        All matches are found before the first edit, so a rule cannot match what another one made.
        `refuse(nodes)` may turn down a match, with a reason. The number of units.
        """
        chosen = self._choose(rules, refuse)
        for match, nodes in sorted(chosen, key=lambda found: found[0].root.node):
            with self.attributed(match.rule.name, match.rule.source):
                make_unit(self, nodes, match.outputs, match.rule.name)
        return len(chosen)

    def _choose(self, rules: Sequence[Rule], refuse: Refuse | None) -> list[tuple[Match, list[fx.Node]]]:
        """The matches that become units, with their nodes: rule by rule, each in the order of the graph.

        A rule is matched again, in another way, where one before it has taken some of the nodes; and always where it
        has several outputs: they are looked for among the readers of a value that nobody has taken.
        """
        chosen: list[tuple[Match, list[fx.Node]]] = []
        taken = self.matcher.taken
        for rule, places in self._match_everywhere(rules).items():
            for node, match in places:
                nodes = match.nodes if match is not None else []
                if len(rule.outputs) > 1 or not taken.isdisjoint(nodes):
                    match = self.matcher.match(rule, node)
                    nodes = match.nodes if match is not None else []
                if match is not None and not self._turned_down(match, nodes, refuse):
                    taken.update(nodes)
                    chosen.append((match, nodes))
        taken.clear()
        for match, nodes in chosen:
            self.near.took(match.rule, nodes)
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

    def open_unit(self, node: fx.Node) -> list[fx.Node]:
        """Replace a unit by the ops inside it; their nodes, in execution order. The inverse of fusing."""
        unit = unit_of(self.gm, node)
        if unit is None:
            raise PassError(f"{self.name}: %{node.name} is no unit.")
        about = info(node)
        copies: dict[fx.Node, Any] = dict(zip(unit.graph.find_nodes(op="placeholder"), node.args, strict=True))
        made: list[fx.Node] = []
        for inner in unit.graph.nodes:
            if op_of(inner) is not None:
                args, kwargs = arguments_of(inner, copies)
                typed = about.values[len(made)] if about.values else None
                copies[inner] = self.node(
                    "call_function", inner.target, args, kwargs, like=node, name=inner.name, typed=typed
                )
                origins = about.parts[len(made)] if about.parts else about.origins
                path = about.paths[len(made)] if about.paths else about.path
                self.describe(copies[inner], origins=origins, path=path, plan=None)
                made.append(copies[inner])
        self.replace(node, made[-1])
        for op in made:  # back to the names that they had before they were fused
            name = next(iter(info(op).origins), op.name)
            if name not in self.names:
                self.rename(op, name)
        return made


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


def make_unit(rewriter: Rewriter, inside: Sequence[fx.Node], outputs: Sequence[fx.Node], kind: str) -> fx.Node:
    """Replace canonical op nodes by one unit that runs them (see `fxq/graph/unit.py`); its node.

    Args:
        rewriter: the rewriter.
        inside: the ops, in execution order.
        outputs: those of them that are read outside.
        kind: name of the unit.
    """
    inputs = list(dict.fromkeys(v for n in inside for v in n.all_input_nodes if v not in inside))
    key = f"{kind}: {_written(inside, outputs, inputs)}"
    units: dict[str, str] = rewriter.context.units
    if key not in units:
        units[key] = rewriter.module(Unit(kind, _body(inside, outputs, inputs)), kind, UNITS)
    name = "_".join([inside[0].name, *(op.name for op in map(op_of, inside[1:]) if op is not None)])
    node = rewriter.node("call_module", units[key], tuple(inputs), like=inside, before=max(outputs), name=name)
    rewriter.describe(
        node,
        parts=tuple(info(n).origins for n in inside),
        values=tuple((info(n).shape, info(n).dtype) for n in inside),
        paths=tuple(info(n).path for n in inside),
    )
    results = [node]
    if len(outputs) == 1:
        rewriter.describe(node, shape=info(outputs[0]).shape, dtype=info(outputs[0]).dtype)
    else:
        results = [
            rewriter.node("call_function", operator.getitem, (node, i), like=old, before=max(outputs))
            for i, old in enumerate(outputs)
        ]
        for old, new in zip(outputs, results, strict=True):
            rewriter.describe(new, shape=info(old).shape, dtype=info(old).dtype)
    for old, new in zip(outputs, results, strict=True):
        rewriter.reroute(old, new, only=lambda user: user not in inside)
    for old in reversed(inside):
        rewriter.erase(old)
    return node


def split_unit(rewriter: Rewriter, node: fx.Node, ops: int | None) -> None:
    """Leave the first ops of a unit as a unit (or a single op) with its plan, and plan the others in float.

    Args:
        rewriter: the rewriter.
        node: the unit, with a plan.
        ops: how many; None: all of them, so that only its plan changes.
    """
    plan = info(node).plan
    if plan is None:
        raise PassError(f"{rewriter.name}: the unit %{node.name} has no plan.")
    unit = node
    if ops is not None:
        opened = rewriter.open_unit(node)
        head = opened[:ops]
        for rest in opened[ops:]:
            rewriter.describe(rest, plan=Plan(replace(plan.decision, fate="float")))
        unit = head[0]
        if len(head) > 1:
            kind = "_".join(str(getattr(n.target, "__name__", "")) for n in head)
            unit = make_unit(rewriter, head, head[-1:], kind)
    rewriter.describe(unit, plan=replace(plan.decided(kind="", text="", fix=""), kernel_ops=None, longer=0))


def _written(inside: Sequence[fx.Node], outputs: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> str:
    """The body of a unit as text, which is the same for the same body."""
    words = {node: f"%{i}" for i, node in enumerate((*inputs, *inside))}
    calls = []
    for node in inside:
        op = op_of(node)
        args, kwargs = arguments_of(node, words)
        calls.append(f"{words[node]} = {op.name if op is not None else (node.op, node.target)}{args} {kwargs}")
    return "; ".join([*calls, " ".join(words[node] for node in outputs)])


def _body(inside: Sequence[fx.Node], outputs: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> fx.Graph:
    """The matched nodes as a graph of their own; its placeholders stand for the outer nodes that it reads."""
    body = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    names: dict[fx.Node, str] = {}
    for node in inside:
        op = op_of(node)
        for position, value in enumerate(node.args):
            if isinstance(value, fx.Node) and value not in names and op is not None:
                name = op.tensors[position]
                names[value] = name if name not in names.values() else f"{op.name}_{name}_{len(names)}"
    for value in inputs:
        copied[value] = body.placeholder(names.get(value) or f"input_{len(copied)}")
    for node in inside:
        op = op_of(node)
        copied[node] = body.node_copy(node, copied.__getitem__)
        copied[node].meta = {}
        copied[node]._rename(op.name if op is not None else node.name)
    result = tuple(copied[o] for o in outputs)
    body.output(result[0] if len(result) == 1 else result)
    return body
