"""Reference run of a region of the qdq graph, step by step. Kernels are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxq.graph.query import NodeSnapshot, arguments_of, flat_nodes, is_op, options_of
from fxq.graph.region import Region
from fxq.graph.run import value_of
from fxq.quant.qparams import spread


@dataclass(frozen=True)
class RegionOutput:
    """Output of a region, computed in qdq arithmetic.

    Attributes:
        raw: value before the last quantize, which shows how near to a tie each element was; the value itself if the
            region does not end in a quantize.
        last: the last quantize or requantize, or None.
        rounded: for floats that are dequantized from integers of the region, these integers; else None.
    """

    raw: Any
    last: NodeSnapshot | None = None
    rounded: RegionOutput | None = None

    @property
    def value(self) -> Any:
        """The value of the output, quantized."""
        return self.raw if self.last is None else self.last.target(self.raw, **self.last.kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the value."""
        return self.raw.dtype if self.last is None else options_of(self.last)["dtype"]

    @property
    def in_steps(self) -> Tensor | None:
        """The value in steps of its grid: zero point added, clamped, not rounded; float32. None for a float output.

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


Round = Callable[[RegionOutput], Tensor]
"""Function that rounds a value inside a region to its grid."""


def run_region(
    gm: fx.GraphModule, region: Region, values: Mapping[fx.Node, Any], rounded: Round = lambda result: result.value
) -> list[RegionOutput]:
    """Run a region on values of its inputs, and return its outputs.

    Does not use `fx.Interpreter`, which lists all modules of `gm` first: that is quadratic over all regions.

    Args:
        gm: module of the graph that the region was read from.
        region: the region.
        values: values of the region's inputs, by node; perhaps also those of its weights, see `weights_in`, which are
            computed otherwise.
        rounded: function that rounds the values that later steps of the region read.
    """
    env, results = dict(values), dict.fromkeys(region.outputs, RegionOutput(None))
    integers: dict[Any, RegionOutput] = {}
    for step in region.steps:
        if step.node in env:
            continue
        rounds = is_op(step, "quantize", "requantize")
        if rounds:
            (raw,), grid = arguments_of(step, env)
            result = integers[step.node] = RegionOutput(raw, replace(step, kwargs=grid))
        else:
            source = integers.get(step.args[0]) if is_op(step, "dequantize") else None
            result = RegionOutput(value_of(gm, step, env), rounded=source)
        if step.node in results:
            results[step.node] = result
        if step is not region.steps[-1]:
            env[step.node] = rounded(result) if rounds else result.raw
    return list(results.values())


def weights_in(gm: fx.GraphModule, region: Region) -> dict[fx.Node, Any]:
    """Values of the weights that a region dequantizes, by node, for several runs of it.

    Args:
        gm: module of the graph that the region was read from.
        region: the region.
    """
    env: dict[fx.Node, Any] = {}
    weights = [step for step in region.steps[:-1] if step.op == "get_attr" or _is_dequantized_constant(step)]
    for step in weights:
        env[step.node] = value_of(gm, step, env)
    return env


def _is_dequantized_constant(step: NodeSnapshot) -> bool:
    """Whether a step dequantizes a constant."""
    if not is_op(step, "dequantize"):
        return False
    return all(node.op == "get_attr" for node in flat_nodes((step.args, step.kwargs)))
