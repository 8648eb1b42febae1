"""Fake quantizers: what rounds values to a grid while a model is trained, and lets gradients through.

    y = (clamp(round_half_even(x / scale) + zero_point, qmin, qmax) - zero_point) * scale

Source: Jacob et al. 2018, section 3 (simulated quantization); Bengio et al. 2013, section 4 (straight-through).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxq.quant.observers import MovingAverage, observer_for
from fxq.quant.qparams import QParams, scale_and_zero_point, spread
from fxq.quant.spec import TensorSpec
from fxq.quant.tensor_range import range_of

LEAST = 1e-3
"""The smallest factor of a learned scale: where a step of the optimizer was too large."""


class FakeQuantize(nn.Module):
    """Base of the two kinds: of values, and of weights.

    Gradients pass where a value is inside of the grid. What is learned of a scale is a factor, so that steps of an
    optimizer like Adam, which do not depend on the size of gradients, suit small and large scales. Its gradient is that
    of LSQ: gradient descent moves the scale as there. It has 1 / sqrt(N * qmax) in it, with N the number of elements
    that share the scale (of one sample).

    Attributes:
        label: what errors call the tensor.
        spec: what the recipe asks for.
        grid: the limits of the integers, the axis and the block, as they were before training.

    Buffers:

        scale: float32, (1,), (C,), or for blocks as `QParams.scale`; where it is learned, as it was at the start.
        zero_point: int32, of the same shape.

    Parameter:

        factor: of a learned scale, float32, of the same shape: the scale is that at the start times its magnitude.

    Source: Esser et al. 2020, sections 2.1 and 2.2 (LSQ).
    """

    name: ClassVar[str] = "fake_quantize"
    kind: ClassVar[str] = "convert"  # in pictures
    of_weights: ClassVar[bool] = False
    scale: Tensor
    zero_point: Tensor

    def __init__(self, spec: TensorSpec, grid: QParams, label: str) -> None:
        super().__init__()
        self.spec, self.grid, self.label = spec, grid, label
        shape = grid.scale.shape or (1,)  # FSDP takes no 0-d parameters
        self.register_buffer("scale", grid.scale.detach().reshape(shape).clone())
        if self.learned:
            self.factor = nn.Parameter(torch.ones(shape))
        self.register_buffer("zero_point", grid.zero_point.detach().reshape(shape).clone())

    @property
    def learned(self) -> bool:
        """Whether the scale is a parameter."""
        return self.spec.range == "learned"

    def rounded(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """`x`, float32, on the grid of this scale and zero point."""
        grid = self.grid
        if not self.learned:
            scale, zero_point = (spread(t, x, grid.axis, grid.block) for t in (scale, zero_point))
            rounding = _RoundedInside if self.of_weights else _Rounded
            return rounding.apply(x, scale, zero_point, grid.qmin, grid.qmax)
        most = grid.qmax - ((grid.qmin + grid.qmax + 1) // 2 if self.spec.symmetric else grid.qmin)
        shared = x.numel() // (len(x) or 1) if grid.axis is None else x.numel() // scale.numel()
        times = 1 / (math.sqrt(max(shared, 1) * most) * scale.square())
        scale = scale * _GradientTimes.apply(self.factor.abs().clamp(min=LEAST), times)
        scale, zero_point = (spread(t, x, grid.axis, grid.block) for t in (scale, zero_point))
        return _RoundedByLearnedScale.apply(x, scale, zero_point, grid.qmin, grid.qmax, self.of_weights)

    def qparams(self) -> QParams:
        """Scale and zero point as they are now, on the CPU."""
        grid = self.grid
        scale = self.scale
        if self.learned:
            scale = scale * whole(self.factor).detach().to(scale.device).abs().clamp(min=LEAST)
        scale, zero_point = (t.cpu().reshape(grid.scale.shape).clone() for t in (scale, self.zero_point))
        return QParams(scale, zero_point, grid.qmin, grid.qmax, grid.dtype, grid.axis, grid.block)

    def extra_repr(self) -> str:
        return str(self.spec)


class FakeQuantizeValue(FakeQuantize):
    """Rounds a value that the model computes; finds its range while the model is trained.

    A forward in train mode notes the smallest and the largest value (`seen`). The grid follows them when `move_ranges`
    and `use_ranges` are called, before the next one: so a forward that is computed again for its gradients gives the
    same numbers. Until then it hands its input on. A learned scale does not follow ranges: it starts with the grid.

    Args:
        spec: with the observer "minmax" (all that was seen counts), or "moving_average" with its momentum; or with a
            learned scale.
        grid: the limits of the integers; where the scale is learned, it starts with these.
        label: what errors call the value.
        group: the number of the edges whose values it rounds.
        nonnegative: whether it stands for a relu, too: values below zero become zero. Only where the zero point is the
            smallest integer. Those that are closer to zero than half a step pass on their gradient.

    Attributes:
        momentum: weight of a new batch in the range; None where the range is the union of all.
        watching: whether forwards in train mode note the values' range.
        has_range: whether one of them did.
        started: whether values are rounded.

    Buffers, besides those of the base:

        low, high: float32, 0-d: the range so far; +inf and -inf before any data.
        seen: float32, (2,): the smallest and the largest value since `use_ranges`; in no `state_dict`.
    """

    low: Tensor
    high: Tensor
    seen: Tensor

    def __init__(self, spec: TensorSpec, grid: QParams, label: str, group: int = 0, nonnegative: bool = False) -> None:
        super().__init__(spec, grid, label)
        self.nonnegative, self.group = nonnegative, group
        self.watching, self.has_range, self.started = not self.learned, self.learned, self.learned
        observer = observer_for(spec)
        self.momentum = observer.momentum if isinstance(observer, MovingAverage) else None
        self.register_buffer("low", torch.tensor(math.inf))
        self.register_buffer("high", torch.tensor(-math.inf))
        self.register_buffer("seen", torch.tensor([math.inf, -math.inf]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x`, floating point, any shape, on the grid; float32."""
        x = x.to(torch.float32)
        if self.training and self.watching and x.numel():
            with torch.no_grad():
                low, high = range_of(x.detach())
                if self.nonnegative:
                    low, high = low.clamp(min=0.0), high.clamp(min=0.0)
                self.seen.copy_(torch.stack([torch.minimum(self.seen[0], low), torch.maximum(self.seen[1], high)]))
        if not self.started:
            return x.relu() if self.nonnegative else x
        return self.rounded(x, self.scale, self.zero_point)


