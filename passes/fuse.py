"""fuse: groups of ops that one kernel can run, as units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

import fxq.patterns  # noqa: F401  (registers the patterns)
from fxq.graph import op_of
from fxq.passbase import Pass, Stage
from fxq.pattern import FUSIONS
from fxq.rewrite import Rewriter


@dataclass(frozen=True)
class Fuse(Pass):
    """Turn what the registered fusion patterns match into units, largest pattern first.

    Before: relu(conv2d(x, w, b))    After: conv2d_relu(x, w, b), one node that runs both
    Keeps: the output, exactly. A node belongs to one unit. Ops that the recipe configures differently stay apart,
    and so do those that the backend wants apart.
    """

    name: ClassVar[str] = "fuse"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage] = Stage.FUSED

    def run(self, rewriter: Rewriter) -> None:
        """Match all rules, then make the units."""
        context = rewriter.context

        def refuse(nodes: Sequence[fx.Node]) -> str | None:
            ops = [op for op in map(op_of, nodes) if op is not None]
            if not context.backend.fuses(ops):
                return f"the backend {context.backend.name} wants these ops apart"
            return context.apart(nodes)

        rewriter.fuse(FUSIONS.largest_first(), refuse)
