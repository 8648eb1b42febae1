"""propagate: move conversions through ops that only move data, and cancel pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fxq.errors import PassError
from fxq.graph.grid import grid_of
from fxq.graph.info import info, precision_of
from fxq.graph.place import where
from fxq.graph.query import argument, flat_nodes, is_op, op_of, options_of
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.pattern import rewrite
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Propagate(Pass):
    """Let ops that only move data move integers instead of floats.

    Before: quantize(reshape(dequantize(q)))    After: reshape(q)
    Also: a quantize after an op that enlarges its input, such as nearest interpolation, moves before the op. A
    dequantize and quantize with two different scales become one requantize.
    Keeps: the output, exactly.
    """

    name: ClassVar[str] = "propagate"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Move dequantize after ops in execution order, and quantize before ops in reverse order; then cancel pairs."""
        for node in rewriter.nodes():
            _push_dequantize(rewriter, node)
        for node in reversed(rewriter.nodes("quantize")):
            _pull_quantize(rewriter, node)
        rewriter.apply(cancel_pair)
        rewriter.erase_unused()


def _push_dequantize(rewriter: Rewriter, node: fx.Node) -> None:
    """op(dequantize(q), ...) -> dequantize(op(q, ...)) for an op that moves integers as they are."""
    op = op_of(node)
    if op is None or not op.traits.layout or precision_of(node) != "moves":
        return
    read = list(flat_nodes([argument(node, name) for name in op.traits.inputs]))
    gm = rewriter.gm
    qp = grid_of(gm, read[0]) if all(is_op(r, "dequantize") for r in read) else None
    if qp is None or qp.axis is not None or not all(qp.same_as(grid_of(gm, r)) for r in read):
        return
    with rewriter.attributed("push_dequantize", _push_dequantize):
        rewriter.update(node, args=fx.node.map_arg(node.args, lambda n: n.args[0] if n in read else n))
        rewriter.describe(node, dtype=qp.dtype)
        dq = rewriter.call("dequantize", node, after=node, name=f"{node.name}_dq", **options_of(read[0]))
        rewriter.describe(dq, path=info(node).path, source=info(node).source)
        rewriter.reroute(node, dq, only=lambda user: user is not dq)


def _pull_quantize(rewriter: Rewriter, node: fx.Node) -> None:
    """quantize(op(x)) -> op(quantize(x)) for an op that only repeats values of x."""
    mover = node.args[0]
    if not isinstance(mover, fx.Node):
        raise PassError(f"{where(rewriter.gm, node)}: quantizes {mover!r}, which is not a value of the graph.")
    op = op_of(mover) if _has_one_scale(options_of(node)) else None
    if op is None or not op.traits.layout or len(op.traits.inputs) != 1 or len(mover.users) != 1:
        return
    source = argument(mover, op.traits.inputs[0])
    if not isinstance(source, fx.Node) or _size(mover) <= _size(source) or info(source).dtype != info(mover).dtype:
        return
    if op.traits.unless is not None and op.traits.unless(options_of(mover)) is not None:
        return
    with rewriter.attributed("pull_quantize", _pull_quantize):
        q = rewriter.node(
            "call_function", node.target, (source,), dict(node.kwargs), after=source, name=f"{source.name}_q"
        )
        rewriter.describe(q, path=info(source).path, source=info(source).source)
        rewriter.update(mover, args=fx.node.map_arg(mover.args, lambda n: q if n is source else n))
        rewriter.describe(mover, dtype=options_of(node)["dtype"])
        rewriter.replace(node, mover)


def _size(node: fx.Node) -> int:
    return math.prod(info(node).shape or ())


@rewrite(exclusive=False)
def cancel_pair(op: Any, x: Any) -> Any:
    """Quantize that directly reads a dequantize."""
    return op.quantize(op.dequantize(x))


def _has_one_scale(grid: Mapping[str, Any]) -> bool:
    """Whether the scale of a grid is a number, and not per channel, per row or computed in the graph."""
    return isinstance(grid["scale"], (int, float))


@cancel_pair.unless
def has_scales_that_are_no_numbers(m: Any) -> bool:
    """Whether one of two grids has a scale per channel or row, or one that the graph computes."""
    return not _have_one_grid(m) and not all(_has_one_scale(m.options(op)) for op in ("quantize", "dequantize"))


def _have_one_grid(m: Any) -> bool:
    target, source = m.options("quantize"), m.options("dequantize")
    return all(target.get(key) == source[key] for key in source)  # activations are never packed


@cancel_pair.becomes
def _cancelled(op: Any, m: Any) -> Any:
    """Return x if both have one grid, else one requantize of it."""
    if _have_one_grid(m):
        return m.x
    target, source = m.options("quantize"), m.options("dequantize")
    del target["axis"]
    return op.requantize(m.x, from_scale=source["scale"], from_zero_point=source["zero_point"], **target)
