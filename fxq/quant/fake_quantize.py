"""Fake quantizers: what rounds values to a grid while a model is trained, and lets gradients through.

    y = (clamp(round_half_even(x / scale) + zero_point, qmin, qmax) - zero_point) * scale

Source: Jacob et al. 2018, section 3 (simulated quantization); Bengio et al. 2013, section 4 (straight-through).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fxq.quant.observers import MovingAverage, observer_for
from fxq.quant.oscillation import Oscillation
from fxq.quant.qparams import QParams, scale_and_zero_point, spread
from fxq.quant.spec import TensorSpec
from fxq.quant.straight_through import Rounded, RoundedByLearnedScale, RoundedInside, magnitude
from fxq.quant.tensor_range import range_of


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
            scale, zero_point = self._spread(scale, x), self._spread(zero_point, x)
            rounding = RoundedInside if self.of_weights else Rounded
            return rounding.apply(x, scale, zero_point, grid.qmin, grid.qmax)
        most = grid.qmax - ((grid.qmin + grid.qmax + 1) // 2 if self.spec.symmetric else grid.qmin)
        shared = x.numel() // (len(x) or 1) if grid.axis is None else x.numel() // scale.numel()
        gradient_scale = 1 / math.sqrt(max(shared, 1) * most)
        factor, scale, zero_point = (self._spread(t, x) for t in (self.factor, scale, zero_point))
        return RoundedByLearnedScale.apply(
            x, factor, scale, zero_point, grid.qmin, grid.qmax, gradient_scale, self.of_weights
        )

    def _spread(self, numbers: Tensor, x: Tensor) -> Tensor:
        """Scales or zero points, shaped to broadcast with `x`."""
        return spread(numbers, x, self.grid.axis, self.grid.block)

    def last_scale(self) -> Tensor:
        """The scale as it is now, without a gradient."""
        if not self.learned:
            return self.scale
        return self.scale * magnitude(full_tensor(self.factor).detach().to(self.scale.device))

    def qparams(self) -> QParams:
        """Scale and zero point as they are now, on the CPU."""
        grid = self.grid
        scale, zero_point = (t.cpu().reshape(grid.scale.shape).clone() for t in (self.last_scale(), self.zero_point))
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

    Buffers, besides those of the base, where the scale is not learned:

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
        if not self.learned:
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

    Attributes:
        oscillation: of the weight, where elements that go back and forth between integers are to be frozen. Then
            `scale` and `zero_point` are those of the last forward in train mode, also where they are not learned.
    """

    of_weights: ClassVar[bool] = True
    oscillation: Oscillation | None

    def __init__(self, spec: TensorSpec, grid: QParams, label: str, edge: tuple[str, int] = ("", 0)) -> None:
        super().__init__(spec, grid, label)
        self.edge, self.oscillation = edge, None

    def forward(self, weight: Tensor) -> Tensor:
        """`weight`, floating point, of the shape that it had when this was made, on the grid; float32."""
        weight = weight.to(torch.float32)
        scale, zero_point = self.grid_of(weight.detach())
        if self.training and self.oscillation is not None:
            with torch.no_grad():
                if not self.learned:
                    self.scale.copy_(scale)
                    self.zero_point.copy_(zero_point)
                steps = torch.round(weight / self._spread(self.last_scale(), weight))
                steps = steps.add_(self._spread(self.zero_point, weight)).clamp_(self.grid.qmin, self.grid.qmax)
                self.oscillation.now.copy_(steps)
        return self.rounded(weight, scale, zero_point)

    @torch.no_grad()
    def restore_frozen(self, weight: Tensor) -> None:
        """Put the elements of the weight that are frozen on the integers that they keep, in place.

        What an earlier forward has kept for its gradients is not spoiled by it, as far as autograd is concerned.
        """
        assert self.oscillation is not None  # of one that freezes
        kept = self.oscillation.before
        scale, zero_point = (
            (self.last_scale(), self.zero_point) if self.learned else self.grid_of(full_tensor(weight).float())
        )
        held = (kept - self._spread(zero_point, kept)) * self._spread(scale, kept)
        held = torch.where(self.oscillation.frozen, held, torch.nan)
        if hasattr(weight, "device_mesh"):  # a DTensor, whose import takes long
            from torch.distributed.tensor import DTensor, distribute_tensor

            assert isinstance(weight, DTensor)
            held = distribute_tensor(held, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.data.copy_(torch.where(held.isnan(), weight.data, held))

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
            high = torch.where((low == 0) & (high == 0), 1.0, high)  # each is a tensor of its own: others say nothing
            scale, zero_point = scale_and_zero_point(low, high, qmin, qmax, symmetric)
            torch._foreach_copy_([q.scale for q in same], scale[:, None].unbind())
            torch._foreach_copy_([q.zero_point for q in same], zero_point[:, None].unbind())
        if quantizers:
            nothing = quantizers[0].seen.new_tensor([math.inf, -math.inf])
            torch._foreach_copy_([q.seen for q in quantizers], [nothing] * len(quantizers))


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor as it is; of one that is spread over processes (`DTensor`), all of it: each of them has to ask."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor
