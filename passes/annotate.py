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
from fxq.errors import RecipeError
from fxq.graph.analysis.mutation import MemoryWriters
from fxq.graph.analysis.value_sizes import size_deciders
from fxq.graph.info import Decision, DecisionKind, Plan, info
from fxq.graph.place import where
from fxq.graph.query import constant, is_op, options_of, reads_only_metadata, submodule, taken_from, values_of
from fxq.graph.unit import Calls, calls_of, inputs_of, read_by
from fxq.ops import OPS
from fxq.ops.traits import STATE_DYNAMIC
from fxq.pipeline.candidates import Candidate, CandidateGraph, unfit_input, unfit_reason
from fxq.pipeline.context import Context
from fxq.quant.dynamic_grid import ROUND_TO_RANGE
from fxq.quant.spec import CACHE_TEXT, DYNAMIC_STATE, WEIGHT, QuantConfig, Role, TensorSpec, is_low_bit
from fxq.recipe.pass_base import Pass, Stage
from fxq.recipe.pipeline import preset_config, preset_line
from fxq.recipe.selector import Selector
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Annotate(Pass):
    """Decide for every op whether it runs on integers, and for every edge which integer form it has.

    Before: a fused graph    After: the same graph, with a `Plan` on every node
    Keeps: the graph.

    Ops with weights run on integers wherever recipe and backend allow it. All other ops follow their neighbours: an op
    that only moves data or has a light kernel runs on integers if an integer op reads its result, and if its inputs are
    integers without a conversion for it alone. The same applies to a sum after a layer. A layer whose activations the
    recipe leaves in float, and an embedding, are weight-only. Every float decision has a reason, and a remedy if there
    is one.

    Ops whose values decide a size, such as durations that become a number of frames, are in float unless an override
    selects them: a small error there is another size, after which nothing is where it was. Weight-only recipes
    quantize their weights all the same.

    Where the recipe's weights have 4 bits or fewer, embeddings, and layers that share their weight with one, such as
    the head of a language model, have 8, unless an override selects them: they lose most, and are mostly small.
    """

    name: ClassVar[str] = "annotate"
    needs: ClassVar[Stage] = Stage.FUSED
    gives: ClassVar[Stage] = Stage.FUSED

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Find candidates, decide between neighbours, and write the plans."""
        own = next((n for n in rewriter.nodes() if is_op(n, "quantize") or n.target is ROUND_TO_RANGE), None)
        if own is not None:
            raise RecipeError(
                f"the model is quantized already: {where(rewriter.gm, own)} quantizes a value. To keep its scales and "
                'zero points: fxq.quantize(model, "stored", example_inputs=x). Else give the float model.'
            )
        nodes = [n for n in rewriter.nodes() if n.op.startswith("call") and taken_from(n) is n]
        planner = _Planner(rewriter, {n: calls_of(rewriter.gm, n) for n in nodes}, MemoryWriters(nodes))
        plans = planner.plans(rewriter.context.backend)
        for node, plan in _with_remedies(rewriter.context, planner, plans).items():
            rewriter.describe(node, plan=plan)


@dataclass(frozen=True)
class _Planner:
    """Planner of the nodes of a graph, for one backend at a time.

    Attributes:
        rewriter: rewriter of the graph.
        ops: ops that each node runs.
        changes: nodes that change values in place.
    """

    rewriter: Rewriter[Context]
    ops: Mapping[fx.Node, Calls]
    changes: MemoryWriters

    @cached_property
    def _multiplied(self) -> set[int]:
        """Identities of the weights of layers that read integers. An embedding that shares one has the layer's spec."""
        config_for = self.rewriter.context.config_for
        reads = [
            read.node
            for node, calls in self.ops.items()
            if calls and not calls[0].op.traits.in_float(config_for(info(node).path, calls[0].op.name)[0].activation)
            for read in inputs_of(calls)
            if read.role == "weight"
        ]
        return {id(constant(self.rewriter.gm, node)) for node in reads}

    @cached_property
    def _looked_up(self) -> set[int]:
        """Identities of the tables of embeddings."""
        tables = (inputs_of(calls) for calls in self.ops.values() if calls and calls[0].op.traits.table)
        reads = (read.node for inputs in tables for read in inputs if read.role == "weight")
        return {id(constant(self.rewriter.gm, node)) for node in reads}

    @cached_property
    def _size_deciders(self) -> Mapping[fx.Node, fx.Node]:
        """Nodes that decide sizes, each with the result of this size."""
        return size_deciders(self.rewriter.gm.graph)

    def plans(self, backend: Backend) -> dict[fx.Node, Plan]:
        """Plan of every node, if the model ran on `backend`."""
        plans: dict[fx.Node, Plan] = {}
        candidates: dict[fx.Node, Candidate] = {}
        for node in self.ops:
            outcome = self._candidate(node, backend)
            if isinstance(outcome, Plan):
                plans[node] = outcome
            else:
                candidates[node] = outcome
        neighbours = CandidateGraph(candidates)
        last = neighbours.reaching_output(self.rewriter.gm.graph)
        plans.update({node: candidate.plan(self.rewriter.name, node in last) for node, candidate in candidates.items()})
        self._agree(plans)
        for node, plan in plans.items():
            if plan.decision.fix and not self._would_run(node, backend, neighbours):
                plans[node] = plan.decided(fix="")
        return plans

    def _agree(self, plans: dict[fx.Node, Plan]) -> None:
        """Give all readers of a kernel that emits only integers one spec: the wanted one with the fewest bits.

        If one of the readers only moves the value, nothing is changed: the form of its result would change, too.
        """
        for node, plan in plans.items():
            if plan.emits is None:
                continue
            readings = [(value, user) for value in values_of(node) for user in value.users if user in plans]
            readers = [user for value, user in readings if value in read_by(self.ops[user], plans[user])]
            wanted_specs = {spec for user in readers if (spec := plans[user].reads) is not None}
            if len(wanted_specs) > 1 and not any(plans[user].precision == "moves" for user in readers):
                plans[node] = replace(plan, agreed=min(wanted_specs, key=lambda spec: spec.bits))

    def _candidate(self, node: fx.Node, backend: Backend) -> Candidate | Plan:
        """Candidate for a node, or the plan that leaves it in float."""
        about, calls, context = info(node), self.ops[node], self.rewriter.context
        no_tensor = "its value is not a tensor"
        if reads_only_metadata(node):
            return self._float("no tensor", "reads a shape" if about.is_tensor else no_tensor)
        if about.traced.kept is not None:
            return Plan(about.traced.kept)
        module = submodule(self.rewriter.gm, node)
        name = OPS.leaf_name(module) if module is not None else None
        if name is not None:
            return self._float("unsupported", f"{name} has no integer form")
        if not about.is_tensor and len(calls.outputs) == 1:
            return self._float("no tensor", no_tensor)
        if not calls:
            hint = "; fxq.extend.register_op adds it" if _is_from_elsewhere(node.target) else ""
            return self._float("unsupported", f"{_target_name(self.rewriter.gm, node)} is not in the op table{hint}")
        config, selector = context.config_for(about.path, calls[0].op.name)
        if calls[0].op.traits.grows:
            return self._growing_state(node, config.state)
        fix = context.override_line(about.path, calls[0].op.name, preset_line(context.recipe.preset))
        if config.is_float:
            selected = selector or "all ops that no override selects"
            return self._float("excluded by the recipe", f"the recipe says float for {selected}", fix)
        decides = config.activation is not None and node in self._size_deciders
        traits = calls[0].op.traits
        rounds = traits.kind != "float" or bool(traits.table)  # tables are rounded, though embeddings compute in float
        why = self._decides_size(node) if decides and rounds else ""
        if why and selector is None:
            return replace(self._float("off the grid", why, fix), exact=True)
        if why and backend is context.backend:
            self.rewriter.describe(node, note=f"{why}; an override selects it all the same")
        return self._with_config(node, backend, config, selector)

    def _decides_size(self, node: fx.Node) -> str:
        """Reason why a node that decides the size of another value should be in float."""
        return f"its values decide how many entries %{self._size_deciders[node].name} has, so rounding would change it"

    def _with_config(
        self, node: fx.Node, backend: Backend, config: QuantConfig, selector: Selector | None
    ) -> Candidate | Plan:
        """Candidate for a node, or its weight-only or float plan; `selector`: that of the override, if there is one."""
        traits = self.ops[node][0].op.traits
        has_weight = traits.weight and traits.axis is not None
        if config.weight is not None and has_weight and traits.in_float(config.activation):
            takes_default = selector is None and self._loses_most(node, config.weight)
            plan_for = self._in_eight_bits if takes_default else self._weight_only
            return plan_for(node, backend, config, config.weight)
        if config.activation is None:
            return self._float("excluded by the recipe", "it has no weight, and the recipe leaves activations in float")
        return self._fit(node, backend, config)

    def _growing_state(self, node: fx.Node, spec: TensorSpec | None) -> Plan:
        """Plan of an `append`: in float; with a spec for its state if the pass store-states stores it as integers."""
        about = info(node)
        if spec is None or not spec.is_for_growing_states:
            return self._float("excluded by the recipe", f"its state is in float; as integers: state={CACHE_TEXT}")
        if about.dtype != torch.float32 or options_of(node)["dim"] in (-1, len(about.shape or ()) - 1):
            return self._float("unsupported", "only states of float32 whose rows do not grow are stored as integers")
        size = int((about.shape or (1,))[-1])
        if spec.block is not None and size % spec.block:
            raise RecipeError(
                f"{where(self.rewriter.gm, node)}: its state has rows of {size} values, which blocks of {spec.block} "
                f'do not divide: use a block size that divides {size}, or per="row".'
            )
        return replace(self._float("undecided", "the pass store-states did not run"), state=spec)

    def _fit(self, node: fx.Node, backend: Backend, config: QuantConfig) -> Candidate | Plan:
        """Candidate for a node that runs with `config`; its float plan if it cannot run on integers."""
        gm, calls = self.rewriter.gm, self.ops[node]
        reason = unfit_reason(gm, calls, self.changes)
        if reason is not None:
            return self._float("unsupported", reason)
        light = calls[0].op.traits.kind == "computes" and not any(call.op.traits.weight for call in calls)
        if light and config.activation is not None and config.activation.range == "dynamic":
            return self._float("no integer neighbour", "only layers with weights have dynamic ranges")
        recurrence, notes = calls[0].op.traits.recurrence, list[str]()
        if recurrence is not None and config.state is not None and not config.state.symmetric:
            config = replace(config, state=replace(DYNAMIC_STATE, bits=config.state.bits))
            notes.append("its state has a symmetric range: an affine one is for states that grow, such as caches")
        recipe_config, config = config, backend.config(gm, config, calls)
        notes += _changes(backend, recipe_config, config, preset_config(self.rewriter.context.recipe.preset))
        support = support_of(backend, gm, node, calls, config)
        if support.ops == 0:
            return self._float("unsupported", support.reason)
        assert config.activation is not None
        overflows = not config.fits_int16 and backend.adds_in_int16(calls)
        state = config.state if recurrence is not None else None
        is_calibrated = state is not None and state.range == "calibrated"
        if state and recurrence and is_calibrated and recurrence.differs(calls[0].tensors, calls[0].options):
            state, why = replace(DYNAMIC_STATE, bits=state.bits), "its output shows another range than its state"
            notes.append(STATE_DYNAMIC.format(why))
        if notes and backend is self.rewriter.context.backend:  # not if another backend is tried for a remedy
            self.rewriter.describe(node, note="; ".join(notes))
        return Candidate(calls, config.activation, config.weight, support, state, overflows)

    def _weight_only(self, node: fx.Node, backend: Backend, config: QuantConfig, spec: TensorSpec) -> Plan:
        """Weight-only plan of a layer that computes in float; its float plan if the weight cannot be in integers."""
        gm, calls = self.rewriter.gm, self.ops[node]
        weights = [read for read in inputs_of(calls) if read.role == "weight"]
        if any(id(constant(gm, read.node)) in self._looked_up - self._multiplied for read in weights):
            spec = spec.for_embedding
        reasons = [unfit_input(gm, calls[0], read, self.changes) for read in weights]
        reasons += [_unfit_weight(constant(gm, read.node), spec) for read in weights]
        reason = next((reason for reason in reasons if reason is not None), None)
        support = backend.supports(gm, node, calls, replace(config, activation=None)) if reason is None else None
        if support is None or support.ops < len(calls):
            return self._float("unsupported", reason or (support.reason if support is not None else ""))
        return Plan(Decision("weight-only", decided_by=self.rewriter.name), weight=spec, compute=config.compute)

    def _loses_most(self, node: fx.Node, spec: TensorSpec) -> bool:
        """Whether a spec has 4 bits or fewer, and a node is an embedding or a layer that shares its table."""
        weights = [read.node for read in inputs_of(self.ops[node]) if read.role == "weight"]
        return is_low_bit(spec) and any(id(constant(self.rewriter.gm, w)) in self._looked_up for w in weights)

    def _in_eight_bits(self, node: fx.Node, backend: Backend, config: QuantConfig, spec: TensorSpec) -> Plan:
        """Weight-only plan of a node with 8 bits instead of those of a spec, with a note on that."""
        plan = self._weight_only(node, backend, config, WEIGHT)
        if plan.precision == "weight-only" and backend is self.rewriter.context.backend:
            self.rewriter.describe(node, note=f"{_IN_EIGHT_BITS}, not {spec.bits}, as no override selects it")
        return plan

    def _float(self, kind: DecisionKind, text: str, fix: str = "") -> Plan:
        return Plan(Decision("float", kind, text, fix, self.rewriter.name))

    def _would_run(self, node: fx.Node, backend: Backend, neighbours: CandidateGraph) -> bool:
        """Whether a node that the recipe leaves in float would run on integers with the config of the preset."""
        config, traits = preset_config(self.rewriter.context.recipe.preset), self.ops[node][0].op.traits
        if config.activation is None:
            if config.weight is None or traits.weight is None or traits.axis is None:
                return False
            return self._weight_only(node, backend, config, config.weight).precision == "weight-only"
        candidate = self._fit(node, backend, config)
        if isinstance(candidate, Plan):
            return False
        source = next(iter(candidate.inputs)) if len(candidate.inputs) == 1 else None
        layer = neighbours.candidates.get(source) if source is not None else None
        clips = all(call.op.traits.narrows for call in candidate.calls)
        if clips and source and layer is not None and layer.heavy and layer.runs and len(layer.calls) == 1:
            return len(source.users) == 1  # it would be in the unit of that layer
        return neighbours.would_run(node, candidate)


