"""Regions of the qdq graph: a unit with the conversions around it, read for lowering and kept for verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxq.graph.grid import grid_of
from fxq.graph.info import info
from fxq.graph.query import CONVERSIONS, Step, arguments_of, constant, is_op, options_of
from fxq.graph.run import value_of
from fxq.graph.unit import Calls, calls_of
from fxq.ops.table import META
from fxq.quant.qparams import QParams


@dataclass(frozen=True)
class Weight:
    """An integer weight of the qdq graph: int8 values and their parameters."""

    values: Tensor
    qparams: QParams


@dataclass(frozen=True)
class Region:
    """A unit of the qdq graph with its conversions: quantize(unit(dequantize(x), ...)).

    Attributes:
        node: the unit (or single op).
        calls: the ops that it runs.
        out: the quantize that alone reads it, or None: then its value is wanted in float.
        steps: what it computes, in order, as the graph was when it was read. Weights are `get_attr`.
        inputs: the nodes that the steps read from outside: no copies; integers where dequantized inside.
    """

    node: fx.Node
    calls: Calls
    out: fx.Node | None
    steps: tuple[Step, ...]
    inputs: tuple[fx.Node, ...]

    @property
    def last(self) -> fx.Node:
        """The node whose value the region computes."""
        return self.out if self.out is not None else self.node

    def to_graph(self) -> fx.Graph:
        """The region as a graph of its own, with the metadata of its nodes."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta[META] = info(node)
        for step in self.steps:
            copies[step.node] = graph.create_node(step.op, step.target, *arguments_of(step, copies), step.name)
            copies[step.node].meta[META] = step.about
        graph.output(copies[self.last])
        return graph


def read_region(gm: fx.GraphModule, node: fx.Node) -> Region | None:
    """The region around a unit or op of the qdq graph; None when `node` runs no op.

    A conversion is a region of its own: it takes in no other conversion.
    """
    calls = calls_of(gm, node)
    if not calls:
        return None
    conversion = is_op(node, *CONVERSIONS)
    out = None
    if not conversion and len(node.users) == 1 and is_op(next(iter(node.users)), "quantize"):
        out = next(iter(node.users))
    steps: dict[fx.Node, Step | None] = {}
    for value in node.all_input_nodes:
        _take(value, steps, conversion)
    for center in (node, out) if out is not None else (node,):
        steps[center] = Step.of(center)
    inputs = tuple(value for value, step in steps.items() if step is None)
    return Region(node, calls, out, tuple(step for step in steps.values() if step is not None), inputs)


def _take(value: fx.Node, steps: dict[fx.Node, Step | None], alone: bool) -> None:
    """Add a value to a region, behind those that it reads; None stands for one that comes from outside.

    A region that stands `alone` takes in weights only, and no conversion.
    """
    if value in steps:
        return
    inside = value.op == "get_attr" or (not alone and is_op(value, "dequantize"))
    if inside:
        for read in value.all_input_nodes:
            _take(read, steps, alone)
    steps[value] = Step.of(value) if inside else None


def out_grid(gm: fx.GraphModule, region: Region) -> QParams | None:
    """Scale and zero point of the integer output of a region; None for a float output."""
    return grid_of(gm, region.out) if region.out is not None else None


def integer_input(gm: fx.GraphModule, value: Any) -> tuple[fx.Node, QParams] | None:
    """The integer tensor and its grid behind a dequantized activation; None when `value` is no such thing."""
    grid = grid_of(gm, value) if is_op(value, "dequantize") else None
    known = grid is not None and grid.axis is None and isinstance(value.args[0], fx.Node)
    return (value.args[0], grid) if known and grid is not None else None


def integer_weight(gm: fx.GraphModule, value: Any) -> Weight | None:
    """The int8 values and parameters behind a dequantized weight; None when `value` is no such thing."""
    if not is_op(value, "dequantize"):
        return None
    values, grid = constant(gm, value.args[0]), grid_of(gm, value)
    return Weight(values, grid) if values is not None and grid is not None else None


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
        grid = options_of(self.last)
        real = self.raw.to(torch.float32)
        if is_op(self.last, "requantize"):
            real = (real - grid["from_zero_point"]).mul_(grid["from_scale"])
        return real.div(grid["scale"]).add_(grid["zero_point"]).clamp_(grid["qmin"], grid["qmax"])


def run_region(gm: fx.GraphModule, region: Region, values: Mapping[fx.Node, Any]) -> Result:
    """What the region computes on these values of its inputs.

    Not with `fx.Interpreter`: that lists all modules of `gm` first, which is quadratic over regions.
    """
    env = dict(values)
    result = Result(None)
    for step in region.steps:
        if is_op(step, "quantize", "requantize"):
            result = Result(env[step.args[0]], step)
        else:
            env[step.node] = value_of(gm, step, env)
            result = Result(env[step.node])
    return result
