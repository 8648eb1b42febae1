"""The reference backend: keeps the qdq graph. Exact, slow, runs on any device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import fx

from fxq.backends.base import Backend, Support
from fxq.graph.region import Region
from fxq.graph.unit import OpCall
from fxq.quant.spec import QuantConfig


class Reference(Backend):
    """Quantizes everything that has an integer form, and runs it as dequantize -> float op -> quantize."""

    name: ClassVar[str] = "reference"
    has_kernels: ClassVar[bool] = False

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: tuple[OpCall, ...], config: QuantConfig) -> Support:
        """All of it: a float op between conversions is the meaning of the integer op."""
        return Support(len(calls))

    def regions(self, gm: fx.GraphModule) -> Iterable[Region]:
        """None: the graph stays as it is."""
        return ()

    def lower(self, gm: fx.GraphModule, region: Region) -> None:
        """No kernel."""
