"""cleanup: nothing in the model that its graph does not use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxq.edit import DATA
from fxq.graph import constant, info
from fxq.passbase import Pass, Stage
from fxq.rewrite import Rewriter


@dataclass(frozen=True)
class Cleanup(Pass):
    """Erase nodes that nobody reads, and drop the modules and weights that no node uses.

    Before: a lowered graph beside float weights and observers    After: the same graph, with what it uses
    Also: a weight inside modules inside modules is kept with fxq's own: reading it through five of them takes 7 µs.
    Keeps: the output, exactly.
    """

    name: ClassVar[str] = "cleanup"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Erase, then make a module anew from the graph: it takes along only what the graph names."""
        rewriter.erase_unused()
        for node in rewriter.nodes():
            if node.op == "get_attr" and str(node.target).count(".") > 1:
                _bring_near(rewriter, node)
        rewriter.gm = fx.GraphModule(rewriter.gm, rewriter.graph)


def _bring_near(rewriter: Rewriter, node: fx.Node) -> None:
    """Read a weight from where it takes one step."""
    path = str(node.target)
    weight = constant(rewriter.gm, node)
    if weight is not None and not path.startswith(f"{DATA}."):
        near = rewriter.constant(weight, path, before=node)
        rewriter.describe(near, qparams=info(node).qparams)
        rewriter.replace(node, near)
