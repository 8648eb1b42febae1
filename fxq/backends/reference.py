"""The reference backend, which runs the qdq graph as it is: exact, slow, on any device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import fx

from fxq.backends.base import Backend, Support
from fxq.graph.region import Region
from fxq.graph.unit import Calls
from fxq.quant.spec import QuantConfig


class Reference(Backend):
    """Backend without kernels. Every quantized op runs as dequantize -> float op -> quantize."""

    name: ClassVar[str] = "reference"
    has_kernels: ClassVar[bool] = False

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        """Support for every unit, since a float op between conversions defines the result of the integer op."""
        return Support(len(calls))

    def regions(self, gm: fx.GraphModule) -> Iterable[Region]:
        """No regions: the graph stays in qdq form."""
        return ()

    def lower(self, gm: fx.GraphModule, region: Region) -> None:
        """No kernel."""
