"""Fallback of an integer op of the qdq graph to float."""

from __future__ import annotations

from torch import fx

from fxq.graph.info import Decision, DecisionKind, Plan, info
from fxq.graph.query import op_of, read_attribute, swapped
from fxq.patterns.conversion_rules import move_in_float
from fxq.rewriting.rewriter import Rewriter


def run_in_float(rewriter: Rewriter, node: fx.Node, kind: DecisionKind, reason: str, fix: str) -> None:
    """Let an integer op run in float, with its float weights. An op that moves integers moves floats.

    The caller decides which op; `move_in_float` (`patterns/conversion_rules.py`) rewrites one that moves integers.

    Args:
        rewriter: rewriter of the qdq graph.
        node: the op, with a plan.
        kind: kind of the decision.
        reason: reason of the decision.
        fix: remedy, a line of a recipe, or empty.
    """
    about = info(node)
    assert about.plan is not None
    for read in node.all_input_nodes:
        path = info(read).stands_for
        if path:
            weight = rewriter.read(path, read_attribute(rewriter.gm, path), before=node)
            rewriter.update(node, args=swapped(node.args, {read: weight}))
    op = op_of(node)
    if op is not None and op.traits.recurrence is not None:
        rewriter.update(node, kwargs=op.traits.recurrence.without_grid(node.kwargs))
    decision = Decision("float", kind, reason, fix, rewriter.name)
    moved = rewriter.match_at(move_in_float, node)
    if moved is not None:
        rewriter.rewrite(moved)
    rewriter.describe(node, plan=Plan(decision, cost=about.plan.cost))
