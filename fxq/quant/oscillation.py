"""Iterative weight freezing: weights that oscillate between two integers in training are frozen to one of them.

Source: Nagel et al. 2022, "Overcoming Oscillations in Quantization-Aware Training", section 4.2 and algorithm 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

MOMENTUM = 0.01
"""Weight of a new forward in the moving averages."""
START_FREQUENCY, END_FREQUENCY = 0.04, 0.011
"""Frequencies above which weights are frozen, at the start and at the end of training."""

_FROZEN_FREQUENCY = 2.0
"""Marks frozen elements in `frequency`: larger than any frequency. A number, so that averaging models keeps it."""


def max_frequency(step: int, steps: int) -> float:
    """Return the frequency above which weights are frozen at a step; it falls along a cosine over `steps`."""
    return END_FREQUENCY + (START_FREQUENCY - END_FREQUENCY) * (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2


class Oscillation(nn.Module):
    """Tracker of the oscillation of each element of a weight, and of the frozen elements.

    Args:
        shape: shape of the weight.
        dtype: dtype of its integers.

    Buffers, in that shape:

        now: integers of the last forward; not in the `state_dict`.
        before: integers of the forward before it; for frozen elements, the integers that they are frozen to.
        direction: int8, sign of the last change, -1 or 1; 0 before any.
        frequency: float16, moving average of the changes that reverse the previous one; 2 for frozen elements.
        ahead: float16, moving average of the integers, minus `before`.
    """

    now: Tensor
    before: Tensor
    direction: Tensor
    frequency: Tensor
    ahead: Tensor

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("now", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("before", torch.zeros(shape, dtype=dtype))
        self.register_buffer("direction", torch.zeros(shape, dtype=torch.int8))
        self.register_buffer("frequency", torch.zeros(shape, dtype=torch.float16))
        self.register_buffer("ahead", torch.zeros(shape, dtype=torch.float16))

    @property
    def frozen(self) -> Tensor:
        """Whether each element is frozen: bool, shape of the weight."""
        return self.frequency.gt(1)

    @torch.no_grad()
    def update(self, highest: float, first: bool = False) -> None:
        """Record the changes of the last forward, and freeze elements that oscillate too often to their mean integer.

        Args:
            highest: frequency above which an element is frozen.
            first: whether this was the first forward.
        """
        if first:
            self.before.copy_(self.now)
        change = self.now.float() - self.before
        reverses = (change.sign() * self.direction).lt(0)
        frozen = self.frozen
        self.frequency.mul_(1 - MOMENTUM).add_(reverses, alpha=MOMENTUM)
        ahead = (self.ahead - change) * (1 - MOMENTUM)
        self.direction.copy_(torch.where(change == 0, self.direction, change.sign()))
        freezes = (self.frequency > highest) & ~frozen
        integers = torch.where(freezes, self.now + ahead.round(), self.now)
        self.before.copy_(torch.where(frozen, self.before, integers))
        self.frequency.masked_fill_(frozen | freezes, _FROZEN_FREQUENCY)
        self.ahead.copy_(ahead)
