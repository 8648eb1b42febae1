"""Regions of the qdq graph: what one kernel replaces, read for lowering and kept for verification."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from fxq.graph.grid import grid_of
from fxq.graph.info import info
from fxq.graph.query import CONVERSIONS, Step, arguments_of, constant, is_op, is_size, options_of, values_of
from fxq.graph.unit import Calls, calls_of
from fxq.ops.table import META
from fxq.quant.packing import unpack
from fxq.quant.qparams import QParams


@dataclass(frozen=True)
class Weight:
    """An integer weight of the qdq graph.

    Attributes:
        stored: its integers; where they are packed, two to a byte, uint8; or float16.
        qparams: their parameters.
        packed: None, or the shape of a row of packed values.
    """

    stored: Tensor
    qparams: QParams
    packed: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """How many values it has."""
        return self.stored.numel() if self.packed is None else len(self.stored) * math.prod(self.packed)

    @property
    def values(self) -> Tensor:
        """Its integers, each an element, in the shape of the weight."""
        return self.stored if self.packed is None else unpack(self.stored, self.packed, self.qparams.qmin < 0)


@dataclass(frozen=True)
class Region:
    """A part of the qdq graph that one kernel can run, as the graph was when it was read.

    Attributes:
        nodes: what the kernel takes the place of, in order.
        outputs: those of them whose values are read outside, in order.
        steps: what it computes, in order: the nodes with the weights, conversions and sizes that they read.
        inputs: the nodes that the steps read from outside: no copies; integers where dequantized inside.
        calls: (of one unit or op alone) the ops that it runs: each has its row, `op`, and its `options`.
    """

    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    steps: tuple[Step, ...]
    inputs: tuple[fx.Node, ...]

    def to_graph(self) -> fx.Graph:
        """The region as a graph of its own, with the metadata of its nodes; of several outputs it returns a tuple."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta[META] = info(node)
        for step in self.steps:
            copies[step.node] = graph.create_node(step.op, step.target, *arguments_of(step, copies), step.name)
            copies[step.node].meta[META] = step.about
        made = tuple(copies[node] for node in self.outputs)
        graph.output(made if len(made) > 1 else made[0])
        return graph


@dataclass(frozen=True)
class UnitRegion(Region):
    """A unit of the qdq graph with its conversions: quantize(unit(dequantize(x), ...)).

    Its outputs are those of the unit, in order: the quantize that alone reads one, or the value, wanted in float.

    Attributes:
        calls: the ops that it runs.
    """

    calls: Calls

    @property
    def node(self) -> fx.Node:
        """The unit (or single op)."""
        return self.nodes[0]


def read_region(gm: fx.GraphModule, node: fx.Node, emits_float: bool = False) -> UnitRegion | None:
    """The region around a unit or op of the qdq graph; None when `node` runs no op.

    A conversion is a region of its own: it takes in no other conversion. With `emits_float`, the region ends in the
    unit, also where a quantize alone reads that. So does a layer that reads floats and whose weights are integers; it
    takes in the conversions of those.
    """
    calls = calls_of(gm, node)
    if not calls:
        return None
    conversion, alone, values = is_op(node, *CONVERSIONS), is_weight_only(node, calls), values_of(node)
    outputs = [node] if conversion else [value if emits_float or alone else _rounded(value) for value in values]

    def taken_along(value: fx.Node) -> bool:
        if conversion or alone:
            return value.op == "get_attr" or (alone and is_weight(value))
        return value.op == "get_attr" or is_op(value, "dequantize")

    nodes = tuple(dict.fromkeys((node, *values, *outputs)))
    return UnitRegion(nodes, tuple(outputs), *_read(nodes, taken_along), calls)


def _rounded(value: fx.Node) -> fx.Node:
    """The quantize that alone reads a value, else the value."""
    (reader, *others) = [*value.users, value]
    return reader if len(others) == 1 and is_op(reader, "quantize") else value


def region_of(nodes: Sequence[fx.Node]) -> Region:
    """The region of these nodes of the qdq graph, in order, with the weights and sizes that they read."""
    inside = set(nodes)
    outputs = tuple(node for node in nodes if _is_read_outside(node, inside))
    return Region(tuple(nodes), outputs, *_read(nodes, lambda value: is_weight(value) or is_size(value)))


