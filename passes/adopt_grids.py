"""adopt-grids: let ops run on integers between the quantize and dequantize that the model itself has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxq.backends.base import Support, support_of
from fxq.errors import RecipeError
from fxq.graph.analysis.mutation import MemoryWriters
from fxq.graph.grid import dynamic_grid_of, grid_of
from fxq.graph.info import Decision, DecisionKind, Edge, Plan, info
from fxq.graph.query import (
    CONVERSIONS,
    DYNAMIC_GRID_OPS,
    activation_nodes,
    constant,
    is_op,
    op_of,
    reads_only_metadata,
    submodule,
    swapped,
    taken_from,
    values_of,
)
from fxq.graph.region import is_weight
from fxq.graph.unit import Calls, activations_of, calls_of, inputs_of, wanted_forms
from fxq.pipeline.candidates import UNREAD, Candidate, unfit_input, unfit_reason
from fxq.pipeline.context import Context
from fxq.quant.dynamic_grid import OWN_RANGE, ROUND_TO_RANGE, DynamicGrid, Grid
from fxq.quant.qparams import QParams
from fxq.quant.spec import ACTIVATION, DYNAMIC, QuantConfig, TensorSpec
from fxq.quant.stored_grids import lies_on_grid, stored_grid, warn_off_grid
from fxq.recipe.pass_base import Pass, Stage
from fxq.recipe.recipe import Recipe
from fxq.rewriting.grid_edits import on_grid
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class AdoptGrids(Pass):
    """Let ops run on integers where the model itself quantizes and dequantizes values, as read from a quantized file.

    Before: quantize(conv2d(dequantize(q), w, b)), where the float weight w has a stored grid
    After: the same graph, with a `Plan` on every op, and the grid on an edge of w, as after choose-grids
    Also: signed activations become unsigned ones with the same values, unless the backend asks for signed ones. An op
    that only moves or clips values to a grid other than that of its inputs gets requantized inputs.
    Keeps: the output, exactly. What the model computes in float stays in float.
    """

    name: ClassVar[str] = "adopt-grids"
    needs: ClassVar[Stage] = Stage.FUSED
    gives: ClassVar[Stage] = Stage.OBSERVED

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Settle the signs of activations, plan all ops, then write the grids of the weights that they read."""
        _refuse_specs(rewriter.context.recipe)
        for node in rewriter.nodes():
            if node.target is ROUND_TO_RANGE:
                (x,) = node.all_input_nodes
                rewriter.replace(node, on_grid(rewriter, x, x, OWN_RANGE, node.name)[1])
        _refuse_float_model(rewriter)
        _move_in_float(rewriter)
        _settle_signs(rewriter)
        _keep_on_grids(rewriter)
        nodes = [n for n in rewriter.nodes() if n.op.startswith("call") and taken_from(n) is n]
        calls = {n: calls_of(rewriter.gm, n) for n in nodes if not is_op(n, *CONVERSIONS, *DYNAMIC_GRID_OPS)}
        planner = _Planner(rewriter, MemoryWriters(nodes), calls)
        for node, plan in planner.plans().items():
            rewriter.describe(node, plan=plan)
        warn_off_grid(planner.changed, "Their layers run in float.")
        for node in calls:
            _store_weights(rewriter, node)


def _refuse_float_model(rewriter: Rewriter[Context]) -> None:
    """Raise `RecipeError` if no value is quantized, and no weight has a stored grid."""
    if any(is_op(node, *CONVERSIONS, *DYNAMIC_GRID_OPS) for node in rewriter.nodes()):
        return
    tensors = (constant(rewriter.gm, node) for node in rewriter.nodes() if node.op == "get_attr")
    if not any(stored_grid(tensor) is not None for tensor in tensors):
        raise RecipeError(
            "the model has no grids: nothing in it is quantized to 8 bits or fewer with float32 scales, apart from "
            "ranges per row, which are read as float, and what they are multiplied with. The recipe "
            '"stored" is for quantized models, such as quantized ONNX files; quantize a float model with "static", '
            '"dynamic" or "weight_only".'
        )


