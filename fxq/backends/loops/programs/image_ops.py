"""Which steps compute ops that read several elements of images, or join them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from fxq.backends.kernel import pair
from fxq.backends.loops.programs.areas import ARENA, LANES, Area
from fxq.backends.loops.programs.planned_values import RAW, NotPlannedError, PlannedValue, constant_of, plans, refuse
from fxq.backends.loops.programs.program_steps import NormStep, PoolStep
from fxq.backends.loops.programs.step_builder import StepBuilder


@plans("adaptive_avg_pool2d")
def adaptive_avg_pool2d(plan: StepBuilder, x: Any, *, output_size: Sequence[int]) -> PlannedValue:
    x = plan.read(x)
    size = x.area.shape[1:3]
    wanted = [a if b is None else b for a, b in zip(size, output_size, strict=True)]
    refuse(any(a % b for a, b in zip(size, wanted, strict=True)), "its windows have several sizes")
    kernel = [a // b for a, b in zip(size, wanted, strict=True)]
    return _pooled(plan, x, kernel, kernel)


@plans("avg_pool2d")
def avg_pool2d(
    plan: StepBuilder,
    x: Any,
    *,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: Any,
) -> PlannedValue:
    refuse(ceil_mode or divisor_override is not None, "it divides by another number, or has windows that end outside")
    return _pooled(plan, x, kernel_size, stride, padding=tuple(padding), counts_padding=count_include_pad)


@plans("mean")
def mean(plan: StepBuilder, x: Any, *, dim: Any, keepdim: bool) -> PlannedValue:
    x = plan.read(x)
    axes = sorted(axis % x.rank for axis in ([dim] if isinstance(dim, int) else dim))
    refuse(x.rank != 4 or x.axis != 1 or axes != [2, 3], "it is the mean of other axes than those of images")
    size = x.area.shape[1:3]
    return _pooled(plan, x, size, size, None if keepdim else 2)


@plans("max_pool2d")
def max_pool2d(
    plan: StepBuilder, x: Any, *, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> PlannedValue:
    refuse(pair(dilation) != (1, 1), "its windows have gaps")
    x = plan.integers(x)
    about: Any = {"padding": tuple(padding), "takes_mean": False, "ceil_mode": ceil_mode}
    made = plan.settle(_pooled(plan, replace(x, grid=RAW), kernel_size, stride, **about), RAW)
    made.grid = x.grid
    return made


def _pooled(
    plan: StepBuilder, x: Any, kernel: Any, stride: Any, rank: int | None = None, ceil_mode: bool = False, **about: Any
) -> PlannedValue:
    """Windows of a value; with `rank`, one of them, and the value has that many axes."""
    x = plan.read(x)
    refuse(x.rank != 4 or x.axis != 1, "its input is no image")
    n, h, w, c = x.area.shape
    padding = about.get("padding", (0, 0))
    try:
        like = F.max_pool2d(torch.empty(1, h, w, device="meta"), kernel, stride, padding, ceil_mode=ceil_mode)
    except RuntimeError as error:
        raise NotPlannedError(str(error)) from None
    about.update(kernel=tuple(kernel), stride=tuple(stride))
    made = plan.add(PoolStep, x, (n, *like.shape[1:], c), x=x.area, x_grid=x.grid, **about)
    made.rank, made.axis = (rank, rank - 1) if rank is not None else (made.rank, made.axis)
    return made


@plans("layer_norm")
def layer_norm(
    plan: StepBuilder, x: Any, weight: Any = None, bias: Any = None, *, normalized_shape: Any, eps: float
) -> PlannedValue:
    x = plan.read(x)
    channels = x.area.shape[3]
    refuse(x.axis != x.rank - 1 or tuple(normalized_shape) != (channels,), "it norms other axes than the channels")
    by, added = constant_of(weight, "weight"), constant_of(bias, "bias")
    by = torch.ones(channels, dtype=torch.float32) if by is None else by
    added = torch.zeros(channels, dtype=torch.float32) if added is None else added
    return plan.add(NormStep, x, x=x.area, x_grid=x.grid, weight=by, bias=added, eps=eps)


@plans("cat")
def cat(plan: StepBuilder, tensors: Sequence[Any], *, dim: int) -> PlannedValue:
    """Integers of one grid side by side: what makes them writes them there, where it can."""
    parts = [plan.integers(x) for x in tensors]
    first = parts[0]
    refuse(any((p.rank, p.axis, p.grid) != (first.rank, first.axis, first.grid) for p in parts), "its parts differ")
    refuse(dim % first.rank != first.axis, "it joins other axes than the channels")
    n, h, w, _ = first.area.shape
    whole = Area((n, h, w, sum(p.area.shape[3] for p in parts)), False)
    channel = 0
    for part in parts:
        area, channels = part.area, part.area.shape[3]
        fits = area.whole is None and area.base == ARENA
        fits = fits and (None in (area.zero, whole.zero) or area.zero == whole.zero)
        if fits and not channels % LANES and not channel % LANES:
            area.become_part(whole, channel)
        else:
            slot = Area(area.shape, False)
            slot.become_part(whole, channel)
            plan.copy(area, slot)
        channel += channels
    return PlannedValue(whole, first.rank, first.axis, first.grid)
