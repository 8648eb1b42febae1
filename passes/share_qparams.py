"""share-qparams: which edges have the same scale and zero point."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import networkx as nx
from torch import fx

from fxq.graph import Edge, info, is_op, options_of
from fxq.passbase import Pass, Stage
from fxq.rewrite import Rewriter
from fxq.spec import TensorSpec
from fxq.unit import calls_of

Key = tuple[fx.Node, TensorSpec]


@dataclass(frozen=True)
class ShareQParams(Pass):
    """Group the integer edges that must have one scale and zero point.

    Before: plans    After: the same graph, with `edges` on every value that takes an integer form
    Keeps: the graph.

    An op that moves data ties its inputs and its output together (cat, max pool, reshape). Groups are the connected
    components of these ties.
    """

    name: ClassVar[str] = "share-qparams"
    needs: ClassVar[Stage] = Stage.FUSED
    gives: ClassVar[Stage] = Stage.FUSED

    def run(self, rewriter: Rewriter) -> None:
        """Collect edges and ties, number the groups, and write them onto the values."""
        nodes = rewriter.nodes()
        wanted: dict[fx.Node, dict[TensorSpec, None]] = {}
        for node in nodes:
            for value, spec in reads_of(node):
                wanted.setdefault(value, {})[spec] = None
        for node in nodes:
            plan = info(node).plan
            if plan is not None and plan.emits is not None and node not in wanted:
                wanted[node] = {plan.emits: None}
        ties: nx.Graph[Hashable] = nx.Graph()
        ties.add_nodes_from((value, spec) for value, specs in wanted.items() for spec in specs)
        moved: set[Key] = set()
        for node in nodes:
            plan = info(node).plan
            if plan is None or plan.fate != "moves":
                continue
            for value, spec in reads_of(node):
                if spec in wanted.get(node, {}):
                    ties.add_edge((value, spec), (node, spec))
                    if not _extends(rewriter, node):
                        moved.add((node, spec))
        groups = list(nx.connected_components(ties))
        group = {key: i for i, keys in enumerate(groups) for key in keys}
        sources = [len(keys - moved) for keys in groups]
        for value, specs in wanted.items():
            edges = []
            for spec in sorted(specs, key=lambda spec: -spec.bits):  # who reads it in float reads the first form
                number = group[value, spec]
                fixed = _fixed_range(rewriter, value) if sources[number] == 1 else None
                edges.append(Edge(spec, number, (value, spec) not in moved, fixed))
            rewriter.describe(value, edges=tuple(edges))


_MAXIMA = (
    *("max_pool1d", "max_pool2d", "max_pool3d"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
)


def _extends(rewriter: Rewriter, node: fx.Node) -> bool:
    """Whether a mover makes values outside the range of its input: then its result is to be observed as well.

    Not where only maxima of windows read a pad with something negative: the lowest value of the grid does as well.
    """
    if is_op(node, "pad") and options_of(node)["value"] < 0 and all(is_op(user, *_MAXIMA) for user in node.users):
        return False
    calls = calls_of(rewriter.gm, node)
    return any(call.op.quant.extends is not None and call.op.quant.extends(call.options) for call in calls)


def _fixed_range(rewriter: Rewriter, value: fx.Node) -> tuple[float, float] | None:
    """The range of the op that makes a value, where it does not depend on the data."""
    calls = calls_of(rewriter.gm, value)
    return calls[-1].op.quant.output_range if calls else None


def reads_of(node: fx.Node) -> list[tuple[fx.Node, TensorSpec]]:
    """The values that a node reads as integers, with the spec it wants of each."""
    plan = info(node).plan
    if plan is None or not plan.reads:
        return []
    return [(value, plan.reads[value.name]) for value in node.all_input_nodes if value.name in plan.reads]
