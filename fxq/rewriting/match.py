"""Matching of rules in a graph, and explanations why a rule did not match.

Matching starts at the pattern's root and follows inputs. Further outputs are found among the users, by op, of values
that are already bound. It is linear in the number of nodes, since patterns are small and every choice is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx

from fxq.errors import PatternError, unknown
from fxq.graph.analysis.mutation import MemoryWriters
from fxq.graph.info import info
from fxq.graph.query import activation_nodes, called_name, constant, flat_nodes, is_op, op_of, options_of
from fxq.rewriting.near_miss import Refusal
from fxq.rewriting.pattern import FUSIONS, ON_REQUEST, REWRITES, AnyOp, Each, Family, PatternNode, Rule

_MAX_CANDIDATES = 16


@dataclass(frozen=True)
class Capture:
    """Value that a pattern's parameter is bound to, for guards and replacements."""

    gm: fx.GraphModule
    value: Any

    @property
    def node(self) -> fx.Node:
        """Graph node. Raises `PatternError` if the value is a number or None."""
        if not isinstance(self.value, fx.Node):
            raise PatternError(f"the capture is {self.value!r}, not a node of the graph.")
        return self.value

    @property
    def is_none(self) -> bool:
        """Whether the argument is absent."""
        return self.value is None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the value; () for a number; None if it is no tensor."""
        if self.value is None:
            return None
        return info(self.value).shape if isinstance(self.value, fx.Node) else ()

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the value; None if it is no tensor."""
        return info(self.value).dtype if isinstance(self.value, fx.Node) else None

    @property
    def tensor(self) -> Tensor | None:
        """Tensor of a weight or another constant of the model; None for other values."""
        return constant(self.gm, self.value)


@dataclass(eq=False)
class Match:
    """Match of a rule: the graph nodes that its pattern stands for.

    Captures are attributes: `m.x.shape`; `m.root` is the first output. A capture has `shape`,
    `dtype`, `node`, `value` (the node or number), `is_none` (the argument is absent) and
    `tensor` (of a weight or another constant).

    Attributes:
        rule: the rule.
        gm: module of the graph.
        bound: graph node of each pattern node (of a capture also a constant); inside `op.each` a tuple of nodes.
        captures: value of each parameter of the pattern, a graph node or constant; inside `op.each` a tuple of them.
    """

    rule: Rule
    gm: fx.GraphModule
    bound: dict[PatternNode, Any]
    captures: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        values = {p.name: v for p, v in self.bound.items() if p.op is None}
        self.captures = {name: values[name] for name in self.rule.captures}

    def __getattr__(self, name: str) -> Capture:
        captures = self.__dict__.get("captures", {})
        if name in captures:
            return Capture(self.gm, captures[name])
        raise AttributeError(f"rule {self.rule.name!r} has no capture {name!r}; it has {', '.join(captures)}.")

    @property
    def root(self) -> Capture:
        """Value of the pattern's first output."""
        return Capture(self.gm, self.bound[self.rule.root])

    @property
    def outputs(self) -> list[fx.Node]:
        """Graph nodes of the pattern's outputs, in order."""
        return [self.bound[p] for p in self.rule.outputs]

    @property
    def nodes(self) -> list[fx.Node]:
        """Matched op nodes, in execution order."""
        return sorted({node for p, v in self.bound.items() if p.op is not None for node in flat_nodes(v)})

    def options(self, op: str) -> dict[str, Any]:
        """Options of the matched node that calls `op`, including defaults; of the first if there are several."""
        for p, v in self.bound.items():
            if p.op is not None and p.name == op:
                return options_of(next(flat_nodes(v)))
        raise PatternError(f"rule {self.rule.name!r} has no op {op!r}.")


