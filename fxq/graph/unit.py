"""A unit: one node that runs its small body graph. Fusion makes units; backends look inside them.

A unit holds no weight: everything it needs is an input, so units of the same body share one module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx

from fxq.graph.bindable import Bindable
from fxq.graph.info import Decision, Plan, info
from fxq.graph.plain_data import NodeData, from_data, to_data
from fxq.graph.query import flat_nodes, op_of, options_of, plan_of, submodule, unobserved
from fxq.ops.table import Op
from fxq.quant.spec import Role, TensorSpec

UNITS = "fxq_units"


class Unit(Bindable, fx.GraphModule):
    """A fused group of ops.

    Attributes:
        kind: the name of the rule that made it, e.g. `conv2d_relu`.
        graph: the body: a placeholder for each capture of the rule, canonical ops, an output. Where it returns several
            values, nodes behind the unit's take each of them.
        pure: it only computes its value.
    """

    pure = True

    def __init__(self, kind: str, graph: fx.Graph) -> None:
        super().__init__({}, graph, class_name="Unit")
        self.kind = kind

    @property
    def captures(self) -> tuple[str, ...]:
        """The names of the rule's captures, in the order in which a call gives their values: nodes, numbers, None."""
        return tuple(str(node.target) for node in self.graph.find_nodes(op="placeholder"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        return Unit(self.kind, copy.deepcopy(self.graph))  # fx would return a plain GraphModule, without the kind

    def __reduce__(self) -> tuple[Any, ...]:
        return _unit, (self.kind, to_data(self.graph))


def _unit(kind: str, data: list[NodeData]) -> Unit:
    return Unit(kind, from_data(data))


@dataclass(frozen=True)
class Inner:
    """A value that an earlier op of the same unit makes: its position among the unit's ops."""

    index: int


@dataclass(frozen=True)
class OpCall:
    """One op of a unit (or a single op node), with where its arguments come from.

    Attributes:
        op: the row of the op table.
        options: its options, defaults included.
        tensors: for each tensor argument: the node of the outer graph, an `Inner` when an earlier op of the unit makes
            it, a number, or None when it is not given.
        name: name of the node in the body.
    """

    op: Op
    options: dict[str, Any]
    tensors: dict[str, Any]
    name: str

    @property
    def activations(self) -> tuple[fx.Node | Inner, ...]:
        """The values among its inputs that are neither numbers nor constants of the model, in order."""
        values = [self.tensors.get(name) for name in self.op.traits.inputs]
        flat = [v for value in values for v in (value if isinstance(value, (tuple, list)) else (value,))]
        return tuple(v for v in flat if isinstance(v, Inner) or (isinstance(v, fx.Node) and v.op != "get_attr"))

    @property
    def computed(self) -> str | None:
        """The first option that a value of the graph gives, as an argument of forward or a size: no kernel knows it."""
        return next((name for name, value in self.options.items() for _ in flat_nodes(value)), None)

    @property
    def pointwise(self) -> bool:
        """Whether each output element depends on one element of one activation (and, at most, on its channel)."""
        return self.op.traits.pointwise and len(self.activations) == 1

    @property
    def rounds_its_state(self) -> bool:
        """Whether a recurrent layer puts its hidden state on a grid, in each step."""
        recurrence = self.op.traits.recurrence
        return recurrence is not None and bool(self.options[recurrence.steps])


class Calls(tuple[OpCall, ...]):
    """The ops that a node runs, in order.

    Attributes:
        rule: of a unit, the name of the rule that made it; else empty.
        captures: of a unit, what the rule captured, by name, as in `OpCall.tensors`.
        outputs: which ops make the values that others read, in the order in which the rule returns them.
    """

    rule: str = ""
    outputs: tuple[int, ...] = (0,)
    captures: Mapping[str, Any] = MappingProxyType({})


def calls_of(gm: fx.GraphModule, node: fx.Node) -> Calls:
    """The ops that a node runs, in order: one for a canonical op, several for a unit, none for anything else."""
    op = op_of(node)
    if op is not None:
        return Calls((OpCall(op, options_of(node), dict(zip(op.tensors, node.args, strict=False)), node.name),))
    unit = unit_of(gm, node)
    if unit is None:
        return Calls()
    outer = dict(zip(unit.graph.find_nodes(op="placeholder"), node.args, strict=True))
    captures = dict(zip(unit.captures, node.args, strict=True))
    returned = list(flat_nodes(unit.graph.output_node().args))
    return calls_among(unit.graph.nodes, unit.kind, captures, returned, outer)


def calls_among(
    nodes: Iterable[fx.Node],
    rule: str,
    captures: Mapping[str, Any],
    outputs: Iterable[fx.Node],
    outer: Mapping[fx.Node, Any] | None = None,
) -> Calls:
    """The ops that these nodes run as one unit, in order.

    Args:
        nodes: the nodes of its body; or the nodes of a graph that are to become one.
        rule: the name of the rule that joins them.
        captures: what the rule captures.
        outputs: those of the nodes that the rule returns.
        outer: what stands for those of its inputs that are nodes of the body.
    """
    known: dict[fx.Node, Any] = dict(outer or {})
    calls: list[OpCall] = []
    for node in nodes:
        op = op_of(node)
        if op is None:
            continue
        tensors = {name: _outside(value, known) for name, value in zip(op.tensors, node.args, strict=False)}
        known[node] = Inner(len(calls))
        calls.append(OpCall(op, options_of(node), tensors, node.name))
    made = Calls(calls)
    made.rule, made.captures = rule, captures
    made.outputs = tuple(known[node].index for node in outputs)
    return made


def _outside(value: Any, outer: dict[fx.Node, Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return [_outside(v, outer) for v in value]
    return outer.get(value, value) if isinstance(value, fx.Node) else value


def unit_of(gm: fx.GraphModule, node: fx.Node) -> Unit | None:
    """The unit that a node runs, or None."""
    module = submodule(gm, node)
    return module if isinstance(module, Unit) else None


@dataclass(frozen=True)
class UnitInput:
    """One tensor that a node reads from outside.

    Attributes:
        node: the node of the outer graph.
        role: what it is to the op; None for what is read in float whatever happens (statistics, slopes).
        axis: the output-channel axis, for a weight.
        call: index of the op that reads it.
    """

    node: fx.Node
    role: Role | None
    axis: int | None
    call: int


def inputs_of(calls: tuple[OpCall, ...]) -> Iterator[UnitInput]:
    """Every tensor that the ops read from outside, in order, once per reading."""
    for i, call in enumerate(calls):
        quant = call.op.traits
        for name, value in call.tensors.items():
            role = quant.role(name)
            for node in flat_nodes(value):
                yield UnitInput(node, role, quant.axis if role == "weight" else None, i)


def activations_of(calls: tuple[OpCall, ...]) -> dict[fx.Node, None]:
    """The values that ops read from outside as activations, constants left out."""
    read = (found.node for found in inputs_of(calls) if found.role == "activation")
    return dict.fromkeys(node for node in read if node.op != "get_attr")


def read_by(calls: tuple[OpCall, ...], plan: Plan) -> dict[fx.Node, None]:
    """The nodes that ops with this plan read as integers: the activations of those that the kernel runs."""
    return activations_of(calls[: max(plan.kernel_ops, default=None)]) if plan.reads is not None else {}


def reads_of(gm: fx.GraphModule, node: fx.Node) -> dict[fx.Node, TensorSpec]:
    """The values that a node reads as integers, with the spec it wants of each; seen through observers."""
    plan = info(node).plan
    if plan is None or plan.reads is None:
        return {}
    values = (unobserved(gm, read) for read in read_by(calls_of(gm, node), plan))
    return {value: (plan_of(value) or _UNPLANNED).agreed or plan.reads for value in values}


_UNPLANNED = Plan(Decision("float"))


def feeding(gm: fx.GraphModule, node: fx.Node, goes_on: Callable[[fx.Node], bool]) -> dict[fx.Node, None]:
    """The nodes that what a node reads as integers comes from, and what these read, as far as the way `goes_on`."""
    found: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        new = [value for value in reads_of(gm, todo.pop()) if value not in found and goes_on(value)]
        found.update(dict.fromkeys(new))
        todo += new
    return found


Wish = tuple[TensorSpec, int | None]
"""The integers that a node wants of a value: the spec, and the axis where each channel, or row, has a scale."""


def wishes_of(gm: fx.GraphModule, node: fx.Node) -> dict[fx.Node, Wish]:
    """The values and the weights that a node reads as integers; seen through observers."""
    plan, calls = info(node).plan, calls_of(gm, node)
    row = calls[0].op.traits.channels if calls else None
    reads = reads_of(gm, node)
    wishes: dict[fx.Node, Wish] = {v: (spec, row if spec.per == "row" else None) for v, spec in reads.items()}
    if plan is not None and plan.precision in ("int8", "weight-only") and plan.weight is not None:
        for read in inputs_of(calls):
            if read.role == "weight" and read.axis is not None:
                axis = read.axis if plan.weight.per == "channel" else None
                if plan.weight.block is not None:
                    axis = 1 - read.axis  # of a weight's first two axes, that of its input channels
                wishes[unobserved(gm, read.node)] = plan.weight, axis
    return wishes
