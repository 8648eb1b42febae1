"""Planning of ops that change shapes or take parts. Most need no step, since values stay in their memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from fxq.backends.loops.programs.areas import Area
from fxq.backends.loops.programs.planned_values import PlannedHeads, PlannedValue, plans, refuse
from fxq.backends.loops.programs.step_builder import StepBuilder
from fxq.quant.qparams import quantize


@plans("flatten")
def flatten(plan: StepBuilder, x: Any, *, start_dim: int, end_dim: int) -> PlannedValue:
    axes = start_dim % len(x.shape), end_dim % len(x.shape)
    is_image = isinstance(x, PlannedValue) and x.rank == 4 and x.axis == 1
    if isinstance(x, PlannedHeads) or (len(x.shape) == 4 and axes == (2, 3) and not is_image):
        refuse(axes != (2, 3), "it joins other axes than heads and their depth")
        return heads_of(plan, x, transposed=False).joined
    refuse(not is_image, "its input is no image")
    refuse(axes != (1, 3), "it does not join all axes of a sample")
    n, h, w, c = x.area.shape
    if (h, w) == (1, 1):
        plan.settle(x, None)
        return PlannedValue(x.area, 2, 1, x.grid)
    return plan.move(x, 2, (n, 1, 1, c * h * w), lambda _: (w, 1, h * w))


@plans("unflatten")
def unflatten(plan: StepBuilder, x: Any, *, dim: int, sizes: Sequence[Any]) -> PlannedHeads:
    is_row = isinstance(x, PlannedValue) and (x.rank, x.axis) == (3, 2)
    refuse(not is_row or dim % x.rank != 2, "it splits another axis than the last")
    return _split(x, torch.empty(x.shape[2], device="meta").view(sizes).shape)


@plans("reshape")
def reshape(plan: StepBuilder, x: Any, *, shape: Sequence[Any]) -> Any:
    refuse(not isinstance(x, (PlannedValue, PlannedHeads)), "it reads a value that the region does not compute")
    wanted = tuple(torch.empty(x.shape, device="meta").reshape(shape).shape)
    if wanted == x.shape:
        return x
    if len(x.shape) == 4 and wanted == (*x.shape[:2], math.prod(x.shape[2:])):
        return heads_of(plan, x, transposed=False).joined
    refuse(not isinstance(x, PlannedValue), "it splits or joins other axes than the last ones")
    if x.rank == 4 and wanted == (x.shape[0], math.prod(x.shape[1:])):
        return flatten(plan, x, start_dim=1, end_dim=-1)
    refuse(
        (x.rank, x.axis) != (3, 2) or len(wanted) < 4 or wanted[:2] != x.shape[:2],
        "it splits or joins other axes than the last ones",
    )
    return _split(x, wanted[2:])


@plans("transpose")
def transpose(plan: StepBuilder, x: Any, *, dim0: int, dim1: int) -> PlannedValue | PlannedHeads:
    rank = len(x.shape)
    if isinstance(x, PlannedValue) and rank == 3 and {dim0 % 3, dim1 % 3} == {1, 2}:
        plan.settle(x, None)
        return PlannedValue(x.area, 3, 3 - x.axis, x.grid)
    refuse(rank != 4 or {dim0 % rank, dim1 % rank} != {1, 2}, "it reorders values in memory")
    x = x if isinstance(x, PlannedHeads) else heads_of(plan, x, transposed=False)
    return PlannedHeads(x.joined, x.heads, not x.transposed)


@plans("permute")
def permute(plan: StepBuilder, x: Any, *, dims: Any) -> PlannedValue | PlannedHeads:
    order = tuple(d % len(dims) for d in dims)
    if order in ((0, 2, 1), (0, 2, 1, 3)):
        return transpose(plan, x, dim0=1, dim1=2)
    refuse(not isinstance(x, PlannedValue) or x.rank != 4, "its input is no image")
    axis = {(1, (0, 2, 3, 1)): 3, (3, (0, 3, 1, 2)): 1}.get((x.axis, order))
    refuse(axis is None, "it reorders values in memory")
    assert axis is not None
    plan.settle(x, None)
    return PlannedValue(x.area, 4, axis, x.grid)


@plans("chunk")
def chunk(plan: StepBuilder, x: Any, *, chunks: int, dim: int, index: int) -> PlannedValue:
    size = -(-x.shape[dim] // chunks)
    return split(plan, x, sizes=size, dim=dim, index=index)


@plans("split")
def split(plan: StepBuilder, x: Any, *, sizes: Any, dim: int, index: int) -> PlannedValue:
    """Plan a part of the channels, in the memory of all of them."""
    refuse(not isinstance(x, PlannedValue) or dim % x.rank != x.axis, "it splits another axis than the channels")
    channels = x.area.shape[3]
    cuts = list(accumulate(sizes, initial=0)) if not isinstance(sizes, int) else [*range(0, channels, sizes), channels]
    return _channels(plan, x, cuts[index % (len(cuts) - 1)], cuts[index % (len(cuts) - 1) + 1])


@plans("getitem")
def getitem(plan: StepBuilder, x: Any, *, index: Any) -> PlannedValue:
    """Plan a range of the channels, in the memory of all of them."""
    parts = list(index) if isinstance(index, tuple) else [index]
    refuse(not isinstance(x, PlannedValue) or len(parts) > x.rank, "it takes no range of channels")
    parts += [slice(None)] * (x.rank - len(parts))
    part = parts.pop(x.axis)
    is_range = isinstance(part, slice) and all(whole == slice(None) for whole in parts)
    refuse(not is_range, "it takes no range of channels")
    taken = range(x.area.shape[3])[part]
    refuse(taken.step != 1 or not taken, "it takes no range of channels")
    return _channels(plan, x, taken.start, taken.stop)


def _channels(plan: StepBuilder, x: PlannedValue, first: int, end: int) -> PlannedValue:
    """Return channels `first` to `end` of a value, in its memory."""
    n, h, w, _ = x.area.shape
    x = plan.in_arena(plan.settle(x, None))
    part = Area((n, h, w, end - first), x.area.is_float)
    part.become_part(x.area, first)
    return PlannedValue(part, x.rank, x.axis, x.grid)


@plans("pad")
def pad(plan: StepBuilder, x: Any, *, pad: Sequence[int], mode: str, value: float | None) -> PlannedValue:
    """Plan an image in a frame: the frame is the border of the image's memory, which no step writes."""
    refuse(mode != "constant", f"it pads with {mode}")
    refuse(not isinstance(x, PlannedValue), "it reads a value that the region does not compute")
    x = plan.in_arena(plan.settle(x, None))
    axes = 2 if x.rank == 4 else 1
    is_image = x.axis == 1 and x.rank > 2
    refuse(not is_image or len(pad) > 2 * axes or min(pad) < 0, "it pads other axes than height and width, or cuts")
    left, right, top, bottom = (*pad, 0, 0, 0, 0)[:4]
    number = value or 0.0
    refuse(x.area.is_float and number != 0.0, "it pads floats with other numbers than 0")
    byte = int(number if x.grid is None else quantize(torch.tensor(number), x.grid))
    framed = x.area.framed((top, left, bottom, right), byte)
    refuse(framed is None, "its input would need a border with two zero points")
    assert framed is not None
    return PlannedValue(framed, x.rank, x.axis, x.grid)


