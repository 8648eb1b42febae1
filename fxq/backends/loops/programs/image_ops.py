"""Planning of ops that read several elements of an image, or join images: pooling, mean, layer norm, cat."""

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
    output = [a if b is None else b for a, b in zip(size, output_size, strict=True)]
    refuse(any(a % b for a, b in zip(size, output, strict=True)), "its windows differ in size")
    kernel = [a // b for a, b in zip(size, output, strict=True)]
    return _pool(plan, x, kernel, kernel)


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
    refuse(ceil_mode or divisor_override is not None, "it has ceil_mode or divisor_override")
    return _pool(plan, x, kernel_size, stride, padding=tuple(padding), counts_padding=count_include_pad)


@plans("mean")
def mean(plan: StepBuilder, x: Any, *, dim: Any, keepdim: bool) -> PlannedValue:
    x = plan.read(x)
    axes = sorted(axis % x.rank for axis in ([dim] if isinstance(dim, int) else dim))
    refuse(x.rank != 4 or x.axis != 1 or axes != [2, 3], "it is the mean of other axes than height and width")
    size = x.area.shape[1:3]
    return _pool(plan, x, size, size, None if keepdim else 2)


@plans("max_pool2d")
def max_pool2d(
    plan: StepBuilder, x: Any, *, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> PlannedValue:
    refuse(pair(dilation) != (1, 1), "its windows have gaps")
    x = plan.integers(x)
    options: Any = {"padding": tuple(padding), "takes_mean": False, "ceil_mode": ceil_mode}
    pooled = plan.settle(_pool(plan, replace(x, grid=RAW), kernel_size, stride, **options), RAW)
    pooled.grid = x.grid
    return pooled


def _pool(
    plan: StepBuilder,
    x: Any,
    kernel: Any,
    stride: Any,
    rank: int | None = None,
    ceil_mode: bool = False,
    **options: Any,
) -> PlannedValue:
    """Plan a pooling step. `rank` is the rank of the result: None, or 2 for a mean of whole images without its axes."""
    x = plan.read(x)
    refuse(x.rank != 4 or x.axis != 1, "its input is no image")
    n, h, w, c = x.area.shape
    padding = options.get("padding", (0, 0))
    try:
        output = F.max_pool2d(torch.empty(1, h, w, device="meta"), kernel, stride, padding, ceil_mode=ceil_mode)
    except RuntimeError as error:
        raise NotPlannedError(str(error)) from None
    options.update(kernel=tuple(kernel), stride=tuple(stride))
    pooled = plan.add(PoolStep, x, (n, *output.shape[1:], c), x=x.area, x_grid=x.grid, **options)
    pooled.rank, pooled.axis = (rank, rank - 1) if rank is not None else (pooled.rank, pooled.axis)
    return pooled


@plans("layer_norm")
def layer_norm(
    plan: StepBuilder, x: Any, weight: Any = None, bias: Any = None, *, normalized_shape: Any, eps: float
) -> PlannedValue:
    x = plan.read(x)
    channels = x.area.shape[3]
    refuse(x.axis != x.rank - 1 or tuple(normalized_shape) != (channels,), "it normalizes other axes than the channels")
    scale, shift = constant_of(weight, "weight"), constant_of(bias, "bias")
    scale = torch.ones(channels, dtype=torch.float32) if scale is None else scale
    shift = torch.zeros(channels, dtype=torch.float32) if shift is None else shift
    return plan.add(NormStep, x, x=x.area, x_grid=x.grid, weight=scale, bias=shift, eps=eps)


@plans("cat")
def cat(plan: StepBuilder, tensors: Sequence[Any], *, dim: int) -> PlannedValue:
    """Plan a concatenation of integers of one grid along the channels.

    The steps that compute the parts write them to their channels of the result where they can. Other parts are copied.
    """
    parts = [plan.integers(x) for x in tensors]
    first = parts[0]
    grids = [p.grid for p in parts if p.grid is not None]
    differ = any((p.rank, p.axis) != (first.rank, first.axis) for p in parts) or len(grids) not in (0, len(parts))
    differ = differ or not all(grid.same_as(grids[0]) for grid in grids)
    refuse(differ, "its parts differ in rank, channel axis or grid")
    refuse(dim % first.rank != first.axis, "it joins other axes than the channels")
    n, h, w, _ = first.area.shape
    joined = Area((n, h, w, sum(p.area.shape[3] for p in parts)), False)
    channel = 0
    for part in parts:
        area, channels = part.area, part.area.shape[3]
        is_movable = area.parent is None and area.base == ARENA
        is_movable = is_movable and (None in (area.zero, joined.zero) or area.zero == joined.zero)
        if is_movable and not channels % LANES and not channel % LANES:
            area.become_part(joined, channel)
        else:
            slot = Area(area.shape, False)
            slot.become_part(joined, channel)
            plan.copy(area, slot)
        channel += channels
    return PlannedValue(joined, first.rank, first.axis, first.grid)
