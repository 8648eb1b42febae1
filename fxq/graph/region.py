"""Regions: parts of the qdq graph that one kernel replaces, read for lowering and kept for verification."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from fxq.graph.grid import dynamic_grid_of, grid_of
from fxq.graph.info import info
from fxq.graph.query import (
    CONVERSIONS,
    NodeSnapshot,
    arguments_of,
    constant,
    dynamic_grid_ops,
    is_op,
    is_size,
    options_of,
    values_of,
)
from fxq.graph.unit import Calls, calls_of
from fxq.ops.table import META
from fxq.quant.dynamic_grid import DynamicGrid, Grid
from fxq.quant.packing import Packing
from fxq.quant.qparams import QParams


@dataclass(frozen=True)
class Weight:
    """An integer or float16 weight of the qdq graph.

    Attributes:
        stored: the stored values: int8 or uint8 integers, integers packed into bytes (uint8), or float16.
        qparams: grid of the weight.
        packing: form of packed values; None if they are not packed.
    """

    stored: Tensor
    qparams: QParams
    packing: Packing | None = None

    @property
    def numel(self) -> int:
        """Number of its values."""
        return self.stored.numel() if self.packing is None else len(self.stored) * self.packing.count

    @property
    def values(self) -> Tensor:
        """Its values, unpacked, in the shape of the weight."""
        return self.stored if self.packing is None else self.packing.unpack(self.stored)


@dataclass(frozen=True)
class Region:
    """Part of the qdq graph that one kernel can run. It is a snapshot: later edits of the graph do not change it.

    The region of one unit or op has its conversions, quantize(unit(dequantize(x), ...)). Its outputs are the outputs of
    the unit, in order: for each, the quantize that is its only reader, else the float value itself.

    Attributes:
        nodes: the nodes that the kernel replaces, in order.
        outputs: the nodes among them whose values are read outside, in order.
        steps: snapshots of all nodes that it computes, in order: `nodes`, and the weights, conversions and sizes that
            they read.
        inputs: the nodes that the steps read from outside; integers, if the region dequantizes them.
        calls: the ops of its unit, each with its row and its options; empty unless it is the region of one unit or op.
    """

    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    steps: tuple[NodeSnapshot, ...]
    inputs: tuple[fx.Node, ...]
    calls: Calls = field(default_factory=Calls)

    @property
    def node(self) -> fx.Node:
        """Its first node: the unit or op, in the region of one."""
        return self.nodes[0]

    def to_graph(self) -> fx.Graph:
        """Copy of the region as a graph, with metadata; it returns a tuple if the region has several outputs."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta[META] = info(node)
        for step in self.steps:
            copies[step.node] = graph.create_node(step.op, step.target, *arguments_of(step, copies), step.name)
            copies[step.node].meta[META] = step.about
        outputs = tuple(copies[node] for node in self.outputs)
        graph.output(outputs if len(outputs) > 1 else outputs[0])
        return graph


def whole_region(graph: fx.Graph) -> Region:
    """Region of all nodes of a graph, such as one that `Region.to_graph` returned."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    returned = graph.output_node().args[0]
    outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    inputs = tuple(graph.find_nodes(op="placeholder"))
    return Region(tuple(nodes), cast(Any, outputs), tuple(map(NodeSnapshot.of, nodes)), inputs)


def read_region(gm: fx.GraphModule, node: fx.Node, emits_float: bool = False) -> Region | None:
    """Region of a unit or op of the qdq graph with its conversions; None if `node` does not run an op.

    The region of a conversion includes no other conversion. A weight-only layer includes the conversions of its weights
    only.

    Args:
        gm: module of the qdq graph.
        node: the unit, op or conversion.
        emits_float: whether the region ends in the unit, even if its only reader is a quantize.
    """
    calls = calls_of(gm, node)
    if not calls:
        return None
    conversion, weight_only, values = is_op(node, *CONVERSIONS), is_weight_only(node, calls), values_of(node)
    outputs = [node] if conversion else [value if emits_float or weight_only else _quantized(value) for value in values]

    def included(value: fx.Node) -> bool:
        if conversion or weight_only:
            return value.op == "get_attr" or (weight_only and is_weight(value))
        return value.op == "get_attr" or is_op(value, "dequantize")

    nodes = tuple(dict.fromkeys((node, *values, *outputs)))
    return Region(nodes, tuple(outputs), *_read(nodes, included), calls)


def _quantized(value: fx.Node) -> fx.Node:
    """The quantize that is the only reader of a value, else the value."""
    (reader, *others) = [*value.users, value]
    return reader if len(others) == 1 and is_op(reader, "quantize") else value


def region_of(nodes: Sequence[fx.Node]) -> Region:
    """Region of these nodes of the qdq graph, in order, with the weights and sizes that they read."""
    inside = set(nodes)
    outputs = tuple(node for node in nodes if _is_read_outside(node, inside))
    return Region(tuple(nodes), outputs, *_read(nodes, lambda value: is_weight(value) or is_size(value)))


def _is_read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a node outside reads the value of `node`. Sizes count only if their values are read outside."""
    if inside.issuperset(node.users):
        return False
    todo, visited = [*node.users], set(inside)
    while todo:
        user = todo.pop()
        if user not in visited:
            if not is_size(user):
                return True
            visited.add(user)
            todo += user.users
    return False


def is_weight_only(node: fx.Node, calls: Calls) -> bool:
    """Whether a node of the qdq graph computes in float with a weight that is stored as integers."""
    plan = info(node).plan
    if plan is not None:
        return plan.precision == "weight-only"
    weight: Any = calls[0].tensors.get(calls[0].op.traits.weight or "")
    if len(calls) > 1 or not is_op(weight, "dequantize") or not is_weight(weight):
        return False
    return not any(is_op(value, "dequantize") for value in calls[0].activations)


def is_weight(node: fx.Node) -> bool:
    """Whether a node is a constant of the model, or dequantizes one."""
    return node.op == "get_attr" or (
        is_op(node, "dequantize") and all(read.op == "get_attr" for read in node.all_input_nodes)
    )


def unit_regions(gm: fx.GraphModule) -> Iterator[Region]:
    """Yield the region of every unit or op that runs on integers, then of every conversion that is left.

    Each region is read only when it is yielded, so that it reads from the kernels that replaced earlier regions.
    """
    for node in list(gm.graph.nodes):
        plan = info(node).plan
        if plan.precision != "float" if plan is not None else _has_grids(gm, node):
            region = read_region(gm, node) if not is_op(node, *CONVERSIONS) else None
            if region is not None:
                yield region
    for node in list(gm.graph.nodes):
        region = read_region(gm, node) if is_op(node, *CONVERSIONS) and not is_weight(node) else None
        if region is not None:
            yield region


