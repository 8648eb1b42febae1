"""fold-batch-norm: batch norms into the layers before or behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxq.patterns.norm import norm_after_layer, norm_before_layer
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class FoldBatchNorm(Pass):
    """Fold an eval-mode batch norm into the weight and bias of the conv or linear before it.

    Before: batch_norm(conv2d(x, w, b), ...)    After: conv2d(x, w', b')
    Also: one that no such layer is before goes into the layer that alone reads it, where nothing is padded with zeros.
    Keeps: the output, to 1e-5 relative in float32. The weights are new tensors; the model's own stay.
    Source: Jacob et al. 2018, section 3.2.
    """

    name: ClassVar[str] = "fold-batch-norm"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rewriter: Rewriter) -> None:
        """Apply the rule everywhere but where the recipe tells layer and batch norm apart."""
        for rule in (norm_after_layer, norm_before_layer):
            rewriter.apply(rule, refuse=lambda match: rewriter.context.refuses_to_join(match.nodes))
        rewriter.erase_unused()
