"""Statistics over parts of the samples: their mean, shrunk by its noise (James and Stein), and what a part needs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

PARTS = 32
"""Number of parts of the samples whose statistics are compared, if there are enough values."""
MIN_PART_VALUES = 16
"""Minimum number of values per channel in a part: with fewer, a standard deviation says little."""


@dataclass
class WaitingPairs:
    """Values in two forms, for example in float and rounded, which wait until there are enough for a part.

    Attributes:
        axis: axis along which the values of several batches are joined.
        count: number of values per channel that have left so far.
        waiting: values in both forms, and their number per channel, which wait.
    """

    axis: int
    count: int = 0
    waiting: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)

    def joined(self, first: Tensor, second: Tensor, count: int) -> tuple[Tensor, Tensor, int] | None:
        """Add values in both forms, and return all that wait, joined, if there are enough for a part; else None.

        Args:
            first: values in the first form.
            second: values in the second form, of the shape of `first`.
            count: number of values per channel in each of them.
        """
        self.waiting.append((first, second, count))
        firsts, seconds, counts = zip(*self.waiting, strict=True)
        if sum(counts) < MIN_PART_VALUES:
            return None
        self.waiting.clear()
        self.count += sum(counts)
        if len(firsts) == 1:
            return first, second, count
        return torch.cat(firsts, self.axis), torch.cat(seconds, self.axis), sum(counts)


@dataclass
class ShrunkMean:
    """Weighted mean by channel of the values of parts of the samples, shrunk towards 0 by its noise.

    Later parts have more weight: when they run, the layers before are corrected better.

    Attributes:
        count: number of parts.
        weight: sum of the weights.
        weight_squares: sum of the squared weights.
        total: weighted sum of the values, float64, (C,).
        squares: weighted sum of the squared values, float64, (C,).

    Source: James and Stein 1961, "Estimation with quadratic loss", with one factor for all channels, at least 0.
    """

    count: int = 0
    weight: int = 0
    weight_squares: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))

    def add(self, values: Tensor) -> None:
        """Add the values of the next parts, float64, (parts, C)."""
        weights = [i**2 for i in range(self.count + 1, self.count + len(values) + 1)]
        self.count += len(values)
        self.weight += sum(weights)
        self.weight_squares += sum(weight**2 for weight in weights)
        row = torch.tensor(weights, dtype=values.dtype, device=values.device)
        self.total, self.squares = self.total + row @ values, self.squares + row @ values.square()

    @property
    def mean(self) -> Tensor:
        """Weighted mean, not shrunk, float64, (C,)."""
        return self.total / self.weight

    def __call__(self) -> Tensor:
        """Weighted mean, shrunk by its noise, float64, (C,). The mean of a single part is not shrunk."""
        if self.count < 2:
            return self.mean
        equal_parts = self.weight**2 / self.weight_squares  # number of equally weighted parts with the same variance
        noise = (self.squares / self.weight - self.mean.square()).clamp(min=0).sum() / (equal_parts - 1)
        return self.mean * (1 - noise / self.mean.square().sum().clamp(min=1e-300)).clamp(min=0)