def _is_read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether others than these nodes read a value, or sizes of it."""
    if inside.issuperset(node.users):
        return False
    todo, seen = [*node.users], set(inside)
    while todo:
        user = todo.pop()
        if user not in seen:
            if not is_size(user):
                return True
            seen.add(user)
            todo += user.users
    return False


def is_weight_only(node: fx.Node, calls: Calls) -> bool:
    """Whether a node of the qdq graph computes in float with a weight that is in integers."""
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


def unit_regions(gm: fx.GraphModule) -> Iterator[UnitRegion]:
    """Every unit or op that runs on integers as a region of its own, then every conversion that is left.

    Each is read when its turn comes, so that it reads from the kernels that took the place of those before it.
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
    """Whether an op of which nobody has decided makes integers; or is a layer, whose kernel can make floats."""
    region = read_region(gm, node) if not is_op(node, *CONVERSIONS) else None
    if region is None or not info(region.outputs[0]).is_tensor:
        return False
    heavy = region.calls[0].op.traits.heavy or is_weight_only(node, region.calls)
    return heavy or any(is_op(out, "quantize") for out in region.outputs)


def _read(
    nodes: Iterable[fx.Node], taken_along: Callable[[fx.Node], bool]
) -> tuple[tuple[Step, ...], tuple[fx.Node, ...]]:
    """The steps and inputs of a region of these nodes and of those before them that are to be taken along."""
    steps: dict[fx.Node, Step | None] = {}  # None: it comes from outside
    for node in nodes:
        _take(node, True, steps, taken_along)
    inputs = tuple(value for value, step in steps.items() if step is None)
    return tuple(step for step in steps.values() if step is not None), inputs


def _take(
    value: fx.Node, inside: bool, steps: dict[fx.Node, Step | None], taken_along: Callable[[fx.Node], bool]
) -> None:
    """Add a value to a region, behind those that it reads."""
    for read in value.all_input_nodes if inside else ():
        if read not in steps:
            _take(read, taken_along(read), steps, taken_along)
    steps[value] = Step.of(value) if inside else None


def out_grids(gm: fx.GraphModule, region: UnitRegion) -> tuple[QParams | None, ...]:
    """Scale and zero point of the outputs of a region; None for a float output."""
    return tuple(grid_of(gm, out) if is_op(out, "quantize") else None for out in region.outputs)


@dataclass(frozen=True)
class Integers:
    """An activation that a kernel reads as integers.

    Attributes:
        values: the node of the integers.
        grid: their grid; where it is measured, that of steps of 1, and of the zero point 0 where that is, too.
        measured: the nodes of the measured scale, and of the measured zero point, as far as they are.
    """

    values: fx.Node
    grid: QParams
    measured: tuple[fx.Node, ...] = ()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """What the kernel is called with."""
        return (self.values, *self.measured)


def integer_input(gm: fx.GraphModule, value: Any) -> Integers | None:
    """The integers behind a dequantized activation; None when `value` is no such thing."""
    if not is_op(value, "dequantize") or not isinstance(value.args[0], fx.Node):
        return None
    grid = grid_of(gm, value)
    if grid is not None:
        return Integers(value.args[0], grid) if grid.axis is None else None
    options = options_of(value)
    scale, zero = options["scale"], options["zero_point"]
    measured = tuple(v for v in (scale, zero) if isinstance(v, fx.Node) and constant(gm, v) is None)
    if scale not in measured or not (zero in measured or isinstance(zero, int)) or options["axis"] is not None:
        return None
    zero = zero if isinstance(zero, int) else 0
    return Integers(value.args[0], QParams.per_tensor(1.0, zero, options["qmin"], options["qmax"]), measured)


def integer_weight(gm: fx.GraphModule, value: Any) -> Weight | None:
    """The integers and parameters behind a dequantized weight; None when `value` is no such thing."""
    if not is_op(value, "dequantize"):
        return None
    stored, grid, packed = constant(gm, value.args[0]), grid_of(gm, value), options_of(value)["packed"]
    if stored is None or grid is None:
        return None
    return Weight(stored, replace(grid, dtype=stored.dtype) if packed is None else grid, packed)


def saved_bytes(gm: fx.GraphModule, node: fx.Node) -> int:
    """How much smaller the weights that a node reads are than in float32, with all that belongs to them."""
    saved = 0
    for value in node.all_input_nodes:
        weight = integer_weight(gm, value)
        if weight is not None:
            held = (constant(gm, read) for read in value.all_input_nodes)
            saved += 4 * weight.numel - sum(tensor.nbytes for tensor in held if tensor is not None)
    return saved
