"""fallback: run ops in float that have no kernel or are slower on integers, with as few conversions as possible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import fx

from fxq.backends.base import support_of
from fxq.common.progress import progress_bar
from fxq.common.timed_calls import threads_set_to
from fxq.cost import cache as costs
from fxq.cost.min_cut import Key, PricedOp, PricedValue, conversions_of, seconds_of
from fxq.cost.prices import (
    choose_by_price,
    float_ops,
    priced_ops,
    priced_values,
    regions_of,
    slower_for_size,
    slower_than_float,
    supports_bfloat16,
    weight_only_ops,
)
from fxq.cost.probe import Prober
from fxq.cost.whole import quickest
from fxq.errors import RecipeError, warn
from fxq.graph.analysis.integer_sums import MAX_INT32, beyond_int32, node_largest_sum
from fxq.graph.info import Cost, DecisionKind, Plan, info, precision_of
from fxq.graph.region import read_region
from fxq.graph.unit import calls_of
from fxq.pipeline.candidates import UNREAD
from fxq.pipeline.context import Context
from fxq.pipeline.float_moves import read_floats
from fxq.pipeline.in_float import run_in_float
from fxq.quant.spec import QuantConfig
from fxq.recipe.pass_base import Pass, Stage
from fxq.recipe.pins import Pin, Pinned, Place, places_of
from fxq.rewriting.rewriter import Rewriter
from fxq.rewriting.unit_edits import split_unit


@dataclass(frozen=True)
class Fallback(Pass):
    """Move ops to float that have no kernel or that are slower on integers, and remove needless conversions.

    Before: quantize(conv2d_act(dequantize(q), w, b)), where the backend has no kernel for the function `act`
    After: quantize(act(conv2d(dequantize(q), w, b))): the convolution emits float, and the function reads it directly
    Also: with `optimize="speed"`, the set of integer ops is the one that makes the graph fastest, by the times of
    kernels, float ops and conversions on this machine (`fxq/cost/min_cut.py`). A float op that reads
    dequantize(quantize(v)) of a float value v reads v.

    Decisions are about the whole graph; the conversions are rewritten by rules, `move_in_float` and `read_float`
    (`patterns/conversion_rules.py`).
    Keeps: the output up to rounding. Results only become more exact, as a rounding is left out.

    Attributes:
        keeps_rounding: whether float ops read rounded values, so that the result is that of the qdq graph.
    """

    name: ClassVar[str] = "fallback"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ
    keeps_rounding: bool = False

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Split units that no kernel runs whole, choose float ops by price, then let float ops read float values."""
        context = rewriter.context
        choose = context.recipe.optimize == "speed"
        pinned = Pinned(context.recipe.decided) if context.recipe.optimize == "decided" else None
        _ask_again(rewriter)
        _bound_sums(rewriter)
        prober = None
        if context.backend.has_kernels and pinned is None:
            prober = Prober(context.backend, context.recipe, costs.machine_costs(), measures=choose)
        with threads_set_to(1):  # other programs do not affect the CPU time of one thread
            opened, able = self._decide(rewriter, prober, pinned)
        pins = (Pin.at(place, "float" if precision_of(node) == "float" else "int8") for node, place in able.items())
        context.decided = (*opened, *pins, *_off_grid(rewriter))
        if not self.keeps_rounding:
            read_floats(rewriter)
        rewriter.erase_unused()

    def _decide(
        self, rewriter: Rewriter[Context], prober: Prober | None, pinned: Pinned | None
    ) -> tuple[list[Pin], dict[fx.Node, Place]]:
        """Split units and move ops to float. Returns the splits, and the nodes that could run on integers."""
        choose = prober is not None and prober.measures
        if prober is not None and choose and any(map(_may_be_opened, rewriter.nodes())):
            _ask_backend(rewriter, prober)
        edits = len(rewriter.edits)
        opened = _open_units(rewriter, prober if choose else None, pinned)
        able = _able(rewriter)
        if pinned is not None:
            _obey(rewriter, pinned, able)
        elif prober is not None:
            if choose and (prober.own is None or len(rewriter.edits) > edits):  # the units changed
                _ask_backend(rewriter, prober)
            _price(rewriter, prober, choose)
            prober.costs.save()
        return opened, able


