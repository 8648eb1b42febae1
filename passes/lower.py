"""lower: units become the backend's integer kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fxq.backends.lower_graph import lower_graph
from fxq.backends.region_kernel import tune
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Lower(Pass):
    """Replace units and the conversions around them, or whole regions, by kernels of the recipe's backend.

    Before: quantize(conv2d_relu(dequantize(x), dequantize(w), b))    After: x86.conv(x)
    Keeps: the output, to one rounding step of the grid. What the backend has no kernel for stays in qdq form.
    Also: with `optimize="speed"`, engines measure on the example what they can choose inside of their regions.
    """

    name: ClassVar[str] = "lower"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.LOWERED

    def run(self, rewriter: Rewriter) -> None:
        """Put the backend's kernels into the graph."""
        lower_graph(rewriter)
        rewriter.erase_unused()
        if rewriter.context.recipe.optimize == "speed":
            with torch.no_grad():
                tune(rewriter.gm, rewriter.context.example)
