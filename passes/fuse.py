"""fuse: groups of ops that one kernel can run, as units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import fxq.patterns  # noqa: F401  (registers the patterns)
from fxq.graph import info, op_of
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
        context = rewriter.context

        def configured_differently(match: Any) -> bool:
            ops = [(op, info(n).path) for n in match.nodes if (op := op_of(n)) is not None]
            configs = [(op, context.config_for(path, (op.name,))[0]) for op, path in ops]
            specs = {config for op, config in configs if op.quant.kind == "computes"}
            return len(specs) > 1 or len({config.is_float for _, config in configs}) > 1

        rewriter.fuse(FUSIONS.largest_first(), refuse=configured_differently)
