"""Ops that give values another shape: most take no step, since the values stay where they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxq.backends.programs.plan import ProgramPlan
from fxq.backends.programs.planned_values import PlannedHeads, PlannedValue, plans, refuse


@plans("flatten")
def flatten(plan: ProgramPlan, x: Any, *, start_dim: int, end_dim: int) -> PlannedValue:
    if (start_dim % 4, end_dim % 4) == (2, 3):
        return heads_of(plan, x, turned=False).whole
    refuse(not isinstance(x, PlannedValue) or x.rank != 4 or x.axis != 1, "its input is no image")
    refuse(start_dim % x.rank != 1 or end_dim % x.rank != 3, "it joins other axes than those of a sample")
    plan.settle(x, None)
    n, h, w, c = x.area.shape
    if (h, w) == (1, 1):
        return PlannedValue(x.area, 2, 1, x.grid)
    return plan.moved(x, 2, (n, 1, 1, c * h * w), by=lambda _: (w, 1, h * w))


@plans("unflatten")
def unflatten(plan: ProgramPlan, x: Any, *, dim: int, sizes: Sequence[Any]) -> PlannedHeads:
    refuse(not isinstance(x, PlannedValue) or x.rank != 3 or dim % x.rank != 2, "it splits another axis than the last")
    return _split(plan, x, torch.empty(x.shape[2], device="meta").view(sizes).shape)


@plans("reshape")
def reshape(plan: ProgramPlan, x: Any, *, shape: Sequence[Any]) -> Any:
    refuse(not isinstance(x, (PlannedValue, PlannedHeads)), "it reads what is no tensor that it computes")
    wanted = tuple(torch.empty(x.shape, device="meta").reshape(shape).shape)
    if wanted == x.shape:
        return x
    if len(x.shape) == 4 and wanted == (*x.shape[:2], math.prod(x.shape[2:])):
        return heads_of(plan, x, turned=False).whole
    refuse(not isinstance(x, PlannedValue), "it splits or joins other axes than the last ones")
    if x.rank == 4 and wanted == (x.shape[0], math.prod(x.shape[1:])):
        return flatten(plan, x, start_dim=1, end_dim=-1)
    refuse(x.rank != 3 or wanted[:2] != x.shape[:2], "it splits or joins other axes than the last ones")
    return _split(plan, x, wanted[2:])


@plans("transpose")
def transpose(plan: ProgramPlan, x: Any, *, dim0: int, dim1: int) -> PlannedHeads:
    x = x if isinstance(x, PlannedHeads) else heads_of(plan, x, turned=True)
    refuse({dim0 % 4, dim1 % 4} != {1, 2}, "it moves values")
    return PlannedHeads(x.whole, x.heads, not x.turned)


@plans("permute")
def permute(plan: ProgramPlan, x: Any, *, dims: Any) -> PlannedValue | PlannedHeads:
    order = tuple(d % len(dims) for d in dims)
    if order == (0, 2, 1, 3):
        return transpose(plan, x, dim0=1, dim1=2)
    refuse(not isinstance(x, PlannedValue) or x.rank != 4, "its input is no image")
    turned = {(1, (0, 2, 3, 1)): 3, (3, (0, 3, 1, 2)): 1}.get((x.axis, order))
    refuse(turned is None, "it moves values")
    assert turned is not None
    plan.settle(x, None)
    return PlannedValue(x.area, 4, turned, x.grid)


@plans("identity", "contiguous")
def identity(plan: ProgramPlan, x: Any, **_: Any) -> Any:
    return x


def heads_of(plan: ProgramPlan, x: Any, turned: bool) -> PlannedHeads:
    """A value of four axes as heads, whose number is its second axis if they are turned, else the third one.

    Unless it is such heads already, it is moved.
    """
    if isinstance(x, PlannedHeads):
        if x.turned == turned:
            return x
        x = plan.rows(x)
    refuse(not isinstance(x, PlannedValue) or x.rank != 4 or x.axis != 3, "its input has no heads")
    n, heads, length, depth = x.shape if turned else (x.shape[0], x.shape[2], x.shape[1], x.shape[3])
    whole = plan.moved(
        x, 3, (n, 1, length, heads * depth), lambda out: (depth, out.wide, 1) if turned else (out.wide, depth, 1)
    )
    return PlannedHeads(whole, heads, turned)


def _split(plan: ProgramPlan, x: PlannedValue, sizes: Sequence[int]) -> PlannedHeads:
    refuse(len(sizes) != 2, f"it splits an axis into {len(sizes)}")
    return PlannedHeads(plan.settle(x, None), sizes[0])
