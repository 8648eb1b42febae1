"""lower: replace units and regions by kernels of the backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fxq.backends.lower_graph import lower_graph
from fxq.backends.region_kernel import tune
from fxq.pipeline.context import Context
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Lower(Pass):
    """Replace units and the conversions around them, or whole regions, by kernels of the recipe's backend.

    Before: quantize(conv2d_relu(dequantize(x), dequantize(w), b))    After: x86.conv(x)
    Keeps: the output, to one rounding step of the grid. Ops without a kernel stay in q/dq form.
    Also: with `optimize="speed"`, engines time the choices inside of their regions on the example.
    """

    name: ClassVar[str] = "lower"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.LOWERED

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Insert the backend's kernels, and tune them for speed if the recipe says so."""
        lower_graph(rewriter)
        rewriter.erase_unused()
        if rewriter.context.recipe.optimize == "speed":
            with torch.no_grad():
                tune(rewriter.gm, rewriter.context.example)
