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
    return row.op in OPS and OPS[row.op].quant.weight is not None


def _weight(layer: LayerQParams) -> dict[str, Any]:
    channels = layer.weight.flatten()[None] if layer.axis is None else layer.weight.movedim(layer.axis, 0).flatten(1)
    scale, zero_point = (t.reshape(-1, 1) for t in (layer.weight_scale, layer.weight_zero_point))
    values = (channels - zero_point) * scale
    low, high = values.aminmax(dim=1) if values.shape[1] else (scale[:, 0] * 0, scale[:, 0] * 0)
    ends = float(low.min()), float(high.max())
    return {
        "axis": layer.axis,
        "low": numbers(low.tolist(), 3),
        "high": numbers(high.tolist(), 3),
        "scale": numbers(scale[:, 0].tolist(), 3),
        "range": numbers(ends),
        "counts": _counts(values, *ends),
    }


def _counts(values: Tensor, low: float, high: float) -> list[int]:
    """How many values lie in each of `BINS` equal bins; one bin where all of them are the same."""
    if low == high:
        return [values.numel()]
    return [int(count) for count in torch.histc(values, BINS, low, high).tolist()]
