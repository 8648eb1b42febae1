"""Running a graph node by node. `fx.Interpreter` lists all modules first, and knows no keyword inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxq.common.data import Batch
from fxq.graph.info import info
from fxq.graph.query import Step, arguments_of, op_of, read_attribute, tensor_meta

Modules = Mapping[str, nn.Module] | None
Typed = tuple["tuple[int, ...] | None", "torch.dtype | None"]
"""Shape and dtype of a value, (None, None) where it is no tensor or not known."""


def value_of(gm: fx.GraphModule, node: fx.Node | Step, env: Mapping[fx.Node, Any], modules: Modules = None) -> Any:
    """The value of a node other than a placeholder, from those of the nodes it reads; the output's is its argument.

    `modules` has some to call in the place of those of `gm`, by path.
    """
    if node.op == "get_attr":
        return read_attribute(gm, str(node.target))
    args, kwargs = arguments_of(node, env)
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
    for node in nodes:
        if node in values:
            continue
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
        graph: the graph, that of `gm` or another one.
        values: the values that are still needed, by node.
        last: by node, the values that it is the last one to read.
        modules: modules to call in the place of those of `gm`, by path.
    """

    def __init__(
        self, gm: fx.GraphModule, batch: Batch, graph: fx.Graph | None = None, modules: Modules = None
    ) -> None:
        self.gm, self.graph, self.modules = gm, graph or gm.graph, modules
        self.values = inputs_for(self.graph, batch)
        self.last = last_uses(self.graph)

    def run(self) -> Any:
        """Run all nodes; what the graph returns."""
        *nodes, last = self.graph.nodes
        for node in nodes:
            self.step(node)
        return self.step(last)

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


def infer(node: fx.Node) -> Typed:
    """Shape and dtype of a function's value, computed on the meta device; (None, None) where that is not possible."""
    return _infer(node, {}, {})


def infer_ops(body: fx.Graph, inputs: Sequence[Any]) -> tuple[Typed, ...]:
    """The same for each op in the body of a unit that is called with these nodes."""
    given = dict(zip(body.find_nodes(op="placeholder"), inputs, strict=False))
    known: dict[fx.Node, Typed] = {}
    return tuple(known.setdefault(node, _infer(node, given, known)) for node in body.nodes if op_of(node) is not None)


def _infer(node: fx.Node, given: Mapping[fx.Node, Any], known: Mapping[fx.Node, Typed]) -> Typed:
    """Of a node that reads what is given for nodes, or is known of them."""

    def on_meta(value: fx.Node) -> Any:
        if value in given:
            return fx.node.map_arg(given[value], on_meta)
        shape, dtype = known.get(value) or (info(value).shape, info(value).dtype)
        if shape is None:
            raise _Unknown
        return torch.empty(shape, dtype=dtype, device="meta")

    try:
        args = fx.node.map_arg(node.args, on_meta)
        kwargs = fx.node.map_arg(node.kwargs, on_meta)
        return tensor_meta(node.target(*args, **kwargs))  # type: ignore[operator]
    except (_Unknown, RuntimeError, TypeError, NotImplementedError, ValueError):
        return None, None


class _Unknown(Exception):
    """A value whose shape is not known takes part."""
