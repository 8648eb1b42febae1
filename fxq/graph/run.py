"""Running a graph node by node, where `fx.Interpreter` costs too much or does too little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from fxq.common.data import Batch
from fxq.graph.query import Step, read_attribute


def value_of(
    gm: fx.GraphModule,
    node: fx.Node | Step,
    env: Mapping[fx.Node, Any],
    instead: Mapping[str, nn.Module] | None = None,
) -> Any:
    """The value of a node other than a placeholder, from those of the nodes it reads; the output's is its argument.

    `instead` has modules to call in the place of those of `gm`, by path.
    """
    if node.op == "get_attr":
        return read_attribute(gm, str(node.target))
    args: Any = fx.node.map_arg(node.args, env.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, env.__getitem__)
    if node.op == "output":
        return args[0]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    if node.op == "call_module":
        target = (instead or {}).get(str(target)) or gm.get_submodule(str(target))
    return target(*args, **kwargs)


def inputs_for(graph: fx.Graph, batch: Batch) -> dict[fx.Node, Any]:
    """The values of the placeholders for a batch: positional, by keyword, or the default; a list for `*args`."""
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    values = dict(zip(nodes, batch.args, strict=False))
    for i, node in enumerate(nodes):
        if str(node.target).startswith("*"):
            values[node] = list(batch.args[i:])
    for node in nodes[len(values) :]:
        values[node] = batch.kwargs.get(str(node.target), node.args[0] if node.args else None)
    return values


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By node, the values that it is the last one to read."""
    last: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for read in node.all_input_nodes:
            if read not in seen:
                seen.add(read)
                last.setdefault(node, []).append(read)
    return last


class Stepper:
    """Runs a graph node by node on one batch; a value goes when the last node that reads it has run.

    Attributes:
        graph: the graph.
        values: the values that are still needed, by node.
        instead: modules to call in the place of those of `gm`, by path.
    """

    def __init__(
        self, gm: fx.GraphModule, graph: fx.Graph, batch: Batch, instead: Mapping[str, nn.Module] | None = None
    ) -> None:
        self.gm, self.graph, self.instead = gm, graph, instead
        self.values = inputs_for(graph, batch)
        self._last = last_uses(graph)

    def step(self, node: fx.Node) -> Any:
        """Run the next node; its value."""
        if node.op == "placeholder":
            return self.values[node]
        value = value_of(self.gm, node, self.values, self.instead)
        if node.users:
            self.values[node] = value
        for dead in self._last.get(node, ()):
            del self.values[dead]
        return value
