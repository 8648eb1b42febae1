"""Iterative freezing: weights that training moves back and forth between two integers come to stay with one of them.

Source: Nagel et al. 2022, "Overcoming Oscillations in Quantization-Aware Training", section 4.2 and algorithm 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

MOMENTUM = 0.01
"""Weight of a forward in the moving averages."""
START_FREQUENCY, END_FREQUENCY = 0.04, 0.011
"""The frequencies above which weights are frozen, at the start and in the end."""


_FROZEN_FREQUENCY = 2.0
"""More than any frequency; a number, so that averages of models hold it."""


def max_frequency(step: int, steps: int) -> float:
    """The frequency above which weights are frozen at a step: less with every one of `steps`, along a cosine."""
    return END_FREQUENCY + (START_FREQUENCY - END_FREQUENCY) * (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2


class Oscillation(nn.Module):
    """How often each element of a weight goes back to where it came from, and which elements are frozen.

    Args:
        shape: of the weight.
        dtype: of its integers.

    Buffers, of that shape:

        now: the integers of the last forward; in no `state_dict`.
        before: those of the forward before it; of elements that are frozen, those that they keep.
        direction: int8, -1 or 1: the sign of the last change; 0 before any.
        frequency: float16, the moving average of changes against the direction of the one before; 2: frozen.
        ahead: float16, the moving average of the integers, minus `before`.
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
        """bool, of the shape of the weight."""
        return self.frequency.gt(1)

    @torch.no_grad()
    def update(self, highest: float, first: bool = False) -> None:
        """Count what the last forward has changed, and freeze what goes back and forth too often.

        Args:
            highest: the frequency above which an element is frozen, with the integer that it had most of the time.
            first: whether there was no forward before it.
        """
        if first:
            self.before.copy_(self.now)
        change = self.now.float() - self.before
        back = (change.sign() * self.direction).lt(0)
        frozen = self.frozen
        self.frequency.mul_(1 - MOMENTUM).add_(back, alpha=MOMENTUM)
        ahead = (self.ahead - change) * (1 - MOMENTUM)
        self.direction.copy_(torch.where(change == 0, self.direction, change.sign()))
        freezes = (self.frequency > highest) & ~frozen
        kept = torch.where(freezes, self.now + ahead.round(), self.now)
        self.before.copy_(torch.where(frozen, self.before, kept))
        self.frequency.masked_fill_(frozen | freezes, _FROZEN_FREQUENCY)
        self.ahead.copy_(ahead)