def _refuse_specs(recipe: Recipe) -> None:
    """Raise `RecipeError` if the recipe gives ops other integers than those of the model."""
    selector = next((selector for selector, config in recipe.overrides if not config.is_float), None)
    if selector is not None:
        raise RecipeError(
            f'override({selector}, ...): the recipe "stored" keeps the grids of the model, and takes no others. Use '
            "fxq.FLOAT to keep ops in float, or quantize the float model."
        )


def _store_weights(rewriter: Rewriter[Context], node: fx.Node) -> None:
    """Write the grids of the weights that a node reads as integers, as edges for insert-qdq."""
    for weight, form in wanted_forms(rewriter.gm, node).items():
        tensor = constant(rewriter.gm, weight)
        if tensor is not None and form not in [edge.form for edge in info(weight).edges]:
            edge = Edge(form.spec, 0, True, axis=form.axis, qparams=stored_grid(tensor))
            rewriter.describe(weight, edges=(*info(weight).edges, edge))


def _move_in_float(rewriter: Rewriter) -> None:
    """Let ops that copy or compare integers read and return floats between conversions. `propagate` undoes it."""
    for node in rewriter.nodes():
        op, about = op_of(node), info(node)
        copies = op is not None and (op.traits.layout or op.traits.maximum) and not op.traits.fill_constants
        if not copies or about.dtype not in (torch.uint8, torch.int8):
            continue
        grids = {read: grid_of(rewriter.gm, read) for read in activation_nodes(node)}
        first = next(iter(grids.values()), None)
        if first is None or not all(grid is not None and grid.same_as(first) for grid in grids.values()):
            continue
        options: dict[str, Any] = {"scale": first.s, "zero_point": first.z, "qmin": first.qmin, "qmax": first.qmax}
        real = {}
        for read in grids:
            typed = (info(read).shape, torch.float32)
            real[read] = rewriter.call("dequantize", read, before=node, name=f"{read.name}_dq", typed=typed, **options)
        users = list(node.users)
        rewriter.update(node, args=swapped(node.args, real))
        rewriter.describe(node, dtype=torch.float32)
        typed = (about.shape, first.dtype)
        q = rewriter.call(
            "quantize", node, after=node, name=f"{node.name}_q", typed=typed, dtype=first.dtype, **options
        )
        for new in (*real.values(), q):
            rewriter.describe(new, path=about.path, source=about.source)
        rewriter.reroute(node, q, only=users.__contains__)


def _settle_signs(rewriter: Rewriter[Context]) -> None:
    """Replace grids of int8 activations by grids of uint8 with the same values, unless the backend asks for int8.

    Grids stay where other ops than dequantize read the integers.
    """
    for node in rewriter.nodes("quantize"):
        grid, readers = grid_of(rewriter.gm, node), list(node.users)
        if grid is None or grid.axis is not None or grid.dtype is not torch.int8:
            continue
        if not all(is_op(reader, "dequantize") for reader in readers):
            continue
        dtype, shift = (torch.int8, 0) if _wants_signed(rewriter, node, readers) else (torch.uint8, 128)
        whole: dict[str, Any] = {"zero_point": grid.z + shift, "qmin": grid.qmin + shift, "qmax": grid.qmax + shift}
        rewriter.describe(node, dtype=dtype)
        rewriter.update(node, kwargs={**node.kwargs, **whole, "dtype": dtype})
        for reader in readers:
            rewriter.update(reader, kwargs={**reader.kwargs, **whole})


def _wants_signed(rewriter: Rewriter[Context], quantized: fx.Node, dequantized: Iterable[fx.Node]) -> bool:
    """Whether the backend asks for signed activations in the unit that computes a value, or in one that reads it.

    Args:
        rewriter: rewriter of the graph.
        quantized: node that quantizes the value.
        dequantized: nodes that dequantize it.
    """
    gm, backend = rewriter.gm, rewriter.context.backend
    nodes = (*quantized.all_input_nodes, *(user for value in dequantized for user in value.users))
    units = [calls_of(gm, node) for node in nodes if not is_op(node, *CONVERSIONS)]
    configs = [backend.config(gm, QuantConfig(ACTIVATION, None), calls) for calls in units if calls]
    return any(config.activation is not None and config.activation.signed for config in configs)


def _keep_on_grids(rewriter: Rewriter) -> None:
    """Insert quantize and dequantize after max pools and ReLUs of values on a grid, which leave them on it."""
    for node in rewriter.nodes():
        op = op_of(node)
        if op is None or not (op.traits.maximum or op.name == "relu") or info(node).dtype is not torch.float32:
            continue
        (read,) = activation_nodes(node)
        grid = grid_of(rewriter.gm, read) if is_op(read, "dequantize") else None
        users = list(node.users)
        if grid is not None and grid.axis is None and not all(is_op(user, "quantize") for user in users):
            _, dq = on_grid(rewriter, node, node, grid, node.name)
            rewriter.reroute(node, dq, only=users.__contains__)


