"""propagate: move conversions through ops that only move data, and cancel pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxq.patterns.conversion_rules import cancel_pair, pull_quantize, push_dequantize
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Propagate(Pass):
    """Let ops that only move data move integers instead of floats.

    Before: quantize(reshape(dequantize(q)))    After: reshape(q)
    Also: a quantize after an op that enlarges its input, such as nearest interpolation, moves before the op. A
    dequantize and quantize with two different scales become one requantize. The rules: `patterns/conversion_rules.py`.
    Keeps: the output, exactly.
    """

    name: ClassVar[str] = "propagate"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Move dequantize after ops, then quantize before ops; then cancel pairs."""
        rewriter.apply(push_dequantize)
        rewriter.apply(pull_quantize)
        rewriter.apply(cancel_pair)
        rewriter.erase_unused()
