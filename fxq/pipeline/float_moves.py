"""Conversion of ops that only move data from integers to floats, where nothing reads their integers."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxq.graph.info import Decision, Plan, precision_of
from fxq.graph.query import argument, dynamic_grid_ops, is_op, op_of, plan_of, reads_only_metadata, swapped
from fxq.pipeline.candidates import UNREAD
from fxq.rewriting.rewriter import Rewriter


def move_floats(rewriter: Rewriter, value: fx.Node) -> None:
    """Let the chain of data-moving ops that ends with `value` move floats, so that `value` is not rounded twice.

    Before: transpose(dequantize(quantize(reshape(dequantize(quantize(x))))))    After: transpose(reshape(x))
    The chain begins after the last op whose integers have another reader. If a kernel that emits only integers
    computes `x`, nothing is changed.
    """
    moved: dict[fx.Node, Any] = {}
    node = value
    while (
        _has_no_integer_reader(value)
        and (dequantize := _input_of_move(node)) is not None
        and _has_no_integer_reader(dequantize.args[0].args[0], dequantize)
    ):
        moved[node] = dequantize
        node = dequantize.args[0].args[0]
    plan = plan_of(node)
    if plan is not None and plan.emits is not None:
        return
    for mover, dequantize in moved.items():
        quantize = dequantize.args[0]
        rewriter.update(mover, args=swapped(mover.args, {dequantize: quantize.args[0]}))
        rewriter.reroute(quantize, quantize.args[0], only=reads_only_metadata)
        decision = Decision("float", "no integer neighbour", UNREAD, decided_by=rewriter.name)
        rewriter.describe(mover, plan=Plan(decision))
    rewriter.erase_unused()


def _input_of_move(node: fx.Node) -> Any:
    """Dequantize of the only input of a node that only moves data; None if the node does something else."""
    op = op_of(node)
    if op is None or not op.traits.layout or len(op.traits.inputs) != 1 or precision_of(node) != "moves":
        return None
    dequantize = argument(node, op.traits.inputs[0])
    return dequantize if is_op(dequantize, "dequantize") and is_op(dequantize.args[0], "quantize") else None


def _has_no_integer_reader(node: fx.Node, dequantize: fx.Node | None = None) -> bool:
    """Whether nothing reads the integers of a value, except this `dequantize`, which then must have one reader."""
    readers = {reader for user in node.users if _is_static_quantize(user) for reader in user.users}
    further = {reader for reader in readers if not reads_only_metadata(reader) and reader is not dequantize}
    return not further and (dequantize is None or len(dequantize.users) == 1)


def _is_static_quantize(node: fx.Node) -> bool:
    """Whether a node quantizes to a grid that is known before the model runs."""
    return is_op(node, "quantize") and not dynamic_grid_ops(node)
