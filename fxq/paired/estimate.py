"""The mean of what parts of the samples say, pulled towards 0 by as much as they disagree (James and Stein)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Estimate:
    """What parts of the samples say of each channel, on average, pulled towards 0 by as much as they disagree.

    Later parts count more: when they are run, the layers before are corrected better.

    Attributes:
        count: how many parts there were.
        weight, weight_squares: sums over them of what each counts, and of the squares of that.
        total, squares: sums of what each says, and of the squares of that, times what it counts: float64, (C,).

    Source: James and Stein 1961, "Estimation with quadratic loss", with the factor of all channels cut off at 0.
    """

    count: int = 0
    weight: int = 0
    weight_squares: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))

    def add(self, found: Tensor) -> None:
        """Take in what the next part says, (C,)."""
        self.count += 1
        weight = self.count**2
        self.weight, self.weight_squares = self.weight + weight, self.weight_squares + weight**2
        self.total, self.squares = self.total + weight * found, self.squares + weight * found.square()

    @property
    def mean(self) -> Tensor:
        """What the parts say on average."""
        return self.total / self.weight

    def __call__(self) -> Tensor:
        """The same, as far as it is no chance. Of one part, nobody can tell."""
        if self.count < 2:
            return self.mean
        parts = self.weight**2 / self.weight_squares  # so many that count alike would tell as much
        noise = (self.squares / self.weight - self.mean.square()).clamp(min=0).sum() / (parts - 1)
        return self.mean * (1 - noise / self.mean.square().sum().clamp(min=1e-300)).clamp(min=0)
