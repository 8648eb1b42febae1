"""annotate: which ops run on integers, which stay in float, and why."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from fxq.backends.base import support_of
from fxq.backends.by_name import Backend, get_backend
from fxq.common.data import device_of
from fxq.graph.analysis.mutation import Changes
from fxq.graph.info import Decision, DecisionKind, Plan, info
from fxq.graph.query import constant, reads_only_metadata, submodule, taken_from, values_of
from fxq.graph.unit import Calls, OpCall, UnitInput, calls_of, inputs_of, read_by
from fxq.ops import OPS
from fxq.ops.traits import STATE_DYNAMIC
from fxq.pipeline.candidates import Candidate, Settled
from fxq.pipeline.context import Context
from fxq.quant.spec import DYNAMIC_STATE, QuantConfig, Role, TensorSpec
from fxq.recipe.pass_base import Pass, Stage
from fxq.recipe.pipeline import preset_config, preset_line
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Annotate(Pass):
    """Decide for every op whether it runs on integers, and for every edge which integers it carries.

    Before: a fused graph    After: the same graph, with a `Plan` on every node
    Keeps: the graph.

    Ops with weights run on integers wherever recipe and backend allow it. Everything else follows its neighbours: an op
    that moves data or has a light kernel runs on integers when somebody reads integers from it, and when its own inputs
    are integers without a conversion made for it alone. So does the sum behind a layer. A layer whose activations the
    recipe leaves in float, and an embedding, has its weight in integers. Every float decision carries its reason.
    """

    name: ClassVar[str] = "annotate"
    needs: ClassVar[Stage] = Stage.FUSED
    gives: ClassVar[Stage] = Stage.FUSED

    def run(self, rewriter: Rewriter) -> None:
        """Find candidates, settle them against their neighbours, and write the plans."""
        nodes = [n for n in rewriter.nodes() if n.op.startswith("call") and taken_from(n) is n]
        asked = _Asked(rewriter, {n: calls_of(rewriter.gm, n) for n in nodes}, Changes(nodes))
        plans = asked.plans(rewriter.context.backend)
        for node, plan in _with_ways_out(rewriter.context, asked, plans).items():
            rewriter.describe(node, plan=plan)


@dataclass(frozen=True)
class _Asked:
    """What is decided about: every node with the ops that it runs.

    Attributes:
        rewriter: of the graph.
        ops: the ops of each node.
        changes: who changes what in place.
    """

    rewriter: Rewriter
    ops: Mapping[fx.Node, Calls]
    changes: Changes

    @cached_property
    def _multiplied(self) -> set[int]:
        """The weights, by identity, that layers multiply with. An embedding with such a table has it in their form."""
        heavy = (inputs_of(calls) for calls in self.ops.values() if calls and not calls[0].op.traits.table)
        reads = (read.node for inputs in heavy for read in inputs if read.role == "weight")
        return {id(constant(self.rewriter.gm, node)) for node in reads}

    def plans(self, backend: Backend) -> dict[fx.Node, Plan]:
        """The decision for every node, were the model to run on `backend`."""
        plans: dict[fx.Node, Plan] = {}
        candidates: dict[fx.Node, Candidate] = {}
        for node in self.ops:
            outcome = self._candidate(node, backend)
            if isinstance(outcome, Plan):
                plans[node] = outcome
            else:
                candidates[node] = outcome
        settled = Settled(candidates)
        last = settled.last(self.rewriter.gm.graph)
        plans.update({node: candidate.plan(self.rewriter.name, node in last) for node, candidate in candidates.items()})
        self._agree(plans)
        for node, plan in plans.items():
            if plan.decision.fix and not self._would_run(node, backend, settled):
                plans[node] = plan.decided(fix="")
        return plans

    def _agree(self, plans: dict[fx.Node, Plan]) -> None:
        """Let all readers of a kernel that emits integers only, hence one form, read the narrowest that one wants.

        Not where one of them only moves it: the form of its result would have to change, too.
        """
        for node, plan in plans.items():
            if plan.emits is None:
                continue
            readings = [(value, user) for value in values_of(node) for user in value.users if user in plans]
            readers = [user for value, user in readings if value in read_by(self.ops[user], plans[user])]
            wishes = {spec for user in readers if (spec := plans[user].reads) is not None}
            if len(wishes) > 1 and not any(plans[user].precision == "moves" for user in readers):
                plans[node] = replace(plan, agreed=min(wishes, key=lambda spec: spec.bits))

    def _candidate(self, node: fx.Node, backend: Backend) -> Candidate | Plan:
        """The node as a candidate, or the plan that leaves it in float."""
        about, calls, context = info(node), self.ops[node], self.rewriter.context
        no_tensor = "its value is not a tensor"
        if reads_only_metadata(node):
            return self._float("no tensor", "reads a shape" if about.is_tensor else no_tensor)
        if about.kept is not None:
            return Plan(about.kept)
        module = submodule(self.rewriter.gm, node)
        name = OPS.leaf_name(module) if module is not None else None
        if name is not None:
            return self._float("unsupported", f"{name} has no integer form")
        if not about.is_tensor and len(calls.outputs) == 1:
            return self._float("no tensor", no_tensor)
        if not calls:
            way = "; fxq.extend.register_op adds it" if _is_users(node.target) else ""
            return self._float("unsupported", f"{_called(self.rewriter.gm, node)} is not in the op table{way}")
        config, selector = context.config_for(about.path, calls[0].op.name)
        if config.is_float:
            fix = context.override_line(about.path, calls[0].op.name, preset_line(context.recipe.preset))
            what = selector or "all that it does not name"
            return self._float("excluded by the recipe", f"the recipe says float for {what}", fix)
        quant = calls[0].op.traits
        if config.weight is not None and quant.weight and quant.axis is not None and quant.in_float(config.activation):
            return self._weight_only(node, backend, config, config.weight)
        if config.activation is None:
            return self._float("excluded by the recipe", "it has no weight, and the recipe leaves activations in float")
        return self._fit(node, backend, config)

    def _fit(self, node: fx.Node, backend: Backend, config: QuantConfig) -> Candidate | Plan:
        """The same for a node that is to run with `config`."""
        gm, calls = self.rewriter.gm, self.ops[node]
        reason = _unfit(gm, calls, self.changes)
        if reason is not None:
            return self._float("unsupported", reason)
        light = calls[0].op.traits.kind == "computes" and not any(call.op.traits.weight for call in calls)
        if light and config.activation is not None and config.activation.range == "dynamic":
            return self._float("no integer neighbour", "ranges are measured for layers with weights alone")
        asked, config = config, backend.config(gm, config, calls)
        notes = _changes(backend, asked, config)
        support = support_of(backend, gm, node, calls, config)
        if support.ops == 0:
            return self._float("unsupported", support.reason)
        assert config.activation is not None
        overflows = not config.fits_int16 and backend.adds_in_int16(calls)
        recurrence = calls[0].op.traits.recurrence
        state = config.state if recurrence is not None else None
        is_calibrated = state is not None and state.range == "calibrated"
        if state and recurrence and is_calibrated and recurrence.differs(calls[0].tensors, calls[0].options):
            state, why = replace(DYNAMIC_STATE, bits=state.bits), "its output shows another range than its state"
            notes.append(STATE_DYNAMIC.format(why))
        if notes and backend is self.rewriter.context.backend:  # others are asked what they would do
            self.rewriter.describe(node, note="; ".join(notes))
        return Candidate(calls, config.activation, config.weight, support, state, overflows)

    def _weight_only(self, node: fx.Node, backend: Backend, config: QuantConfig, spec: TensorSpec) -> Plan:
        """The plan for a layer that computes in float, with its weight in integers where that can be."""
        gm, calls = self.rewriter.gm, self.ops[node]
        weights = [read for read in inputs_of(calls) if read.role == "weight"]
        if calls[0].op.traits.table and not any(id(constant(gm, read.node)) in self._multiplied for read in weights):
            spec = spec.for_embedding
        reasons = [_unfit_input(gm, calls[0], read, self.changes) for read in weights]
        reasons += [_unfit_weight(constant(gm, read.node), spec) for read in weights]
        reason = next((reason for reason in reasons if reason is not None), None)
        support = backend.supports(gm, node, calls, replace(config, activation=None)) if reason is None else None
        if support is None or support.ops < len(calls):
            return self._float("unsupported", reason or (support.reason if support is not None else ""))
        return Plan(Decision("weight-only", decided_by=self.rewriter.name), weight=spec)

    def _float(self, kind: DecisionKind, text: str, fix: str = "") -> Plan:
        return Plan(Decision("float", kind, text, fix, self.rewriter.name))

    def _would_run(self, node: fx.Node, backend: Backend, settled: Settled) -> bool:
        """Whether a node that the recipe leaves in float would run on integers if it did not."""
        config, quant = preset_config(self.rewriter.context.recipe.preset), self.ops[node][0].op.traits
        if config.activation is None:
            if config.weight is None or quant.weight is None or quant.axis is None:
                return False
            return self._weight_only(node, backend, config, config.weight).precision == "weight-only"
        found = self._fit(node, backend, config)
        if isinstance(found, Plan):
            return False
        only = next(iter(found.inputs)) if len(found.inputs) == 1 else None
        before = settled.candidates.get(only) if only is not None else None
        clips = all(call.op.traits.narrows for call in found.calls)
        if clips and only and before is not None and before.heavy and before.runs and len(before.calls) == 1:
            return len(only.users) == 1  # it would be in the unit of that layer
        return settled.would_run(node, found)


def _with_ways_out(context: Context, asked: _Asked, plans: Mapping[fx.Node, Plan]) -> dict[fx.Node, Plan]:
    """The plans; where one leaves an op in float, wholly or in part, with the line that would not, if there is any.

    A kernel of the same backend that runs more comes first, then the reference backend, which is exact but slower than
    float. Others are not asked: what they need may not be installed, or slow to import.
    """
    whole = {n for n, plan in plans.items() if plan.kernel_ops[1:] == (len(asked.ops[n]),)}
    ways = dict.fromkeys(whole, 'recipe.with_optimize("coverage")')
    left = [n for n, plan in plans.items() if _stays(plan) and not plan.decision.fix and n not in whole]
    if left and context.backend.name != "reference":
        there = asked.plans(get_backend("reference", device_of(context.model)))
        ways.update({n: 'recipe.with_backend("reference")' for n in left if not _stays(there[n])})
    return {node: plan.decided(fix=ways[node]) if node in ways else plan for node, plan in plans.items()}


def _stays(plan: Plan) -> bool:
    """Whether ops of a node stay in float."""
    return plan.precision == "float" or bool(plan.kernel_ops)


def _called(gm: fx.GraphModule, node: fx.Node) -> str:
    module = submodule(gm, node)
    return type(module).__name__ if module is not None else str(getattr(node.target, "__name__", node.target))


def _is_users(target: Any) -> bool:
    """Whether a function, or an op of `torch.library`, is none of torch's or Python's own."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        return not str(target).startswith("aten.")
    home = getattr(target, "__module__", None) or "builtins"
    return callable(target) and home.partition(".")[0] not in ("torch", "fxq", *sys.stdlib_module_names)


