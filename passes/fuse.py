"""fuse: groups of ops that one kernel can run, as units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import fxq.patterns  # noqa: F401  (registers the patterns)
from fxq.passbase import Pass, Stage
from fxq.pattern import FUSIONS
from fxq.rewrite import Rewriter


@dataclass(frozen=True)
class Fuse(Pass):
    """Turn what the registered fusion patterns match into units, largest pattern first.

    Before: relu(conv2d(x, w, b))    After: conv2d_relu(x, w, b), one node that runs both
    Keeps: the output, exactly. A node belongs to one unit; ops that the recipe configures differently stay apart.
    """

    name: ClassVar[str] = "fuse"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage] = Stage.FUSED

    def run(self, rewriter: Rewriter) -> None:
        """Match all rules, then make the units."""
        rewriter.fuse(FUSIONS.largest_first(), refuse=rewriter.context.configures_apart)