class FakeQuantizeWeight(FakeQuantize):
    """Rounds a weight, on the grid of its own range at every call, or on that of a learned scale.

    Args:
        spec: with the observer "minmax"; for a learned scale any observer, which has seen the weight before.
        grid: the limits of the integers, the axis and the block; where the scale is learned, it starts with these.
        label: what errors call the weight.
        edge: the path of the weight as it is quantized, and which of its edges this one is for.
    """

    of_weights: ClassVar[bool] = True

    def __init__(self, spec: TensorSpec, grid: QParams, label: str, edge: tuple[str, int] = ("", 0)) -> None:
        super().__init__(spec, grid, label)
        self.edge = edge

    def forward(self, weight: Tensor) -> Tensor:
        """`weight`, floating point, of the shape that it had when this was made, on the grid; float32."""
        weight = weight.to(torch.float32)
        return self.rounded(weight, *self.grid_of(weight.detach()))

    def grid_of(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The scale and the zero point that a weight has."""
        if self.learned:
            return self.scale, self.zero_point
        axis, block = self.grid.axis, self.grid.block
        low, high = range_of(weight, axis, block)
        scale, zero_point = scale_and_zero_point(low, high, self.grid.qmin, self.grid.qmax, self.spec.symmetric)
        return scale.reshape(self.scale.shape), zero_point.reshape(self.scale.shape)

    def qparams_of(self, weight: Tensor) -> QParams:
        """The same, of a weight on the CPU, as it is kept."""
        if self.learned:
            return self.qparams()
        scale, zero_point = (t.reshape(self.grid.scale.shape) for t in self.grid_of(weight))
        return replace(self.grid, scale=scale, zero_point=zero_point)


@torch.no_grad()
def move_ranges(quantizers: Sequence[FakeQuantizeValue], seen: Tensor) -> None:
    """Let ranges follow what was seen in a forward. What holds NaN or infinity, or no value, does not count.

    Args:
        quantizers: those whose ranges move.
        seen: float32, (N, 2): for each of them the smallest and the largest value.

    Source: Jacob et al. 2018, section 3.1 (moving averages).
    """
    counts = torch.isfinite(seen).all(1)
    low, high = torch.stack([q.low for q in quantizers]), torch.stack([q.high for q in quantizers])
    weights = torch.tensor([math.nan if q.momentum is None else q.momentum for q in quantizers], device=seen.device)
    for ends, new, wider in ((low, seen[:, 0], torch.minimum), (high, seen[:, 1], torch.maximum)):
        averaged = torch.where(weights == 1, new, ends + (new - ends) * weights)
        moved = torch.where(weights.isnan() | ends.isinf(), wider(ends, new), averaged)
        ends.copy_(torch.where(counts, moved, ends))
    torch._foreach_copy_([q.low for q in quantizers], low.unbind())
    torch._foreach_copy_([q.high for q in quantizers], high.unbind())


def use_ranges(quantizers: Sequence[FakeQuantizeValue]) -> None:
    """Let grids be those of the ranges so far, where there are any, and forget what was seen in the last forward.

    Args:
        quantizers: those whose scales are not learned.
    """
    alike: dict[tuple[int, int, bool], list[FakeQuantizeValue]] = {}
    for q in quantizers:
        if q.has_range:
            alike.setdefault((q.grid.qmin, q.grid.qmax, q.spec.symmetric), []).append(q)
    with torch.no_grad():
        for (qmin, qmax, symmetric), same in alike.items():
            low, high = torch.stack([q.low for q in same]), torch.stack([q.high for q in same])
            scale, zero_point = scale_and_zero_point(low, high, qmin, qmax, symmetric)
            torch._foreach_copy_([q.scale for q in same], scale[:, None].unbind())
            torch._foreach_copy_([q.zero_point for q in same], zero_point[:, None].unbind())
        if quantizers:
            nothing = quantizers[0].seen.new_tensor([math.inf, -math.inf])
            torch._foreach_copy_([q.seen for q in quantizers], [nothing] * len(quantizers))


def whole(tensor: Tensor) -> Tensor:
    """A tensor as it is; of one that is spread over processes (`DTensor`), all of it: each of them has to ask."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


class _Rounded(torch.autograd.Function):
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


class _RoundedInside(torch.autograd.Function):
    """The same, of values whose own range the grid has: all gradients pass, and nothing is kept for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        return torch.round(x / scale).add_(zero_point).clamp_(qmin, qmax).sub_(zero_point).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None, None, None


class _RoundedByLearnedScale(torch.autograd.Function):
    """The same, with a gradient for the scale: Esser et al. 2020, section 2.1, equations 3 and 5.

    What a parameter needs for it is computed of the parameter, which is there anyway; other values keep it, in int16.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, parameter: bool
    ) -> Tensor:
        exact = x / scale
        ctx.save_for_backward(x if parameter else _cut_off(exact, zero_point, qmin, qmax), scale, zero_point)
        ctx.limits = qmin, qmax, parameter
        return exact.round_().add_(zero_point).clamp_(qmin, qmax).sub_(zero_point).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept, scale, zero_point = ctx.saved_tensors
        qmin, qmax, parameter = ctx.limits
        cut_off = _cut_off(kept / scale, zero_point, qmin, qmax) if parameter else kept
        below, above = cut_off.eq(BELOW), cut_off.eq(ABOVE)
        by_scale = torch.where(below, qmin - zero_point, cut_off.to(torch.float32).div_(PARTS))
        by_scale = torch.where(above, qmax - zero_point, by_scale).mul_(grad)
        return grad * below.logical_or_(above).logical_not_(), by_scale.sum_to_size(scale.shape), *[None] * 4


PARTS, BELOW, ABOVE = 2**16 - 4, -(2**15), 2**15 - 1


def _cut_off(exact: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """What rounding adds to each value, in parts of a step: int16; BELOW and ABOVE for values outside of the grid."""
    parts = torch.round(exact).sub_(exact).mul_(PARTS).round_()
    parts.masked_fill_(exact <= qmin - zero_point, BELOW).masked_fill_(exact >= qmax - zero_point, ABOVE)
    return parts.to(torch.int16)


class _GradientTimes(torch.autograd.Function):
    """A tensor as it is, whose gradient is multiplied by numbers of its shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: Tensor) -> Tensor:
        ctx.save_for_backward(times)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (times,) = ctx.saved_tensors
        return grad * times, None