class Matcher:
    """Matches rules in one graph. Call `update(node)` after an edit that made or changed a node.

    Attributes:
        gm: module of the graph.
        taken: nodes that no further match may contain.
        changes: changes in place, by node.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.taken: set[fx.Node] = set()
        self._users: dict[fx.Node, dict[str, deque[fx.Node]]] = {}
        self.changes = MemoryWriters(gm.graph.nodes)

    def update(self, node: fx.Node) -> None:
        """Record the inputs and the in-place changes of a node that was made or changed."""
        self.changes.note(node)
        op = op_of(node)
        if op is not None:
            for read in node.all_input_nodes:
                if read in self._users:
                    self._users[read].setdefault(op.name, deque()).append(node)

    def match(self, rule: Rule, node: fx.Node, refusal: Refusal | None = None) -> Match | None:
        """Match `rule` with its root at `node`; None if it does not match. `refusal` gets the furthest failure."""
        failed = refusal if refusal is not None else Refusal()
        for bound in self._solve([(rule.root, node)], {}, 0, failed):
            for complete in self._other_outputs(rule, bound, failed):
                match = Match(rule, self.gm, complete)
                reason = self._refused(match)
                if reason is None:
                    return match
                failed.record(rule.size + 1, str, reason)
        return None

    def _solve(
        self, todo: list[tuple[Any, Any]], bound: dict[PatternNode, Any], matched: int, failed: Refusal
    ) -> Iterator[dict[PatternNode, Any]]:
        """Find all ways to bind the pairs of pattern and value in `todo`, in addition to `bound` (`matched` ops)."""
        if not todo:
            yield bound
            return
        (pattern, value), *rest = todo
        why = self._why_not(pattern, value, bound)
        if why is not None:
            failed.record(matched, *why)
        elif isinstance(pattern, (tuple, list)):
            yield from self._solve([*zip(pattern, value, strict=True), *rest], bound, matched, failed)
        elif isinstance(pattern, Each):
            alike = self._solve_each(pattern, value, matched, failed)
            if alike is not None:
                ops = sum(p.op is not None for p in alike)
                yield from self._solve(rest, {**bound, **alike}, matched + ops, failed)
        elif not isinstance(pattern, PatternNode) or pattern in bound:
            yield from self._solve(rest, bound, matched, failed)
        elif pattern.op is None:
            yield from self._solve(rest, {**bound, pattern: value}, matched, failed)
        else:
            for inputs in _orders(pattern, value):
                yield from self._solve([*inputs, *rest], {**bound, pattern: value}, matched + 1, failed)

    def _solve_each(
        self, repeated: Each, values: Any, matched: int, failed: Refusal
    ) -> dict[PatternNode, tuple[Any, ...]] | None:
        """Bind the nodes of a pattern to one entry for each value; None if a value does not fit."""
        parts = []
        for value in dict.fromkeys(values):
            part = next(self._solve([(repeated.pattern, value)], {}, matched, failed), None)
            if part is None:
                return None
            parts.append(part)
        return {p: tuple(part[p] for part in parts) for p in parts[0]}

    def _why_not(self, pattern: Any, value: Any, bound: dict[PatternNode, Any]) -> tuple[Any, ...] | None:
        """Reason why a value does not fit a pattern, as arguments of `Refusal.record`; None if it may fit."""
        plain = not isinstance(value, fx.Node)
        if isinstance(pattern, (tuple, list)):
            alike = isinstance(value, (tuple, list)) and len(pattern) == len(value)
            return None if alike else (_unlike, pattern, value)
        if isinstance(pattern, Each):
            nodes = isinstance(value, (tuple, list)) and value and all(isinstance(v, fx.Node) for v in value)
            return None if nodes else (_unlike, pattern.pattern, value)
        if not isinstance(pattern, PatternNode):
            return None if plain and pattern == value else (_unlike, pattern, value)
        if pattern in bound:
            same = bound[pattern] is value or (plain and bound[pattern] == value)
            return None if same else (_unequal, pattern, bound[pattern], value)
        if pattern.op is None:
            return None
        if not _fits(pattern, value):
            return _mismatch, pattern, value
        if value in self.taken:
            return "%{0.name} belongs to another match".format, value
        return ("%{0.name} would be matched twice".format, value) if value in bound.values() else None

    def _other_outputs(
        self, rule: Rule, bound: dict[PatternNode, Any], failed: Refusal
    ) -> Iterator[dict[PatternNode, Any]]:
        missing = next((p for p in rule.outputs if p not in bound), None)
        if missing is None:
            yield bound
            return
        matched = sum(p.op is not None for p in bound)
        for node in islice(self._candidates(missing, bound), _MAX_CANDIDATES):
            for more in self._solve([(missing, node)], bound, matched, failed):
                yield from self._other_outputs(rule, more, failed)
        failed.record(matched, "no {0.name} that shares a value with the first output".format, missing)

    def _candidates(self, wanted: PatternNode, bound: dict[PatternNode, Any]) -> Iterator[fx.Node]:
        """Graph nodes that may be the output `wanted`: users of its op of a bound value that it depends on."""
        for p in wanted.inputs:
            if isinstance(p, PatternNode) and isinstance(bound.get(p), fx.Node):
                yield from self.users(bound[p], wanted.name)
                return
        for p in wanted.inputs:
            if isinstance(p, PatternNode) and p.op is not None:
                for inner in islice(self._candidates(p, bound), _MAX_CANDIDATES):
                    yield from self.users(inner, wanted.name)
                return

    def users(self, node: fx.Node, op: str) -> Iterator[fx.Node]:
        """Users of `node` that call `op` and are not taken. Erased users are dropped from the index."""
        if node not in self._users:
            table: dict[str, deque[fx.Node]] = {}
            for user in node.users:
                row = op_of(user)
                if row is not None:
                    table.setdefault(row.name, deque()).append(user)
            self._users[node] = table
        users = self._users[node].get(op, deque())
        while users and not self._is_free(users[0], node, op):
            users.popleft()
        return (user for user in list(islice(users, _MAX_CANDIDATES)) if self._is_free(user, node, op))

    def _is_free(self, user: fx.Node, read: fx.Node, op: str) -> bool:
        """Whether `user` still calls `op` on `read`, and may be matched."""
        return user not in self.taken and is_op(user, op) and read in user.all_input_nodes and not user._erased

    def _refused(self, match: Match) -> str | None:
        nodes, outputs = set(match.nodes), set(match.outputs)
        both = next((n for value in match.captures.values() for n in flat_nodes(value) if n in nodes), None)
        if both is not None:
            return f"%{both.name} would be an input of the match and a part of it"
        for node in nodes - outputs if match.rule.exclusive else ():
            outside = next((user for user in node.users if user not in nodes), None)
            if outside is not None:
                return f"%{node.name} is also read by %{outside.name}"
        last = max(outputs)
        for node in outputs:
            early = next((user for user in node.users if user not in nodes and user < last), None)
            if early is not None:
                return f"%{early.name} reads %{node.name} before %{last.name} is computed"
        for value in match.captures.values():
            for node in flat_nodes(value):
                changer = self.changes.of(node)
                if changer is not None:
                    return f"%{node.name} is changed in place by %{changer.name}"
        return next((guard.__name__ for guard in match.rule.guards if guard(match)), None)


def _fits(pattern: PatternNode, value: Any) -> bool:
    """Whether a graph value is a call of the pattern's op with its options."""
    if not isinstance(value, fx.Node) or not pattern.accepts(op_of(value)):
        return False
    if isinstance(pattern.op, AnyOp):
        return _exception(value) is None and len(_activations(pattern, value)) == len(pattern.inputs)
    if not pattern.options:
        return True
    options = options_of(value)
    return all(options[key] == wanted for key, wanted in pattern.options.items())


