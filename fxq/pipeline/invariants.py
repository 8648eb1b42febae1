"""Invariants of each stage, which the pass manager checks after every pass in addition to `graph.lint()`."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import fx

from fxq.errors import PassError
from fxq.graph.info import info
from fxq.graph.place import where
from fxq.graph.query import constant, is_op, op_of, submodule, taken_from
from fxq.graph.unit import unit_of
from fxq.ops import OPS
from fxq.quant.observer_base import Observer
from fxq.recipe.pass_base import Stage

Check = Callable[[fx.GraphModule, fx.Node], str | None]


def check(gm: fx.GraphModule, stage: Stage, after: str) -> None:
    """Raise `PassError` with the pass `after` and the node, if a node breaks an invariant of the stage."""
    try:
        gm.graph.lint()
    except (RuntimeError, ValueError) as error:
        raise PassError(f"after {after}: the graph is invalid: {_lint(gm, error)}") from error
    if not gm.graph.find_nodes(op="output"):
        raise PassError(f"after {after}: the graph has no output node: it returns nothing.")
    checks = _CHECKS[stage]
    for node in gm.graph.nodes:
        for check_node in checks:
            reason = check_node(gm, node)
            if reason is not None:
                raise PassError(f"after {after}: {where(gm, node)}: {reason}")


def _lint(gm: fx.GraphModule, error: Exception) -> str:
    """Message of `graph.lint` without the graph that it prints, and with the place of the node that it names."""
    message = str(error).partition("\n")[0]
    named = re.search(r"Node '?(\w+)", message)
    node = next((n for n in gm.graph.nodes if named is not None and n.name == named[1]), None)
    return f"{where(gm, node)}: {message}" if node is not None else message


def _spelled_canonically(gm: fx.GraphModule, node: fx.Node) -> str | None:
    if node.op in ("call_function", "call_method") and op_of(node) is None and info(node).traced.kept is None:
        row = OPS.of_call(node.target)
        if row is not None and info(node).is_tensor and taken_from(node) is node:
            return f"is a spelling of {row[0].name}; a pass writes rewriter.call({row[0].name!r}, ...)"
    return None


def _has_all_arguments(gm: fx.GraphModule, node: fx.Node) -> str | None:
    op = op_of(node)
    if op is None:
        return None
    unknown = [key for key in node.kwargs if key not in op.options]
    if unknown:
        return f"{op.name} has no option {unknown[0]!r}"
    return (
        None
        if len(node.args) <= len(op.tensors)
        else f"{op.name} takes {len(op.tensors)} tensors, not {len(node.args)}"
    )


def _unit_is_called_right(gm: fx.GraphModule, node: fx.Node) -> str | None:
    unit = unit_of(gm, node)
    if unit is None:
        return None
    inputs = len(unit.graph.find_nodes(op="placeholder"))
    return None if inputs == len(node.args) else f"the unit takes {inputs} inputs, the call gives {len(node.args)}"


def _edges_are_observed(gm: fx.GraphModule, node: fx.Node) -> str | None:
    for edge in info(node).edges:
        if edge.observed:
            watching = [u for u in _readers_through_observers(gm, node) if isinstance(submodule(gm, u), Observer)]
            if not watching:
                return f"its value is to be quantized ({edge.spec}) but no observer watches it"
    return None


def _readers_through_observers(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    observers, todo = [], list(node.users)
    while todo:
        user = todo.pop()
        if isinstance(submodule(gm, user), Observer):
            observers.append(user)
            todo.extend(user.users)
    return observers


def _no_observer_left(gm: fx.GraphModule, node: fx.Node) -> str | None:
    return "an observer is left; run calibration and insert-qdq" if isinstance(submodule(gm, node), Observer) else None


def _converts_right(gm: fx.GraphModule, node: fx.Node) -> str | None:
    if not is_op(node, "quantize", "dequantize"):
        return None
    source = node.args[0]
    dtype = info(source).dtype if isinstance(source, fx.Node) else None
    if is_op(node, "quantize") and dtype is not None and not dtype.is_floating_point:
        return f"quantizes %{source}, which is {dtype} already"
    if (
        not is_op(node, "quantize")
        and dtype not in (None, torch.uint8, torch.int8)
        and not _is_kept_in_float16(gm, source)
    ):
        return f"dequantizes %{source}, which is {dtype}"
    scale = node.kwargs.get("scale")
    if scale is None:
        return "has no scale. Run calibration first, or set the layer to float"
    fixed = constant(gm, scale) if isinstance(scale, fx.Node) else torch.as_tensor(scale)
    values = fixed if fixed is not None else torch.ones(())  # a scale that the graph computes is not known yet
    may_be_negative = node.kwargs.get("block") is not None  # weights of files, such as Q4_0 of GGUF
    if not bool((torch.isfinite(values) & ((values > 0) | (may_be_negative & (values != 0)))).all()):
        return "its scale is not a positive finite number"
    return None


def _is_kept_in_float16(gm: fx.GraphModule, source: object) -> bool:
    """Whether a value is a weight that is stored in float16."""
    weight = constant(gm, source)
    return weight is not None and weight.dtype == torch.float16


_CANONICAL: list[Check] = [_spelled_canonically, _has_all_arguments]
_FUSED: list[Check] = [*_CANONICAL, _unit_is_called_right]
_QDQ: list[Check] = [*_FUSED, _no_observer_left, _converts_right]
_CHECKS: dict[Stage, list[Check]] = {
    Stage.NONE: [],
    Stage.TRACED: [],
    Stage.CANONICAL: _CANONICAL,
    Stage.FUSED: _FUSED,
    Stage.OBSERVED: [*_FUSED, _edges_are_observed],
    Stage.QDQ: _QDQ,
    Stage.LOWERED: [_no_observer_left, _unit_is_called_right],
}