def _unfit(gm: fx.GraphModule, calls: tuple[OpCall, ...], changes: Changes) -> str | None:
    """Why the op, the first one of a unit, cannot run on integers on any backend; None when it can.

    What the others need is for the backend to say: what its kernel does not run, runs in float.
    """
    first = calls[0]
    quant = first.op.traits
    if quant.kind == "float":
        return f"{first.op.name} has no integer form"
    if first.computed is not None and not quant.layout:
        return f"its {first.computed} is a value that can differ from call to call"
    reason = quant.unless({**first.options, **first.tensors}) if quant.unless is not None else None
    if reason is not None:
        return reason
    if not first.activations:
        return "its inputs are constants"
    reasons = (_unfit_input(gm, first, read, changes) for read in inputs_of(calls))
    return next((reason for reason in reasons if reason is not None), None)


def _changes(backend: Backend, asked: QuantConfig, config: QuantConfig) -> list[str]:
    """What a backend reads in another way than the recipe asks for."""
    roles: tuple[Role, ...] = ("activation", "weight", "state")
    return [
        f"for {backend.name}, its {role} is {config.of(role)}, and not {asked.of(role)}"
        for role in roles
        if config.of(role) != asked.of(role)
    ]


def _unfit_weight(tensor: torch.Tensor | None, spec: TensorSpec) -> str | None:
    """Why a weight cannot be kept as a spec says; None where it can, and where it is no constant."""
    if tensor is None:
        return None
    if tensor.dtype != torch.float32:
        return f"its weight is {tensor.dtype}, not float32".replace("torch.", "")
    most = float(tensor.abs().max()) if spec.format == "float16" and tensor.numel() else 0.0
    if most > torch.finfo(torch.float16).max:
        return f"its weight has values up to {most:.3g}, beyond float16"
    if 0.0 < most < torch.finfo(torch.float16).tiny:
        return f"its weight has values of {most:.3g} at most, which float16 rounds to a few bits or to zero"
    return None


def _unfit_input(gm: fx.GraphModule, first: OpCall, read: UnitInput, changes: Changes) -> str | None:
    about, changer = info(read.node), changes.of(read.node)
    if read.role in ("weight", "bias"):
        tensor = constant(gm, read.node)
        if tensor is None:
            return f"its {read.role} is computed at run time"
        if read.role == "weight" and tensor.numel() == 0:
            return f"its weight is empty: {tuple(tensor.shape)}"
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
