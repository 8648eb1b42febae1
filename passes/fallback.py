"""fallback: ops without a kernel, and those that lose as integers, run in float with the least conversion."""

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
from fxq.cost.min_cut import Key, PricedValue, conversions_of
from fxq.cost.prices import (
    choose_by_price,
    emits_float,
    float_ops,
    priced_ops,
    priced_values,
    regions_of,
    slower_for_size,
    slower_than_float,
    weight_only_ops,
)
from fxq.cost.probe import Prober
from fxq.cost.whole import quickest
from fxq.errors import RecipeError, warn
from fxq.graph.analysis.integer_sums import MAX_INT32, beyond_int32, node_largest_sum
from fxq.graph.info import Cost, DecisionKind, Plan, info, precision_of
from fxq.graph.query import (
    CONVERSIONS,
    DYNAMIC_GRID_OPS,
    dynamic_grid_ops,
    is_op,
    plan_of,
    reads_only_metadata,
    taken_from,
)
from fxq.graph.region import read_region
from fxq.graph.unit import calls_of
from fxq.pipeline.candidates import UNREAD
from fxq.pipeline.context import Context
from fxq.pipeline.in_float import run_in_float
from fxq.quant.spec import QuantConfig
from fxq.recipe.pass_base import Pass, Stage
from fxq.recipe.pins import Pin, Pinned, Place, places_of
from fxq.rewriting.rewriter import Rewriter
from fxq.rewriting.unit_edits import split_unit


