"""Fallback of an integer op of the qdq graph to float."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxq.graph.grid import grid_of
from fxq.graph.info import Decision, DecisionKind, Plan, info
from fxq.graph.query import (
    flat_nodes,
    is_op,
    op_of,
    read_attribute,
    swapped,
)
from fxq.quant.qparams import QParams
from fxq.rewriting.rewriter import Rewriter


def run_in_float(rewriter: Rewriter, node: fx.Node, kind: DecisionKind, reason: str, fix: str) -> None:
    """Let an integer op run in float, with its float weights. An op that moves integers moves floats.

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
    if grid_of(rewriter.gm, node) is not None:
        _move_floats(rewriter, node)
    rewriter.describe(node, plan=Plan(decision, cost=about.plan.cost))


def _move_floats(rewriter: Rewriter, node: fx.Node) -> None:
    """Rewrite op(q) as quantize(op(dequantize(q))), the inverse of `propagate`."""
    about = info(node)
    qp = grid_of(rewriter.gm, node)
    assert qp is not None
    op = op_of(node)
    assert op is not None
    read = list(flat_nodes(node.args[: len(op.traits.inputs)]))
    real = {}
    for value in dict.fromkeys(read):
        # an input that was requantized for the op is dequantized from its original grid
        original: Any = value.args[0] if is_op(value, "requantize") else value
        own = grid_of(rewriter.gm, original)
        assert own is not None
        real[value] = rewriter.call("dequantize", original, before=node, name=f"{original.name}_dq", **_options(own))
        rewriter.describe(real[value], path=about.path, source=about.source)
    rewriter.update(node, args=swapped(node.args, real))
    q = rewriter.call(
        "quantize", node, after=node, name=f"{node.name}_q", typed=(about.shape, about.dtype),
        **_options(qp), dtype=qp.dtype,
    )  # fmt: skip
    rewriter.describe(q, path=about.path, source=about.source)
    rewriter.describe(node, dtype=info(next(iter(real.values()))).dtype)
    rewriter.reroute(node, q, only=lambda user: user is not q)


def _options(grid: QParams) -> dict[str, Any]:
    return {"scale": grid.s, "zero_point": grid.z, "qmin": grid.qmin, "qmax": grid.qmax}
