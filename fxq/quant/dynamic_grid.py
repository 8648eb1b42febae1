"""Dynamic grids: scale and zero point computed at each call, of a whole tensor or of each of its rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxq.quant.qparams import QParams, define_op
from fxq.quant.spec import TensorSpec


@dataclass(frozen=True)
class DynamicGrid:
    """Grid whose scale, and zero point if it is affine, are computed at each call.

    An affine grid without an axis is that of ONNX's DynamicQuantizeLinear.

    Attributes:
        qmin: smallest integer of the grid.
        qmax: largest integer of the grid.
        dtype: storage type.
        axis: None: one scale for the tensor. Else one per row, where a row has the axes from this negative one to the
            last: -1 for tokens, -3 for images with their channels.
        symmetric: whether the zero point is fixed at the middle of the integers; else it is affine.
    """

    qmin: int
    qmax: int
    dtype: torch.dtype
    axis: int | None = None
    symmetric: bool = True

    @classmethod
    def of(cls, spec: TensorSpec, axis: int | None) -> DynamicGrid:
        """Make the dynamic grid of a spec."""
        return cls(spec.qmin, spec.qmax, spec.dtype, axis, spec.symmetric)

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return (self.qmax - self.qmin).bit_length()

    @property
    def middle(self) -> int:
        """Zero point of a symmetric grid."""
        return (self.qmin + self.qmax + 1) // 2

    @property
    def inputs(self) -> int:
        """Number of tensors that a kernel takes after the integers: 1, their scale, or 2, scale and zero point."""
        return 1 if self.symmetric else 2

    @property
    def unit_grid(self) -> QParams:
        """Static grid of the integers with scale 1, and zero point 0 if affine: a kernel's result is scaled later."""
        return QParams.per_tensor(1.0, self.middle if self.symmetric else 0, self.qmin, self.qmax, self.dtype)

    @property
    def steps(self) -> int:
        """Number of steps that the largest magnitude is divided into; for an affine grid, the whole range.

        An affine grid per row leaves one step free, since its zero point is rounded up.
        """
        if self.symmetric:
            return self.qmax - self.middle
        return self.qmax - self.qmin - (0 if self.axis is None else 1)

    def scale_of(self, x: Tensor) -> Tensor:
        """Scale of `x` (float32), see `dynamic_scale`."""
        return dynamic_scale(*dynamic_range(x, self.axis), self.steps, self.symmetric)

    def rounded(self, x: Tensor) -> Tensor:
        """Round `x` (float32, any shape) to its own dynamic grid: float32, same shape."""
        low, high = dynamic_range(x, self.axis)
        scale = dynamic_scale(low, high, self.steps, self.symmetric)
        nearest = self.axis is None
        zero = self.middle if self.symmetric else dynamic_zero_point(low, scale, self.qmin, nearest)
        return (x / scale).round_().add_(zero).clamp_(self.qmin, self.qmax).sub_(zero).mul_(scale)


Grid = QParams | DynamicGrid
"""Grid of a tensor: static (known before the call) or dynamic."""


def dynamic_range(x: Tensor, axis: int | None = None, block: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of `x`, zero included, of the tensor, of each row, or of each block.

    Args:
        x: float32, any shape.
        axis: first axis of a row, negative; None: one range for the tensor.
        block: number of values of a block of the last axis, which it divides; None: no blocks.

    Returns:
        Two float32 tensors: 0-d, or with an `axis` the shape of `x` with ones from that axis on, or with a `block` the
        shape of `x` with the number of blocks as last size. NaN gives NaN.
    """
    if block is not None:
        low, high = dynamic_range(x.unflatten(-1, (x.shape[-1] // block, block)), -1)
        return low.squeeze(-1), high.squeeze(-1)
    if x.numel() == 0:
        zeros = x.new_zeros((*x.shape[:axis], *[1] * -axis) if axis is not None else ())
        return zeros, zeros
    axes, per_row = tuple(range(axis, 0)) if axis is not None else (), axis is not None
    return x.amin(axes, keepdim=per_row).clamp_(max=0.0), x.amax(axes, keepdim=per_row).clamp_(min=0.0)


def dynamic_scale(low: Tensor, high: Tensor, steps: int, symmetric: bool = True) -> Tensor:
    """Return the scale that divides a range into steps; if `symmetric`, its largest magnitude.

    Args:
        low: smallest value, float32, as `dynamic_range` returns it.
        high: largest value, same shape.
        steps: see `DynamicGrid.steps`.
        symmetric: whether the grid is symmetric.

    Returns:
        float32, same shape. A finite range gives a finite scale of at least `MIN_SCALE`; NaN gives NaN, and infinity
        gives infinity. `dequantize` may give infinity if the range ends less than a step before the largest float32.

    Example:
        >>> float(dynamic_scale(torch.tensor(-2.0), torch.tensor(1.0), 127).mul(127))
        2.0
    """
    if symmetric:
        return torch.maximum(high, low.neg()).div_(steps).clamp_(min=MIN_SCALE)
    return (high / steps).sub_(low, alpha=1 / steps).clamp_(min=MIN_SCALE)  # high - low may be too large for float32


def dynamic_zero_point(low: Tensor, scale: Tensor, qmin: int, nearest: bool = False) -> Tensor:
    """Return the zero point of an affine grid, which places `low` at `qmin` or less than a step above it.

    Args:
        low: smallest value, float32, as `dynamic_range` returns it.
        scale: as `dynamic_scale` returns it, same shape.
        qmin: smallest integer of the grid.
        nearest: whether to round the zero point to the nearest integer. `low` is then within half a step of `qmin`, on
            either side, and a value outside of the grid is clamped.

    Returns:
        Integers as float32, since kernels multiply with them, same shape.

    Source: Jacob et al. 2018, section 3 (nudged zero point); ONNX, DynamicQuantizeLinear (the nearest one).
    """
    steps = low / scale
    zero_point = (steps.round_() if nearest else steps.floor_()).neg_()
    return zero_point.add_(qmin) if qmin else zero_point


MIN_SCALE = 1e-30
"""Smallest scale. float32 divides by it without loss, and values below half of it become zero."""

OWN_RANGE = DynamicGrid(0, 255, torch.uint8, symmetric=False)
"""Grid of ONNX's DynamicQuantizeLinear."""
define_op("round_to_range(Tensor x) -> Tensor", OWN_RANGE.rounded, torch.empty_like)
ROUND_TO_RANGE = torch.ops.fxq.round_to_range.default
"""Operator that rounds values to the grid of their own range, `OWN_RANGE`."""
