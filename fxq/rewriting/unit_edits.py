"""Edits of units: make a unit of a match, replace a unit by its ops, split a unit."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxq.errors import PassError
from fxq.graph.info import FusedInfo, Plan, info
from fxq.graph.query import arguments_of, flat_nodes, op_of, swapped, taken_part, values_of
from fxq.graph.unit import UNITS, Unit, calls_of, unit_of
from fxq.rewriting.editor import Editor
from fxq.rewriting.match import Match, inputs_as_in
from fxq.rewriting.pattern import PatternNode


def make_unit(editor: Editor, match: Match, moved: dict[fx.Node, fx.Node] | None = None) -> fx.Node:
    """Replace the nodes of a match by one unit that runs them (see `fxq/graph/unit.py`). Returns its node.

    Args:
        editor: edits the graph.
        match: the match.
        moved: replacements of nodes that were erased since the rule was matched. Those of this unit are added.
    """
    moved = {} if moved is None else moved
    bound = {pattern: swapped(value, moved) for pattern, value in match.bound.items()}
    inputs = {name: swapped(value, moved) for name, value in match.captures.items()}
    inside, patterns = match.nodes, {node: pattern for pattern, node in match.bound.items() if pattern.op is not None}
    reads = {node: inputs_as_in(node, patterns[node], bound) for node in inside}
    options = [read for node in inside for read in flat_nodes(node.kwargs) if read not in patterns]
    inputs |= {f"option_{i}": read for i, read in enumerate(options) if read not in inputs.values()}
    same = [(id(patterns[node]), reads[node] is patterns[node].inputs, node.kwargs) for node in inside]

    def body() -> fx.Graph:
        return _body(match, reads, patterns, inputs)

    name = match.rule.name
    node, results = _join(editor, inside, match.outputs, name, f"{name} {same}", body, tuple(inputs.values()))
    moved.update(zip(match.outputs, results, strict=True))
    return node


def _join(
    editor: Editor,
    inside: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    kind: str,
    key: str,
    body: Callable[[], fx.Graph],
    inputs: tuple[Any, ...],
) -> tuple[fx.Node, list[fx.Node]]:
    """Replace op nodes by a call of a unit. Returns its node and the nodes of its outputs. Equal keys share a body."""
    units = editor.context.units
    if key not in units:
        units[key] = editor.module(Unit(kind, body()), kind, UNITS)
    name = "_".join([inside[0].name, *(op.name for op in map(op_of, inside[1:]) if op is not None)])
    node = editor.node("call_module", units[key], inputs, like=inside, before=max(outputs), name=name)
    editor.describe(
        node,
        fused=FusedInfo(
            parts=tuple(info(n).origins for n in inside),
            values=tuple((info(n).shape, info(n).dtype) for n in inside),
            paths=tuple(info(n).path for n in inside),
        ),
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
    arguments: Mapping[str, Any],
) -> fx.Graph:
    """Copy the matched nodes to a graph of their own, the body of a unit.

    Args:
        match: the match.
        reads: for each matched node, in execution order, the pattern's inputs in the order in which it reads them.
        patterns: pattern node of each matched node.
        arguments: arguments of the unit, by placeholder name.
    """
    body = fx.Graph()
    placeholders = {name: body.placeholder(name) for name in arguments}
    outer = {value: placeholders[name] for name, value in arguments.items() if isinstance(value, fx.Node)}
    copies: dict[Any, Any] = {p: placeholders[p.name] for p in match.bound if p.op is None}
    for node, inputs in reads.items():
        pattern = patterns[node]
        args = fx.node.map_aggregate(inputs, lambda p: copies.get(p, p))
        kwargs = fx.node.map_arg(node.kwargs, outer.__getitem__)
        outer[node] = copies[pattern] = body.create_node("call_function", node.target, args, kwargs, pattern.name)
    body.output(_one_or_all([copies[pattern] for pattern in match.rule.outputs]))
    return body


def open_unit(editor: Editor, node: fx.Node) -> list[fx.Node]:
    """Replace a unit by the ops inside it. Returns their nodes, in execution order."""
    unit = unit_of(editor.gm, node)
    if unit is None:
        raise PassError(f"{editor.name}: %{node.name} is not a unit.")
    about = info(node)
    copies: dict[fx.Node, Any] = dict(zip(unit.graph.find_nodes(op="placeholder"), node.args, strict=True))
    nodes: list[fx.Node] = []
    for inner in unit.graph.nodes:
        op = op_of(inner)
        if op is not None:
            args, kwargs = arguments_of(inner, copies)
            typed = about.fused.values[len(nodes)] if about.fused.values else None
            copies[inner] = editor.call(op.name, *args, like=node, name=inner.name, typed=typed, **kwargs)
            origins = about.fused.parts[len(nodes)] if about.fused.parts else about.origins
            path = about.fused.paths[len(nodes)] if about.fused.paths else about.path
            editor.describe(copies[inner], origins=origins, path=path, plan=None)
            nodes.append(copies[inner])
    returned = [copies[value] for value in flat_nodes(unit.graph.output_node().args)]
    for part in values_of(node):
        if part is not node:
            editor.replace(part, returned[taken_part(part, node)])
    editor.replace(node, _one_or_all(returned))
    for opened in nodes:  # restore the names from before the fusion
        name = next(iter(info(opened).origins), opened.name)
        if name not in editor.names:
            editor.rename(opened, name)
    return nodes


def split_unit(editor: Editor, node: fx.Node, ops: int | None) -> None:
    """Split a unit: its first ops stay a unit (or a single op) with its plan, the others run in float.

    Args:
        editor: edits the graph.
        node: the unit, with a plan.
        ops: number of ops that stay in the unit. With None or all of them, only the plan changes.
    """
    plan, note, calls = info(node).plan, info(node).note, calls_of(editor.gm, node)
    if plan is None:
        raise PassError(f"{editor.name}: the unit %{node.name} has no plan.")
    unit = node
    if ops is not None and ops < len(calls):
        body, arguments, returned = _head(editor.gm, node, ops)
        opened = open_unit(editor, node)
        for rest in opened[ops:]:
            editor.describe(rest, plan=Plan(replace(plan.decision, precision="float")))
        unit = opened[0]
        if ops > 1:
            kind = "_".join(call.op.name for call in calls[:ops])
            outputs = [opened[i] for i in returned]
            unit, _ = _join(editor, opened[:ops], outputs, kind, f"{node.target} {ops}", lambda: body, arguments)
    editor.describe(unit, plan=replace(plan.decided(kind="", text="", fix=""), kernel_ops=()), note=note)


def _head(gm: fx.GraphModule, node: fx.Node, ops: int) -> tuple[fx.Graph, tuple[Any, ...], list[int]]:
    """Copy the first ops of a unit to a body of their own.

    Returns:
        The body, its arguments, and the indices of the ops whose values are its outputs.
    """
    unit = unit_of(gm, node)
    assert unit is not None  # it was opened, or is about to be
    head = [inner for inner in unit.graph.nodes if op_of(inner) is not None][:ops]
    read = {value for inner in head for value in inner.all_input_nodes}
    bound = zip(unit.graph.find_nodes(op="placeholder"), node.args, strict=True)
    arguments = {placeholder: value for placeholder, value in bound if placeholder in read}
    body = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for inner in (*arguments, *head):
        copies[inner] = body.node_copy(inner, copies.__getitem__)
    returned = [i for i, inner in enumerate(head) if not set(head).issuperset(inner.users)]
    body.output(_one_or_all([copies[head[i]] for i in returned]))
    return body, tuple(arguments.values()), returned


def _one_or_all(values: Sequence[Any]) -> Any:
    """Return value of a body: a single value, or a tuple of several."""
    return values[0] if len(values) == 1 else tuple(values)
