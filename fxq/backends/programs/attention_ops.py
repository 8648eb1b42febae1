"""Which step computes attention."""

from __future__ import annotations

import math
from typing import Any

from fxq.backends.programs.areas import Area
from fxq.backends.programs.layer_steps import AttentionStep
from fxq.backends.programs.plan import ProgramPlan
from fxq.backends.programs.planned_values import PlannedHeads, PlannedValue, plans, refuse
from fxq.backends.programs.program_steps import PointwiseStep
from fxq.backends.programs.view_ops import heads_of


@plans("scaled_dot_product_attention")
def scaled_dot_product_attention(
    plan: ProgramPlan,
    x: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> PlannedHeads:
    refuse(dropout_p, "it drops values")
    query, key, value = (heads_of(plan, part, turned=True) for part in (x, key, value))
    n, heads, _, depth = query.shape
    refuse(key.shape != value.shape or key.shape[:2] != (n, heads) or key.shape[3] != depth, "its heads differ")
    areas = [_floats(plan, part) for part in (query, key, value)]
    scale = 1 / math.sqrt(depth) if scale is None else scale
    about: Any = dict(zip(("query", "key", "value"), areas, strict=True), heads=heads, scale=scale, is_causal=is_causal)
    mask = plan.mask(attn_mask)
    if mask is not None:
        about.update(mask=mask.area, by_mask=_strides_of(mask, (n, heads, query.shape[2], key.shape[2])))
    return PlannedHeads(plan.add(AttentionStep, query.whole, **about), heads, turned=True)


def _floats(plan: ProgramPlan, heads: PlannedHeads) -> Area:
    """Where a value lies as floats."""
    x = plan.read(heads.whole)
    if x.area.is_float:
        return x.area
    return plan.settle(plan.add(PointwiseStep, x, x=x.area, x_grid=x.grid), None).area


def _strides_of(mask: PlannedValue, shape: tuple[int, int, int, int]) -> list[int]:
    """Elements of a mask from a sample, head, query and key to the next; 0 where it is the same for all."""
    area = mask.area
    by = [area.sample, area.pitch, area.wide, 1]
    if mask.rank == 4 and mask.axis == 1:
        by = [area.sample, 1, area.pitch, area.wide]
    by = {4: by, 3: [by[0], by[2], 1], 2: [by[0], 1]}[mask.rank]
    sizes = [1] * (4 - mask.rank) + list(mask.shape)
    refuse(any(size not in (1, whole) for size, whole in zip(sizes, shape, strict=True)), "its mask has another shape")
    return [0 if size == 1 else step for size, step in zip(sizes, [0] * (4 - mask.rank) + by, strict=True)]
