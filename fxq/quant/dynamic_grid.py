"""Grids that are measured when the model runs, on each value as a whole or on each of its rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxq.quant.spec import TensorSpec


@dataclass(frozen=True)
class DynamicGrid:
    """The integers of a value whose scale is measured at run time, and where it is not symmetric its zero point.

    One for the whole value that is not symmetric is that of ONNX's DynamicQuantizeLinear, which engines have.

    Attributes:
        qmin: smallest integer of the grid.
        qmax: largest integer of the grid.
        dtype: storage type.
        axis: None: one scale for the value. Else one for each row: the values from this axis, counted from the end, on;
            -1 is a token, -3 an image with its channels.
        symmetric: whether it is symmetric around float zero, so that its zero point is known before.
    """

    qmin: int
    qmax: int
    dtype: torch.dtype
    axis: int | None = None
    symmetric: bool = True

    @classmethod
    def of(cls, spec: TensorSpec, axis: int | None) -> DynamicGrid:
        """What a spec asks for."""
        return cls(spec.qmin, spec.qmax, spec.dtype, axis, spec.symmetric)

    @property
    def bits(self) -> int:
        """How many bits a value takes."""
        return (self.qmax - self.qmin).bit_length()

    @property
    def middle(self) -> int:
        """The integer that stands for float zero, where the grid is symmetric."""
        return (self.qmin + self.qmax + 1) // 2

    @property
    def steps(self) -> int:
        """How many steps the largest magnitude has; of a grid that is not symmetric, the whole range.

        Of such a row one step is left over: the zero point is rounded up, which moves the range by less than a step.
        """
        if self.symmetric:
            return self.qmax - self.middle
        return self.qmax - self.qmin - (0 if self.axis is None else 1)

    def scale_of(self, x: Tensor) -> Tensor:
        """The scale that values have, float32; as `dynamic_scale`."""
        return dynamic_scale(*dynamic_range(x, self.axis), self.steps, self.symmetric)

    def rounded(self, x: Tensor) -> Tensor:
        """The values of the grid that are the nearest to `x`, float32, on which the grid is measured."""
        low, high = dynamic_range(x, self.axis)
        scale = dynamic_scale(low, high, self.steps, self.symmetric)
        nearest = self.axis is None
        zero = self.middle if self.symmetric else dynamic_zero_point(low, scale, self.qmin, nearest)
        return (x / scale).round_().add_(zero).clamp_(self.qmin, self.qmax).sub_(zero).mul_(scale)


def dynamic_range(x: Tensor, axis: int | None = None) -> tuple[Tensor, Tensor]:
    """The smallest and the largest of zero and the values of `x`; of each row with an `axis`.

    Args:
        x: float32, any shape.
        axis: the first axis of a row, counted from the end; None: one range, 0-d.

    Returns:
        Two float32, of the shape of `x` with ones from `axis` on. NaN gives NaN.
    """
    if x.numel() == 0:
        nothing = x.new_zeros((*x.shape[:axis], *[1] * -axis) if axis is not None else ())
        return nothing, nothing
    row, rows = tuple(range(axis, 0)) if axis is not None else (), axis is not None
    return x.amin(row, keepdim=rows).clamp_(max=0.0), x.amax(row, keepdim=rows).clamp_(min=0.0)


def dynamic_scale(low: Tensor, high: Tensor, steps: int, symmetric: bool = True) -> Tensor:
    """The scale with which a range, or where it is `symmetric` the larger end of it, is so many steps.

    Args:
        low: the smallest value, as `dynamic_range` gives it.
        high: the largest one.
        steps: as `DynamicGrid.steps`.
        symmetric: whether the grid is symmetric around zero.

    Returns:
        float32, of the same shape. A finite range gives a finite scale, no smaller one than `SMALLEST`; of one that
        ends less than a step from the end of float32, `dequantize` may give infinity. NaN and infinity give themselves.

    Example:
        >>> float(dynamic_scale(torch.tensor(-2.0), torch.tensor(1.0), 127).mul(127))
        2.0
    """
    if symmetric:
        return torch.maximum(high, low.neg()).div_(steps).clamp_(min=SMALLEST)
    return (high / steps).sub_(low, alpha=1 / steps).clamp_(min=SMALLEST)  # high - low may be too large for float32


def dynamic_zero_point(low: Tensor, scale: Tensor, qmin: int, nearest: bool = False) -> Tensor:
    """The integer that stands for float zero, so that `low` is at `qmin` or less than a step above.

    Args:
        low: as `dynamic_range` gives it.
        scale: as `dynamic_scale` gives it, of the same shape.
        qmin: smallest integer of the grid.
        nearest: `low` is at most half a step from `qmin`, on either side: what lies beyond an end is clamped.

    Returns:
        A whole number in float32, since kernels multiply with it; of the same shape.

    Source: Jacob et al. 2018, section 3 (nudged zero point); ONNX, DynamicQuantizeLinear (the nearest one).
    """
    steps = low / scale
    zero_point = (steps.round_() if nearest else steps.floor_()).neg_()
    return zero_point.add_(qmin) if qmin else zero_point


SMALLEST = 1e-30
"""A scale that float32 divides by without loss: whatever is smaller than half a step of it becomes zero."""
