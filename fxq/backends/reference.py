"""The reference backend: keeps the qdq graph. Exact, slow, runs on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import fx

from fxq.backends.base import Backend, Support
from fxq.spec import QuantConfig
from fxq.unit import OpCall

if TYPE_CHECKING:
    from fxq.rewrite import Rewriter


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