_IN_EIGHT_BITS = "an embedding, or a layer with its table: 8 bits"


def _with_remedies(context: Context, planner: _Planner, plans: Mapping[fx.Node, Plan]) -> dict[fx.Node, Plan]:
    """Return the plans, with a remedy for ops that stay in float, wholly or in part, if there is one.

    The first choice is a kernel of the same backend that runs more ops, the second the reference backend, which is
    exact but slower than float. Other backends are not tried: they may not be installed, or slow to import.
    """
    whole = {n for n, plan in plans.items() if plan.kernel_ops[1:] == (len(planner.ops[n]),)}
    remedies = dict.fromkeys(whole, 'recipe.with_optimize("coverage")')
    in_float = [n for n, plan in plans.items() if _other_backend_may_run(plan) and n not in whole]
    if in_float and context.backend.has_kernels:
        plans_there = planner.plans(get_backend("reference", device_of(context.model)))
        remedies.update({n: 'recipe.with_backend("reference")' for n in in_float if not _has_float_ops(plans_there[n])})
    return {node: plan.decided(fix=remedies[node]) if node in remedies else plan for node, plan in plans.items()}


def _other_backend_may_run(plan: Plan) -> bool:
    """Whether a plan without a remedy leaves ops in float for a reason that another backend may not have."""
    decision = plan.decision
    return _has_float_ops(plan) and not decision.fix and decision.kind not in ("no tensor", "excluded by the recipe")


