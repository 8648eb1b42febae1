"""Ops that could run on integers, why others cannot, and the decision which of them do, given their neighbours."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from fxq.backends.by_name import Support
from fxq.graph.analysis.mutation import MemoryWriters
from fxq.graph.info import Decision, Plan, info
from fxq.graph.query import constant, reads_only_metadata, taken_from, values_of
from fxq.graph.unit import Calls, OpCall, UnitInput, activations_of, inputs_of
from fxq.quant.spec import TensorSpec

UNREAD = "nothing reads integers from it"
"""Reason of a float op that would run on integers only for an integer reader, and has none."""


@dataclass(eq=False)
class Candidate:
    """Node that could run on integers.

    Attributes:
        calls: ops of the node.
        spec: spec of its activation inputs. Ops that only move data take the spec of their readers instead.
        weight: spec of its weights; None: float.
        state: spec of its hidden state; None: it has none, or it is float.
        support: support by the backend.
        overflows: whether a kernel overflows with 8 bits of both activations and weights, see reduce_range.
        wanted: spec that a reader wants of its value, or None.
        reason: reason why it does not run on integers; empty while it may.
    """

    calls: Calls
    spec: TensorSpec
    weight: TensorSpec | None
    support: Support
    state: TensorSpec | None = None
    overflows: bool = False
    wanted: TensorSpec | None = None
    reason: str = ""

    @property
    def inputs(self) -> Mapping[fx.Node, None]:
        """Nodes that it reads as integers: the activations of the ops that the kernel runs."""
        return self._inputs[self.ops]

    @cached_property
    def _inputs(self) -> Mapping[int, Mapping[fx.Node, None]]:
        """`inputs` for each number of ops that the kernel may run."""
        return {ops: activations_of(self.calls[:ops]) for ops in {self.support.ops, self._before_sum}}

    @cached_property
    def _before_sum(self) -> int:
        """Number of ops of a layer's unit before the first that reads a second activation.

        A unit that does not begin with a layer counts as a whole: a squeeze-and-excitation reads its input twice.
        """
        if not self.calls[0].op.traits.heavy:
            return self.support.ops
        later = (i.call for i in inputs_of(self.calls[: self.support.ops]) if i.role == "activation" and i.call > 0)
        return min(later, default=self.support.ops)

    @property
    def ops(self) -> int:
        """Number of ops that the kernel runs, given what readers want so far.

        A sum after a layer stays float if nothing reads it as integers: in a transformer, where layer norms read the
        residual stream, integers would only add one rounding per layer.
        """
        return self.support.ops if self.wanted is not None or not self.heavy else self._before_sum

    @property
    def heavy(self) -> bool:
        """Whether integers pay for the node alone, without integer neighbours."""
        return any(call.op.traits.heavy for call in self.calls)

    @property
    def moves(self) -> bool:
        """Whether the node only moves data, and has one result."""
        return len(self.calls.outputs) == 1 and all(call.op.traits.kind == "moves" for call in self.calls)

    @property
    def runs(self) -> bool:
        """Whether it runs on integers, given what readers want so far."""
        return not self.reason and (self.heavy or self.wanted is not None)

    @property
    def reads(self) -> TensorSpec | None:
        """Spec of its inputs so far, or None. A node that only moves data takes the spec that its readers want."""
        if not self.runs:
            return None
        return self.wanted if self.moves else self.spec

    def plan(self, decided_by: str, last: bool = False) -> Plan:
        """Plan of the node.

        Args:
            decided_by: name of the pass.
            last: whether its value reaches the output in float, see `CandidateGraph.reaching_output`.
        """
        spec = self.reads
        if spec is None:
            return Plan(Decision("float", "no integer neighbour", self.reason or UNREAD, decided_by=decided_by))
        if self.moves:
            return Plan(Decision("moves", decided_by=decided_by), reads=spec)
        emits = None if self.support.emits_float or (last and self.support.emits_float_last) else self.spec
        decision = Decision("int8", decided_by=decided_by)
        plan = Plan(decision, reads=spec, weight=self.weight, state=self.state, emits=emits, overflows=self.overflows)
        support = self.support
        if self.ops < support.ops:
            plan = plan.decided(kind="no integer neighbour", text="nothing reads integers from the sum")
            return replace(plan, kernel_ops=(self.ops,))
        if not support.fewer and support.ops == len(self.calls):
            return plan
        plan = plan.decided(kind="slower" if support.fewer else "unsupported", text=support.reason)
        return replace(plan, kernel_ops=(support.fewer, support.ops) if support.fewer else (support.ops,))


class CandidateGraph:
    """Candidates of a graph, decided together: an op without a reason of its own runs on integers if neighbours do.

    At first every candidate runs on integers whose value an integer reader wants. Then candidates that would need a
    conversion for themselves alone move to float. This leaves their neighbours fewer reasons to run on integers, and is
    repeated until nothing changes. No decision is revoked: the order does not matter, and the time is linear in the
    edges of the graph.

    Attributes:
        candidates: the candidates in the order of the graph, decided by the constructor.
    """

    def __init__(self, candidates: dict[fx.Node, Candidate]) -> None:
        self.candidates = candidates
        self._readings = {node: _readings(node) for node in candidates}  # `_wanted_spec` drops readers that want floats
        self._read_so_far: dict[fx.Node, tuple[Mapping[fx.Node, None], TensorSpec | None]] = {}
        for node, candidate in reversed(candidates.items()):
            candidate.wanted = self._wanted_spec(node)
            self._read_so_far[node] = _reads_now(candidate)
        self._readers = Counter(value for inputs, _ in self._read_so_far.values() for value in inputs)
        todo = deque(candidates)
        while todo:
            node = todo.popleft()
            candidate = candidates[node]
            candidate.reason = candidate.reason or self._refusal(candidate, own=1)
            todo += self._update(node)

    def reaching_output(self, graph: fx.Graph) -> set[fx.Node]:
        """Nodes whose value reaches the output without being quantized on the way."""
        nodes: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if any(user.op == "output" or (user in nodes and self._reads_float(user, node)) for user in node.users):
                nodes.add(node)
        return nodes

    def _reads_float(self, reader: fx.Node, value: fx.Node) -> bool:
        candidate = self.candidates.get(reader)
        return not (reads_only_metadata(reader) or (candidate and candidate.runs and value in candidate.inputs))

    def would_run(self, node: fx.Node, candidate: Candidate) -> bool:
        """Whether a node that has a float plan would run on integers if it were this candidate."""
        self._readings[node] = _readings(node)
        candidate.wanted = self._wanted_spec(node)
        return candidate.runs and not self._refusal(candidate, own=0)

    def _wanted_spec(self, node: fx.Node) -> TensorSpec | None:
        """Spec that the first reader of a node wants. Readers that want floats are dropped from `_readings`."""
        readings = self._readings[node]
        while readings:
            value, reader = readings[-1]
            user = self.candidates.get(reader)
            spec = user.reads if user is not None and value in user.inputs else None
            if spec is not None and spec.range != "dynamic":  # a dynamic range is computed from floats
                return spec
            readings.pop()
        return None

    def _refusal(self, candidate: Candidate, own: int) -> str:
        """Reason why an op needs a conversion for itself alone, and so moves to float; empty if it does not.

        Args:
            candidate: the op.
            own: how many of the counted readers of an input are the op itself.
        """
        if not candidate.runs or candidate.heavy:
            return ""
        if candidate.moves and not any(call.op.traits.narrows for call in candidate.calls):
            return ""
        for value in candidate.inputs:
            producer = self.candidates.get(taken_from(value))
            if (producer is None or not producer.runs) and self._readers[value] <= own:
                return f"its input %{value.name} is float, so float costs no conversion"
        return ""

    def _update(self, first: fx.Node) -> list[fx.Node]:
        """Update what readers want after the decision on a node. Returns nodes that may have lost their reason."""
        affected: list[fx.Node] = []
        todo = [first]
        while todo:
            node = todo.pop()
            candidate = self.candidates[node]
            candidate.wanted = self._wanted_spec(node)
            (old_inputs, spec), (new_inputs, _) = self._read_so_far[node], _reads_now(candidate)
            if new_inputs is old_inputs and candidate.reads == spec:
                continue
            self._read_so_far[node] = _reads_now(candidate)
            for value in old_inputs:
                maker = taken_from(value)
                if maker in self.candidates and self._readings[maker][-1:] == [(value, node)]:
                    todo.append(maker)
                if value not in new_inputs:
                    self._readers[value] -= 1
                    affected += value.users if self._readers[value] == 1 else ()
            affected += () if candidate.runs else (user for value in values_of(node) for user in value.users)
        return [node for node in affected if node in self.candidates]


def _readings(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Values of a node, each with a node that reads it, last reader first."""
    return [(value, user) for value in values_of(node) for user in value.users][::-1]