def _ask_again(rewriter: Rewriter[Context]) -> None:
    """Ask the backend about layers with dynamic ranges, since `smooth` may have chosen them after `annotate`."""
    backend = rewriter.context.backend
    for node in rewriter.nodes():
        plan, calls = info(node).plan, calls_of(rewriter.gm, node)
        if plan is None or plan.precision != "int8" or plan.reads is None or plan.reads.range != "dynamic":
            continue
        support = support_of(backend, rewriter.gm, node, calls, QuantConfig(plan.reads, plan.weight, plan.state))
        if support.ops == 0:
            with rewriter.attributed("run_in_float", run_in_float):
                reason = f"{info(node).note}; {support.reason}".removeprefix("; ")
                run_in_float(rewriter, node, "unsupported", reason, WITHOUT_DYNAMIC_INPUTS)
        elif support.ops < (plan.kernel_ops or (len(calls),))[-1]:
            plan = replace(plan, kernel_ops=(support.ops,))
            rewriter.describe(node, plan=plan.decided(kind="unsupported", text=support.reason))


def _bound_sums(rewriter: Rewriter[Context]) -> None:
    """Move layers whose integer sums could overflow int32 to float, on all backends: an export would overflow, too."""
    for node in rewriter.nodes():
        plan, largest = info(node).plan, 0.0
        if plan is not None and plan.precision == "int8":
            largest = node_largest_sum(rewriter.gm, node)
        reason = beyond_int32(largest)
        if reason is not None and plan is not None:
            with rewriter.attributed("run_in_float", run_in_float):
                run_in_float(rewriter, node, "unsupported", reason, _fewer_bits(rewriter, node, plan, largest))


def _fewer_bits(rewriter: Rewriter[Context], node: fx.Node, plan: Plan, largest: float) -> str:
    """Recipe line with fewer activation bits, so that a layer's sums fit in int32; empty if too few would be left."""
    call, spec = calls_of(rewriter.gm, node)[0], plan.reads
    bits = (spec.bits if spec is not None else 0) - math.ceil(
        math.log2(largest / MAX_INT32)
    )  # each bit halves the sums
    if spec is None or bits < MIN_PROPOSED_BITS or call.rounds_its_state:
        return ""
    dynamic = f', per="{spec.per}", range="dynamic"' if spec.range == "dynamic" else ""
    path = (info(node).fused.paths or (info(node).path,))[0]
    config = f"fxq.QuantConfig(activation=fxq.TensorSpec(bits={bits}{dynamic}))"
    return rewriter.context.override_line(path, call.op.name, config)


def _ask_backend(rewriter: Rewriter[Context], prober: Prober) -> None:
    """Let the backend price the current units, if it prices whole graphs."""
    context = rewriter.context
    prober.own = context.backend.prices(rewriter.gm, (context.samples or [context.example])[0])


def _may_be_opened(node: fx.Node) -> bool:
    """Whether prices decide how many ops of a unit one kernel runs."""
    plan = info(node).plan
    return plan is not None and len(plan.kernel_ops) > 1


def _open_units(rewriter: Rewriter, prober: Prober | None, pinned: Pinned | None) -> list[Pin]:
    """Split the units that no kernel runs whole. Returns the decisions on units where the price decides."""
    decided = []
    for node, place in places_of(rewriter.gm, rewriter.nodes()).items():
        plan = info(node).plan
        if plan is None or not plan.kernel_ops:
            continue
        ops = plan.kernel_ops[-1]
        if len(plan.kernel_ops) > 1:
            region = read_region(rewriter.gm, node)
            if pinned is not None:
                ops = pinned.ops(place)
            elif prober is not None and region is not None:
                ops = prober.fastest(rewriter.gm, region, plan.kernel_ops)
            decided.append(Pin.at(place, "opened", ops))
        with rewriter.attributed("split_unit", split_unit):
            split_unit(rewriter, node, ops)
    return decided