class _Planner:
    """Planner of the ops of a graph that has conversions already.

    Attributes:
        rewriter: rewriter of the graph.
        changes: nodes that change values in place.
        calls: ops that each node runs, without conversions.
        changed: weights that are no longer on the grids of their file.
        grids: grids of float values: of what is dequantized, also after ops that copy it.
    """

    def __init__(self, rewriter: Rewriter[Context], changes: MemoryWriters, calls: Mapping[fx.Node, Calls]) -> None:
        self.rewriter, self.changes, self.calls = rewriter, changes, calls
        self.gm, self.context = rewriter.gm, rewriter.context
        self.changed: list[str] = []
        self.grids: dict[fx.Node, Grid] = {}
        for node in rewriter.nodes():
            if is_op(node, "dequantize") and not is_weight(node):
                grid = grid_of(self.gm, node) or dynamic_grid_of(node)
                if grid is not None and (grid.axis is None or isinstance(grid, DynamicGrid)):
                    self.grids[node] = grid
            elif self._copies(node) and (common := self._common_grid(node)) is not None:
                self.grids[node] = common

    def plans(self) -> dict[fx.Node, Plan]:
        """Plans of all ops: first of those that compute, then, from the output on, of those that move values."""
        plans = {node: self._plan(node) for node, calls in self.calls.items() if not self._moves(calls)}
        for node in reversed(list(self.calls)):
            if node not in plans:
                plans[node] = self._moving_plan(node, plans)
        return plans

    def _moves(self, calls: Calls) -> bool:
        return bool(calls) and len(calls.outputs) == 1 and all(call.op.traits.kind == "moves" for call in calls)

    def _copies(self, node: fx.Node) -> bool:
        """Whether an op copies floats, so that they stay on their grid."""
        calls = self.calls.get(node, ())
        layout = len(calls) == 1 and calls[0].op.traits.layout and not calls[0].op.traits.fill_constants
        return layout and info(node).dtype is torch.float32

    def _common_grid(self, node: fx.Node) -> QParams | None:
        """The one static grid of all activations that a node reads, or None."""
        grids = [self.grids.get(read) for read in activations_of(self.calls[node])]
        first = next(iter(grids), None)
        if not isinstance(first, QParams):
            return None
        return first if all(isinstance(g, QParams) and g.same_as(first) for g in grids) else None

    def _target_grid(self, node: fx.Node) -> QParams | None:
        """The one grid to which a value is quantized wherever it is read; None if it is also read in float."""
        users = [user for value in values_of(node) for user in value.users if not reads_only_metadata(user)]
        grids = [grid_of(self.gm, user) if is_op(user, "quantize") else None for user in users]
        first = next(iter(grids), None)
        if first is None or first.axis is not None:
            return None
        return first if all(grid is not None and grid.same_as(first) for grid in grids) else None

    def _plan(self, node: fx.Node) -> Plan:
        """Plan of a node that computes: on integers if the model dequantizes what it reads and has integer weights."""
        about, calls = info(node), self.calls[node]
        if about.traced.kept is not None:
            return Plan(about.traced.kept)
        if reads_only_metadata(node) or (not about.is_tensor and len(calls.outputs) == 1):
            return self._float("no tensor", "its value is not a tensor")
        if not calls:
            module = submodule(self.gm, node)
            name = type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target))
            return self._float("unsupported", f"{name} is not in the op table")
        config, selector = self.context.config_for(about.path, calls[0].op.name)
        if config.is_float:
            return self._float("excluded by the recipe", f"the recipe says float for {selector}")
        weight = self._weight_spec(calls)
        reads = activations_of(calls[:1])
        if weight is not None and not any(read in self.grids for read in reads):
            return self._weight_only(node, calls, weight)
        loose = next((read for read in reads if read not in self.grids), None)
        if loose is not None:
            return self._float("no integer neighbour", f"the model has its input %{loose.name} in float")
        if calls[0].op.traits.weight is not None and weight is None:
            return self._float("unsupported", "its weight is float, off its grid, or on a grid that no layer stores")
        return self._on_integers(node, calls, weight)

    def _on_integers(self, node: fx.Node, calls: Calls, weight: TensorSpec | None) -> Plan:
        specs = {_spec_of(grid) for read in activations_of(calls[:1]) if (grid := self.grids.get(read)) is not None}
        if len(specs) != 1:
            return self._float("unsupported", "the model mixes static and dynamic grids among its inputs")
        config = QuantConfig(specs.pop(), weight, state=None)
        candidate = self._candidate(node, calls, config)
        if isinstance(candidate, Plan):
            return candidate
        on_target = self._target_grid(node) is not None
        candidate.wanted = candidate.spec if on_target and candidate.spec.range != "dynamic" else None
        plan = candidate.plan(AdoptGrids.name, last=not on_target)
        in_float = [read for read in activations_of(calls[: plan.kernel_ops[-1] if plan.kernel_ops else None])
                    if read not in self.grids]  # fmt: skip
        if in_float and plan.precision == "int8":
            first = min(read.call for read in inputs_of(calls) if read.node in in_float)
            why = f"the model has its input %{in_float[0].name} in float"
            plan = replace(plan.decided(kind="no integer neighbour", text=why), kernel_ops=(first,), emits=None)
        if plan.precision == "int8" and plan.emits is not None and not on_target:
            return self._float(
                "no integer neighbour", "the model has its result in float, and its kernel emits integers"
            )
        return plan

    def _candidate(self, node: fx.Node, calls: Calls, config: QuantConfig) -> Candidate | Plan:
        """Candidate for a node that runs with `config`; its float plan if no kernel runs it with exactly that."""
        reason = unfit_reason(self.gm, calls, self.changes)
        if reason is not None:
            return self._float("unsupported", reason)
        backend = self.context.backend
        support = support_of(backend, self.gm, node, calls, config)
        if support.ops == 0:
            return self._float("unsupported", support.reason)
        if not config.fits_int16 and backend.adds_in_int16(calls):
            return self._float(
                "unsupported", f"sums of {backend.name} may saturate on this machine with 8 bits of both"
            )
        assert config.activation is not None
        return Candidate(calls, config.activation, config.weight, support)

    def _weight_only(self, node: fx.Node, calls: Calls, weight: TensorSpec) -> Plan:
        layer = Calls(calls[:1])
        weights = [read for read in inputs_of(layer) if read.role == "weight"]
        for reason in (unfit_input(self.gm, layer[0], read, self.changes) for read in weights):
            if reason is not None:
                return self._float("unsupported", reason)
        support: Support = self.context.backend.supports(self.gm, node, layer, QuantConfig(None, weight, state=None))
        if support.ops == 0:
            return self._float("unsupported", support.reason)
        plan = Plan(Decision("weight-only", decided_by=AdoptGrids.name), weight=weight)
        return plan if len(calls) == 1 else replace(plan, kernel_ops=(1,))

    def _weight_spec(self, calls: Calls) -> TensorSpec | None:
        """Spec of the stored integers of a layer's weight; None if it has none, or not on the axis of its layer.

        A weight that was changed after it was read has none either: it is no longer on its grid.
        """
        traits = calls[0].op.traits
        weights = [read for read in inputs_of(calls) if read.role == "weight"]
        tensor = constant(self.gm, weights[0].node) if len(weights) == 1 else None
        grid = stored_grid(tensor)
        if grid is None or traits.axis is None:
            return None
        rank = tensor.dim() if tensor is not None else 0
        if grid.axis is not None and grid.axis % rank != (traits.axis if grid.block is None else 1 - traits.axis):
            return None
        assert tensor is not None  # it has a grid
        if not lies_on_grid(tensor, grid):
            self.changed.append(str(weights[0].node.target))
            return None
        per: Any = grid.block or ("tensor" if grid.axis is None else "channel")
        symmetric = grid.qmin < 0 and not bool(grid.zero_point.any())
        return TensorSpec(bits=grid.bits, signed=grid.qmin < 0, symmetric=symmetric, per=per, observer="minmax")

    def _moving_plan(self, node: fx.Node, plans: Mapping[fx.Node, Plan]) -> Plan:
        """Plan of a node that moves or clips values: on integers if it reads integers and one of its readers does."""
        calls, about = self.calls[node], info(node)
        if about.traced.kept is not None:
            return Plan(about.traced.kept)
        grids = [self.grids.get(read) for read in activations_of(calls)]
        if not grids or not all(isinstance(grid, QParams) for grid in grids):
            return self._float("no integer neighbour", "the model has its input in float")
        target = self._target_grid(node)
        read_as_integers = node in self.grids and any(self._reads_integers(user, node, plans) for user in node.users)
        if target is None and not read_as_integers:
            return self._float("no integer neighbour", UNREAD)
        candidate = self._candidate(node, calls, QuantConfig(ACTIVATION, None, state=None))
        if isinstance(candidate, Plan):
            return candidate
        candidate.wanted = ACTIVATION
        common = self._common_grid(node)
        copies_alone = self._copies(node) and common is not None
        if target is not None and not copies_alone and not (common is not None and common.same_as(target)):
            self._requantize(node, target)
        return candidate.plan(AdoptGrids.name)

    def _requantize(self, node: fx.Node, grid: QParams) -> None:
        """Round what a node reads to the grid of its result: the values that it selects are then rounded alike."""
        new = {}
        for read in activations_of(self.calls[node]):
            new[read] = on_grid(self.rewriter, read, read, grid, read.name, like=node)[1]
        self.rewriter.update(node, args=fx.node.map_arg(node.args, lambda value: new.get(value, value)))

    def _reads_integers(self, user: fx.Node, value: fx.Node, plans: Mapping[fx.Node, Plan]) -> bool:
        plan = plans.get(user)
        if plan is None:
            return is_op(user, "quantize")
        return plan.precision in ("int8", "moves") and value in activations_of(self.calls[user])

    def _float(self, kind: DecisionKind, text: str) -> Plan:
        return Plan(Decision("float", kind, text, decided_by=AdoptGrids.name))


def _spec_of(grid: Grid) -> TensorSpec:
    """Spec of activations on a grid."""
    if isinstance(grid, DynamicGrid):
        return replace(DYNAMIC, per="tensor" if grid.axis is None else "row", symmetric=grid.symmetric)
    return ACTIVATION if grid.dtype is torch.uint8 else replace(ACTIVATION, signed=True)
