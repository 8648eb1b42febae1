"""choose-grids: scale and zero point of every edge, from the ranges that calibration collected."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from fxq.backends.loops.range_search import least_block_range
from fxq.errors import CalibrationError, PassError
from fxq.graph.analysis.fill_constants import FillConstants
from fxq.graph.analysis.given import InputDerivedValues
from fxq.graph.info import Decision, Edge, IntegerForm, Plan, grid_key, info
from fxq.graph.place import where
from fxq.graph.query import constant, reads_only_metadata, states_of, submodule, taken_from, unobserved
from fxq.graph.unit import calls_of, inputs_of, integer_sources, reads_of, wanted_forms
from fxq.ops.traits import STATE_DYNAMIC
from fxq.pipeline.context import Context
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.observer_base import Observer
from fxq.quant.observers import LeastError, observer_for
from fxq.quant.qparams import QParams
from fxq.quant.resumed_grids import resumed_grid
from fxq.quant.shared_grids import MAX_SPAN_RATIO, SharedGridGroup, group_around, group_of
from fxq.quant.spec import DYNAMIC_STATE, TensorSpec
from fxq.quant.stored_grids import grid_within, lies_on_grid, stored_grid, warn_off_grid
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter

log = logging.getLogger("fxq")
Key = tuple[fx.Node, IntegerForm]

_MAX_GAP = 0.9
"""Largest share of a range that may be an empty gap. The values on both sides of it have 26 of 256 integers left."""
_MAX_STATE_RATIO = 1.25
"""How much larger than its later states the first state of a layer may be, to share their grid. It costs 2 dB."""


@dataclass(frozen=True)
class ChooseGrids(Pass):
    """Choose scale and zero point of every edge from the observed ranges.

    Before: observed edges in groups    After: the same graph, with `qparams` on every edge
    Keeps: the graph.
    Also: `context.reduce_range` chooses 7 bits for activations or for weights where kernels saturate with 8 bits of
    both. After training, the grids are the trained ones (`context.grids`).
    Refuses: infinity among the inputs of a layer with weights.

    An op that only moves values, such as a concatenation, shares one grid with its inputs. There are two exceptions. If
    the shared grid is at least four times as wide as the range of an input that other ops read too, this input has a
    separate grid, and insert-qdq requantizes. If the result of the op would use only a small part of the grid, as after
    a slice, the op runs in float, and so do the ops that move its inputs.
    Fill constants of masks and pads are not data. A grid becomes at most twice as wide to hold them. If that is not
    enough, the value and the ops that only pass it on run in float. The same applies to a mask that is an input of the
    model, if it moves some of the values far away from the others.
    """

    name: ClassVar[str] = "choose-grids"
    needs: ClassVar[Stage] = Stage.OBSERVED
    gives: ClassVar[Stage] = Stage.OBSERVED

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Choose all grids, then write them: if data is missing, the graph is unchanged and can still be calibrated."""
        if rewriter.context.grids is not None:
            for node in rewriter.nodes():
                plan, edges = rewriter.context.grids.get(grid_key(node), (None, ()))
                rewriter.describe(node, plan=plan, edges=edges)
            return
        chooser = _Chooser(rewriter)
        for node in rewriter.nodes():
            if not isinstance(submodule(rewriter.gm, node), Observer):
                chooser.visit(node)
        chosen = chooser.chosen()
        warn_off_grid(chooser.changed, "New scales are chosen for them, as for float weights.")
        for node, plan in chooser.plans.items():
            rewriter.describe(node, plan=plan)
        for node in rewriter.nodes():
            _choose_state_grid(rewriter, chooser, node)
        for value, edges in chosen.items():
            rewriter.describe(value, edges=edges)
            for edge in edges:
                _note_zeros(rewriter, value, chooser.observers.get((value, edge.form)))


def _choose_state_grid(rewriter: Rewriter, chooser: _Chooser, node: fx.Node) -> None:
    """Choose the grid of the hidden state, if a node is a recurrent layer with one in integers."""
    plan = info(node).plan
    if plan is None or plan.state is None:
        return
    new_plan = chooser.with_state(node, plan, plan.state)
    rewriter.describe(node, plan=new_plan)
    if new_plan.state is not None and new_plan.state.range != plan.state.range:
        why = "the first one is far larger than those that follow"
        rewriter.describe(node, note=STATE_DYNAMIC.format(why))


