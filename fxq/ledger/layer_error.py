"""How far every op of an integer model is from the float model's, and how the values of the float model lie."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxq.common.data import Batch, first_of
from fxq.common.isolation import without_autocast
from fxq.common.metrics import Agreement, sqnr
from fxq.graph.grid import grid_of
from fxq.graph.program import IsolatedGraph
from fxq.ledger.float_record import Distribution, distribution
from fxq.ledger.ledger import NodeRow
from fxq.paired.side_by_side import ComparedValue, rounded_at, side_by_side
from fxq.paired.used_rows import used_rows
from fxq.pipeline.context import Context
from fxq.pipeline.float_ops import FloatModelOps
from fxq.quant.qparams import QParams, dequantize, quantize

log = logging.getLogger("fxq")


@dataclass
class Measured:
    """Numbers by the name of an op in the ledger.

    Attributes:
        sqnr: dB of its value against the float model's, what happens before it included.
        own_sqnr: the same where it runs on the float model's values.
        fault_sqnr: the same without the rounding of its output to a grid that integer ops read from: that error is
            counted for these ops.
        values: the distribution of the float model's values.
    """

    sqnr: dict[str, float] = field(default_factory=dict)
    own_sqnr: dict[str, float] = field(default_factory=dict)
    fault_sqnr: dict[str, float] = field(default_factory=dict)
    values: dict[str, Distribution] = field(default_factory=dict)


def measured_with(context: Context, original: FloatModelOps) -> list[Batch]:
    """What to measure with, best first: the first recorded batch, of which one sample is enough for a large model."""
    recorded = context.samples[:1]
    if context.divisible and original.is_large:
        recorded = [first_of(batch, 1) for batch in recorded]
    return [*recorded, context.example]


def measure(
    original: FloatModelOps,
    gm: fx.GraphModule,
    node_rows: Mapping[str, NodeRow],
    batches: list[Batch],
    read: Set[fx.Node],
) -> Measured:
    """Compare the value of every node of an integer graph with the float model's.

    Args:
        original: the float model.
        gm: the integer model.
        node_rows: the ledger's row for each of its nodes, by the name of the node.
        batches: inputs to try: the first that both models run on is used.
        read: the nodes of `gm` whose integers an integer op reads.
    """
    for batch in batches:
        try:
            with torch.no_grad(), without_autocast():
                return _measure(original, gm, node_rows, batch, read)
        except Exception as error:  # of a batch whose first axis does not count samples, the recorded part does not fit
            log.info("no SQNR of layers on %s: %s", batch, error)
    log.warning("the ledger has no SQNR: the float and the int8 graph do not both run on recorded samples.")
    return Measured()


def _measure(
    original: FloatModelOps, gm: fx.GraphModule, node_rows: Mapping[str, NodeRow], batch: Batch, read: Set[fx.Node]
) -> Measured:
    found, pairs = Measured(), same_values(gm, node_rows, original.nodes)
    grids = {real: grid_of(gm, rounded_at(node)) for node, real in pairs.items()}
    shown = {op.name: original.nodes[op.name] for op in original.ops if op.name in original.nodes}
    shown |= {node_rows[node.name].row.name: real for node, real in pairs.items()}
    names: dict[fx.Node, list[str]] = {}
    for name, node in shown.items():
        names.setdefault(node, []).append(name)

    def see(node: fx.Node, value: Any) -> None:
        seen = distribution(value, grids.get(node)) if node in names else None
        if seen is not None:
            found.values.update(dict.fromkeys(names[node], seen))

    reference, compared = IsolatedGraph(original.gm, original.graph), IsolatedGraph(gm, gm.graph)
    used = used_rows(reference, batch, set(pairs.values()))
    for value in side_by_side(reference, compared, pairs, batch, own=True, see=see, used=used):
        name = node_rows[value.node.name].row.name
        found.sqnr[name], found.own_sqnr[name] = sqnr(value.want, value.got), sqnr(value.want, value.own)
        end = rounded_at(value.node)
        grid = grid_of(gm, end) if end in read else None
        found.fault_sqnr[name] = _fault(value, grid) if grid is not None else found.own_sqnr[name]
    return found


def _fault(value: ComparedValue, grid: QParams) -> float:
    """dB of what a node does wrong alone, its last rounding, onto this grid, left out.

    The two errors do not depend on each other, so that their powers add. What is left may be little beside what is
    taken away, and is not known better than to a hundredth of it.
    """
    alone, rounding, same = Agreement(), Agreement(), True
    for want, own in zip(value.want, value.own or (), strict=True):
        rounded = dequantize(quantize(want.to(torch.float32), grid), grid)
        alone.add(want, own)
        rounding.add(want, rounded)
        same = same and torch.equal(rounded, own)
    noise = 0.0 if same else max(alone.noise - rounding.noise, rounding.noise / 100)
    return replace(alone, noise=noise).sqnr


def same_values(
    gm: fx.GraphModule, node_rows: Mapping[str, NodeRow], reference: Mapping[str, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The nodes of a final graph, and the node of a reference that makes the same value.

    Args:
        gm: the integer model.
        node_rows: its ledger's row for each of its nodes, by the name of the node.
        reference: the reference's nodes, by the op whose value they make.
    """
    nodes = ((node, node_rows.get(node.name)) for node in gm.graph.nodes)
    return {n: reference[s.value.name] for n, s in nodes if s is not None and s.value.name in reference}