def _has_grids(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether an undecided op emits integers or is a layer, whose kernel may emit floats."""
    region = read_region(gm, node) if not is_op(node, *CONVERSIONS) else None
    if region is None or not info(region.outputs[0]).is_tensor:
        return False
    heavy = region.calls[0].op.traits.heavy or is_weight_only(node, region.calls)
    return heavy or any(is_op(out, "quantize") for out in region.outputs)


def _read(
    nodes: Iterable[fx.Node], included: Callable[[fx.Node], bool]
) -> tuple[tuple[NodeSnapshot, ...], tuple[fx.Node, ...]]:
    """Steps and inputs of a region of these nodes and of the nodes before them that are `included`."""
    steps: dict[fx.Node, NodeSnapshot | None] = {}  # None for an input
    for node in nodes:
        _add(node, True, steps, included)
    inputs = tuple(value for value, step in steps.items() if step is None)
    return tuple(step for step in steps.values() if step is not None), inputs


def _add(
    value: fx.Node, inside: bool, steps: dict[fx.Node, NodeSnapshot | None], included: Callable[[fx.Node], bool]
) -> None:
    """Add a value to a region, after the values that it reads."""
    for read in value.all_input_nodes if inside else ():
        if read not in steps:
            _add(read, included(read), steps, included)
    steps[value] = NodeSnapshot.of(value) if inside else None


def out_grids(gm: fx.GraphModule, region: Region) -> tuple[QParams | None, ...]:
    """Grid of each output of a region; None for a float output."""
    return tuple(grid_of(gm, out) if is_op(out, "quantize") else None for out in region.outputs)


@dataclass(frozen=True)
class IntegerInput:
    """An activation that a kernel reads as integers.

    Attributes:
        values: the node of the integers.
        grid: their grid, per tensor if it is static.
        dynamic_nodes: nodes that compute the scale, and perhaps the zero point, at run time; empty for a static grid.
    """

    values: fx.Node
    grid: Grid
    dynamic_nodes: tuple[fx.Node, ...] = ()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Arguments of the kernel for this activation."""
        return (self.values, *self.dynamic_nodes)


def integer_input(gm: fx.GraphModule, value: Any) -> IntegerInput | None:
    """Integers of a dequantized activation; None if `value` is not one."""
    if not is_op(value, "dequantize") or not isinstance(value.args[0], fx.Node):
        return None
    grid = grid_of(gm, value)
    if grid is not None:
        return IntegerInput(value.args[0], grid) if grid.axis is None else None
    dynamic = dynamic_grid_of(value)
    if dynamic is not None:
        return IntegerInput(value.args[0], dynamic, dynamic_grid_ops(value))
    return _with_grid_from_outside(value)


def _with_grid_from_outside(value: fx.Node) -> IntegerInput | None:
    """Activation whose dynamic scale is an input of the graph, as in a copy of a region; None for others."""
    options = options_of(value)
    scale, zero, integers = options["scale"], options["zero_point"], value.args[0]
    inputs = tuple(v for v in (scale, zero) if isinstance(v, fx.Node))
    if scale not in inputs or options["axis"] is not None or any(v.op != "placeholder" for v in inputs):
        return None
    assert isinstance(integers, fx.Node)  # `integer_input` has checked it
    shape, of_scale = info(integers).shape, info(scale).shape
    if shape is None or of_scale is None:
        return None
    if len(of_scale) == len(shape) > 0:
        first = next((i for i, (size, own) in enumerate(zip(shape, of_scale, strict=True)) if size != own), -1)
        axis = first if first < 0 else first - len(shape)
    else:
        axis = None
    if math.prod(of_scale if axis is None else of_scale[axis:]) != 1:
        return None
    dtype = torch.int8 if options["qmin"] < 0 else torch.uint8
    grid = DynamicGrid(options["qmin"], options["qmax"], dtype, axis, symmetric=len(inputs) == 1)
    return IntegerInput(integers, grid, inputs) if not grid.symmetric or zero == grid.middle else None


def integer_weight(gm: fx.GraphModule, value: Any) -> Weight | None:
    """Stored integers and grid of a dequantized weight; None if `value` is not one."""
    if not is_op(value, "dequantize"):
        return None
    stored, grid, packing = constant(gm, value.args[0]), grid_of(gm, value), packing_of(value)
    if stored is None or grid is None:
        return None
    return Weight(stored, replace(grid, dtype=stored.dtype) if packing is None else grid, packing)


def packing_of(value: fx.Node) -> Packing | None:
    """Form of the packed integers of a dequantized weight; None if they are not packed."""
    options = options_of(value)
    row = options["packed"]
    return None if row is None else Packing(row, options["bits"], options["qmin"] < 0)


def weight_sizes(gm: fx.GraphModule, node: fx.Node) -> tuple[int, int]:
    """Number of values of the integer weights of a node, and their bytes with scales and zero points.

    A weight that only corrects another one has bytes, and no values.
    """
    values = size = 0
    for value in node.all_input_nodes:
        weight = integer_weight(gm, value)
        if weight is not None:
            tensors = (constant(gm, read) for read in value.all_input_nodes)
            values += 0 if info(value).corrects else weight.numel
            size += sum(t.nbytes for t in tensors if t is not None)
    return values, size
