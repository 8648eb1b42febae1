"""Grids whose scale is measured when the model runs, of each value as a whole or of each of its rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxq.quant.spec import TensorSpec


@dataclass(frozen=True)
class MeasuredGrid:
    """The integers of a value whose scale is measured at run time. It is symmetric: its zero point is known before.

    Attributes:
        qmin: smallest integer of the grid.
        qmax: largest integer of the grid.
        dtype: storage type.
        axis: None: one scale for the value. Else one for each row: the values from this axis, counted from the end, on;
            -1 is a token, -3 an image with its channels.
    """

    qmin: int
    qmax: int
    dtype: torch.dtype
    axis: int | None = None

    @classmethod
    def of(cls, spec: TensorSpec, axis: int | None) -> MeasuredGrid:
        """What a spec asks for."""
        return cls(spec.qmin, spec.qmax, spec.dtype, axis)

    @property
    def zero_point(self) -> int:
        """The integer that stands for float zero: the middle."""
        return (self.qmin + self.qmax + 1) // 2

    @property
    def steps(self) -> int:
        """How many integers there are on either side of zero, where both sides have as many."""
        return self.qmax - self.zero_point


def measured_scale(x: Tensor, steps: int, axis: int | None = None) -> Tensor:
    """The scale with which the largest magnitude in `x` is `steps` steps; a scale for each row with an `axis`.

    Args:
        x: float32, any shape.
        steps: integers on either side of zero.
        axis: the first axis of a row, counted from the end; None: one scale, 0-d.

    Returns:
        float32, of the shape of `x` with ones from `axis` on. What is all zeros gets the smallest scale there is, NaN
        and infinity give themselves.

    Example:
        >>> measured_scale(torch.tensor([[1.0, -2.0], [0.5, 0.25]]), 127, axis=-1).mul(127).tolist()
        [[2.0], [0.5]]
    """
    if x.numel() == 0:
        return x.new_full((*x.shape[:axis], *[1] * -axis) if axis is not None else (), SMALLEST)
    largest = x.abs().amax(tuple(range(axis, 0)) if axis is not None else (), keepdim=axis is not None)
    return (largest / steps).clamp(min=SMALLEST)


SMALLEST = 1e-30
"""A scale that float32 divides by without loss: whatever is smaller than a step of it becomes zero."""
