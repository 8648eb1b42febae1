"""Types and facts in a line of a graph's text: they set the metadata of the line's node."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fxq.errors import InputError, unknown
from fxq.graph.info import set_info
from fxq.graph.query import op_of, tensor_meta
from fxq.graph.run import Typed, infer
from fxq.graph.text.text_values import parsed, read_arguments, read_type, type_text
from fxq.graph.text.text_writer import FACTS, derived, with_facts
from fxq.graph.unit import Unit


def describe(
    node: fx.Node,
    target: Any,
    annotation: ast.expr | None,
    comment: str,
    nodes: Mapping[str, fx.Node],
    complete: bool,
) -> None:
    """Set the metadata of a node from its line, and check the type of its value.

    Args:
        node: the node, already in its graph.
        target: the tensor that it reads or the module that it calls, or None.
        annotation: the type in the line, or None.
        comment: the comment of the line.
        nodes: the nodes before it, by name.
        complete: whether to trust the type in the line; else it is compared with the inferred one.

    Raises:
        InputError: the types differ, or the comment has an unknown fact.
    """
    facts = _facts(comment, nodes)
    called = target if node.op == "call_module" else None
    defaults = derived(node, called, facts, complete)
    typed = tensor_meta(target) if node.op == "get_attr" else (None, None)
    if node.op != "get_attr" and not complete:
        typed = _inferred_type(node, called, defaults.fused.values)
    if annotation is not None:
        written = read_type(annotation)
        if None not in (typed[0], written[0]) and typed != written:
            raise InputError(f"its value is {type_text(*typed)}, but the line says {type_text(*written)}.")
        typed = written
    set_info(node, **with_facts(defaults, facts)._replace(shape=typed[0], dtype=typed[1])._asdict())


def _inferred_type(node: fx.Node, called: Any, values: Sequence[Typed]) -> Typed:
    """Type of an op's value; for a unit, the type of its last op, one of `values`."""
    if isinstance(called, Unit):
        last = next(iter(called.graph.output_node().args))
        return values[-1] if isinstance(last, fx.Node) and values else (None, None)
    return infer(node) if op_of(node) is not None else (None, None)


def _facts(comment: str, nodes: Mapping[str, fx.Node]) -> dict[str, Any]:
    if not comment:
        return {}
    call = parsed(f"facts({comment})")[0].value  # type: ignore[attr-defined]
    args, named = read_arguments(call, nodes)
    facts = {**dict(zip(("path", "source"), args, strict=False)), **named}
    for key in facts:
        if key not in FACTS:
            raise InputError(unknown("fact of a node", key, FACTS))
    return facts