def _reads_now(candidate: Candidate) -> tuple[Mapping[fx.Node, None], TensorSpec | None]:
    """Values that a candidate reads as integers so far, and their spec."""
    return (candidate.inputs if candidate.runs else _NOTHING), candidate.reads


_NOTHING: Mapping[fx.Node, None] = {}


def unfit_reason(gm: fx.GraphModule, calls: tuple[OpCall, ...], changes: MemoryWriters) -> str | None:
    """Reason why the first op of a unit cannot run on integers on any backend; None if it can.

    The backend decides about the other ops of the unit: those that its kernel does not run, run in float.
    """
    first = calls[0]
    traits = first.op.traits
    if traits.kind == "float":
        return f"{first.op.name} has no integer form"
    if first.run_time_option is not None and not traits.layout:
        return f"its {first.run_time_option} is a value that can differ from call to call"
    reason = traits.unless({**first.options, **first.tensors}) if traits.unless is not None else None
    if reason is not None:
        return reason
    if not first.activations:
        return "its inputs are constants"
    reasons = (unfit_input(gm, first, read, changes) for read in inputs_of(calls))
    return next((reason for reason in reasons if reason is not None), None)


def unfit_input(gm: fx.GraphModule, first: OpCall, read: UnitInput, changes: MemoryWriters) -> str | None:
    """Reason why an op cannot read one of its inputs on integers; None if it can."""
    about, changer = info(read.node), changes.of(read.node)
    if read.role in ("weight", "bias"):
        tensor = constant(gm, read.node)
        if tensor is None:
            return f"its {read.role} is computed at run time"
        if read.role == "weight" and tensor.numel() == 0:
            return f"its weight is empty: {tuple(tensor.shape)}"
        if read.role == "weight" and tensor.dtype is not torch.float32:
            return f"its weight is {tensor.dtype}, not float32".replace("torch.", "")
        return f"its {read.role} is changed in place by %{changer.name}" if changer is not None else None
    if read.role != "activation":
        return None
    if not about.is_tensor:
        return f"its input %{read.node.name} is no tensor but a plain value that can differ from call to call"
    if about.dtype is not torch.float32:
        return f"its input %{read.node.name} is {about.dtype}, not float32".replace("torch.", "")
    if changer is not None:
        return f"its input %{read.node.name} is changed in place by %{changer.name}"
    if read.node.op == "get_attr":
        by_channel = first.op.traits.pointwise and sum(size != 1 for size in about.shape or ()) < 2
        return f"its input {read.node.target} is a constant" if read.call == 0 and not by_channel else None
    return None
