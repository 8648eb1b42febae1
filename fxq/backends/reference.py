"""The reference backend: keeps the qdq graph. Exact, slow, runs on any device."""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from fxq.backends.base import Backend, Support
from fxq.graph.unit import OpCall
from fxq.quant.spec import QuantConfig
from fxq.rewriting.rewriter import Rewriter


class Reference(Backend):
    """Quantizes everything that has an integer form, and runs it as dequantize -> float op -> quantize."""

    name: ClassVar[str] = "reference"
    has_kernels: ClassVar[bool] = False

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: tuple[OpCall, ...], config: QuantConfig) -> Support:
        """All of it: a float op between conversions is the meaning of the integer op."""
        return Support(len(calls))

    def lower(self, rewriter: Rewriter) -> None:
        """Leave the graph as it is."""
        return None
