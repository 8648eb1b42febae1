"""Running a graph node by node. `fx.Interpreter` lists all modules first, and knows no keyword inputs."""

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
    modules: Mapping[str, nn.Module] | None = None,
) -> Any:
    """The value of a node other than a placeholder, from those of the nodes it reads; the output's is its argument.

    `modules` has some to call in the place of those of `gm`, by path.
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
        target = (modules or {}).get(str(target)) or gm.get_submodule(str(target))
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


class Runner:
    """Runs a graph node by node on one batch; a value goes when the last node that reads it has run.

    Subclasses that do more override `compute`, which gives the value of a node, `step`, or `free`.

    Attributes:
        gm: the module with the weights.
        graph: the graph.
        values: the values that are still needed, by node.
        last: by node, the values that it is the last one to read.
        modules: modules to call in the place of those of `gm`, by path.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        batch: Batch,
        graph: fx.Graph | None = None,
        modules: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.gm, self.graph, self.modules = gm, graph if graph is not None else gm.graph, modules
        self.values = inputs_for(self.graph, batch)
        self.last = last_uses(self.graph)

    def run(self) -> Any:
        """Run all nodes; what the graph returns."""
        value = None
        for node in self.graph.nodes:
            value = self.step(node)
        return value

    def step(self, node: fx.Node) -> Any:
        """Run the next node; its value."""
        return self.values[node] if node.op == "placeholder" else self.put(node, self.compute(node))

    def compute(self, node: fx.Node) -> Any:
        """The value of a node, from those of the nodes that it reads."""
        return value_of(self.gm, node, self.values, self.modules)

    def put(self, node: fx.Node, value: Any) -> Any:
        """Take this for the value of the next node, which has been run; the value."""
        if node.users:
            self.values[node] = value
        for dead in self.last.get(node, ()):
            self.free(dead)
        return value

    def free(self, node: fx.Node) -> None:
        """Let go of a value that nobody reads any more."""
        del self.values[node]
