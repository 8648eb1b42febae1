"""Distributions for the report page: histograms of activations, and ranges of weights by channel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxq.ledger.float_record import Distribution
from fxq.ledger.layer_qparams import LayerQParams
from fxq.ledger.ledger import Entry
from fxq.ledger.quantized import Quantized
from fxq.ops import OPS
from fxq.quant.qparams import dequantize, spread
from fxq.report.graph_data import number, numbers

BINS = 64
"""Number of bins of a histogram of weights."""


def values(distributions: Mapping[str, Distribution]) -> dict[str, Any]:
    """Return the distributions of the float model's values as plain data, by the name of the ledger's row."""
    return {
        name: {
            "low": number(distribution.low),
            "high": number(distribution.high),
            "counts": distribution.counts,
            "clip": numbers(distribution.clip, 5) if distribution.clip is not None else None,
            "outside": number(distribution.outside, 3),
        }
        for name, distribution in distributions.items()
    }


def weights(model: Quantized) -> dict[str, Any]:
    """Return the dequantized weights' ranges and histograms as plain data, by the name of the ledger's row.

    Each has: `axis`; `low`, `high` and `scale` of each channel along it (of the whole tensor if it is None); the
    `range` of all values; and `counts` of the values in equal bins over that range.
    """
    rows: defaultdict[str, list[str]] = defaultdict(list)
    layers: defaultdict[str, list[LayerQParams]] = defaultdict(
        list
    )  # a unit may have several, in the order of its rows
    for row in model.ledger:
        if _has_weight(row):
            rows[row.into].append(row.name)
    for layer in model.qparams().values():
        layers[layer.node].append(layer)
    return {
        name: _weight(layer)
        for node, node_layers in layers.items()
        for name, layer in zip(rows[node][-len(node_layers) :], node_layers, strict=False)
    }


def _has_weight(row: Entry) -> bool:
    return row.op in OPS and OPS[row.op].traits.weight is not None


def _weight(layer: LayerQParams) -> dict[str, Any]:
    """Ranges and histogram of a weight. For a weight in blocks, they are per row, with the largest scale of each."""
    grid = next(iter(layer.weights.values())).qparams
    axis = layer.axis if layer.block is None else 0
    steps = spread(layer.weight_scale, layer.weight, layer.axis, layer.block).expand_as(layer.weight)
    values, steps = (_channels(t, axis) for t in (dequantize(layer.weight, grid), steps))
    scale = steps.amax(1) if values.shape[1] else layer.weight_scale.reshape(-1)
    low, high = values.aminmax(dim=1) if values.shape[1] else (scale * 0, scale * 0)
    ends = float(low.min()), float(high.max())
    return {
        "axis": axis,
        "low": numbers(low.tolist(), 3),
        "high": numbers(high.tolist(), 3),
        "scale": numbers(scale.tolist(), 3),
        "range": numbers(ends),
        "counts": _counts(values, *ends),
    }


def _channels(values: Tensor, axis: int | None) -> Tensor:
    """Reshape values to a row per channel along the axis, or to one row if it is None."""
    return values.flatten()[None] if axis is None else values.movedim(axis, 0).flatten(1)


def _counts(values: Tensor, low: float, high: float) -> list[int]:
    """Count the values in each of `BINS` equal bins; one bin if all values are equal."""
    if low == high:
        return [values.numel()]
    return [int(count) for count in torch.histc(values, BINS, low, high).tolist()]