def _price(rewriter: Rewriter[Context], prober: Prober, choose: bool) -> None:
    """Record the cost of every op; with `choose`, move integer ops to float where that makes the graph faster."""
    nodes = rewriter.nodes()
    regions = regions_of(rewriter.gm, nodes)
    unknown = sum(
        prober.measures and prober.can_price(region) and not prober.knows(region) for region in regions.values()
    )
    with progress_bar("measuring kernels", unknown, rewriter.context.progress if unknown else False) as advance:
        ops = priced_ops(rewriter.gm, regions, prober, advance)
        float_costs = dict(float_ops(rewriter.gm, nodes, prober))
        weight_only_costs = dict(weight_only_ops(rewriter.gm, nodes, prober))
    for node, cost in (*float_costs.items(), *weight_only_costs.items()):
        _record(rewriter, node, cost)
    float_seconds = 1e-6 * sum(cost.float_us for cost in float_costs.values())
    bfloat16 = [node for node in weight_only_costs if supports_bfloat16(rewriter.gm, node)]
    slow = slower_for_size(weight_only_costs, float_seconds + sum(op.real for op in ops if op.source), bfloat16)
    if slow is not None:
        warn(slow)
    integers: set[Key] = set(regions)
    if choose:
        ops, values, integers = choose_by_price(rewriter.gm, nodes, regions, prober, ops)
    else:
        values = priced_values(rewriter.gm, nodes, regions, prober)
        slow = slower_than_float(ops, values, integers, float_seconds)
        if slow is not None:
            warn(slow)
    idle = _drop_idle(integers, values, nodes)
    if choose and prober.own is not None:
        integers, idle = _quickest_cut(rewriter, ops, values, (integers, idle))
    conversions = conversions_of(integers, values)
    for op in ops:
        _apply_price(rewriter, op, op.key in integers, op.key in idle, conversions.get(op.key, 0.0))


def _quickest_cut(
    rewriter: Rewriter[Context],
    ops: Sequence[PricedOp],
    values: Sequence[PricedValue],
    chosen: tuple[set[Key], set[fx.Node]],
) -> tuple[set[Key], set[fx.Node]]:
    """Time whole graphs end to end: the chosen mix, all on integers, and all in float. Returns the fastest of the cuts.

    A cut is the ops on integers, and the idle ones, see `_drop_idle`. Equal cuts are timed once. Prices add up, as the
    engine has profiled both graphs: by these, a mix must gain over all on integers to be timed, and float may not be
    clearly slower.

    Args:
        rewriter: rewriter of the graph, which is timed in copies.
        ops: all ops that could run on integers.
        values: the values between them.
        chosen: the cut that is fastest by prices.
    """
    all_integers = {op.key for op in ops}
    cuts = [(all_integers, _drop_idle(all_integers, values, rewriter.nodes()))]
    priced = [op for op in ops if op.source]
    longest = seconds_of(all_integers, priced, values)
    for cut, limit in ((chosen, longest / MIN_PRICED_GAIN), ((set[Key](), chosen[1]), MAX_FLOAT_RATIO * longest)):
        if cut not in cuts and seconds_of(cut[0], priced, values) <= limit:
            cuts.append(cut)
    changes = [partial(move_to_float, [op.key for op in ops if op.key not in cut]) for cut, _ in cuts]
    return cuts[quickest(rewriter.gm, rewriter.context, changes) if len(cuts) > 1 else 0]


def _apply_price(
    rewriter: Rewriter[Context], op: PricedOp, on_integers: bool, is_idle: bool, conversions: float
) -> None:
    """Record the cost of an op that could run on integers; move it to float if it does not.

    Args:
        rewriter: rewriter of the graph.
        op: the op, with its times in seconds.
        on_integers: whether it runs on integers.
        is_idle: whether it only moves values that are not read as integers.
        conversions: extra time of conversions around it on integers, in seconds.
    """
    node: Any = op.key
    if op.source:
        around = None if is_idle else 1e6 * conversions
        _record(rewriter, node, Cost(1e6 * op.real, 1e6 * op.int8, around, op.source))
    if not on_integers:
        kind: DecisionKind = "no integer neighbour" if is_idle else "slower"
        slower = SLOWER if op.int8 > op.real else SLOWER_WITH_CONVERSIONS
        with rewriter.attributed("run_in_float", run_in_float):
            run_in_float(rewriter, node, kind, UNREAD if is_idle else slower, COVERAGE)


