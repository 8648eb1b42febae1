"""What a line of a graph's text says of its node besides the call: the type of its value, and facts in the comment."""

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
from fxq.graph.text.text_writer import FACTS, derived
from fxq.graph.unit import Unit


def describe(
    node: fx.Node,
    held: Any,
    annotation: ast.expr | None,
    comment: str,
    nodes: Mapping[str, fx.Node],
    complete: bool,
) -> None:
    """Set the metadata of a node, and check its type.

    Args:
        node: the node, which is in its graph.
        held: the tensor that it reads or the module that it calls, if it does.
        annotation: the type that the line writes.
        comment: its comment.
        nodes: the nodes before it, by name.
        complete: whether the type is taken as it is written; else it is compared with the one that the op gives.

    Raises:
        InputError: the type is another one, or the comment holds what is no fact.
    """
    facts = _facts(comment, nodes)
    called = held if node.op == "call_module" else None
    known = derived(node, called, facts, complete)
    typed = tensor_meta(held) if node.op == "get_attr" else (None, None)
    if node.op != "get_attr" and not complete:
        typed = _found_type(node, called, known.values)
    if annotation is not None:
        said = read_type(annotation)
        if None not in (typed[0], said[0]) and typed != said:
            raise InputError(f"its value is {type_text(*typed)}, the line says {type_text(*said)}.")
        typed = said
    set_info(node, **{**known._asdict(), **facts, "shape": typed[0], "dtype": typed[1]})


def _found_type(node: fx.Node, called: Any, values: Sequence[Typed]) -> Typed:
    """The type that an op gives; of a node that calls a unit, from those of the ops inside."""
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
