"""Numbers that say how far two results are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.trees import leaves

CEILING = 50.0
"""dB. SQNR of one 8-bit rounding of a full-range signal; losses above it are float noise and are not counted."""


_AT_ONCE = 1 << 15
"""Values that are summed at once. In float64 they stay in the cache; a whole tensor takes ten times as long."""


@dataclass
class Agreement:
    """How far values are from what they should be: sums in float64 over any number of tensors.

    Infinity where it should be counts as nothing.

    Attributes:
        signal: sum of the squares of what they should be.
        energy: sum of their own squares.
        cross: sum of the products of the two.
        noise: sum of the squares of the differences.
        largest: the largest absolute difference.

    Example:
        >>> found = Agreement()
        >>> found.add(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
        >>> found.sqnr, found.max_error
        (20.0, 0.5)
    """

    signal: float = 0.0
    energy: float = 0.0
    cross: float = 0.0
    noise: float = 0.0
    largest: float = 0.0

    def add(self, reference: Tensor, value: Tensor) -> None:
        """Take in a value of the same number of elements as its reference, on any device.

        What is not finite and the same in both is left out.
        """
        a, b = (t.detach().to("cpu").reshape(-1) for t in (reference, value))
        for want, got in zip(a.split(_AT_ONCE), b.split(_AT_ONCE), strict=True):
            want, got = want.double(), got.double()
            difference = want - got
            if not math.isfinite(float(difference.sum())):  # the same infinity in both, as behind a mask, is no error
                alike = (want.isinf() & (want == got)) | (want.isnan() & got.isnan())
                want, got = want.masked_fill(alike, 0.0), got.masked_fill(alike, 0.0)
                difference = want - got
            self.signal += float(torch.dot(want, want))
            self.energy += float(torch.dot(got, got))
            self.cross += float(torch.dot(want, got))
            self.noise += float(torch.dot(difference, difference))
            if len(difference):
                low, high = difference.aminmax()
                self.largest = max(self.largest, -float(low), float(high))

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise ratio in dB: infinity when the two are equal, NaN where a value is no number."""
        if self.noise == 0.0:
            return math.inf
        if not math.isfinite(self.noise):
            return math.nan
        return 10.0 * math.log10(self.signal / self.noise) if self.signal > 0.0 else -math.inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two as vectors: 1 when they are equal, 0 where just one of them is zero."""
        if self.noise == 0.0:
            return 1.0
        length = math.sqrt(self.signal) * math.sqrt(self.energy)
        return self.cross / length if length != 0.0 else 0.0

    @property
    def max_error(self) -> float:
        """The largest absolute difference, in units of the value."""
        return math.nan if math.isnan(self.noise) else self.largest


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
    found = Agreement()
    for a, b in zip(tensors(reference), tensors(value), strict=True):
        found.add(a, b)
    return found.sqnr


def token_weights(tokens: Tensor) -> Tensor:
    """How much each row of (N, C) counts where all are to count alike, (N,): one divided by its power.

    That of the usual row is added, so that those near zero do not count for much more than others.
    """
    power = tokens.square().sum(1)
    return 1 / (power + power.median()).clamp(min=1e-30)


def loss(before: float, after: float) -> float:
    """Decibels lost between two SQNRs, counted below `CEILING`; infinity when `after` is NaN."""
    return math.inf if math.isnan(after) else min(before, CEILING) - min(after, CEILING)


def tensors(values: Any) -> Iterator[Tensor]:
    """Every tensor inside nested tuples, lists, mappings and dataclasses, in order."""
    return (leaf for leaf in leaves(values) if isinstance(leaf, Tensor))


def identical(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and values, NaN where NaN is.

    Example:
        >>> identical(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
        True
    """
    if a is b:
        return True
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def storage_address(tensor: Tensor) -> int:
    """Address of the memory that a tensor shares with its views."""
    return tensor.untyped_storage().data_ptr()


def nbytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers of a model, the integer weights of kernels included.

    Memory that two of them share counts once. What kernels pack when they run, and can make again, is left out.

    Example:
        >>> nbytes(nn.Linear(10, 10, bias=False))
        400
    """
    tensors: Sequence[Tensor] = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
