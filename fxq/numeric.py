"""Numbers that say how far two results are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

CEILING = 50.0
"""dB. SQNR of one 8-bit rounding of a full-range signal; losses above it are float noise and are not counted."""


def sqnr(reference: Any, value: Any) -> float:
    """Signal to quantization noise ratio of `value` against `reference`, in dB.

    Args:
        reference: a float tensor, or nested tuples, lists and dicts of them.
        value: the same structure and shapes.

    Returns:
        10 log10(sum(reference**2) / sum((reference - value)**2)), over all tensors together, in float64; infinity when
        they are equal, NaN when `value` is not finite where `reference` is.

    Source: Krishnamoorthi 2018, section 3.
    """
    signal = noise = 0.0
    for a, b in zip(tensors(reference), tensors(value), strict=True):
        a64, b64 = a.detach().to("cpu", torch.float64), b.detach().to("cpu", torch.float64)
        signal += float((a64 * a64).sum())
        noise += float(((a64 - b64) ** 2).sum())
    if noise == 0.0:
        return math.inf
    if not math.isfinite(noise):
        return math.nan
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def loss(before: float, after: float) -> float:
    """Decibels lost between two SQNRs, counted below `CEILING`; infinity when `after` is NaN."""
    return math.inf if math.isnan(after) else min(before, CEILING) - min(after, CEILING)


def tensors(values: Any) -> Iterator[Tensor]:
    """Every tensor inside nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors(value)
    elif is_dataclass(values) and not isinstance(values, type):
        for field in fields(values):
            yield from tensors(getattr(values, field.name))
