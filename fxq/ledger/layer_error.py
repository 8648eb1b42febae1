"""Errors of every op of a quantized model against the float model, and distributions of the float model's values."""

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
class LayerErrors:
    """Errors and distributions of ops, by name in the ledger.

    Attributes:
        sqnr: dB of each value against the float model's, with the errors of all ops before it.
        own_sqnr: dB of each value when its op runs on the float model's values.
        fault_sqnr: as `own_sqnr`, but without the rounding of the output to a grid that integer ops read: that error
            is counted for these ops.
        values: distributions of the float model's values.
    """

    sqnr: dict[str, float] = field(default_factory=dict)
    own_sqnr: dict[str, float] = field(default_factory=dict)
    fault_sqnr: dict[str, float] = field(default_factory=dict)
    values: dict[str, Distribution] = field(default_factory=dict)


def measured_with(context: Context) -> list[Batch]:
    """Batches to measure errors with: the first recorded batch (one sample for a large model), then the example."""
    recorded = context.samples[:1]
    if context.divisible and context.is_large:
        recorded = [first_of(batch, 1) for batch in recorded]
    return [*recorded, context.example]


def measure(
    original: FloatModelOps,
    gm: fx.GraphModule,
    node_rows: Mapping[str, NodeRow],
    batches: list[Batch],
    read: Set[fx.Node],
) -> LayerErrors:
    """Compare the value of every node of an integer graph with the float model's.

    Args:
        original: the float model.
        gm: the integer model.
        node_rows: row of the ledger for each node of `gm`, by the name of the node.
        batches: inputs to try; the first one that both models run on is used.
        read: nodes of `gm` whose integers an integer op reads.
    """
    for batch in batches:
        try:
            with torch.no_grad(), without_autocast():
                return _measure(original, gm, node_rows, batch, read)
        except Exception as error:  # if axis 0 does not count samples, the recorded part of a batch may not fit
            log.info("no SQNR of layers on %s: %s", batch, error)
    log.warning("the ledger has no SQNR: the float graph or the int8 graph does not run on recorded samples.")
    return LayerErrors()


def _measure(
    original: FloatModelOps, gm: fx.GraphModule, node_rows: Mapping[str, NodeRow], batch: Batch, read: Set[fx.Node]
) -> LayerErrors:
    errors, pairs = LayerErrors(), same_values(gm, node_rows, original.nodes)
    grids = {real: grid_of(gm, rounded_at(node)) for node, real in pairs.items()}
    reference_nodes = {op.name: original.nodes[op.name] for op in original.ops if op.name in original.nodes}
    reference_nodes |= {node_rows[node.name].row.name: real for node, real in pairs.items()}
    names: dict[fx.Node, list[str]] = {}
    for name, node in reference_nodes.items():
        names.setdefault(node, []).append(name)

    def record_distribution(node: fx.Node, value: Any) -> None:
        values_distribution = distribution(value, grids.get(node)) if node in names else None
        if values_distribution is not None:
            errors.values.update(dict.fromkeys(names[node], values_distribution))

    reference, compared = IsolatedGraph(original.gm, original.graph), IsolatedGraph(gm, gm.graph)
    used = used_rows(reference, batch, set(pairs.values()))
    for value in side_by_side(reference, compared, pairs, batch, own=True, see=record_distribution, used=used):
        name = node_rows[value.node.name].row.name
        errors.sqnr[name], errors.own_sqnr[name] = sqnr(value.want, value.got), sqnr(value.want, value.own)
        last = rounded_at(value.node)
        grid = grid_of(gm, last) if last in read else None
        errors.fault_sqnr[name] = _fault(value, grid) if grid is not None else errors.own_sqnr[name]
    return errors


def _fault(value: ComparedValue, grid: QParams) -> float:
    """SQNR in dB of a node on float inputs, without the error of the last rounding, to `grid`.

    The two errors are independent, so their powers add, and the rounding's power is subtracted. The difference has
    limited precision: it is at least 1/100 of the rounding's power.
    """
    total, rounding, is_only_rounding = Agreement(), Agreement(), True
    for want, own in zip(value.want, value.own or (), strict=True):
        rounded = dequantize(quantize(want.to(torch.float32), grid), grid)
        total.add(want, own)
        rounding.add(want, rounded)
        is_only_rounding = is_only_rounding and torch.equal(rounded, own)
    noise = 0.0 if is_only_rounding else max(total.noise - rounding.noise, rounding.noise / 100)
    return replace(total, noise=noise).sqnr


def same_values(
    gm: fx.GraphModule, node_rows: Mapping[str, NodeRow], reference: Mapping[str, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Pair the nodes of a final graph with the nodes of a reference that compute the same values.

    Args:
        gm: the integer model.
        node_rows: row of its ledger for each of its nodes, by the name of the node.
        reference: nodes of the reference, by the name of the op whose value they compute.

    Returns:
        The reference's node for each node of `gm` that has one.
    """
    nodes = ((node, node_rows.get(node.name)) for node in gm.graph.nodes)
    return {n: reference[s.value.name] for n, s in nodes if s is not None and s.value.name in reference}
