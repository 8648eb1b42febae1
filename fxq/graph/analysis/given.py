"""Values that follow from the inputs of a model without a layer, such as masks."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxq.graph.query import unobserved
from fxq.graph.unit import InnerValue, calls_of


class InputDerivedValues:
    """Values of a graph that are computed from its inputs without a layer. Observers are skipped."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self._values: set[fx.Node] = set()
        for node in gm.graph.nodes:
            if node.op == "placeholder" or self._follows(node):
                self._values.add(node)

    def applies_mask(self, node: fx.Node) -> bool:
        """Whether a node combines a value that layers compute with one that follows from inputs, as masking does."""
        calls = calls_of(self.gm, node)
        if not calls or not calls[-1].op.traits.masks:
            return False
        read = [v for v in calls[-1].tensors.values() if isinstance(v, (InnerValue, fx.Node))]
        input_derived = [isinstance(v, fx.Node) and unobserved(self.gm, v) in self._values for v in read]
        return any(input_derived) and not all(input_derived)

    def _follows(self, node: fx.Node) -> bool:
        """Whether a value is computed from values in `_values` without a layer."""
        inputs = list(self._inputs(node))
        heavy = node.op == "call_module" or any(call.op.traits.heavy for call in calls_of(self.gm, node))
        return bool(inputs) and not heavy and self._values.issuperset(inputs)

    def _inputs(self, node: fx.Node) -> Iterator[fx.Node]:
        """Values that a node reads, without constants."""
        for read in node.all_input_nodes:
            value = unobserved(self.gm, read)
            if value.op != "get_attr":
                yield value
