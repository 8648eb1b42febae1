"""Rounding to a grid through which gradients pass.

Source: Bengio et al. 2013, section 4 (straight-through); Esser et al. 2020, section 2.1 (for scales that are learned).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PARTS, BELOW, ABOVE = 2**16 - 4, -(2**15), 2**15 - 1
"""Of what rounding adds to a value, in int16: parts of a step, and what stands for values outside of the grid."""


class Rounded(torch.autograd.Function):
    """Values on a grid. The gradient of what is inside of it passes; for scale and zero point there is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        steps = torch.round(x / scale).add_(zero_point)
        inside = steps.clamp(qmin, qmax)
        ctx.save_for_backward(inside.eq(steps))
        return inside.sub_(zero_point).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (passes,) = ctx.saved_tensors
        return grad * passes, None, None, None, None


class RoundedInside(torch.autograd.Function):
    """The same, of values whose own range the grid has: all gradients pass, and nothing is kept for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        return torch.round(x / scale).add_(zero_point).clamp_(qmin, qmax).sub_(zero_point).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None, None, None


class RoundedByLearnedScale(torch.autograd.Function):
    """The same, with a gradient for the scale: Esser et al. 2020, section 2.1, equations 3 and 5.

    What a parameter needs for it is computed of the parameter, which is there anyway; other values keep it, in int16.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, parameter: bool
    ) -> Tensor:
        exact = x / scale
        ctx.save_for_backward(x if parameter else _parts(exact, zero_point, qmin, qmax), scale, zero_point)
        ctx.limits = qmin, qmax, parameter
        return exact.round_().add_(zero_point).clamp_(qmin, qmax).sub_(zero_point).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept, scale, zero_point = ctx.saved_tensors
        qmin, qmax, parameter = ctx.limits
        if parameter:
            exact = kept / scale
            below, above = exact <= qmin - zero_point, exact >= qmax - zero_point
            added = torch.round(exact).sub_(exact)
        else:
            below, above = kept.eq(BELOW), kept.eq(ABOVE)
            added = kept.to(torch.float32).div_(PARTS)
        by_scale = torch.where(below, qmin - zero_point, added)
        by_scale = torch.where(above, qmax - zero_point, by_scale).mul_(grad)
        return grad * below.logical_or_(above).logical_not_(), by_scale.sum_to_size(scale.shape), *[None] * 4


def _parts(exact: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """What rounding adds to each value, in parts of a step: int16; BELOW and ABOVE for values outside of the grid."""
    parts = torch.round(exact).sub_(exact).mul_(PARTS).round_()
    parts.masked_fill_(exact <= qmin - zero_point, BELOW).masked_fill_(exact >= qmax - zero_point, ABOVE)
    return parts.to(torch.int16)


class GradientTimes(torch.autograd.Function):
    """A tensor as it is, whose gradient is multiplied by numbers of its shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: Tensor) -> Tensor:
        ctx.save_for_backward(times)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (times,) = ctx.saved_tensors
        return grad * times, None
