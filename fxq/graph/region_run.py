"""Running a region of the qdq graph, step by step: what a kernel in its place is compared to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxq.graph.query import Step, arguments_of, is_op, options_of
from fxq.graph.region import Region
from fxq.graph.run import value_of
from fxq.quant.qparams import spread


@dataclass(frozen=True)
class Result:
    """What a region computes, in qdq arithmetic.

    Attributes:
        raw: its value; where it ends in a quantize, what goes into that, since rounding hides how near a tie was.
        last: that quantize (or requantize), or None.
    """

    raw: Any
    last: Step | None = None

    @property
    def value(self) -> Any:
        """The value of the region, rounded."""
        return self.raw if self.last is None else self.last.target(self.raw, **self.last.kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the value."""
        return self.raw.dtype if self.last is None else options_of(self.last)["dtype"]

    @property
    def steps(self) -> Tensor | None:
        """Where it ends in a quantize: its value in steps, zero point included and clamped, but not rounded; float32.

        float32 holds 0..255 to 2e-5 steps.
        """
        if self.last is None:
            return None
        grid, real = options_of(self.last), self.raw.to(torch.float32)
        if is_op(self.last, "requantize"):
            real = (real - grid["from_zero_point"]).mul_(grid["from_scale"])
        scale, zero_point = grid["scale"], grid["zero_point"]
        if isinstance(scale, Tensor):
            scale, zero_point = (spread(v, real, grid["axis"], grid["block"]) for v in (scale, zero_point))
        return real.div(scale).add_(zero_point).clamp_(grid["qmin"], grid["qmax"])


Round = Callable[[Result], Tensor]
"""How a value inside a region is rounded to its grid."""


def run_region(
    gm: fx.GraphModule, region: Region, values: Mapping[fx.Node, Any], rounded: Round = lambda result: result.value
) -> list[Result]:
    """What the region computes on these values of its inputs, output by output.

    Not with `fx.Interpreter`: that lists all modules of `gm` first, which is quadratic over regions.

    Args:
        gm: the module of the graph that the region was read from.
        region: the region.
        values: by input.
        rounded: how to round what steps inside of the region read.
    """
    env, results = dict(values), dict.fromkeys(region.outputs, Result(None))
    for step in region.steps:
        rounds = is_op(step, "quantize", "requantize")
        if rounds:
            (raw,), grid = arguments_of(step, env)
            result = Result(raw, replace(step, kwargs=grid))
        else:
            result = Result(value_of(gm, step, env))
        if step.node in results:
            results[step.node] = result
        if step is not region.steps[-1]:
            env[step.node] = rounded(result) if rounds else result.raw
    return list(results.values())
