"""Execution of a graph node by node, and shape inference. Unlike `fx.Interpreter`, it supports keyword inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from fxq.common.data import Batch
from fxq.graph.info import info
from fxq.graph.query import NodeSnapshot, arguments_of, op_of, read_attribute, tensor_meta

Modules = Mapping[str, nn.Module] | None
Typed = tuple["tuple[int, ...] | None", "torch.dtype | None"]
"""Shape and dtype of a value; (None, None) if it is not a tensor or is unknown."""


def value_of(
    gm: fx.GraphModule, node: fx.Node | NodeSnapshot, env: Mapping[fx.Node, Any], modules: Modules = None
) -> Any:
    """Compute the value of a node from the values in `env`. The node must not be a placeholder.

    Args:
        gm: module with the weights and submodules.
        node: the node; the value of an output node is its argument.
        env: values of the nodes that it reads.
        modules: modules to call instead of those of `gm`, by path.
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
    """Values of the placeholders for a batch: positional, by keyword, or the default; a list for `*args`."""
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
    """For each node, the values whose last reader it is."""
    last: dict[fx.Node, list[fx.Node]] = {}
    used_later: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for read in node.all_input_nodes:
            if read not in used_later:
                used_later.add(read)
                last.setdefault(node, []).append(read)
    return last


class Runner:
    """Runs a graph node by node on one batch; a value is freed after its last reader has run.

    Subclasses override `compute` (computes the value of a node), `step` or `free`.

    Attributes:
        gm: the module with the weights.
        graph: the graph to run, `gm.graph` or another one.
        values: the values that are still needed, by node.
        last: for each node, the values whose last reader it is.
        modules: modules to call instead of those of `gm`, by path.
    """

    def __init__(
        self, gm: fx.GraphModule, batch: Batch, graph: fx.Graph | None = None, modules: Modules = None
    ) -> None:
        self.gm, self.graph, self.modules = gm, graph or gm.graph, modules
        self.values = inputs_for(self.graph, batch)
        self.last = last_uses(self.graph)

    def run(self) -> Any:
        """Run all nodes and return the graph's output."""
        *nodes, last = self.graph.nodes
        for node in nodes:
            self.step(node)
        return self.step(last)

    def step(self, node: fx.Node) -> Any:
        """Run the next node and return its value."""
        return self.values[node] if node.op == "placeholder" else self.put(node, self.compute(node))

    def compute(self, node: fx.Node) -> Any:
        """Compute the value of a node from the values that it reads."""
        return value_of(self.gm, node, self.values, self.modules)

    def put(self, node: fx.Node, value: Any) -> Any:
        """Store the value of a node that has run, free values that are no longer needed, and return the value."""
        if node.users:
            self.values[node] = value
        for dead in self.last.get(node, ()):
            self.free(dead)
        return value

    def free(self, node: fx.Node) -> None:
        """Free a value that no further node reads."""
        del self.values[node]


def infer(node: fx.Node) -> Typed:
    """Shape and dtype of the value of a function call, computed without its values; (None, None) if that fails."""
    return _infer(node, {}, {})


def infer_ops(body: fx.Graph, inputs: Sequence[Any]) -> tuple[Typed, ...]:
    """Shape and dtype of each op in the body of a unit that is called with `inputs`."""
    arguments = dict(zip(body.find_nodes(op="placeholder"), inputs, strict=False))
    types: dict[fx.Node, Typed] = {}
    return tuple(
        types.setdefault(node, _infer(node, arguments, types)) for node in body.nodes if op_of(node) is not None
    )


def _infer(node: fx.Node, arguments: Mapping[fx.Node, Any], types: Mapping[fx.Node, Typed]) -> Typed:
    """Infer the type of a node from the arguments of placeholders and the types of other nodes."""

    def on_meta(value: fx.Node) -> Any:
        if value in arguments:
            return fx.node.map_arg(arguments[value], on_meta)
        shape, dtype = types.get(value) or (info(value).shape, info(value).dtype)
        if shape is None:
            raise _Unknown
        return torch.empty(shape, dtype=dtype, device="meta")

    try:
        args = fx.node.map_arg(node.args, on_meta)
        kwargs = fx.node.map_arg(node.kwargs, on_meta)
        inferred = _infer_pointwise(node, args, kwargs) or _infer_small(node, args, kwargs)
        return inferred or tensor_meta(node.target(*args, **kwargs))  # type: ignore[operator]
    except (_Unknown, RuntimeError, TypeError, NotImplementedError, ValueError):
        return None, None


def _infer_pointwise(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Typed | None:
    """Type of a pointwise op, or a clamp, of activations only; None for other ops.

    It runs the op on one element, since kernels for the meta device import sympy, which is slow.
    """
    op = op_of(node)
    inputs = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    if op is None or not (op.traits.pointwise or op.traits.narrows):
        return None
    names = [name for name, value in zip(op.tensors, args, strict=False) if isinstance(value, torch.Tensor)]
    if len(names) < len(inputs) or not set(names) <= set(op.traits.inputs):
        return None  # a mask or a statistic may have another shape
    elements = [
        torch.zeros([1] * v.dim(), dtype=v.dtype, device="cpu") if isinstance(v, torch.Tensor) else v for v in args
    ]
    try:
        value = op.target(*elements, **kwargs)
    except RuntimeError:  # a dtype without kernels for CPUs
        return None
    shape = torch.broadcast_tensors(*inputs)[0].shape
    return (tuple(shape), value.dtype) if isinstance(value, torch.Tensor) and value.dim() == len(shape) else None


def _infer_small(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Typed | None:
    """Type of an op with an integer form; None for other ops, and where the op reads many values.

    It runs layers with one input and one output channel, recurrent layers for one step, and other ops as they are, on
    zeros: kernels for the meta device import sympy, which is slow.
    """
    op = op_of(node)
    if op is None or op.traits.kind == "float":
        return None
    traits, values, options = op.traits, dict(zip(op.tensors, args, strict=False)), dict(kwargs)
    axis, left_out = 0, 0
    try:
        x, weight = values[traits.inputs[0]], values.get(traits.weight or "")
        if traits.recurrence is not None:
            left_out, values[traits.inputs[0]] = len(x) - 1, x[:1]
        elif traits.heavy and traits.channels is not None and weight is not None:
            axis, left_out = traits.channels, weight.shape[traits.axis or 0] - 1
            if traits.axis == 1:
                left_out = weight.shape[1] * options.get("groups", 1) - 1
            options |= {"groups": 1} if "groups" in options else {}
            thin = {traits.inputs[0]: x.narrow(axis, 0, 1), traits.weight: weight[:1, :1]}
            values = {name: thin.get(name) for name in values}
        tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
        if sum(value.numel() for value in tensors) > _MAX_INFERRED_ELEMENTS:
            return None
        value = op.target(*tree_map(_zeros, tuple(values.values())), **options)
        shape = list(value.shape)
        shape[axis] += left_out
    except Exception:  # a layer of a user's own with other axes, or no kernel for CPUs
        return None
    return tuple(shape), value.dtype


def _zeros(value: Any) -> Any:
    """Zeros on the CPU like a tensor; any other value as it is."""
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


_MAX_INFERRED_ELEMENTS = 1 << 23
"""Elements up to which an op runs faster than sympy is imported."""


class _Unknown(Exception):
    """Raised if an argument has an unknown shape."""
