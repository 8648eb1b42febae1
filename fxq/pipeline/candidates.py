"""Ops that could run on integers, and which of them do beside their neighbours: what `annotate` decides with."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from fxq.backends.by_name import Support
from fxq.graph.info import Decision, Plan
from fxq.graph.query import reads_only_metadata, taken_from, values_of
from fxq.graph.unit import Calls, activations_of, inputs_of
from fxq.quant.spec import TensorSpec

UNREAD = "nothing reads integers from it"
"""Why an op is float that could run on integers, but not for its own sake."""


@dataclass(eq=False)
class Candidate:
    """An op that could run on integers.

    Attributes:
        calls: the ops of the node.
        spec: what it wants of its activation inputs, when it has a say (ops with weights and light ops).
        weight: what it wants of its weights; None: floats.
        state: what it wants of its hidden state; None: it has none, or in float.
        support: what the backend says of it.
        overflows: whether activations or weights must give up a bit.
        wanted: the spec that a consumer wants of its value, or None.
        reason: why it was turned down; empty while it stands.
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
        """The nodes that its activations come from; what the ops behind the kernel read, they read in float."""
        return self._inputs[self.ops]

    @cached_property
    def _inputs(self) -> Mapping[int, Mapping[fx.Node, None]]:
        """The same for every number of ops that the kernel may run."""
        return {ops: activations_of(self.calls[:ops]) for ops in {self.support.ops, self._before_sum}}

    @cached_property
    def _before_sum(self) -> int:
        """How many ops of a layer's unit come before the first that reads a second activation.

        All of a unit that begins with something else: a squeeze-and-excitation reads its input again.
        """
        if not self.calls[0].op.traits.heavy:
            return self.support.ops
        later = (i.call for i in inputs_of(self.calls[: self.support.ops]) if i.role == "activation" and i.call > 0)
        return min(later, default=self.support.ops)

    @property
    def ops(self) -> int:
        """How many ops the kernel runs, by what is wanted of it so far.

        A layer's sum that nobody reads as integers is left to float: integers would do no more to the residual stream
        of a transformer, where layer norms read the sums, than to round it once for every layer.
        """
        return self.support.ops if self.wanted is not None or not self.heavy else self._before_sum

    @property
    def heavy(self) -> bool:
        """Worth a kernel for its own sake."""
        return any(call.op.traits.heavy for call in self.calls)

    @property
    def moves(self) -> bool:
        """Only moves data, to one place."""
        return len(self.calls.outputs) == 1 and all(call.op.traits.kind == "moves" for call in self.calls)

    @property
    def runs(self) -> bool:
        """Whether it runs on integers, by what is wanted of it so far."""
        return not self.reason and (self.heavy or self.wanted is not None)

    @property
    def reads(self) -> TensorSpec | None:
        """What it wants of its inputs so far; what only moves data wants what is wanted of it."""
        if not self.runs:
            return None
        return self.wanted if self.moves else self.spec

    def plan(self, decided_by: str, last: bool = False) -> Plan:
        """Plan of the node, decided by this pass; `last`: its value reaches the output in float, see `Settled.last`."""
        spec = self.reads
        if spec is None:
            return Plan(Decision("float", "no integer neighbour", self.reason or UNREAD, decided_by=decided_by))
        if self.moves:
            return Plan(Decision("moves", decided_by=decided_by), reads=spec)
        emits = None if self.support.emits_float or (last and self.support.emits_float_last) else self.spec
        decision = Decision("int8", decided_by=decided_by)
        plan = Plan(decision, reads=spec, weight=self.weight, state=self.state, emits=emits, overflows=self.overflows)
        ours = self.support
        if self.ops < ours.ops:
            plan = plan.decided(kind="no integer neighbour", text="nothing reads integers from the sum")
            return replace(plan, kernel_ops=(self.ops,))
        if not ours.fewer and ours.ops == len(self.calls):
            return plan
        plan = plan.decided(kind="slower" if ours.fewer else "unsupported", text=ours.reason)
        return replace(plan, kernel_ops=(ours.fewer, ours.ops) if ours.fewer else (ours.ops,))


class Settled:
    """Candidates that follow their neighbours: wishes flow up from consumers, refusals flow down from producers.

    At first all that is wished for runs. What would need a conversion made for it alone is turned down, which leaves
    its neighbours fewer reasons to run, until nothing changes. No decision is ever taken back, so that the order does
    not matter, and the time is linear in the edges of the graph.

    Attributes:
        candidates: all of them in the order of the graph, settled.
    """

    def __init__(self, candidates: dict[fx.Node, Candidate]) -> None:
        self.candidates = candidates
        self._readings = {node: _readings(node) for node in candidates}  # those that want floats are dropped
        self._read_so_far: dict[fx.Node, tuple[Mapping[fx.Node, None], TensorSpec | None]] = {}
        for node, candidate in reversed(candidates.items()):
            candidate.wanted = self._wish(node)
            self._read_so_far[node] = _reads_now(candidate)
        self._readers = Counter(value for inputs, _ in self._read_so_far.values() for value in inputs)
        todo = deque(candidates)
        while todo:
            node = todo.popleft()
            candidate = candidates[node]
            candidate.reason = candidate.reason or self._refusal(candidate, own=1)
            todo += self._follow(node)

    def last(self, graph: fx.Graph) -> set[fx.Node]:
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
        """Whether a node that is not among the candidates would run on integers if it were this one."""
        self._readings[node] = _readings(node)
        candidate.wanted = self._wish(node)
        return candidate.runs and not self._refusal(candidate, own=0)

    def _wish(self, node: fx.Node) -> TensorSpec | None:
        """The spec that the first consumer wants of a value of a node; those that want none are forgotten."""
        readings = self._readings[node]
        while readings:
            value, reader = readings[-1]
            user = self.candidates.get(reader)
            spec = user.reads if user is not None and value in user.inputs else None
            if spec is not None and spec.range != "dynamic":  # such a reader rounds a value for itself, as it comes
                return spec
            readings.pop()
        return None

    def _refusal(self, candidate: Candidate, own: int) -> str:
        """Why an op that runs would need a conversion made for it alone; empty where it does not.

        `own` is how often it counts itself among the readers of its inputs.
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

    def _follow(self, first: fx.Node) -> list[fx.Node]:
        """Update the wishes for what a node reads now; the nodes that may have lost their reason to run."""
        near: list[fx.Node] = []
        todo = [first]
        while todo:
            node = todo.pop()
            candidate = self.candidates[node]
            candidate.wanted = self._wish(node)
            (before, spec), (now, _) = self._read_so_far[node], _reads_now(candidate)
            if now is before and candidate.reads == spec:
                continue
            self._read_so_far[node] = _reads_now(candidate)
            for value in before:
                maker = taken_from(value)
                if maker in self.candidates and self._readings[maker][-1:] == [(value, node)]:
                    todo.append(maker)
                if value not in now:
                    self._readers[value] -= 1
                    near += value.users if self._readers[value] == 1 else ()
            near += () if candidate.runs else (user for value in values_of(node) for user in value.users)
        return [node for node in near if node in self.candidates]


def _readings(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The values of a node, each with who reads it; the first to read comes last."""
    return [(value, user) for value in values_of(node) for user in value.users][::-1]


def _reads_now(candidate: Candidate) -> tuple[Mapping[fx.Node, None], TensorSpec | None]:
    """What a candidate reads as integers so far, and in which form."""
    return (candidate.inputs if candidate.runs else _NOTHING), candidate.reads


_NOTHING: Mapping[fx.Node, None] = {}
