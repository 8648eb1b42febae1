"""Fake quantizers: modules that round values to a grid in training, and pass gradients through.

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
    """Base of the fake quantizers of activations and of weights.

    Gradients pass for values inside of the grid. A learned scale is its start times a learned factor, so that an
    optimizer such as Adam, whose steps do not depend on the size of gradients, suits small and large scales. The
    gradient of the factor is such that gradient descent moves the scale as in LSQ, with gradient scale
    1 / sqrt(N * qmax), where N is the number of elements of one sample that share the scale.

    Attributes:
        label: name of the tensor in errors.
        spec: spec of the recipe.
        grid: grid before training: limits of the integers, axis and block.

    Buffers:

        scale: float32, (1,), (C,), or per block the shape of `QParams.scale`; for a learned scale, its start.
        zero_point: int32, same shape.

    Parameter:

        factor: for a learned scale, float32, same shape: the scale is `scale` times the magnitude of `factor`.

    Source: Esser et al. 2020, sections 2.1 and 2.2 (LSQ).
    """

    name: ClassVar[str] = "fake_quantize"
    kind: ClassVar[str] = "convert"  # colour of the box in pictures
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
        """Round `x` (float32) to the grid of this scale and zero point: float32, same shape."""
        grid = self.grid
        if not self.learned:
            scale, zero_point = self._spread(scale, x), self._spread(zero_point, x)
            rounding = RoundedInside if self.of_weights else Rounded
            return rounding.apply(x, scale, zero_point, grid.qmin, grid.qmax)
        largest = grid.qmax - ((grid.qmin + grid.qmax + 1) // 2 if self.spec.symmetric else grid.qmin)
        sharing = x.numel() // (len(x) or 1) if grid.axis is None else x.numel() // scale.numel()  # elements per scale
        gradient_scale = 1 / math.sqrt(max(sharing, 1) * largest)
        factor, scale, zero_point = (self._spread(t, x) for t in (self.factor, scale, zero_point))
        return RoundedByLearnedScale.apply(
            x, factor, scale, zero_point, grid.qmin, grid.qmax, gradient_scale, self.of_weights
        )

    def _spread(self, numbers: Tensor, x: Tensor) -> Tensor:
        """Return scales or zero points in a shape that broadcasts with `x`."""
        return spread(numbers, x, self.grid.axis, self.grid.block)

    def last_scale(self) -> Tensor:
        """Return the current scale, without a gradient."""
        if not self.learned:
            return self.scale
        return self.scale * magnitude(full_tensor(self.factor).detach().to(self.scale.device))

    def qparams(self) -> QParams:
        """Return the current scale and zero point, on the CPU."""
        grid = self.grid
        scale, zero_point = (t.cpu().reshape(grid.scale.shape).clone() for t in (self.last_scale(), self.zero_point))
        return QParams(scale, zero_point, grid.qmin, grid.qmax, grid.dtype, grid.axis, grid.block)

    def extra_repr(self) -> str:
        return str(self.spec)


class FakeQuantizeValue(FakeQuantize):
    """Fake quantizer of an activation, which tracks its range in training.

    A forward in train mode records the smallest and the largest value in `seen`. `move_ranges` and `use_ranges`, called
    between forwards, update the grid: a forward that is recomputed for its gradients gives the same numbers. Before the
    first update the input is returned unchanged. A learned scale starts with the grid and does not track ranges.

    Args:
        spec: a spec with the observer "minmax" (union of all ranges) or "moving_average", or with a learned scale.
        grid: limits of the integers; also the start of a learned scale.
        label: name of the tensor in errors.
        group: number of the shared-grid group that it rounds.
        nonnegative: whether to apply a relu, too, which needs `qmin` as zero point. Negative values within half a step
            of zero pass their gradient.

    Attributes:
        momentum: weight of a new batch in the range; None for the union of all ranges.
        watching: whether forwards in train mode record the range.
        has_range: whether a range was recorded.
        started: whether values are rounded.

    Buffers, besides those of the base, if the scale is not learned:

        low, high: float32, 0-d, the range so far; +inf and -inf before any data.
        seen: float32 (2,), smallest and largest value since `use_ranges`; not in the `state_dict`.
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
        """Round `x` (floating point, any shape) to the grid: float32, same shape."""
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
    """Fake quantizer of a weight, with the grid of its current range, or with a learned scale.

    Args:
        spec: a spec with the observer "minmax", or with a learned scale and any observer.
        grid: limits of the integers, axis and block; also the start of a learned scale.
        label: name of the weight in errors.
        edge: path of the quantized weight, and index among its edges.

    Attributes:
        oscillation: tracker of elements that oscillate between integers, to freeze them, or None. With it, `scale` and
            `zero_point` are those of the last forward in train mode, even if they are not learned.
    """

    of_weights: ClassVar[bool] = True
    oscillation: Oscillation | None

    def __init__(self, spec: TensorSpec, grid: QParams, label: str, edge: tuple[str, int] = ("", 0)) -> None:
        super().__init__(spec, grid, label)
        self.edge, self.oscillation = edge, None

    def forward(self, weight: Tensor) -> Tensor:
        """Round `weight` (floating point, in its shape at creation) to the grid: float32, same shape."""
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
        """Set the frozen elements of the weight to their integers, in place and invisible to autograd."""
        assert self.oscillation is not None
        integers = self.oscillation.before
        scale, zero_point = (
            (self.last_scale(), self.zero_point) if self.learned else self.grid_of(full_tensor(weight).float())
        )
        values = (integers - self._spread(zero_point, integers)) * self._spread(scale, integers)
        values = torch.where(self.oscillation.frozen, values, torch.nan)
        if hasattr(weight, "device_mesh"):  # a DTensor, whose import is slow
            from torch.distributed.tensor import DTensor, distribute_tensor

            assert isinstance(weight, DTensor)
            values = distribute_tensor(values, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.data.copy_(torch.where(values.isnan(), weight.data, values))

    def grid_of(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale, float32, and the zero point, int32, for a weight, in the shape of `self.scale`."""
        if self.learned:
            return self.scale, self.zero_point
        axis, block = self.grid.axis, self.grid.block
        low, high = range_of(weight, axis, block)
        scale, zero_point = scale_and_zero_point(low, high, self.grid.qmin, self.grid.qmax, self.spec.symmetric)
        return scale.reshape(self.scale.shape), zero_point.reshape(self.scale.shape)

    def qparams_of(self, weight: Tensor) -> QParams:
        """Return the grid of a weight that is on the CPU."""
        if self.learned:
            return self.qparams()
        scale, zero_point = (t.reshape(self.grid.scale.shape) for t in self.grid_of(weight))
        return replace(self.grid, scale=scale, zero_point=zero_point)


@torch.no_grad()
def move_ranges(quantizers: Sequence[FakeQuantizeValue], seen: Tensor) -> None:
    """Update the ranges with those of a forward. Ranges with NaN or infinity, and of empty tensors, are left out.

    Args:
        quantizers: the fake quantizers to update.
        seen: float32 (N, 2), for each of them the smallest and the largest value.

    Source: Jacob et al. 2018, section 3.1 (moving averages).
    """
    counts = torch.isfinite(seen).all(1)
    low, high = torch.stack([q.low for q in quantizers]), torch.stack([q.high for q in quantizers])
    weights = torch.tensor([math.nan if q.momentum is None else q.momentum for q in quantizers], device=seen.device)
    for ends, new, union in ((low, seen[:, 0], torch.minimum), (high, seen[:, 1], torch.maximum)):
        averaged = torch.where(weights == 1, new, ends + (new - ends) * weights)
        moved = torch.where(weights.isnan() | ends.isinf(), union(ends, new), averaged)
        ends.copy_(torch.where(counts, moved, ends))
    torch._foreach_copy_([q.low for q in quantizers], low.unbind())
    torch._foreach_copy_([q.high for q in quantizers], high.unbind())


def use_ranges(quantizers: Sequence[FakeQuantizeValue]) -> None:
    """Set the grids to the ranges so far, if there are any, and reset `seen`.

    Args:
        quantizers: fake quantizers whose scales are not learned.
    """
    by_limits: dict[tuple[int, int, bool], list[FakeQuantizeValue]] = {}
    for q in quantizers:
        if q.has_range:
            by_limits.setdefault((q.grid.qmin, q.grid.qmax, q.spec.symmetric), []).append(q)
    with torch.no_grad():
        for (qmin, qmax, symmetric), group in by_limits.items():
            low, high = torch.stack([q.low for q in group]), torch.stack([q.high for q in group])
            high = torch.where((low == 0) & (high == 0), 1.0, high)  # they are not channels of one tensor
            scale, zero_point = scale_and_zero_point(low, high, qmin, qmax, symmetric)
            torch._foreach_copy_([q.scale for q in group], scale[:, None].unbind())
            torch._foreach_copy_([q.zero_point for q in group], zero_point[:, None].unbind())
        if quantizers:
            unseen = quantizers[0].seen.new_tensor([math.inf, -math.inf])
            torch._foreach_copy_([q.seen for q in quantizers], [unseen] * len(quantizers))


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor; if it is sharded over processes (`DTensor`), gather it, which all of them must do."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor
