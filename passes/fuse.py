"""fuse: groups of ops that one kernel can run, as units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

import fxq.patterns  # noqa: F401  (registers the patterns)
from fxq.backends.base import support_of
from fxq.graph.info import info
from fxq.graph.unit import Calls, calls_among
from fxq.pipeline.context import Context
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.match import Match
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Fuse(Pass):
    """Turn what the fusion patterns match, fxq's and the recipe's, into units, largest pattern first.

    Before: relu(conv2d(x, w, b))    After: conv2d_relu(x, w, b), one node that runs both
    Keeps: the output, exactly. A node belongs to one unit. Ops that the recipe configures differently stay apart,
    and so do those that the backend wants apart, or of which it has a kernel for some alone: the others are decided on
    like any op that was never fused.
    """

    name: ClassVar[str] = "fuse"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage] = Stage.FUSED

    def run(self, rewriter: Rewriter) -> None:
        """Match all rules, then make the units."""
        context: Context = rewriter.context

        def refuse(match: Match) -> str | None:
            calls = calls_among(match.nodes, match.rule.name, match.captures, match.outputs)
            if not context.backend.fuses(calls):
                return f"the backend {context.backend.name} wants these ops apart"
            return context.refuses_to_join(match.nodes) or _left_over(rewriter, match.nodes, calls)

        rewriter.fuse(context.recipe.fusion_rules(), refuse)


def _left_over(rewriter: Rewriter, nodes: Sequence[fx.Node], calls: Calls) -> str | None:
    """Why a unit of these ops would run in float in part, where a kernel of the backend runs others of them."""
    context = rewriter.context
    asked, _ = context.config_for(info(nodes[0]).path, calls[0].op.name)
    if asked.activation is None and asked.weight is not None:
        return "the recipe leaves activations in float, where a layer runs alone"
    if asked.is_float:
        return None
    backend, gm = context.backend, rewriter.gm
    support = support_of(backend, gm, nodes[-1], calls, backend.config(gm, asked, calls))
    if support.ops == len(calls) or (support.ops == 0 and not any(call.op.traits.heavy for call in calls[1:])):
        return None
    return f"{backend.name} has a kernel for the first {support.ops} of these {len(calls)} ops alone"
