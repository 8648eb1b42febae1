"""Making, opening and shortening units: what of a graph becomes one node, and what of it is apart again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxq.errors import PassError
from fxq.graph.info import Plan, info
from fxq.graph.query import arguments_of, flat_nodes, op_of, swapped, taken_part, values_of
from fxq.graph.unit import UNITS, Unit, calls_of, unit_of
from fxq.rewriting.editor import Editor
from fxq.rewriting.match import Match, inputs_as_in
from fxq.rewriting.pattern import PatternNode


def make_unit(editor: Editor, match: Match, moved: dict[fx.Node, fx.Node] | None = None) -> fx.Node:
    """Replace the nodes of a match by one unit that runs them (see `fxq/graph/unit.py`); its node.

    Args:
        editor: of the graph.
        match: the match.
        moved: what stands in the place of nodes that were there when the rule was matched; learns of this unit's.
    """
    moved = {} if moved is None else moved
    bound = {pattern: swapped(value, moved) for pattern, value in match.bound.items()}
    given = {name: swapped(value, moved) for name, value in match.captures.items()}
    inside, patterns = match.nodes, {node: pattern for pattern, node in match.bound.items() if pattern.op is not None}
    reads = {node: inputs_as_in(node, patterns[node], bound) for node in inside}
    options = [read for node in inside for read in flat_nodes(node.kwargs) if read not in patterns]
    given |= {f"option_{i}": read for i, read in enumerate(options) if read not in given.values()}
    same = [(id(patterns[node]), reads[node] is patterns[node].inputs, node.kwargs) for node in inside]

    def body() -> fx.Graph:
        return _body(match, reads, patterns, given)

    name = match.rule.name
    node, results = _join(editor, inside, match.outputs, name, f"{name} {same}", body, tuple(given.values()))
    moved.update(zip(match.outputs, results, strict=True))
    return node


def _join(
    editor: Editor,
    inside: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    kind: str,
    key: str,
    body: Callable[[], fx.Graph],
    given: tuple[Any, ...],
) -> tuple[fx.Node, list[fx.Node]]:
    """Replace op nodes by a call of a unit; its node, and the nodes of its outputs. Equal keys say equal bodies."""
    units: dict[str, str] = editor.context.units
    if key not in units:
        units[key] = editor.module(Unit(kind, body()), kind, UNITS)
    name = "_".join([inside[0].name, *(op.name for op in map(op_of, inside[1:]) if op is not None)])
    node = editor.node("call_module", units[key], given, like=inside, before=max(outputs), name=name)
    editor.describe(
        node,
        parts=tuple(info(n).origins for n in inside),
        values=tuple((info(n).shape, info(n).dtype) for n in inside),
        paths=tuple(info(n).path for n in inside),
    )
    results = [node]
    if len(outputs) > 1:
        take = [("call_function", operator.getitem, (node, i)) for i in range(len(outputs))]
        results = [editor.node(*call, like=old, before=max(outputs)) for call, old in zip(take, outputs, strict=True)]
    for old, new in zip(outputs, results, strict=True):
        editor.describe(new, shape=info(old).shape, dtype=info(old).dtype)
        editor.reroute(old, new, only=lambda user: user not in inside)
    for old in reversed(inside):
        editor.erase(old)
    for old, new in zip(outputs, results, strict=True) if len(outputs) > 1 else ():
        editor.rename(new, old.name)
    return node, results


def _body(
    match: Match,
    reads: Mapping[fx.Node, tuple[Any, ...]],
    patterns: Mapping[fx.Node, PatternNode],
    given: Mapping[str, Any],
) -> fx.Graph:
    """The matched nodes as a graph of their own.

    Args:
        match: the match.
        reads: by node, in order, what of the pattern it reads.
        patterns: what of the pattern each node is.
        given: what the unit is called with, by the names of the placeholders.
    """
    body = fx.Graph()
    placeholders = {name: body.placeholder(name) for name in given}
    outer = {value: placeholders[name] for name, value in given.items() if isinstance(value, fx.Node)}
    copies: dict[Any, Any] = {p: placeholders[p.name] for p in match.bound if p.op is None}
    for node, inputs in reads.items():
        pattern = patterns[node]
        args = fx.node.map_aggregate(inputs, lambda p: copies.get(p, p))
        kwargs = fx.node.map_arg(node.kwargs, outer.__getitem__)
        outer[node] = copies[pattern] = body.create_node("call_function", node.target, args, kwargs, pattern.name)
    body.output(_one_or_all([copies[pattern] for pattern in match.rule.outputs]))
    return body


def open_unit(editor: Editor, node: fx.Node) -> list[fx.Node]:
    """Replace a unit by the ops inside it; their nodes, in execution order. The inverse of fusing."""
    unit = unit_of(editor.gm, node)
    if unit is None:
        raise PassError(f"{editor.name}: %{node.name} is no unit.")
    about = info(node)
    copies: dict[fx.Node, Any] = dict(zip(unit.graph.find_nodes(op="placeholder"), node.args, strict=True))
    made: list[fx.Node] = []
    for inner in unit.graph.nodes:
        op = op_of(inner)
        if op is not None:
            args, kwargs = arguments_of(inner, copies)
            typed = about.values[len(made)] if about.values else None
            copies[inner] = editor.call(op.name, *args, like=node, name=inner.name, typed=typed, **kwargs)
            origins = about.parts[len(made)] if about.parts else about.origins
            path = about.paths[len(made)] if about.paths else about.path
            editor.describe(copies[inner], origins=origins, path=path, plan=None)
            made.append(copies[inner])
    returned = [copies[value] for value in flat_nodes(unit.graph.output_node().args)]
    for part in values_of(node):
        if part is not node:
            editor.replace(part, returned[taken_part(part, node)])
    editor.replace(node, _one_or_all(returned))
    for opened in made:  # back to the names that they had before they were fused
        name = next(iter(info(opened).origins), opened.name)
        if name not in editor.names:
            editor.rename(opened, name)
    return made


def split_unit(editor: Editor, node: fx.Node, ops: int | None) -> None:
    """Leave the first ops of a unit as a unit (or a single op) with its plan, and plan the others in float.

    Args:
        editor: of the graph.
        node: the unit, with a plan.
        ops: how many; None, or as many as it has: all of them, so that only its plan changes.
    """
    plan, note, calls = info(node).plan, info(node).note, calls_of(editor.gm, node)
    if plan is None:
        raise PassError(f"{editor.name}: the unit %{node.name} has no plan.")
    unit = node
    if ops is not None and ops < len(calls):
        body, given, returned = _head(editor.gm, node, ops)
        opened = open_unit(editor, node)
        for rest in opened[ops:]:
            editor.describe(rest, plan=Plan(replace(plan.decision, precision="float")))
        unit = opened[0]
        if ops > 1:
            kind = "_".join(call.op.name for call in calls[:ops])
            outputs = [opened[i] for i in returned]
            unit, _ = _join(editor, opened[:ops], outputs, kind, f"{node.target} {ops}", lambda: body, given)
    editor.describe(unit, plan=replace(plan.decided(kind="", text="", fix=""), kernel_ops=()), note=note)


def _head(gm: fx.GraphModule, node: fx.Node, ops: int) -> tuple[fx.Graph, tuple[Any, ...], list[int]]:
    """The first ops of a unit as a body of their own, with those captures that they read.

    Besides, the values of these, and which of the ops make what others read.
    """
    unit = unit_of(gm, node)
    assert unit is not None  # it was opened, or is about to be
    head = [inner for inner in unit.graph.nodes if op_of(inner) is not None][:ops]
    read = {value for inner in head for value in inner.all_input_nodes}
    given = zip(unit.graph.find_nodes(op="placeholder"), node.args, strict=True)
    kept = {placeholder: value for placeholder, value in given if placeholder in read}
    body = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for inner in (*kept, *head):
        copies[inner] = body.node_copy(inner, copies.__getitem__)
    returned = [i for i, inner in enumerate(head) if not set(head).issuperset(inner.users)]
    body.output(_one_or_all([copies[head[i]] for i in returned]))
    return body, tuple(kept.values()), returned


def _one_or_all(values: Sequence[Any]) -> Any:
    """What a body returns: its one value, or a tuple of several."""
    return values[0] if len(values) == 1 else tuple(values)