def _mismatch(pattern: PatternNode, value: Any) -> str:
    """Reason why a graph value does not fit a pattern node."""
    wildcard = isinstance(pattern.op, AnyOp)
    expects = f"the pattern expects {pattern.op if wildcard else pattern.name}"
    if not isinstance(value, fx.Node):
        return f"{expects}, but the graph has {_show(value)}"
    if not pattern.accepts(op_of(value)):
        called = value.op if value.op in ("placeholder", "output") else called_name(value)
        return f"{expects}, but %{value.name} is {called}"
    if wildcard and (reason := _exception(value)) is not None:
        return f"{expects}, but %{value.name} is an exception of {called_name(value)}: {reason}"
    if wildcard:
        wanted = f"{len(pattern.inputs)} activation{'s' if len(pattern.inputs) > 1 else ''}"
        return f"{expects} and {wanted}, but %{value.name} has {len(activation_nodes(value))}"
    options = options_of(value)
    key, wanted = next((key, wanted) for key, wanted in pattern.options.items() if options[key] != wanted)
    return f"the pattern expects {pattern.name} with {key}={wanted!r}, but %{value.name} has {options[key]!r}"


def _exception(node: fx.Node) -> str | None:
    """Reason why a call does not have the kind of its op's row; None if it has."""
    op = op_of(node)
    return op.traits.unless(options_of(node)) if op is not None and op.traits.unless is not None else None


