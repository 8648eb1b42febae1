"""The layers that an engine runs, and the nodes of the region that they are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from torch import fx

from fxq.graph.info import EngineLayer
from fxq.graph.query import CONVERSIONS, is_op, op_of


def kind_of(dtype: str) -> Literal["int8", "float"]:
    """What a layer counts as that computes in a type: one that the engine does not say is not called float."""
    return "float" if "float" in dtype else "int8"


def of_nodes(layer: EngineLayer, nodes: Mapping[str, fx.Node]) -> EngineLayer:
    """A layer of an ONNX model as one of the region that the model was written of.

    One that quantizes inside what its ops read takes floats, and is on integers all the same.

    Args:
        layer: its nodes are those of the model, its kind is "int8", "float" or "convert".
        nodes: the nodes of the region, by name.
    """
    names = dict.fromkeys(name.partition("/")[0] for name in layer.nodes)
    made_of = sorted((nodes[name] for name in names if name in nodes), key=_rank)
    op, kind = op_of(made_of[0]) if made_of else None, layer.kind
    if op is not None and op.name in CONVERSIONS:
        kind = "convert"
    elif kind == "int8" if op is not None and op.traits.kind == "moves" else layer.op in _LAYOUT:
        kind = "moves"
    elif kind == "float" and any(quantize in made_of for node in made_of for quantize in _quantizes(node)):
        kind = "int8"
    ops = [node for node in made_of if not is_op(node, *CONVERSIONS)] or made_of
    return layer._replace(nodes=tuple(node.name for node in ops), kind=kind, us=round(layer.us, 1))


def _quantizes(node: fx.Node) -> list[fx.Node]:
    """What makes the integers that a node of the qdq graph reads."""
    return [made for read in node.all_input_nodes if is_op(read, "dequantize") for made in read.all_input_nodes]


_LAYOUT = ("Reorder", "Transpose", "Reshape")
"""What engines call the changes of layout that they put in, or that stand in front of a layer and behind it."""


def shares(layers: Iterable[EngineLayer], taken: Mapping[str, fx.Node]) -> dict[fx.Node, float]:
    """Microseconds of each node of a region.

    What the engine has joined counts for the first of its layers, else for the first op.

    Args:
        layers: what the engine runs, in order.
        taken: the nodes, by name.
    """
    found: dict[fx.Node, float] = {}
    left = 0.0
    for layer in layers:
        node = next((taken[name] for name in layer.nodes if name in taken), None)
        if node is None:
            left += layer.us  # a change of layout, for what follows
            continue
        found[node] = found.get(node, 0.0) + left + layer.us
        left = 0.0
    for node in taken.values():  # a layer that goes by the name of the op behind it, which was joined to it
        if _rank(node) == 0 and node not in found:
            behind = next(iter(node.users), node)
            while is_op(behind, *CONVERSIONS) and behind.users:
                behind = next(iter(behind.users))
            if behind in found and _rank(behind) == 1:
                found[node] = found.pop(behind)
    return found


def _rank(node: fx.Node) -> int:
    """Layers, then other ops, then conversions."""
    op = op_of(node)
    if op is None or op.traits.heavy:
        return 0
    return 2 if op.name in CONVERSIONS else 1
