"""Outputs of a model for batches, and their distance from those of another model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch as fxq takes it, the batch left as it is."""
    if isinstance(batch, Mapping):
        return model(**{name: value.clone() for name, value in batch.items()})
    return model(batch.clone())


def outputs(model: nn.Module, batches: Sequence[Any]) -> list[Tensor]:
    """Every float tensor that the model returns, in order, its values over all batches in one row."""
    outputs = zip(*(tensors(call(model, batch)) for batch in batches), strict=True)
    return [torch.cat([tensor.flatten() for tensor in same]) for same in outputs]


def tensors(value: Any) -> Iterator[Tensor]:
    """Every float tensor inside nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors(part)


def sqnr(reference: Any, value: Any) -> float:
    """dB: 10 log10(sum(reference^2) / sum((reference - value)^2)) of the output that has the least of it.

    Infinity where they are equal, NaN where a value is not finite.
    """
    least = math.inf
    for a, b in zip(tensors(reference), tensors(value), strict=True):
        noise = float((a.double() - b.double()).square().sum())
        signal = float(a.double().square().sum())
        if not math.isfinite(noise) or not math.isfinite(signal):
            return math.nan
        if noise > 0.0:
            least = min(least, 10 * math.log10(signal / noise) if signal > 0.0 else -math.inf)
    return least
