"""fold-batch-norm: fold batch norms into neighbouring layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxq.graph.info import info
from fxq.graph.query import op_of
from fxq.patterns.fusions.norm import norm_after_layer, norm_before_layer
from fxq.pipeline.context import Context
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.match import Match
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class FoldBatchNorm(Pass):
    """Fold an eval-mode batch norm into the weight and bias of the conv or linear before it.

    Before: batch_norm(conv2d(x, w, b), ...)    After: conv2d(x, w', b')
    Also: a batch norm without such a layer before it is folded into the only layer that reads it, unless this pads with
    zeros.
    Keeps: the output, to 1e-5 relative in float32. The weights are new tensors; the model is not changed. If the recipe
    has the batch norm in float and the layer in integers, they stay apart.
    Source: Jacob et al. 2018, section 3.2.

    Args:
        into_next: whether to fold batch norms into the layer after them. Training leaves these as they are.
    """

    into_next: bool = True

    name: ClassVar[str] = "fold-batch-norm"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Apply the rules, except where the recipe has different configs for layer and batch norm."""
        context = rewriter.context

        def refuse(match: Match) -> str | None:
            layers = ((info(n).path, op.name) for n in match.nodes if (op := op_of(n)) is not None and op.traits.weight)
            if any(context.config_for(*layer)[0].is_float for layer in layers):
                return None
            return context.refuses_to_join(match.nodes)

        for rule in (norm_after_layer, norm_before_layer) if self.into_next else (norm_after_layer,):
            rewriter.apply(rule, refuse=refuse)
        rewriter.erase_unused()
