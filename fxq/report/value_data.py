"""How values lie, for the report page: histograms of what ops hand on, and the ranges of weights by channel."""

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


def values(found: Mapping[str, Distribution]) -> dict[str, Any]:
    """The distributions of the float model's values, by the row of the ledger: see `Distribution`."""
    return {
        name: {
            "low": number(seen.low),
            "high": number(seen.high),
            "counts": seen.counts,
            "clip": numbers(seen.clip, 5) if seen.clip is not None else None,
            "outside": number(seen.outside, 3),
        }
        for name, seen in found.items()
    }


def weights(model: Quantized) -> dict[str, Any]:
    """The weights as the integers say them, by the name of the layer's row in the ledger.

    For each: `axis`; `low`, `high` and `scale` of each channel along it (of the whole tensor where it is None); the
    `range` of all of them, and `counts` of the values in equal bins over it.
    """
    rows: defaultdict[str, list[str]] = defaultdict(list)
    layers: defaultdict[str, list[LayerQParams]] = defaultdict(list)  # a unit may hold several, in order of its rows
    for row in model.ledger:
        if _has_weight(row):
            rows[row.into].append(row.name)
    for layer in model.qparams().values():
        layers[layer.node].append(layer)
    return {
        name: _weight(layer)
        for node, found in layers.items()
        for name, layer in zip(rows[node][-len(found) :], found, strict=False)
    }


def _has_weight(row: Entry) -> bool:
    return row.op in OPS and OPS[row.op].traits.weight is not None


def _weight(layer: LayerQParams) -> dict[str, Any]:
    """Of a weight in blocks, the channels are its rows, each with its largest scale."""
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
    """Values as a row for each entry of the axis; as one row without an axis."""
    return values.flatten()[None] if axis is None else values.movedim(axis, 0).flatten(1)


def _counts(values: Tensor, low: float, high: float) -> list[int]:
    """How many values lie in each of `BINS` equal bins; one bin where all of them are the same."""
    if low == high:
        return [values.numel()]
    return [int(count) for count in torch.histc(values, BINS, low, high).tolist()]
