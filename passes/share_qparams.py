"""share-qparams: group the edges that can have the same scale and zero point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxq.graph.analysis.fill_constants import FillConstants
from fxq.graph.info import Edge, IntegerForm, info, precision_of
from fxq.graph.query import values_of
from fxq.graph.unit import calls_of, reads_of, wanted_forms
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter

Key = tuple[fx.Node, IntegerForm]
"""Edge of a value, by its form."""
Reads = Mapping[fx.Node, Mapping[fx.Node, IntegerForm]]
"""Forms that each node wants of the activations that it reads as integers."""
Wanted = dict[fx.Node, dict[IntegerForm, None]]
"""Forms that all readers of each value want."""


@dataclass(frozen=True)
class ShareQParams(Pass):
    """Group the integer edges that can have one scale and zero point.

    Before: plans    After: the same graph, with `edges` on every value and weight that takes an integer form
    Keeps: the graph.

    An op that moves data (cat, max pool, reshape) ties the edges of its inputs and its output together. Groups are the
    connected components of these ties. An edge with a dynamic range is alone in its group. `choose-grids` may split a
    group once the ranges are known.
    """

    name: ClassVar[str] = "share-qparams"
    needs: ClassVar[Stage] = Stage.FUSED
    gives: ClassVar[Stage] = Stage.FUSED

    def run(self, rewriter: Rewriter) -> None:
        """Collect edges and ties, number the groups, and write them onto the values."""
        nodes = rewriter.nodes()
        reads = {node: reads_of(rewriter.gm, node) for node in nodes}
        wanted = _calibrated_forms(nodes, reads)
        ties = _ties(nodes, reads, wanted)
        groups = _groups(wanted, ties)
        moved = {result for _, result in ties}
        fill_constants = FillConstants(rewriter.gm)
        for value, forms in wanted.items():
            constants = tuple(sorted(fill_constants.of(value))) if value.op != "get_attr" else ()
            has_own_range = bool(constants) or selects(rewriter.gm, value)
            edges = []
            for form in sorted(forms, key=lambda form: -form.spec.bits):  # float readers read the first form
                source = (value, form) not in moved
                edges.append(
                    Edge(form.spec, groups[value, form], source, source or has_own_range, constants, form.axis)
                )
            rewriter.describe(value, edges=tuple(edges))
        _add_alone(rewriter, nodes, len(set(groups.values())))


def _calibrated_forms(nodes: Sequence[fx.Node], reads: Reads) -> Wanted:
    """Forms with a calibrated range that readers want of each activation, or in which its kernel emits it."""
    wanted: Wanted = {}
    for read in reads.values():
        for value, form in read.items():
            if form.spec.range != "dynamic":
                wanted.setdefault(value, {})[form] = None
    for node in nodes:
        plan = info(node).plan
        if plan is not None and plan.emits is not None:
            for value in values_of(node):
                wanted.setdefault(value, {IntegerForm(plan.emits): None})
    return wanted


def _ties(nodes: Sequence[fx.Node], reads: Reads, wanted: Wanted) -> list[tuple[Key, Key]]:
    """Pairs of an input and the result of an op that moves it in the same integer form."""
    movers = [node for node in nodes if precision_of(node) == "moves"]
    return [
        ((value, form), (node, form))
        for node in movers
        for value, form in reads[node].items()
        if form in wanted.get(node, {})
    ]


def _groups(wanted: Wanted, ties: Sequence[tuple[Key, Key]]) -> dict[Key, int]:
    """Number of the group of each edge: connected components of the ties, in the order of `wanted`."""
    import networkx as nx

    graph: nx.Graph[Key] = nx.Graph()
    graph.add_nodes_from((value, form) for value, forms in wanted.items() for form in forms)
    graph.add_edges_from(ties)
    return {key: number for number, keys in enumerate(nx.connected_components(graph)) for key in keys}


def _add_alone(rewriter: Rewriter, nodes: Sequence[fx.Node], group: int) -> None:
    """Add the edges that share their grid with no other: of weights, and of values with dynamic ranges.

    Args:
        rewriter: rewriter of the graph.
        nodes: all nodes of the graph.
        group: first free group number.
    """
    wanted: Wanted = {}
    for node in nodes:
        for value, form in wanted_forms(rewriter.gm, node).items():
            if value.op == "get_attr" or form.spec.range == "dynamic":
                wanted.setdefault(value, {})[form] = None
    for value, forms in wanted.items():
        is_weight = value.op == "get_attr"
        edges = [
            Edge(spec, group + i, True, is_weight and spec.format == "integer", axis=axis)
            for i, (spec, axis) in enumerate(forms)
        ]
        calibrated = [edge for edge in info(value).edges if not (is_weight or edge.dynamic)]
        rewriter.describe(value, edges=(*calibrated, *edges))
        group += len(edges)


def selects(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node returns a part of its input values, or clips them."""
    return any(call.op.traits.selects for call in calls_of(gm, node))
