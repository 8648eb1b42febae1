"""share-qparams: which edges can have the same scale and zero point."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxq.graph.analysis.fill_constants import FillConstants
from fxq.graph.info import Edge, info, precision_of
from fxq.graph.query import values_of
from fxq.graph.unit import WantedForm, calls_of, reads_of, wanted_forms
from fxq.quant.spec import TensorSpec
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter

Key = tuple[fx.Node, TensorSpec]


@dataclass(frozen=True)
class ShareQParams(Pass):
    """Group the integer edges that can have one scale and zero point.

    Before: plans    After: the same graph, with `edges` on every value and weight that takes an integer form
    Keeps: the graph. An edge whose scale is measured at run time is alone in its group.

    An op that moves data ties its inputs and its output together (cat, max pool, reshape). Groups are the connected
    components of these ties. Which ties hold, `choose-grids` decides when the ranges are known.
    """

    name: ClassVar[str] = "share-qparams"
    needs: ClassVar[Stage] = Stage.FUSED
    gives: ClassVar[Stage] = Stage.FUSED

    def run(self, rewriter: Rewriter) -> None:
        """Collect edges and ties, number the groups, and write them onto the values."""
        import networkx as nx

        nodes = rewriter.nodes()
        wanted: dict[fx.Node, dict[TensorSpec, None]] = {}
        reads = {node: reads_of(rewriter.gm, node) for node in nodes}
        for read in reads.values():
            for value, spec in read.items():
                if spec.range != "dynamic":
                    wanted.setdefault(value, {})[spec] = None
        for node in nodes:
            plan = info(node).plan
            if plan is not None and plan.emits is not None:
                for value in values_of(node):
                    wanted.setdefault(value, {plan.emits: None})
        ties: nx.Graph[Hashable] = nx.Graph()
        ties.add_nodes_from((value, spec) for value, specs in wanted.items() for spec in specs)
        moved: set[Key] = set()
        for node in nodes:
            for value, spec in reads[node].items() if precision_of(node) == "moves" else ():
                if spec in wanted.get(node, {}):
                    ties.add_edge((value, spec), (node, spec))
                    moved.add((node, spec))
        groups = nx.connected_components(ties)
        group = {key: i for i, keys in enumerate(groups) for key in keys}
        fill_constants = FillConstants(rewriter.gm)
        for value in nodes:
            constants = tuple(sorted(fill_constants.of(value))) if value.op != "get_attr" else ()
            edges = []
            for spec in sorted(wanted.get(value, {}), key=lambda spec: -spec.bits):  # float readers read the first form
                source = (value, spec) not in moved
                observed = source or bool(constants) or selects(rewriter.gm, value)
                edges.append(Edge(spec, group[value, spec], source, observed, constants))
            if edges:
                rewriter.describe(value, edges=tuple(edges))
        _add_alone(rewriter, nodes, len(set(group.values())))


def _add_alone(rewriter: Rewriter, nodes: Sequence[fx.Node], group: int) -> None:
    """Give weights, and values whose scales are measured, an edge for each form that their readers want.

    No other edge shares their grids. `group`: the first number that is free.
    """
    wanted: dict[fx.Node, dict[WantedForm, None]] = {}
    for node in nodes:
        for value, wish in wanted_forms(rewriter.gm, node).items():
            if value.op == "get_attr" or wish[0].range == "dynamic":
                wanted.setdefault(value, {})[wish] = None
    for value, wishes in wanted.items():
        is_weight = value.op == "get_attr"
        edges = [
            Edge(spec, group + i, True, is_weight and spec.format == "integer", axis=axis)
            for i, (spec, axis) in enumerate(wishes)
        ]
        calibrated = [edge for edge in info(value).edges if not (is_weight or edge.dynamic)]
        rewriter.describe(value, edges=(*calibrated, *edges))
        group += len(edges)


def selects(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node hands on, or clips to, a part of what it reads."""
    return any(call.op.traits.selects for call in calls_of(gm, node))