@dataclass(frozen=True)
class Fallback(Pass):
    """Place float ops so that no value is converted twice, and let islands of integers that lose run in float.

    Before: quantize(conv2d_act(dequantize(q), w, b)), where the backend has no kernel for the function `act`
    After: quantize(act(conv2d(dequantize(q), w, b))): the convolution emits float, the function reads it as it is
    Also: with `optimize="speed"`, the ops that run on integers are those that make the graph fastest, by the seconds
    that kernels, float ops and conversions were measured to take on this machine (`fxq/cost/min_cut.py`). And a float
    op that reads dequantize(quantize(v)) of a float value v reads v itself.
    Keeps: the output up to rounding; what changes is more exact, as a rounding is left out.
    """

    name: ClassVar[str] = "fallback"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    def run(self, rewriter: Rewriter) -> None:
        """Open the units that no kernel runs whole, price what is left, then let float ops read float values."""
        context: Context = rewriter.context
        choose = context.recipe.optimize == "speed"
        pinned = Pinned(context.recipe.decided) if context.recipe.optimize == "decided" else None
        _ask_again(rewriter)
        _bound_sums(rewriter)
        prober = None
        if context.backend.has_kernels and pinned is None:
            prober = Prober(context.backend, context.recipe, costs.machine_costs(), measures=choose)
        with threads_set_to(1):  # other programs do not affect the CPU time of one thread
            opened, able = self._decide(rewriter, prober, pinned)
        runs = ("float" if precision_of(node) == "float" else "int8" for node in able)
        context.decided = (*opened, *map(Pin.at, able.values(), runs), *_off_grid(rewriter))
        for node in rewriter.nodes("quantize"):
            _read_float(rewriter, node)
        rewriter.erase_unused()

    def _decide(
        self, rewriter: Rewriter, prober: Prober | None, pinned: Pinned | None
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


def _ask_again(rewriter: Rewriter) -> None:
    """Ask the backend about layers that measure what they read, as it may be `smooth` that has decided so."""
    backend = rewriter.context.backend
    for node in rewriter.nodes():
        plan, calls = info(node).plan, calls_of(rewriter.gm, node)
        if plan is None or plan.precision != "int8" or plan.reads is None or plan.reads.range != "dynamic":
            continue
        support = support_of(backend, rewriter.gm, node, calls, QuantConfig(plan.reads, plan.weight, plan.state))
        if support.ops == 0:
            with rewriter.attributed("run_in_float", run_in_float):
                reason = f"{info(node).note}; {support.reason}".removeprefix("; ")
                run_in_float(rewriter, node, "unsupported", reason, FEWER_MEASURED)
        elif support.ops < (plan.kernel_ops or (len(calls),))[-1]:
            plan = replace(plan, kernel_ops=(support.ops,))
            rewriter.describe(node, plan=plan.decided(kind="unsupported", text=support.reason))


def _bound_sums(rewriter: Rewriter) -> None:
    """Move layers whose integer sums could overflow int32 to float, for all backends, since exports sum them, too."""
    for node in rewriter.nodes():
        plan, largest = info(node).plan, 0.0
        if plan is not None and plan.precision == "int8":
            largest = node_largest_sum(rewriter.gm, node)
        reason = beyond_int32(largest)
        if reason is not None and plan is not None:
            with rewriter.attributed("run_in_float", run_in_float):
                run_in_float(rewriter, node, "unsupported", reason, _fewer_bits(rewriter, node, plan, largest))


def _fewer_bits(rewriter: Rewriter, node: fx.Node, plan: Plan, largest: float) -> str:
    """Recipe line that reduces activation bits so that a layer's sums fit in int32, or empty. A bit halves the sums."""
    call, spec = calls_of(rewriter.gm, node)[0], plan.reads
    bits = (spec.bits if spec is not None else 0) - math.ceil(math.log2(largest / MAX_INT32))
    if spec is None or bits < MIN_PROPOSED_BITS or call.rounds_its_state:
        return ""
    measured = f', per="{spec.per}", range="dynamic"' if spec.range == "dynamic" else ""
    path = (info(node).paths or (info(node).path,))[0]
    config = f"fxq.QuantConfig(activation=fxq.TensorSpec(bits={bits}{measured}))"
    return rewriter.context.override_line(path, call.op.name, config)


def _ask_backend(rewriter: Rewriter, prober: Prober) -> None:
    """Let the backend say itself what the units that there are now cost, where it does that."""
    context = rewriter.context
    prober.own = context.backend.prices(rewriter.gm, (context.samples or [context.example])[0])


def _may_be_opened(node: fx.Node) -> bool:
    """Whether prices decide how many ops of a unit one kernel runs."""
    plan = info(node).plan
    return plan is not None and len(plan.kernel_ops) > 1


def _open_units(rewriter: Rewriter, prober: Prober | None, pinned: Pinned | None) -> list[Pin]:
    """Open the units that no kernel runs whole; what was decided of those that one runs at a price."""
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


def _price(rewriter: Rewriter, prober: Prober, choose: bool) -> None:
    """Put on record what every op costs; if they are to `choose` by it, put the integer ops that lose into float."""
    nodes, context = rewriter.nodes(), rewriter.context
    regions = regions_of(rewriter.gm, nodes)
    unknown = sum(
        prober.measures and prober.can_price(region) and not prober.knows(region) for region in regions.values()
    )
    with progress_bar("measuring kernels", unknown, context.progress if unknown else False) as advance:
        ops = priced_ops(rewriter.gm, regions, prober, advance)
        left = dict(float_ops(rewriter.gm, nodes, prober))
        kept = dict(weight_only_ops(rewriter.gm, nodes, prober))
    for priced_node, cost in (*left.items(), *kept.items()):
        _record(rewriter, priced_node, cost)
    others = 1e-6 * sum(cost.float_us for cost in left.values())
    slow = slower_for_size(kept, others + sum(op.real for op in ops if op.source))
    if slow is not None:
        warn(slow)
    integers: set[Key] = set(regions)
    if choose:
        ops, values, integers = choose_by_price(rewriter.gm, nodes, regions, prober, ops)
    else:
        values = priced_values(rewriter.gm, nodes, regions, prober)
        slow = slower_than_float(ops, values, integers, others)
        if slow is not None:
            warn(slow)
    idle = _drop_idle(integers, values, nodes)
    if choose and prober.own is not None:
        every: set[Key] = set(regions)
        idle_too = _drop_idle(every, values, nodes)
        cuts = [(every, idle_too), (integers, idle), (set[Key](), idle)]
        changes = [partial(_try, [op.key for op in ops if op.key not in cut]) for cut, _ in cuts]
        integers, idle = cuts[quickest(rewriter.gm, context, changes)]
    conversions = conversions_of(integers, values)
    for op in ops:
        node: Any = op.key
        if op.source:
            around = None if node in idle else 1e6 * conversions.get(node, 0.0)
            _record(rewriter, node, Cost(1e6 * op.real, 1e6 * op.int8, around, op.source))
        if node not in integers:
            kind: DecisionKind = "no integer neighbour" if node in idle else "slower"
            slower = NOT_WORTH_IT if op.int8 > op.real else CONVERTED
            with rewriter.attributed("run_in_float", run_in_float):
                run_in_float(rewriter, node, kind, UNREAD if node in idle else slower, COVERAGE)


def _try(floats: Sequence[Any], rewriter: Rewriter, copies: Mapping[fx.Node, fx.Node]) -> None:
    """Put these ops into float in a copy of the graph, as this pass does in the end."""
    for node in floats:
        run_in_float(rewriter, copies[node], "slower", "", COVERAGE)
    for node in rewriter.nodes("quantize"):
        _read_float(rewriter, node)
    rewriter.erase_unused()


def _drop_idle(integers: set[Key], values: Sequence[PricedValue], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Take out of `integers` what only moves data that no integer op reads, also through others; all such nodes.

    To move integers costs no less then, and loses a rounding.
    """
    readers = {value.producer: value.readers for value in values}
    idle = set()
    for node in reversed(nodes):
        if precision_of(node) == "moves" and not any(r in integers for r in readers.get(node, ())):
            integers.discard(node)
            idle.add(node)
    return idle


def _able(rewriter: Rewriter) -> dict[fx.Node, Place]:
    """What runs on integers now, with its place."""
    places = places_of(rewriter.gm, rewriter.nodes())
    return {node: place for node, place in places.items() if precision_of(node) in ("int8", "moves")}


def _off_grid(rewriter: Rewriter) -> Iterator[Pin]:
    """What runs in float because of its values: on other data it could run on integers."""
    for node, place in places_of(rewriter.gm, rewriter.nodes()).items():
        plan = info(node).plan
        if plan is not None and plan.precision == "float" and plan.decision.kind == "off the grid":
            yield Pin.at(place, "float")


def _obey(rewriter: Rewriter, pinned: Pinned, able: Mapping[fx.Node, Place]) -> None:
    """Put into float what a recipe's decisions say, and warn of what is to run on integers and cannot here."""
    for node, place in able.items():
        if pinned.is_float(place):
            with rewriter.attributed("run_in_float", run_in_float):
                run_in_float(rewriter, node, "excluded by the recipe", DECIDED, COVERAGE)
    lost = pinned.lost(able.values())
    if lost:
        there = {place: node for node, place in places_of(rewriter.gm, rewriter.nodes()).items()}
        gone = [place for place in lost if place not in there]
        if gone:
            raise RecipeError(
                f"the recipe's decisions speak of {gone[0]}, which this model has not ({len(gone)} such). They are of "
                'another model: quantize with recipe.with_optimize("speed") and take recipe_as_decided() of the result.'
            )
        plan = info(there[lost[0]]).plan
        warn(
            f"{len(lost)} ops that the recipe's decisions run on integers have no kernel here and run in float, the "
            f"first is {lost[0]}: {plan.decision.text if plan is not None else ''}. print(qmodel.ledger)"
        )


def _record(rewriter: Rewriter, node: fx.Node, cost: Cost) -> None:
    plan = info(node).plan
    assert plan is not None  # an op without one is not measured
    rewriter.describe(node, plan=replace(plan, cost=cost))


DECIDED = "the recipe's decisions say float"
NOT_WORTH_IT = "float is faster at this size on this machine"
MIN_PROPOSED_BITS = 4
"""Minimum activation bits to propose to the user; below, float is the better choice."""
FEWER_MEASURED = (
    'recipe.without_pass("smooth").insert_pass(fxq.passes.Smooth(measure_gain=math.inf), after="insert-qdq")'
)
COVERAGE = 'recipe.with_optimize("coverage")'
CONVERTED = "float is faster at this size on this machine: its conversions cost more than its kernel saves"


def _read_float(rewriter: Rewriter, quantize: fx.Node) -> None:
    """Let readers of dequantize(quantize(v)) that read floats, and those of its shape, read v, where v is float anyway.

    It is where it is made in float; and where a layer makes it that nobody reads as integers: its kernel emits floats.
    """
    value: Any = quantize.args[0]
    copies = [user for user in quantize.users if is_op(user, "dequantize")]
    readers = [user for copy in copies for user in copy.users]
    shapes = [user for user in quantize.users if reads_only_metadata(user)]
    if not _is_float(value) and not dynamic_grid_ops(quantize):  # what measures reads floats
        read_alone = len(value.users) == 1 and len(copies) + len(shapes) == len(quantize.users)
        if not read_alone or not all(map(_reads_float, readers)) or not emits_float(rewriter.gm, taken_from(value)):
            return
    with rewriter.attributed("read_float", _read_float):
        for copy in copies:
            if any(map(_reads_float, copy.users)):
                rewriter.reroute(copy, value, only=_reads_float)
        if shapes:
            rewriter.reroute(quantize, value, only=reads_only_metadata)


def _reads_float(node: fx.Node) -> bool:
    """Whether a node of the qdq graph reads floats: it computes in float, or measures and rounds what it reads."""
    return (
        _is_float(node) or is_op(node, *DYNAMIC_GRID_OPS) or (is_op(node, "quantize") and bool(dynamic_grid_ops(node)))
    )


def _is_float(node: fx.Node) -> bool:
    """Whether a node of the qdq graph computes in float: an input or output, or what annotate left in float."""
    if is_op(node, *CONVERSIONS):
        return False
    plan = plan_of(node)
    return plan is None or plan.in_float
