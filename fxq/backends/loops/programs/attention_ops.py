"""Planning of attention."""

from __future__ import annotations

import math
from typing import Any

from fxq.backends.loops.programs.areas import Area
from fxq.backends.loops.programs.layer_steps import AttentionStep
from fxq.backends.loops.programs.planned_values import PlannedHeads, PlannedValue, plans, refuse
from fxq.backends.loops.programs.program_steps import PointwiseStep
from fxq.backends.loops.programs.step_builder import StepBuilder
from fxq.backends.loops.programs.view_ops import heads_of


@plans("scaled_dot_product_attention")
def scaled_dot_product_attention(
    plan: StepBuilder,
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
    query, key, value = (heads_of(plan, part, transposed=True) for part in (x, key, value))
    n, heads, _, depth = query.shape
    refuse(key.shape != value.shape or key.shape[:2] != (n, heads) or key.shape[3] != depth, "its heads differ")
    attended = plan.add(
        AttentionStep, query.joined, query=_floats(plan, query), key=_floats(plan, key), value=_floats(plan, value),
        heads=heads, scale=1 / math.sqrt(depth) if scale is None else scale, is_causal=is_causal,
        **_mask_arguments(plan.mask(attn_mask), (n, heads, query.shape[2], key.shape[2])),
    )  # fmt: skip
    return PlannedHeads(attended, heads, transposed=True)


def _floats(plan: StepBuilder, heads: PlannedHeads) -> Area:
    """Area of the heads as floats; integers are converted by a step."""
    x = plan.read(heads.joined)
    if x.area.is_float:
        return x.area
    return plan.settle(plan.add(PointwiseStep, x, x=x.area, x_grid=x.grid), None).area


def _mask_arguments(mask: PlannedValue | None, scores: tuple[int, int, int, int]) -> dict[str, Any]:
    """Arguments of the step for a mask, which may broadcast over samples, heads, queries or keys."""
    if mask is None:
        return {}
    leading_ones = [1] * (4 - mask.rank)
    sizes = [*leading_ones, *mask.shape]
    refuse(any(size not in (1, n) for size, n in zip(sizes, scores, strict=True)), "its mask has another shape")

    def strides() -> list[int]:
        sample, row, pixel = (mask.area.sample_stride, mask.area.row_stride, mask.area.pixel_stride)
        image_strides = [sample, 1, row, pixel] if mask.axis == 1 else [sample, row, pixel, 1]
        strides_by_rank = {4: image_strides, 3: [sample, pixel, 1], 2: [sample, 1]}[mask.rank]
        return [0 if size == 1 else step for size, step in zip(sizes, [*leading_ones, *strides_by_rank], strict=True)]

    return {"mask": mask.area, "mask_strides": strides}