def move_to_float(floats: Sequence[Any], rewriter: Rewriter, copies: Mapping[fx.Node, fx.Node]) -> None:
    """Move ops to float in a copy of the graph, to time it.

    Args:
        floats: nodes of the original graph.
        rewriter: rewriter of the copy.
        copies: node of the copy for each node of the original graph.
    """
    for node in floats:
        run_in_float(rewriter, copies[node], "slower", "", COVERAGE)
    read_floats(rewriter)
    rewriter.erase_unused()


def _drop_idle(integers: set[Key], values: Sequence[PricedValue], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Remove from `integers` ops that only move data and have no integer reader, directly or through other such ops.

    Moving integers would gain nothing there and cost a rounding. Returns the removed nodes.
    """
    readers = {value.producer: value.readers for value in values}
    idle = set()
    for node in reversed(nodes):
        if precision_of(node) == "moves" and not any(r in integers for r in readers.get(node, ())):
            integers.discard(node)
            idle.add(node)
    return idle


def _able(rewriter: Rewriter) -> dict[fx.Node, Place]:
    """Nodes that run on integers so far, with their places."""
    places = places_of(rewriter.gm, rewriter.nodes())
    return {node: place for node, place in places.items() if precision_of(node) in ("int8", "moves")}


def _off_grid(rewriter: Rewriter) -> Iterator[Pin]:
    """Yield pins of ops that run in float because of their values, or because these decide a size."""
    for node, place in places_of(rewriter.gm, rewriter.nodes()).items():
        plan = info(node).plan
        if plan is not None and plan.precision == "float" and plan.decision.kind == "off the grid":
            yield Pin.at(place, "float")


def _obey(rewriter: Rewriter, pinned: Pinned, able: Mapping[fx.Node, Place]) -> None:
    """Move the ops to float that a recipe's decisions name. Warn if it names integer ops that have no kernel here."""
    for node, place in able.items():
        if pinned.is_float(place):
            with rewriter.attributed("run_in_float", run_in_float):
                run_in_float(rewriter, node, "excluded by the recipe", DECIDED, COVERAGE)
    lost = pinned.lost(able.values())
    if lost:
        nodes = {place: node for node, place in places_of(rewriter.gm, rewriter.nodes()).items()}
        missing = [place for place in lost if place not in nodes]
        if missing:
            raise RecipeError(
                f"the recipe's decisions are for another model: this one has no {missing[0]} ({len(missing)} such "
                'places). Quantize with recipe.with_optimize("speed") and take recipe_as_decided() of the result.'
            )
        plan = info(nodes[lost[0]]).plan
        warn(
            f"{len(lost)} ops that the recipe's decisions run on integers have no kernel here and run in float; the "
            f"first is {lost[0]}: {plan.decision.text if plan is not None else ''}. print(qmodel.ledger) lists all."
        )


def _record(rewriter: Rewriter, node: fx.Node, cost: Cost) -> None:
    plan = info(node).plan
    assert plan is not None  # only ops with a plan are priced
    rewriter.describe(node, plan=replace(plan, cost=cost))


MIN_PRICED_GAIN = 1.05
"""Speedup of a mix over all ops on integers, by prices, from which it is timed."""
MAX_FLOAT_RATIO = 2.0
"""Time of all ops in float relative to all on integers, by prices, above which float is not timed."""
DECIDED = "the recipe's decisions say float"
SLOWER = "float is faster at this size on this machine"
MIN_PROPOSED_BITS = 4
"""Minimum number of activation bits that a remedy proposes. Below, float is the better choice."""
WITHOUT_DYNAMIC_INPUTS = (
    'recipe.without_pass("smooth").insert_pass(fxq.passes.Smooth(measure_gain=math.inf), after="insert-qdq")'
)
COVERAGE = 'recipe.with_optimize("coverage")'
SLOWER_WITH_CONVERSIONS = "float is faster at this size on this machine: conversions cost more than the kernel saves"
