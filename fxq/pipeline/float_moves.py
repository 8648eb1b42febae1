"""Ops that only move data, taken off their grid: they move floats where nobody needs their integers."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxq.graph.info import Decision, Plan, precision_of
from fxq.graph.query import argument, dynamic_grid_ops, is_op, op_of, plan_of, reads_only_metadata, swapped
from fxq.pipeline.candidates import UNREAD
from fxq.rewriting.rewriter import Rewriter


def move_floats(rewriter: Rewriter, value: fx.Node) -> None:
    """Let the ops that only move data, from the one that makes `value` back, move floats, as far as they may.

    Before: transpose(dequantize(quantize(reshape(dequantize(quantize(x))))))    After: transpose(reshape(x))
    So what is rounded anew behind `value` is not rounded twice. It goes back to an op whose integers somebody else
    reads, and nothing is changed where a kernel makes `x` that emits nothing but integers.
    """
    moved: dict[fx.Node, Any] = {}
    node = value
    while _is_free(value) and (back := _moved_by(node)) is not None and _is_free(back.args[0].args[0], back):
        moved[node] = back
        node = back.args[0].args[0]
    plan = plan_of(node)
    if plan is not None and plan.emits is not None:
        return
    for mover, back in moved.items():
        quantize = back.args[0]
        rewriter.update(mover, args=swapped(mover.args, {back: quantize.args[0]}))
        rewriter.reroute(quantize, quantize.args[0], only=reads_only_metadata)
        decision = Decision("float", "no integer neighbour", UNREAD, decided_by=rewriter.name)
        rewriter.describe(mover, plan=Plan(decision))
    rewriter.erase_unused()


def _moved_by(node: fx.Node) -> Any:
    """The dequantize of the one value that a node only moves; None where it does something else."""
    op = op_of(node)
    if op is None or not op.traits.layout or len(op.traits.inputs) != 1 or precision_of(node) != "moves":
        return None
    back = argument(node, op.traits.inputs[0])
    return back if is_op(back, "dequantize") and is_op(back.args[0], "quantize") else None


def _is_free(node: fx.Node, back: fx.Node | None = None) -> bool:
    """Whether nobody reads the integers of a value; or nobody but the dequantize `back`, whose value one op reads."""
    readers = {reader for user in node.users if _is_known(user) for reader in user.users}
    others = {reader for reader in readers if not reads_only_metadata(reader) and reader is not back}
    return not others and (back is None or len(back.users) == 1)


def _is_known(node: fx.Node) -> bool:
    """Whether a node quantizes to a grid that is known before the model runs."""
    return is_op(node, "quantize") and not dynamic_grid_ops(node)