@plans("identity", "contiguous")
def identity(plan: StepBuilder, x: Any, **_: Any) -> Any:
    return x


def heads_of(plan: StepBuilder, x: Any, transposed: bool) -> PlannedHeads:
    """Return a value of four axes as heads. Their number is its axis 1 if they are transposed, else axis 2.

    A step moves the values unless they have this form already.
    """
    if isinstance(x, PlannedHeads) and x.transposed == transposed:
        return x
    if isinstance(x, PlannedHeads):  # length and heads change roles
        n, _, length, channels = x.joined.area.shape
        depth = channels // x.heads
        shape = (n, 1, x.heads, length * depth)
        return PlannedHeads(
            plan.move(x.joined, 3, shape, lambda to: (to.pixel_stride, depth, 1), x.heads), length, transposed
        )
    refuse(not isinstance(x, PlannedValue) or x.rank != 4 or x.axis != 3, "its input has no heads")
    n, heads, length, depth = x.shape if transposed else (x.shape[0], x.shape[2], x.shape[1], x.shape[3])
    joined = plan.move(
        x,
        3,
        (n, 1, length, heads * depth),
        lambda to: (depth, to.pixel_stride, 1) if transposed else (to.pixel_stride, depth, 1),
    )
    return PlannedHeads(joined, heads, transposed)


def _split(x: PlannedValue, sizes: Sequence[int]) -> PlannedHeads:
    """Split the last axis into heads."""
    refuse(len(sizes) != 2, f"it splits an axis into {len(sizes)}")
    return PlannedHeads(x, sizes[0])
