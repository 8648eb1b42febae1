"""Rows of the op table: functions that clip. They count as moving values, since values keep their scale."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxq.ops.registry import aten, row, unary_function
from fxq.ops.table import Arguments, spell
from fxq.ops.traits import moves


def _numbers(bound: Arguments) -> Arguments | str:
    low, high = bound.pop("min", None), bound.pop("max", None)
    if not all(v is None or isinstance(v, (int, float)) for v in (low, high)):
        return "clamps between limits that are computed at run time"
    high = float("inf") if high is None else high
    low = -float("inf") if low is None else min(low, high)  # torch.clamp returns max if min is larger
    return {**bound, "min_val": low, "max_val": high}


_CLIPS = moves("x", narrows=True, selects=True, fused_after=("conv", "linear"))

relu = unary_function(
    __name__, replace(_CLIPS, fused_after=("conv", "linear", "excite")),
    "relu", "max(x, 0).", F.relu, nn.ReLU, torch.relu, torch.relu_,
    "relu", "relu_", aten.relu.default, aten.relu_.default,
)  # fmt: skip
relu6 = unary_function(__name__, _CLIPS, "relu6", "min(max(x, 0), 6).", F.relu6, nn.ReLU6, aten.relu6.default)
_CLAMP = "x min max"


@row(
    nn.Hardtanh,
    spell(F.hardtanh, "x min_val max_val inplace"),
    spell(F.hardtanh_, "x min_val max_val"),
    aten.hardtanh.default,
    aten.hardtanh_.default,
    *(spell(t, _CLAMP, _numbers) for t in (torch.clamp, torch.clip, "clamp", "clamp_", "clip", "clip_")),
    *(spell(t, _CLAMP, _numbers) for t in (aten.clamp.default, aten.clamp_.default)),
    *(spell(t, "x min", _numbers) for t in (torch.clamp_min, "clamp_min", "clamp_min_", aten.clamp_min.default)),
    *(spell(t, "x max", _numbers) for t in (torch.clamp_max, "clamp_max", "clamp_max_", aten.clamp_max.default)),
    traits=_CLIPS,
)
def hardtanh(x: Tensor, *, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """min(max(x, min_val), max_val); one bound may be infinite, and then integers stay integers."""
    if not x.is_floating_point() and math.isinf(min_val) != math.isinf(max_val):
        return torch.clamp(x, max=max_val) if math.isinf(min_val) else torch.clamp(x, min=min_val)
    return torch.clamp(x, min_val, max_val)
