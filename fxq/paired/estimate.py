"""Mean over parts of the samples, shrunk by its noise (James and Stein)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


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
