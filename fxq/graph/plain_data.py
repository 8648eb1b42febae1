"""A graph as plain data and back, for pickling: fx would trace the model again, and lose names and metadata."""

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
    """Stands for the node of that number among the arguments of another."""

    index: int


@dataclass(frozen=True)
class _Function:
    """Stands for a function that pickle does not find by itself: its import path."""

    path: str


def to_data(graph: fx.Graph) -> list[NodeData]:
    """The nodes in order: op, target, args, kwargs, name, metadata."""
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
    """The numbers of the nodes among the arguments of another."""
    found: list[int] = []
    map_aggregate(arguments, lambda value: found.append(value.index) if isinstance(value, _Read) else None)
    return iter(found)


def from_data(data: list[NodeData]) -> fx.Graph:
    """Inverse of `to_data`."""
    graph = fx.Graph()
    made: list[fx.Node] = []

    def write(value: Any) -> Any:
        return made[value.index] if isinstance(value, _Read) else value

    for op, target, args, kwargs, name, meta in data:
        target = resolve_name(target.path) if isinstance(target, _Function) else target
        node = graph.create_node(op, target, map_aggregate(args, write), map_aggregate(kwargs, write), name)
        node.meta.update(meta)
        made.append(node)
    return graph