def _activations(pattern: PatternNode, node: fx.Node) -> list[Any]:
    """Values that the inputs of a trait wildcard are matched with: activations, or one list of all of them."""
    nodes = activation_nodes(node)
    return [nodes] if len(pattern.inputs) == 1 and isinstance(pattern.inputs[0], Each) else nodes


def _unequal(pattern: PatternNode, first: Any, second: Any) -> str:
    return f"{pattern.name} is used twice in the pattern, but {_show(first)} is not {_show(second)}"


def _unlike(pattern: Any, value: Any) -> str:
    return f"the pattern expects {pattern!r}, but the graph has {_show(value)}"


def _orders(pattern: PatternNode, node: fx.Node) -> Iterator[list[tuple[Any, Any]]]:
    """Pair the pattern's inputs with the node's arguments: as written, and swapped if the op commutes."""
    if isinstance(pattern.op, AnyOp):
        yield list(zip(pattern.inputs, _activations(pattern, node), strict=True))
        return
    count = max(len(pattern.inputs), len(node.args))
    inputs = [
        *pattern.inputs,
        *[None] * (count - len(pattern.inputs)),
    ]  # an argument left out of the pattern must be absent
    args = [*node.args, *[None] * (count - len(node.args))]
    yield list(zip(inputs, args, strict=True))
    if pattern.op is not None and pattern.op.commutes and len(pattern.inputs) == 2:
        yield list(zip(inputs, args[1::-1], strict=True))


def inputs_as_in(node: fx.Node, pattern: PatternNode, bound: Mapping[PatternNode, Any]) -> tuple[Any, ...]:
    """Inputs of a pattern node, in the order in which its graph node reads them."""
    swaps = pattern.op is not None and pattern.op.commutes and len(pattern.inputs) == 2
    if swaps and bound.get(pattern.inputs[0], pattern.inputs[0]) != node.args[0]:
        return pattern.inputs[::-1]
    return pattern.inputs


def _show(value: Any) -> str:
    return f"%{value.name}" if isinstance(value, fx.Node) else repr(value)


def explain(rule: str | Rule | Family, gm: fx.GraphModule, node: str | fx.Node) -> str:
    """Explain whether a rule matches at a node: which nodes match, or how far matching came and why it stopped.

    Args:
        rule: a rule, or the name of a rewrite or of a fusion, including those with `everywhere=False`.
        gm: a graph as it is before the pass that applies the rule, e.g. for fusions from
            `fxq.extend.run_passes(model, recipe, example_inputs=x, until="fold-batch-norm")`, and for the rules of
            `propagate` with `data=` and `until="correct-bias"`.
        node: the node where the pattern's first output would be, or its name.

    Returns:
        One line of text.

    Raises:
        PatternError: unknown rule or node (nearest names given).
    """
    rules = {**REWRITES, **ON_REQUEST, **{fusion.name: fusion for fusion in FUSIONS}}
    chosen = _find("rule", rule, rules) if isinstance(rule, str) else rule[0] if isinstance(rule, Family) else rule
    place = node if isinstance(node, fx.Node) else _find("node", node, {n.name: n for n in gm.graph.nodes})
    refusal = Refusal()
    match = Matcher(gm).match(chosen, place, refusal)
    where = f"{chosen.name} ({chosen.source}) at %{place.name}"
    if match is not None:
        return f"{where}: matches {', '.join('%' + n.name for n in match.nodes)}"
    depth = f"{max(0, min(refusal.matched, chosen.size))} of {chosen.size} ops matched"
    return f"{where}: no match ({depth}): {refusal.reason}"


def _find(kind: str, name: str, choices: Mapping[str, Any]) -> Any:
    if name not in choices:
        raise PatternError(unknown(kind, name, choices))
    return choices[name]
