"""Units: nodes that run a small body graph, a fused group of ops; and the ops, inputs and grids of a unit or op.

A unit holds no weights: they are inputs, so units with the same body share one module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx

from fxq.graph.bindable import Bindable
from fxq.graph.info import Decision, IntegerForm, Plan, info
from fxq.graph.plain_data import NodeData, from_data, to_data
from fxq.graph.query import flat_nodes, op_of, options_of, plan_of, submodule, unobserved
from fxq.ops.table import Op
from fxq.quant.spec import Role

UNITS = "fxq_units"


class Unit(Bindable, fx.GraphModule):
    """A fused group of ops.

    Attributes:
        kind: name of the rule that made it, e.g. `conv2d_relu`.
        graph: the body: a placeholder for each capture of the rule, canonical ops, an output. If it returns several
            values, nodes after the unit's node take each of them.
        pure: always True: it has no side effects.
    """

    pure = True

    def __init__(self, kind: str, graph: fx.Graph) -> None:
        super().__init__({}, graph, class_name="Unit")
        self.kind = kind

    @property
    def captures(self) -> tuple[str, ...]:
        """Names of the rule's captures, in the order of the call's arguments (nodes, numbers or None)."""
        return tuple(str(node.target) for node in self.graph.find_nodes(op="placeholder"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        return Unit(self.kind, copy.deepcopy(self.graph))  # fx would return a plain GraphModule without `kind`

    def __reduce__(self) -> tuple[Any, ...]:
        return _unit, (self.kind, to_data(self.graph))


def _unit(kind: str, data: list[NodeData]) -> Unit:
    return Unit(kind, from_data(data))


@dataclass(frozen=True)
class InnerValue:
    """Value of an earlier op of the same unit: the op's index among the unit's ops."""

    index: int


@dataclass(frozen=True)
class OpCall:
    """One op of a unit, or a single op node, with the sources of its arguments.

    Attributes:
        op: row of the op table.
        options: its options, defaults included.
        tensors: tensor arguments by name: a node of the outer graph, an `InnerValue` (value of an earlier op of the
            unit), a number, or None if it is missing.
        name: name of the node in the body.
    """

    op: Op
    options: dict[str, Any]
    tensors: dict[str, Any]
    name: str

    @property
    def activations(self) -> tuple[fx.Node | InnerValue, ...]:
        """Its activations, in order, without numbers and constants of the model."""
        values = [self.tensors.get(name) for name in self.op.traits.inputs]
        flat = [v for value in values for v in (value if isinstance(value, (tuple, list)) else (value,))]
        return tuple(v for v in flat if isinstance(v, InnerValue) or (isinstance(v, fx.Node) and v.op != "get_attr"))

    @property
    def run_time_option(self) -> str | None:
        """Name of the first option whose value is computed at run time, such as a size; None if there is none."""
        return next((name for name, value in self.options.items() for _ in flat_nodes(value)), None)

    @property
    def pointwise(self) -> bool:
        """Whether each output element depends on one element of one activation and, at most, its channel."""
        return self.op.traits.pointwise and len(self.activations) == 1

    @property
    def rounds_its_state(self) -> bool:
        """Whether the op is a recurrent layer that quantizes its hidden state in each step."""
        recurrence = self.op.traits.recurrence
        return recurrence is not None and bool(self.options[recurrence.steps])


class Calls(tuple[OpCall, ...]):
    """The ops that a node runs, in order.

    Attributes:
        rule: name of the rule that made the unit; empty for a single op.
        captures: captured values of the unit's rule, by name, in the form of `OpCall.tensors`.
        outputs: indices of the ops whose values the unit returns, in the order of the rule.
    """

    rule: str = ""
    outputs: tuple[int, ...] = (0,)
    captures: Mapping[str, Any] = MappingProxyType({})


def calls_of(gm: fx.GraphModule, node: fx.Node) -> Calls:
    """Ops that a node runs, in order: one for a canonical op, several for a unit, none for other nodes."""
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
    """Ops that these nodes run as one unit, in order.

    Args:
        nodes: nodes of a unit's body, or nodes of a graph that are to become a unit.
        rule: name of the rule that fuses them.
        captures: captured values of the rule, by name.
        outputs: the nodes whose values the unit returns.
        outer: arguments of the unit, by placeholder of the body.
    """
    sources: dict[fx.Node, Any] = dict(outer or {})
    calls: list[OpCall] = []
    for node in nodes:
        op = op_of(node)
        if op is None:
            continue
        tensors = {name: _source(value, sources) for name, value in zip(op.tensors, node.args, strict=False)}
        sources[node] = InnerValue(len(calls))
        calls.append(OpCall(op, options_of(node), tensors, node.name))
    unit_calls = Calls(calls)
    unit_calls.rule, unit_calls.captures = rule, captures
    unit_calls.outputs = tuple(sources[node].index for node in outputs)
    return unit_calls


def _source(value: Any, sources: dict[fx.Node, Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return [_source(v, sources) for v in value]
    return sources.get(value, value) if isinstance(value, fx.Node) else value


def unit_of(gm: fx.GraphModule, node: fx.Node) -> Unit | None:
    """The unit that a node runs, or None."""
    module = submodule(gm, node)
    return module if isinstance(module, Unit) else None


@dataclass(frozen=True)
class UnitInput:
    """One tensor that a unit or op reads from the outer graph.

    Attributes:
        node: node of the outer graph.
        role: role of the tensor; None for tensors that are always read in float (statistics, slopes).
        axis: output-channel axis of a weight; None for other tensors.
        call: index of the op that reads it.
    """

    node: fx.Node
    role: Role | None
    axis: int | None
    call: int


def inputs_of(calls: tuple[OpCall, ...]) -> Iterator[UnitInput]:
    """Yield every tensor that the ops read from the outer graph, in order, once per op that reads it."""
    for i, call in enumerate(calls):
        traits = call.op.traits
        for name, value in call.tensors.items():
            role = traits.role(name)
            for node in flat_nodes(value):
                yield UnitInput(node, role, traits.axis if role == "weight" else None, i)


def activations_of(calls: tuple[OpCall, ...]) -> dict[fx.Node, None]:
    """Activations that the ops read from the outer graph, without constants of the model."""
    activations = (read.node for read in inputs_of(calls) if read.role == "activation")
    return dict.fromkeys(node for node in activations if node.op != "get_attr")


def read_by(calls: tuple[OpCall, ...], plan: Plan) -> dict[fx.Node, None]:
    """Nodes that ops with this plan read as integers: the activations of the ops that the kernel runs."""
    return activations_of(calls[: max(plan.kernel_ops, default=None)]) if plan.reads is not None else {}


def reads_of(gm: fx.GraphModule, node: fx.Node) -> dict[fx.Node, IntegerForm]:
    """Activations that a node reads as integers, with the form that it wants of each; observers are skipped."""
    plan = info(node).plan
    if plan is None or plan.reads is None:
        return {}
    calls = calls_of(gm, node)
    row_axis = calls[0].op.traits.channels if calls else None
    forms = {}
    for value in (unobserved(gm, read) for read in read_by(calls, plan)):
        spec = (plan_of(value) or _UNPLANNED).agreed or plan.reads
        forms[value] = IntegerForm(spec, row_axis if spec.per == "row" else None)
    return forms


_UNPLANNED = Plan(Decision("float"))


def integer_sources(gm: fx.GraphModule, node: fx.Node, goes_on: Callable[[fx.Node], bool]) -> dict[fx.Node, None]:
    """Nodes whose integers reach a node: those it reads, their inputs, and so on through nodes for which `goes_on`."""
    sources: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        new = [value for value in reads_of(gm, todo.pop()) if value not in sources and goes_on(value)]
        sources.update(dict.fromkeys(new))
        todo += new
    return sources


def wanted_forms(gm: fx.GraphModule, node: fx.Node) -> dict[fx.Node, IntegerForm]:
    """Activations and weights that a node reads as integers, with the forms that it wants; observers are skipped."""
    plan, forms = info(node).plan, reads_of(gm, node)
    if plan is not None and plan.precision in ("int8", "weight-only") and plan.weight is not None:
        for read in inputs_of(calls_of(gm, node)):
            if read.role == "weight" and read.axis is not None:
                axis = read.axis if plan.weight.per == "channel" else None
                if plan.weight.block is not None:
                    axis = 1 - read.axis  # the input-channel axis: the other one of the first two
                forms[unobserved(gm, read.node)] = IntegerForm(plan.weight, axis)
    return forms


def emits_float(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a unit is a layer with at most an activation function after it: its kernel can return floats."""
    plan = info(node).plan
    if plan is not None and plan.emits is not None:
        return False
    first, *rest = calls_of(gm, node)
    return first.op.traits.heavy and not any(call.op.traits.kind == "computes" for call in rest)
