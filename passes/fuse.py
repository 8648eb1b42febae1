"""fuse: make units of ops that one kernel can run."""

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
    """Turn the matches of fusion patterns into units, largest pattern first. The recipe can add patterns.

    Before: relu(conv2d(x, w, b))    After: conv2d_relu(x, w, b), one node that runs both ops
    Keeps: the output, exactly. A node belongs to at most one unit. Ops stay apart if the recipe configures them
    differently, if the backend does not fuse them, or if it has a kernel only for some of them.
    """

    name: ClassVar[str] = "fuse"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage] = Stage.FUSED

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Match all rules, then make the units."""
        context = rewriter.context

        def refuse(match: Match) -> str | None:
            calls = calls_among(match.nodes, match.rule.name, match.captures, match.outputs)
            if not context.backend.fuses(calls):
                return f"the backend {context.backend.name} does not fuse these ops"
            return context.refuses_to_join(match.nodes) or _partial_kernel(rewriter, match.nodes, calls)

        rewriter.fuse(context.recipe.fusion_rules(), refuse)


def _partial_kernel(rewriter: Rewriter[Context], nodes: Sequence[fx.Node], calls: Calls) -> str | None:
    """Reason why no kernel runs all of these ops, although one runs some of them; None if they may become a unit."""
    context = rewriter.context
    config, _ = context.config_for(info(nodes[0]).path, calls[0].op.name)
    if config.activation is None and config.weight is not None:
        return "the recipe leaves activations in float, where layers are not fused"
    if config.is_float:
        return None
    backend, gm = context.backend, rewriter.gm
    support = support_of(backend, gm, nodes[-1], calls, backend.config(gm, config, calls))
    if support.ops == len(calls) or (support.ops == 0 and not any(call.op.traits.heavy for call in calls[1:])):
        return None
    return f"{backend.name} has a kernel only for the first {support.ops} of these {len(calls)} ops"
