"""cleanup: nothing in the model that its graph does not use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxq.passbase import Pass, Stage
from fxq.rewrite import Rewriter


@dataclass(frozen=True)
class Cleanup(Pass):
    """Erase nodes that nobody reads, and drop the modules and weights that no node uses.

    Before: a lowered graph beside float weights and observers    After: the same graph, with what it uses
    Keeps: the output, exactly.
    """

    name: ClassVar[str] = "cleanup"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Erase, then make a module anew from the graph: it takes along only what the graph names."""
        rewriter.erase_unused()
        rewriter.gm = fx.GraphModule(rewriter.gm, rewriter.graph)
