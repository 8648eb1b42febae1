"""Conversion of a graph to plain data and back, for pickling. Pickling by fx would lose names and metadata."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

from fxq.ops.table import META

NodeData = tuple[str, Any, Any, Any, str, dict[str, Any]]


@dataclass(frozen=True)
class _Read:
    """Placeholder for a node among the arguments of another one: its index in the graph."""

    index: int


@dataclass(frozen=True)
class _Function:
    """Placeholder for a function that pickle cannot find: its import path."""

    path: str


def to_data(graph: fx.Graph) -> list[NodeData]:
    """Return the nodes of a graph in order, as (op, target, args, kwargs, name, metadata)."""
    number = {node: i for i, node in enumerate(graph.nodes)}

    def read(value: Any) -> Any:
        return _Read(number[value]) if isinstance(value, fx.Node) else value

    return [
        (
            n.op,
            _named(n.target),
            map_aggregate(n.args, read),
            map_aggregate(n.kwargs, read),
            n.name,
            {key: n.meta[key] for key in (META, "stack_trace") if key in n.meta},
        )
        for n in graph.nodes
    ]


def _named(target: Any) -> Any:
    if isinstance(target, OpOverload):
        return _Function(f"torch:ops.{target}")
    if "<locals>" in getattr(target, "__qualname__", "") and target.__module__.startswith("torch."):  # as torch.unique
        return _Function(f"{target.__module__}:{target.__name__}")
    return target


def numbers_of(arguments: Any) -> Iterator[int]:
    """Indices of the nodes among the arguments of another one."""
    indices: list[int] = []
    map_aggregate(arguments, lambda value: indices.append(value.index) if isinstance(value, _Read) else None)
    return iter(indices)


def from_data(data: list[NodeData]) -> fx.Graph:
    """Construct a graph from the data of `to_data`."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def write(value: Any) -> Any:
        return nodes[value.index] if isinstance(value, _Read) else value

    for op, target, args, kwargs, name, meta in data:
        target = resolve_name(target.path) if isinstance(target, _Function) else target
        node = graph.create_node(op, target, map_aggregate(args, write), map_aggregate(kwargs, write), name)
        node.meta.update(meta)
        nodes.append(node)
    return graph