def _note_zeros(rewriter: Rewriter, value: fx.Node, observer: Observer | None) -> None:
    if observer is not None and observer.seen_only_zeros:
        rewriter.describe(value, note="calibration saw only zeros: its grid is that of values up to 1")
        log.warning("%s: calibration saw only zeros; its grid is that of values up to 1.", observer.name)


class _Chooser:
    """Chooser of the grids of a graph; visits its values in order.

    Attributes:
        observers: observers by value and integer form.
        readers: nodes that read each value.
        plans: plans that change.
        off: values that are on no grid, each with the reason that readers give.
        reduce_range: role that has 7 bits where kernels overflow with 8.
        infinite: values of `off` that hold infinity.
        changed: weights that are no longer on the grids of their file.
    """

    def __init__(self, rewriter: Rewriter[Context]) -> None:
        self.gm, self.reduce_range = rewriter.gm, rewriter.context.reduce_range
        self.fill_constants, self.given = FillConstants(rewriter.gm), InputDerivedValues(rewriter.gm)
        self.observers: dict[Key, Observer] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        self.plans: dict[fx.Node, Plan] = {}
        self.off: dict[fx.Node, str] = {}
        self.infinite: set[fx.Node] = set()
        self.changed: list[str] = []
        self._groups: dict[Key, SharedGridGroup] = {}
        for node in rewriter.nodes():
            observer = submodule(self.gm, node)
            if isinstance(observer, Observer):
                self.observers[unobserved(self.gm, node), IntegerForm(observer.spec, observer.axis)] = observer
            elif not reads_only_metadata(node):
                for read in node.all_input_nodes:
                    self.readers.setdefault(unobserved(self.gm, read), []).append(node)

    def chosen(self) -> dict[fx.Node, tuple[Edge, ...]]:
        """Edges of every value and weight, with their grids. A value in `off` keeps only edges with a dynamic range."""
        roots = dict.fromkeys(grid_group.root() for grid_group in self._groups.values())
        reduce_range = self._overflowing() if self.reduce_range == "activations" else set()
        grids = {root: (number, root.qparams(root in reduce_range)) for number, root in enumerate(roots)}
        chosen: dict[fx.Node, tuple[Edge, ...]] = {}
        for node in self.gm.graph.nodes:
            edges = [edge for edge in info(node).edges if edge.dynamic or node not in self.off]
            if info(node).edges:
                chosen[node] = tuple(self._with_grid(node, edge, grids) for edge in edges)
        return chosen

    def _with_grid(self, node: fx.Node, edge: Edge, grids: Mapping[SharedGridGroup, tuple[int, QParams]]) -> Edge:
        """Edge with its grid. `grids` holds number and grid of the groups of calibrated edges, by their root."""
        if node.op == "get_attr":
            return self._weight(node, edge)
        if edge.dynamic:
            reduces = self.reduce_range == "activations" and self._overflows(node, edge)
            return replace(edge, qparams=DynamicGrid.of(edge.spec.reduced_range if reduces else edge.spec, edge.axis))
        number, grid = grids[self._groups[node, edge.form].root()]
        return replace(edge, group=number, qparams=grid)

    def with_state(self, node: fx.Node, plan: Plan, spec: TensorSpec) -> Plan:
        """Plan of a recurrent layer, with the grid of its hidden state, which is symmetric."""
        grid = spec.reduced_range if plan.overflows and self.reduce_range == "activations" else spec
        if spec.range != "calibrated":
            return replace(plan, state=grid)
        signed = replace(grid, signed=True)
        scales: list[float] = []
        for value in (unobserved(self.gm, state) for state in states_of(node)):
            own = [
                o
                for (seen, form), o in self.observers.items()
                if seen is value and form.spec.reduced_range == spec.reduced_range
            ]
            tensor, observer = constant(self.gm, value), next(iter(own), None)
            if tensor is not None:
                observer = observer_for(signed)
                observer(tensor)
            if observer is None:
                raise PassError(f"{where(self.gm, value)}: no observer watches this state. Run insert-observers.")
            if not scales or not observer.seen_only_zeros:  # first states often are
                scales.append(observer.on(signed).qparams().s)
        if max(scales) > _MAX_STATE_RATIO * scales[0]:  # the later states would use only a part of the grid
            return replace(plan, state=replace(DYNAMIC_STATE, bits=grid.bits))
        return replace(plan, state=grid, state_scale=max(scales))

    def _overflows(self, node: fx.Node, edge: Edge) -> bool:
        """Whether a kernel that reads an edge overflows with 8 bits of both activations and weights."""
        readers = [r for r in self.readers[node] if wanted_forms(self.gm, r).get(node) == edge.form]
        return any(self._plan(reader).overflows for reader in readers)

    def _weight(self, node: fx.Node, edge: Edge) -> Edge:
        """Edge of a weight, with its grid: 7 bits if weights reduce their range and a kernel overflows with 8."""
        if edge.spec.format == "float16":
            return replace(edge, qparams=QParams.of_float16())
        tensor, observer = constant(self.gm, node), self.observers.get((node, edge.form))
        if tensor is None or observer is None:
            raise PassError(f"{where(self.gm, node)}: no observer watches this weight. Run insert-observers.")
        reduce_range = self.reduce_range == "weights" and self._overflows(node, edge)
        spec = edge.spec.reduced_range if reduce_range else edge.spec
        stored = stored_grid(tensor)
        if stored is not None and (within := grid_within(spec, edge.axis, stored)) is not None:
            if lies_on_grid(tensor, within):
                return replace(edge, qparams=within)
            self.changed.append(str(node.target))

        def grid() -> QParams:
            private = copy.copy(observer)  # the observer itself stays as it is, for further calibration
            private._buffers = {name: buffer.clone() for name, buffer in observer.named_buffers()}
            private.paused = False
            if isinstance(private, LeastError):
                private.search = least_block_range
            private(tensor)
            return (private.on(spec) if reduce_range else private).qparams()

        if not type(observer).__module__.startswith("fxq."):  # classes of the user change without a version
            return replace(edge, qparams=grid())
        return replace(edge, qparams=resumed_grid(tensor, f"{observer.spec!r} {spec!r} axis {observer.axis}", grid))

    def _overflowing(self) -> set[SharedGridGroup]:
        """Groups with a reader whose kernel overflows with 8 bits."""
        readers = {reader for readers in self.readers.values() for reader in readers if self._plan(reader).overflows}
        keys = (key for reader in readers for key in reads_of(self.gm, reader).items())
        return {self._groups[key].root() for key in keys if key in self._groups}

    def visit(self, node: fx.Node) -> None:
        """Choose the groups of a node's edges. The values that it reads must have been visited."""
        if node.op == "get_attr":
            return
        reads = reads_of(self.gm, node)
        for value in reads:
            if value in self.off:
                self._stop_reading(node, value, f"its input %{value.name} {self.off[value]}")
        edges = [edge for edge in info(node).edges if not edge.dynamic]
        moved = self._plan(node).precision == "moves"
        for edge in edges:
            inputs = [self._groups[key] for key in reads.items() if key[1] == edge.form] if moved else []
            grid_group = self._moved_group(node, edge, inputs) if inputs else self._new_group(node, edge)
            if grid_group is None:
                return
            self._groups[node, edge.form] = grid_group

    def _plan(self, node: fx.Node) -> Plan:
        return self.plans.get(node) or info(node).plan or Plan(Decision("float"))

    def _new_group(self, node: fx.Node, edge: Edge) -> SharedGridGroup | None:
        """New group of a value that is computed; None if no grid holds it."""
        observer = self.observers.get((node, edge.form))
        moved = next((value for value in reads_of(self.gm, node) if value in self.off), None)
        if observer is None and moved is not None:
            self._take_off(node, self.off[moved])
            return None
        if observer is None:
            raise PassError(
                f"{where(self.gm, node)}: no observer watches its value. Run insert-observers after the pass that "
                "made its edges."
            )
        grid_group = group_of(observer)
        if not self._holds(node, edge, grid_group):
            return None
        if self._needs_resolution(node):
            grid_group.note_span(grid_group.span)
        return grid_group

    def _moved_group(self, node: fx.Node, edge: Edge, inputs: Iterable[SharedGridGroup]) -> SharedGridGroup | None:
        """Group of the result of an op that only moves values, joined with its inputs; None if no grid holds it."""
        roots = list(dict.fromkeys(grid_group.root() for grid_group in inputs))
        grid_group = group_around(roots)
        observer = self.observers.get((node, edge.form))
        own = group_of(observer) if observer is not None else None
        if own is not None and 0 < MAX_SPAN_RATIO * own.span <= grid_group.span:
            self._cut(node, grid_group.span / own.span)
            return self._new_group(node, edge)
        if own is not None and (own.low < grid_group.low or own.high > grid_group.high):
            grid_group = own.join(grid_group)
        if not self._holds(node, edge, grid_group):
            return None
        span = grid_group.span
        for root in roots:
            if span < MAX_SPAN_RATIO * root.smallest_span:
                grid_group = grid_group.join(root)
            else:
                grid_group.cover(root)
        if self._needs_resolution(node):
            grid_group.note_span(own.span if own is not None else grid_group.span)
        return grid_group

    def _holds(self, node: fx.Node, edge: Edge, grid_group: SharedGridGroup) -> bool:
        """Add the fill constants of a value to its group. If the grid cannot hold them, take it off the grid: False."""
        observer = self.observers.get((node, edge.form))
        met = observer.met_constants if observer is not None else ()
        constants = self.fill_constants.added_by(node).union(met)
        if observer is not None and self.given.applies_mask(node):
            low, high = observer.gap()
            if high - low > _MAX_GAP * grid_group.span:
                self._take_off(node, f"is in two ranges far apart, up to {low:.3g} and from {high:.3g}, as of a mask")
                return False
        far = [value for value in constants if not grid_group.can_hold(value)]
        if not far:
            grid_group.constants |= constants
            return True
        reason = f"holds {', '.join(f'{value:g}' for value in sorted(far))}, far outside of its data"
        if any(map(math.isinf, far)):
            self.infinite.add(node)
        self._take_off(node, f"{reason} ({grid_group.low:.3g} to {grid_group.high:.3g})")
        return False

    def _take_off(self, node: fx.Node, reason: str) -> None:
        """Remove all grids of a value. `reason` is a predicate such as "holds -inf"."""
        self.off[node] = reason
        for edge in info(node).edges:
            self._groups.pop((node, edge.form), None)
        maker = taken_from(node)
        if self._plan(maker).precision != "float":
            self.plans[maker] = Plan(_off_grid(f"its value {reason}"))

    def _needs_resolution(self, node: fx.Node) -> bool:
        """Whether an op computes with the value, or several ops read it: its grid may then not become much coarser."""
        readers = self.readers.get(node, [])
        return len(readers) != 1 or self._plan(readers[0]).precision != "moves"

    def _stop_reading(self, node: fx.Node, value: fx.Node, reason: str) -> None:
        """Let a node read a value in float. If only a later op of a layer's unit reads it, the ops before stay int8."""
        plan = self._plan(node)
        calls = calls_of(self.gm, node)
        first = min((read.call for read in inputs_of(calls) if unobserved(self.gm, read.node) is value), default=0)
        if value in self.infinite and calls[first].op.traits.heavy:
            raise CalibrationError(
                f"{where(self.gm, node)}: its input %{value.name} holds Inf. A mask may hold it, but not the input of "
                "a layer with weights; clean the data."
            )
        if first == 0 or plan.precision != "int8" or not calls[0].op.traits.heavy:
            self.plans[node] = Plan(_off_grid(reason), agreed=plan.agreed)
        elif not plan.kernel_ops or plan.kernel_ops[-1] > first:
            decision = replace(_off_grid(reason), precision=plan.precision, fix=plan.decision.fix)
            self.plans[node] = replace(plan, decision=decision, kernel_ops=(first,))

    def _cut(self, node: fx.Node, ratio: float) -> None:
        """Let a node select from floats, and so all ops that move its input, back to the op that computes it.

        Args:
            node: the node, which selects a part of its input.
            ratio: range of the input relative to that of the result.
        """
        why = f"the range of the values that it selects is {ratio:.0f} times smaller than that of its input"
        self.plans[node] = Plan(_off_grid(why), exact=True)
        why = f"%{node.name} selects values of a small part of its range"
        for mover in integer_sources(self.gm, node, lambda value: self._plan(value).precision == "moves"):
            self.plans[mover] = Plan(_off_grid(why), exact=True)


def _off_grid(why: str) -> Decision:
    """Decision to compute in float, since no grid represents the values well."""
    return Decision("float", "off the grid", why, decided_by=ChooseGrids.name)
