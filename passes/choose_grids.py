"""choose-grids: scale and zero point of every edge, now that the ranges are known."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from fxq.errors import CalibrationError, PassError
from fxq.graph.analysis.fill_constants import FillConstants
from fxq.graph.analysis.given import Given
from fxq.graph.info import Decision, Edge, Plan, grid_key, info
from fxq.graph.place import where
from fxq.graph.query import constant, reads_only_metadata, states_of, submodule, taken_from, unobserved
from fxq.graph.unit import calls_of, feeding, inputs_of, reads_of, wishes_of
from fxq.ops.traits import STATE_DYNAMIC
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.observer_base import Observer
from fxq.quant.observers import observer_for
from fxq.quant.qparams import QParams
from fxq.quant.shared_grids import MAX_SPAN_RATIO, SharedGridGroup, group_around, group_of
from fxq.quant.spec import DYNAMIC_STATE, TensorSpec
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter

log = logging.getLogger("fxq")
Key = tuple[fx.Node, TensorSpec]

_GAP = 0.9
"""An empty stretch that takes this much of a range leaves the values on either side less than 26 of 256 integers."""
_WIDER = 1.25
"""How much larger a state that is given may be than those that a layer makes, for both to be on one grid: 2 dB."""


@dataclass(frozen=True)
class ChooseGrids(Pass):
    """Choose scale and zero point of every edge from what calibration saw.

    Before: observed edges in groups    After: the same graph, with `qparams` on every edge
    Keeps: the graph.

    What an op moves shares the grid of its result, unless that is four times as wide as the values themselves, and they
    are read elsewhere: then they keep a grid of their own, and insert-qdq converts. Where it is the result that would
    be left with a small part of a grid, the op runs in float, and so does what hands it its values.
    Where kernels overflow with 8 bits, the grids of the activations that they read, or those of their weights, have 7:
    `context.reduce_range` says which.
    Constants of masks, pads and fills are no data. The grid becomes wider for them by one bit at most; one further out
    keeps the values that may hold it, and the ops that read them, in float, up to where something new is computed. So
    does a mask that is an input, where calibration saw it push some of the values far away from the others.
    Behind training, grids are those that it has found (`context.grids`).
    Refuses: infinity that a layer multiplies with its weights.
    """

    name: ClassVar[str] = "choose-grids"
    needs: ClassVar[Stage] = Stage.OBSERVED
    gives: ClassVar[Stage] = Stage.OBSERVED

    def run(self, rewriter: Rewriter) -> None:
        """Go through the values in order, and only then write: without data, the model can still be calibrated."""
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
        for node, plan in chooser.plans.items():
            rewriter.describe(node, plan=plan)
        for node in rewriter.nodes():
            made = info(node).plan
            if made is not None and made.state is not None:
                plan = chooser.with_state(node, made, made.state)
                rewriter.describe(node, plan=plan)
                if plan.state is not None and plan.state.range != made.state.range:
                    why = "the first one is far larger than those that follow"
                    rewriter.describe(node, note=STATE_DYNAMIC.format(why))
        for value, edges in chosen.items():
            rewriter.describe(value, edges=edges)
            for edge in edges:
                _note_zeros(rewriter, value, chooser.observers.get((value, edge.spec, edge.axis)))


def _note_zeros(rewriter: Rewriter, value: fx.Node, observer: Observer | None) -> None:
    if observer is not None and observer.seen_only_zeros:
        rewriter.describe(value, note="calibration saw nothing but zeros: its grid is that of values up to 1")
        log.warning("%s: calibration saw nothing but zeros; its grid is that of values up to 1.", observer.name)


class _Chooser:
    """Goes through the values of a graph in order.

    Attributes:
        observers: by the edge that they watch.
        plans: the plans that change.
        off: values that are on no grid, with the reason for their readers.
        reduce_range: which role gives up a bit where kernels overflow with 8.
        weights: those that take an integer form.
        measured: values that take one whose scale is measured at run time.
        infinite: those of them that hold infinity.
    """

    def __init__(self, rewriter: Rewriter) -> None:
        self.gm, self.fill_constants, self.given = rewriter.gm, FillConstants(rewriter.gm), Given(rewriter.gm)
        self.reduce_range = rewriter.context.reduce_range
        self.weights: list[fx.Node] = []
        self.measured: list[fx.Node] = []
        self.observers: dict[tuple[fx.Node, TensorSpec, int | None], Observer] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        self.plans: dict[fx.Node, Plan] = {}
        self.off: dict[fx.Node, str] = {}
        self.infinite: set[fx.Node] = set()
        self._strands: dict[Key, SharedGridGroup] = {}
        for node in rewriter.nodes():
            observer = submodule(self.gm, node)
            if isinstance(observer, Observer):
                self.observers[unobserved(self.gm, node), observer.spec, observer.axis] = observer
            elif not reads_only_metadata(node):
                for read in node.all_input_nodes:
                    self.readers.setdefault(unobserved(self.gm, read), []).append(node)

    def chosen(self) -> dict[fx.Node, tuple[Edge, ...]]:
        """The edges of every value, with their grids."""
        numbers: dict[SharedGridGroup, int] = {}
        for grid_group in self._strands.values():
            numbers.setdefault(grid_group.root(), len(numbers))
        reduce_range = self._overflowing() if self.reduce_range == "activations" else set()
        grids = {grid_group: grid_group.qparams(grid_group in reduce_range) for grid_group in numbers}
        found = {}
        for value in dict.fromkeys(value for value, _ in self._strands):
            calibrated = [edge for edge in info(value).edges if not edge.measured]
            roots = {edge: self._strands[value, edge.spec].root() for edge in calibrated}
            edges = (replace(edge, group=numbers[root], qparams=grids[root]) for edge, root in roots.items())
            found[value] = tuple(edges)
        weights = {node: tuple(self._weight(node, edge) for edge in info(node).edges) for node in self.weights}
        found = {**found, **weights, **dict.fromkeys(self.off, ())}
        for node in self.measured:
            edges = (self._measured(node, edge) for edge in info(node).edges if edge.measured)
            found[node] = (*found.get(node, ()), *edges)
        return found

    def with_state(self, node: fx.Node, plan: Plan, spec: TensorSpec) -> Plan:
        """The plan of a recurrent layer with the grid of its hidden state, which is symmetric."""
        grid = spec.reduced_range if plan.overflows and self.reduce_range == "activations" else spec
        if spec.range != "calibrated":
            return replace(plan, state=grid)
        signed = replace(grid, signed=True)
        scales: list[float] = []
        for value in (unobserved(self.gm, state) for state in states_of(node)):
            found = [
                o
                for (seen, s, _), o in self.observers.items()
                if seen is value and s.reduced_range == spec.reduced_range
            ]
            tensor, observer = constant(self.gm, value), next(iter(found), None)
            if tensor is not None:
                observer = observer_for(signed)
                observer(tensor)
            if observer is None:
                raise PassError(f"{where(self.gm, value)}: no observer watches this state. Run insert-observers.")
            if not scales or not observer.seen_only_zeros:  # as first states often are
                scales.append(observer.on(signed).qparams().s)
        if max(scales) > _WIDER * scales[0]:  # the first state would leave the others a part of the grid
            return replace(plan, state=replace(DYNAMIC_STATE, bits=grid.bits))
        return replace(plan, state=grid, state_scale=max(scales))

    def _measured(self, node: fx.Node, edge: Edge) -> Edge:
        """An edge whose scale is measured, with its grid."""
        spec = (
            edge.spec.reduced_range if self.reduce_range == "activations" and self._overflows(node, edge) else edge.spec
        )
        return replace(edge, qparams=DynamicGrid.of(spec, edge.axis))

    def _overflows(self, node: fx.Node, edge: Edge) -> bool:
        """Whether a kernel that reads an edge overflows with 8 bits of both activations and weights."""
        readers = [r for r in self.readers[node] if wishes_of(self.gm, r).get(node) == (edge.spec, edge.axis)]
        return any(self._plan(reader).overflows for reader in readers)

    def _weight(self, node: fx.Node, edge: Edge) -> Edge:
        """The edge of a weight with its grid: one bit less where a kernel that reads it overflows with 8."""
        if edge.spec.format == "float16":
            return replace(edge, qparams=QParams.of_float16())
        tensor, observer = constant(self.gm, node), self.observers.get((node, edge.spec, edge.axis))
        if tensor is None or observer is None:
            raise PassError(f"{where(self.gm, node)}: no observer watches this weight. Run insert-observers.")
        seen = copy.copy(observer)
        seen._buffers = {name: buffer.clone() for name, buffer in observer.named_buffers()}
        seen.paused = False
        seen(tensor)
        reduce_range = self.reduce_range == "weights" and self._overflows(node, edge)
        return replace(edge, qparams=(seen.on(edge.spec.reduced_range) if reduce_range else seen).qparams())

    def _overflowing(self) -> set[SharedGridGroup]:
        """The strands that a kernel reads which overflows with 8 bits."""
        readers = {reader for found in self.readers.values() for reader in found if self._plan(reader).overflows}
        keys = (key for reader in readers for key in reads_of(self.gm, reader).items())
        return {self._strands[key].root() for key in keys if key in self._strands}

    def visit(self, node: fx.Node) -> None:
        """Decide about a node and its value. Those that it reads come before."""
        if node.op == "get_attr":
            if info(node).edges:
                self.weights.append(node)
            return
        reads = reads_of(self.gm, node)
        for value in reads:
            if value in self.off:
                self._stop_reading(node, value, f"its input %{value.name} {self.off[value]}")
        edges = [edge for edge in info(node).edges if not edge.measured]
        if len(edges) < len(info(node).edges):
            self.measured.append(node)
        moved = self._plan(node).precision == "moves"
        for edge in edges:
            inputs = [self._strands[key] for key in reads.items() if key[1] == edge.spec] if moved else []
            grid_group = self._moved(node, edge, inputs) if inputs else self._made(node, edge)
            if grid_group is None:
                return
            self._strands[node, edge.spec] = grid_group

    def _plan(self, node: fx.Node) -> Plan:
        return self.plans.get(node) or info(node).plan or Plan(Decision("float"))

    def _made(self, node: fx.Node, edge: Edge) -> SharedGridGroup | None:
        """The strand that begins with a value; None where that is on no grid."""
        observer = self.observers.get((node, edge.spec, None))
        moved = next((value for value in reads_of(self.gm, node) if value in self.off), None)
        if observer is None and moved is not None:
            self._take_off(node, self.off[moved])
            return None
        if observer is None:
            raise PassError(
                f"{where(self.gm, node)}: no observer watches its value. Run insert-observers behind the pass that "
                "made its edges."
            )
        grid_group = group_of(observer)
        if not self._holds(node, edge, grid_group):
            return None
        if self._is_kept(node):
            grid_group.note_span(grid_group.span)
        return grid_group

    def _moved(self, node: fx.Node, edge: Edge, inputs: Iterable[SharedGridGroup]) -> SharedGridGroup | None:
        """The strand of a value that an op hands on; None where it is on no grid."""
        roots = list(dict.fromkeys(grid_group.root() for grid_group in inputs))
        grid_group = group_around(roots)
        observer = self.observers.get((node, edge.spec, None))
        own = group_of(observer) if observer is not None else None
        if own is not None and 0 < MAX_SPAN_RATIO * own.span <= grid_group.span:
            self._cut(node, grid_group.span / own.span)
            return self._made(node, edge)
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
        if self._is_kept(node):
            grid_group.note_span(own.span if own is not None else grid_group.span)
        return grid_group

    def _holds(self, node: fx.Node, edge: Edge, grid_group: SharedGridGroup) -> bool:
        """Let a strand hold the constants of a value. False where it cannot: then the value is on no grid."""
        observer = self.observers.get((node, edge.spec, None))
        met = observer.met_constants if observer is not None else ()
        constants = self.fill_constants.brought_by(node).union(met)
        if observer is not None and self.given.masks(node):
            low, high = observer.gap()
            if high - low > _GAP * grid_group.span:
                self._take_off(node, f"is in two ranges far apart, up to {low:.3g} and from {high:.3g}, as of a mask")
                return False
        far = [value for value in constants if not grid_group.can_hold(value)]
        if not far:
            grid_group.constants |= constants
            return True
        words = f"holds {', '.join(f'{value:g}' for value in sorted(far))}, far outside of its data"
        if any(map(math.isinf, far)):
            self.infinite.add(node)
        self._take_off(node, f"{words} ({grid_group.low:.3g} to {grid_group.high:.3g})")
        return False

    def _take_off(self, node: fx.Node, words: str) -> None:
        """Let a value be on no grid."""
        self.off[node] = words
        for other in info(node).edges:
            self._strands.pop((node, other.spec), None)
        maker = taken_from(node)
        if self._plan(maker).precision != "float":
            self.plans[maker] = Plan(_off_grid(f"its value {words}"))

    def _is_kept(self, node: fx.Node) -> bool:
        """Whether an op reads a value that does more than to move it, or several ops read it."""
        readers = self.readers.get(node, [])
        return len(readers) != 1 or self._plan(readers[0]).precision != "moves"

    def _stop_reading(self, node: fx.Node, value: fx.Node, reason: str) -> None:
        """Let a node read a value in float: from there on where it is a layer's unit that reads it later on."""
        plan = self._plan(node)
        calls = calls_of(self.gm, node)
        first = min((read.call for read in inputs_of(calls) if unobserved(self.gm, read.node) is value), default=0)
        if value in self.infinite and calls[first].op.traits.heavy:
            raise CalibrationError(
                f"{where(self.gm, node)}: its input %{value.name} holds Inf, which a mask may, but nothing that a "
                "layer multiplies; clean the data."
            )
        if first == 0 or plan.precision != "int8" or not calls[0].op.traits.heavy:
            self.plans[node] = Plan(_off_grid(reason), agreed=plan.agreed)
        elif not plan.kernel_ops or plan.kernel_ops[-1] > first:
            decision = replace(_off_grid(reason), precision=plan.precision, fix=plan.decision.fix)
            self.plans[node] = replace(plan, decision=decision, kernel_ops=(first,))

    def _cut(self, node: fx.Node, times: float) -> None:
        """Let a node select from floats: what makes these, up to where they are computed, moves floats as well."""
        why = f"what it selects spans {times:.0f} times less than its input"
        self.plans[node] = Plan(_off_grid(why), exact=True)
        why = f"%{node.name} selects values of a small part of its range"
        for mover in feeding(self.gm, node, lambda value: self._plan(value).precision == "moves"):
            self.plans[mover] = Plan(_off_grid(why), exact=True)


def _off_grid(why: str) -> Decision:
    """The decision to compute in float what no grid holds well."""
    return Decision("float", "off the grid", why, decided_by=ChooseGrids.name)