def _has_float_ops(plan: Plan) -> bool:
    """Whether some ops of a node stay in float."""
    return plan.precision == "float" or bool(plan.kernel_ops)


def _target_name(gm: fx.GraphModule, node: fx.Node) -> str:
    module = submodule(gm, node)
    return type(module).__name__ if module is not None else str(getattr(node.target, "__name__", node.target))


def _is_from_elsewhere(target: Any) -> bool:
    """Whether a function, or an op of `torch.library`, is defined outside of torch, fxq and Python's library."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        return not str(target).startswith("aten.")
    home = getattr(target, "__module__", None) or "builtins"
    return callable(target) and home.partition(".")[0] not in ("torch", "fxq", *sys.stdlib_module_names)


def _changes(backend: Backend, recipe_config: QuantConfig, config: QuantConfig, preset: QuantConfig) -> list[str]:
    """Notes on specs that a backend replaces, see `Backend.notes_specs`.

    Args:
        backend: the backend.
        recipe_config: specs as the recipe says.
        config: specs as the backend takes them.
        preset: specs of the preset without changes by the user.
    """
    roles: tuple[Role, ...] = ("activation", "weight", "state")
    return [
        f"for {backend.name}, its {role} is {config.of(role)}, and not {recipe_config.of(role)}"
        for role in roles
        if config.of(role) != recipe_config.of(role)
        and (backend.notes_specs or recipe_config.of(role) != preset.of(role))
    ]


def _unfit_weight(tensor: torch.Tensor | None, spec: TensorSpec) -> str | None:
    """Reason why a weight cannot be stored as a spec says; None if it can, or if it is not a constant."""
    if tensor is None:
        return None
    largest = float(tensor.abs().max()) if spec.format == "float16" and tensor.numel() else 0.0
    if largest > torch.finfo(torch.float16).max:
        return f"its weight has values up to {largest:.3g}, beyond float16"
    if 0.0 < largest < torch.finfo(torch.float16).tiny:
        return f"its weight has values of {largest:.3g} at most, which float16 rounds to a few bits or to zero"
    return None
