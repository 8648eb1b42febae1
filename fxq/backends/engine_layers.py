"""Layers that an engine runs, matched with the nodes of the region that they compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from fxq.graph.info import EngineLayer
from fxq.graph.precision import Precision
from fxq.graph.query import CONVERSIONS, is_op, op_of


def kind_of(dtype: str) -> Precision:
    """Precision of a layer that computes in `dtype`. A dtype that the engine does not name counts as int8."""
    return "float" if "float" in dtype else "int8"


def region_layer(layer: EngineLayer, nodes: Mapping[str, fx.Node]) -> EngineLayer:
    """Return a layer of an ONNX model as a layer of the region from which the model was written.

    A layer that an engine reports as float counts as int8 if it quantizes its inputs itself.

    Args:
        layer: has the nodes of the ONNX model, and the kind "int8", "float" or "convert".
        nodes: nodes of the region, by name.
    """
    names = dict.fromkeys(name.partition("/")[0] for name in layer.nodes)
    layer_nodes = sorted((nodes[name] for name in names if name in nodes), key=_rank)
    op, kind = op_of(layer_nodes[0]) if layer_nodes else None, layer.kind
    if op is not None and op.name in CONVERSIONS:
        kind = "convert"
    elif kind == "int8" if op is not None and op.traits.kind == "moves" else layer.op in _LAYOUT:
        kind = "moves"
    elif kind == "float" and any(source in layer_nodes for node in layer_nodes for source in _integer_sources(node)):
        kind = "int8"
    ops = [node for node in layer_nodes if not is_op(node, *CONVERSIONS)] or layer_nodes
    return layer._replace(nodes=tuple(node.name for node in ops), kind=kind, us=round(layer.us, 1))


def _integer_sources(node: fx.Node) -> list[fx.Node]:
    """Nodes that compute the integers that a node of the qdq graph reads through dequantize."""
    return [source for read in node.all_input_nodes if is_op(read, "dequantize") for source in read.all_input_nodes]


_LAYOUT = ("Reorder", "Transpose", "Reshape")
"""Names that engines use for changes of layout, which they insert before and after layers."""


def node_times(layers: Iterable[EngineLayer], nodes: Mapping[str, fx.Node]) -> dict[fx.Node, float]:
    """Microseconds of each node of a region.

    The time of a fused layer counts for its first heavy op (`OpTraits.heavy`), or else for its first op.

    Args:
        layers: layers that the engine runs, in order.
        nodes: nodes of the region, by name.
    """
    times: dict[fx.Node, float] = {}
    layout_us = 0.0
    for layer in layers:
        node = next((nodes[name] for name in layer.nodes if name in nodes), None)
        if node is None:
            layout_us += layer.us  # a change of layout counts for the next layer
            continue
        times[node] = times.get(node, 0.0) + layout_us + layer.us
        layout_us = 0.0
    for node in nodes.values():  # a layer that the engine names after the following op, which it has fused with it
        if _rank(node) == 0 and node not in times:
            next_op = next(iter(node.users), node)
            while is_op(next_op, *CONVERSIONS) and next_op.users:
                next_op = next(iter(next_op.users))
            if next_op in times and _rank(next_op) == 1:
                times[node] = times.pop(next_op)
    return times


def _rank(node: fx.Node) -> int:
    """Sort key of the nodes of a layer: heavy ops first, then other ops, then conversions."""
    op = op_of(node)
    if op is None or op.traits.heavy:
        return 0
    return 2 if op.name in CONVERSIONS else 1
