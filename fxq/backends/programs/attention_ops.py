"""Which step computes attention."""

from __future__ import annotations

import math
from typing import Any

from fxq.backends.programs.areas import Area
from fxq.backends.programs.layer_steps import AttentionStep
from fxq.backends.programs.plan import ProgramPlan
from fxq.backends.programs.planned_values import PlannedHeads, plans, refuse
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
    refuse(attn_mask is not None or dropout_p, "it has a mask, or drops values")
    query, key, value = (heads_of(plan, part, turned=True) for part in (x, key, value))
    n, heads, _, depth = query.shape
    refuse(key.shape != value.shape or key.shape[:2] != (n, heads) or key.shape[3] != depth, "its heads differ")
    areas = [_floats(plan, part) for part in (query, key, value)]
    scale = 1 / math.sqrt(depth) if scale is None else scale
    about: Any = dict(zip(("query", "key", "value"), areas, strict=True), heads=heads, scale=scale, is_causal=is_causal)
    return PlannedHeads(plan.add(AttentionStep, query.whole, **about), heads, turned=True)


def _floats(plan: ProgramPlan, heads: PlannedHeads) -> Area:
    """Where a value lies as floats."""
    x = plan.read(heads.whole)
    if x.area.is_float:
        return x.area
    return plan.settle(plan.add(PointwiseStep, x, x=x.area, x_grid=x.grid), None).area
