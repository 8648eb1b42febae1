"""Metrics of the difference between two results: SQNR, cosine, largest error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.trees import leaves

MAX_COUNTED_SQNR_DB = 50.0
"""SQNR of one 8-bit rounding of a full-range signal, in dB. Losses above it are float noise and do not count."""


_AT_ONCE = 1 << 15
"""Values that are summed at once, few enough to stay in the cache as float64."""


@dataclass
class Agreement:
    """Agreement of values with reference values: sums in float64 over any number of tensors.

    Equal infinities and NaN in both places are left out.

    Attributes:
        signal: sum of the squares of the reference.
        energy: sum of the squares of the values.
        cross: sum of the products of the two.
        noise: sum of the squares of the differences.
        largest: largest absolute difference.

    Example:
        >>> agreement = Agreement()
        >>> agreement.add(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
        >>> agreement.sqnr, agreement.max_error
        (20.0, 0.5)
    """

    signal: float = 0.0
    energy: float = 0.0
    cross: float = 0.0
    noise: float = 0.0
    largest: float = 0.0

    def add(self, reference: Tensor, value: Tensor) -> None:
        """Add a tensor and its reference, with the same number of elements, on any device."""
        for want, got, difference in _pieces(reference, value):
            self.signal += float(torch.dot(want, want))
            self.energy += float(torch.dot(got, got))
            self.cross += float(torch.dot(want, got))
            self.noise += float(torch.dot(difference, difference))
            if len(difference):
                low, high = difference.aminmax()
                self.largest = max(self.largest, -float(low), float(high))

    def include(self, other: Agreement) -> None:
        """Add the sums of another agreement, of other tensors."""
        self.signal += other.signal
        self.energy += other.energy
        self.cross += other.cross
        self.noise += other.noise
        self.largest = max(self.largest, other.largest)

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise ratio in dB: infinity for equal tensors, NaN if a difference is not finite."""
        return _decibels(self.signal, self.noise)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two as vectors: 1 if they are equal, 0 if only one of them is zero."""
        if self.noise == 0.0:
            return 1.0
        length = math.sqrt(self.signal) * math.sqrt(self.energy)
        return self.cross / length if length != 0.0 else 0.0

    @property
    def max_error(self) -> float:
        """Largest absolute difference, in the unit of the values."""
        return math.nan if math.isnan(self.noise) else self.largest


def _pieces(reference: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Pieces of a tensor, of another one and of their difference, float64 (n,), with 0 where both are equally infinite.

    The same applies where both are NaN.
    """
    a, b = (t.detach().to("cpu").reshape(-1) for t in (reference, value))
    for want, got in zip(a.split(_AT_ONCE), b.split(_AT_ONCE), strict=True):
        want, got = want.double(), got.double()
        difference = want - got
        if not math.isfinite(float(difference.sum())):  # equal infinities, as after a mask, are no error
            equal = (want.isinf() & (want == got)) | (want.isnan() & got.isnan())
            want, got = want.masked_fill(equal, 0.0), got.masked_fill(equal, 0.0)
            difference = want - got
        yield want, got, difference


def _decibels(signal: float, noise: float) -> float:
    """Ratio of two powers in dB: infinity without noise, NaN if the noise is not finite."""
    if noise == 0.0:
        return math.inf
    if not math.isfinite(noise):
        return math.nan
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def sqnr(reference: Any, value: Any) -> float:
    """Signal to quantization noise ratio of `value` against `reference`, in dB.

    Args:
        reference: a float tensor, or nested tuples, lists and dicts of them.
        value: the same structure and shapes.

    Returns:
        10 log10(sum(reference**2) / sum((reference - value)**2)), over all tensors together, in float64; infinity if
        they are equal, NaN if `value` is not finite where `reference` is.

    Source: Krishnamoorthi 2018, section 3.
    """
    pairs = list(zip(tensors(reference), tensors(value), strict=True))
    if all(a is b or torch.equal(a, b) for a, b in pairs):  # as most values of a float op on the same inputs
        return math.inf
    signal = noise = 0.0
    for want, _, difference in (piece for a, b in pairs for piece in _pieces(a, b)):
        signal += float(torch.dot(want, want))
        noise += float(torch.dot(difference, difference))
    return _decibels(signal, noise)


def token_weights(tokens: Tensor) -> Tensor:
    """Return the weights, (N,), that make the rows of `tokens`, float (N, C), count equally in a squared error.

    A weight is 1 / (power of the row + median power); without the median, rows near zero would count far more.
    """
    power = tokens.square().sum(1)
    return 1 / (power + power.median()).clamp(min=1e-30)


def loss(before: float, after: float) -> float:
    """Return the loss between two SQNRs in dB, counted below `MAX_COUNTED_SQNR_DB`; infinity if `after` is NaN."""
    return math.inf if math.isnan(after) else min(before, MAX_COUNTED_SQNR_DB) - min(after, MAX_COUNTED_SQNR_DB)


def tensors(values: Any) -> Iterator[Tensor]:
    """Return the tensors inside nested tuples, lists, mappings and dataclasses, in order."""
    return (leaf for leaf in leaves(values) if isinstance(leaf, Tensor))


def identical(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and values; NaN equals NaN.

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
    """Bytes of all parameters and buffers of a model, including integer weights of kernels.

    Shared memory counts once. Weights that kernels pack when they run are left out.

    Example:
        >>> nbytes(nn.Linear(10, 10, bias=False))
        400
    """
    tensors: Sequence[Tensor] = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
