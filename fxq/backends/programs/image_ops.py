"""Which steps compute ops that read several elements of images, or move them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fxq.backends.kernel import pair
from fxq.backends.programs.areas import ARENA, LANES, Area
from fxq.backends.programs.plan import RAW, Plan, Value, plans, refuse
from fxq.backends.programs.steps import Move, Norm, Pool


@plans("adaptive_avg_pool2d")
def adaptive_avg_pool2d(plan: Plan, x: Any, *, output_size: Sequence[int]) -> Value:
    x = plan.read(x)
    size = x.area.shape[1:3]
    wanted = [a if b is None else b for a, b in zip(size, output_size, strict=True)]
    refuse(any(a % b for a, b in zip(size, wanted, strict=True)), "its windows have several sizes")
    kernel = [a // b for a, b in zip(size, wanted, strict=True)]
    return _pooled(plan, x, kernel, kernel)


@plans("avg_pool2d")
def avg_pool2d(
    plan: Plan,
    x: Any,
    *,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: Any,
) -> Value:
    refuse(ceil_mode or divisor_override is not None, "it divides by another number, or has windows that end outside")
    return _pooled(plan, x, kernel_size, stride, padding=tuple(padding), counts_padding=count_include_pad)


@plans("mean")
def mean(plan: Plan, x: Any, *, dim: Any, keepdim: bool) -> Value:
    x = plan.read(x)
    axes = sorted(axis % x.rank for axis in ([dim] if isinstance(dim, int) else dim))
    refuse(x.rank != 4 or x.axis != 1 or axes != [2, 3], "it is the mean of other axes than those of images")
    size = x.area.shape[1:3]
    return _pooled(plan, x, size, size, None if keepdim else 2)


@plans("max_pool2d")
def max_pool2d(
    plan: Plan, x: Any, *, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Value:
    refuse(ceil_mode or pair(dilation) != (1, 1), "its windows end outside, or have gaps")
    x = plan.integers(x)
    read = replace(x, grid=RAW)
    made = plan.settle(_pooled(plan, read, kernel_size, stride, padding=tuple(padding), takes_mean=False), RAW)
    made.grid, made.area.zero = x.grid, x.area.zero
    return made


def _pooled(plan: Plan, x: Any, kernel: Any, stride: Any, rank: int | None = None, **about: Any) -> Value:
    x = plan.read(x)
    refuse(x.rank != 4 or x.axis != 1, "its input is no image")
    n, h, w, c = x.area.shape
    padding = about.get("padding", (0, 0))
    shape = [(size + 2 * p - k) // s + 1 for size, p, k, s in zip((h, w), padding, kernel, stride, strict=True)]
    refuse(min(shape) < 1, "its input is smaller than its window")
    made = plan.add(
        Pool,
        x,
        (n, shape[0], shape[1], c),
        x=x.area,
        x_grid=x.grid,
        kernel=tuple(kernel),
        stride=tuple(stride),
        **about,
    )
    made.rank, made.axis = (rank, rank - 1) if rank is not None else (made.rank, made.axis)
    return made


@plans("layer_norm")
def layer_norm(plan: Plan, x: Any, weight: Any = None, bias: Any = None, *, normalized_shape: Any, eps: float) -> Value:
    x = plan.read(x)
    channels = x.area.shape[3]
    refuse(x.axis != x.rank - 1 or tuple(normalized_shape) != (channels,), "it norms other axes than the channels")
    by = torch.ones(channels) if weight is None else weight.real
    added = torch.zeros(channels) if bias is None else bias.real
    return plan.add(Norm, x, x=x.area, x_grid=x.grid, weight=by, bias=added, eps=eps)


@plans("cat")
def cat(plan: Plan, tensors: Sequence[Any], *, dim: int) -> Value:
    """Integers of one grid side by side: what makes them writes them there, where it can."""
    parts = [plan.integers(x) for x in tensors]
    first = parts[0]
    refuse(any((p.rank, p.axis, p.grid) != (first.rank, first.axis, first.grid) for p in parts), "its parts differ")
    refuse(dim % first.rank != first.axis, "it joins other axes than the channels")
    n, h, w, _ = first.area.shape
    whole = Area((n, h, w, sum(p.area.shape[3] for p in parts)), False, zero=first.area.zero)
    channel = 0
    for part in parts:
        area, channels = part.area, part.area.shape[3]
        if area.whole is None and area.base == ARENA and not channels % LANES and not channel % LANES:
            area.become_part(whole, channel)
        else:
            slot = Area(area.shape, False)
            slot.become_part(whole, channel)
            plan.copy(area, slot)
        channel += channels
    return Value(whole, first.rank, first.axis, first.grid)


@plans("flatten")
def flatten(plan: Plan, x: Any, *, start_dim: int, end_dim: int) -> Value:
    refuse(not isinstance(x, Value) or x.rank != 4 or x.axis != 1, "its input is no image")
    refuse(start_dim % x.rank != 1 or end_dim % x.rank != 3, "it joins other axes than those of a sample")
    refuse(x.step is not None, "it moves what is not decided")
    n, h, w, c = x.area.shape
    if (h, w) == (1, 1):
        return Value(x.area, 2, 1, x.grid)
    raw = None if x.area.is_float else RAW
    room = -(-c * h * w // LANES) * LANES
    made = plan.settle(plan.add(Move, x, (n, 1, 1, c * h * w), x=x.area, by=(room, w, 1, h * w)), raw)
    made.area.zero = x.area.zero
    return Value(made.area, 2, 1, x.grid)


@plans("permute")
def permute(plan: Plan, x: Any, *, dims: Any) -> Value:
    refuse(not isinstance(x, Value) or x.rank != 4, "its input is no image")
    turned = {(1, (0, 2, 3, 1)): 3, (3, (0, 3, 1, 2)): 1}.get((x.axis, tuple(d % 4 for d in dims)))
    refuse(turned is None, "it moves values")
    assert turned is not None
    plan.settle(x, None) if x.step is not None else None
    return Value(x.area, 4, turned, x.grid)


@plans("identity")
def identity(plan: Plan, x: Value) -> Value:
    return x
