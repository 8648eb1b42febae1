"""The qdq graph as ops and values with prices: what `fxq/cost/min_cut.py` decides on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxq.cost.min_cut import Key, Priced, PricedValue, cheapest, seconds_of
from fxq.cost.probe import MIN_SPEEDUP, Prober
from fxq.graph.info import Cost, info, precision_of
from fxq.graph.query import CONVERSIONS, dynamic_grid_ops, is_op, producer_of, reads_only_metadata, taken_from
from fxq.graph.region import UnitRegion, read_region
from fxq.graph.unit import calls_of

log = logging.getLogger("fxq")
TABLE_MARGIN = 2.0
"""How far int8 over float as measured has to be from the price table's before it counts. What other programs leave of
caches and execution units makes integers up to so many times slower, also in CPU time."""


def regions_of(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> dict[fx.Node, UnitRegion]:
    """The regions of the ops and units that run on integers, and could run in float."""
    found = {}
    for node in nodes:
        runs = precision_of(node) in ("int8", "moves") and not is_op(node, *CONVERSIONS)
        region = read_region(gm, node) if runs else None
        if region is not None:
            found[node] = region
    return found


def priced_ops(
    gm: fx.GraphModule, regions: dict[fx.Node, UnitRegion], prober: Prober, advance: Callable[[], None]
) -> list[Priced]:
    """Ops with their seconds on integers and in float, the conversions around them left out.

    A conversion from one grid to another, which an op needs for what it reads, counts for its integer form. An op that
    cannot be measured stays on integers: what is wrong with its kernel is for verify-lowering to find. But one that
    only moves data, as a reshape to a size that is read at run time, costs the same either way, so that its neighbours
    decide. Where the prober measures nothing, they are those that the price table knows. `advance` is called after each
    that was measured.
    """
    ops = []
    for node, region in regions.items():
        unmeasured = Priced(node, 0.0, 0.0 if precision_of(node) == "moves" else math.inf, source="")
        if not prober.can_price(region):
            ops.append(unmeasured)
            continue
        if not prober.measures:
            ops.append(_estimated(gm, node, regions, prober) or unmeasured)
            continue
        known = prober.knows(region)
        try:
            ops.append(_priced(gm, node, regions, prober))
        except Exception as error:  # whatever a kernel raises on random inputs
            log.warning("%s cannot be timed (%s: %s).", node.name, type(error).__name__, error)
            ops.append(unmeasured)
        if not known:
            advance()
    return ops


def choose_by_price(
    gm: fx.GraphModule,
    nodes: Sequence[fx.Node],
    regions: dict[fx.Node, UnitRegion],
    prober: Prober,
    ops: list[Priced],
) -> tuple[list[Priced], list[PricedValue], set[Key]]:
    """The ops and the values with the prices that decide, and the ops that run on integers in the cheapest choice.

    The price table decides, so that the choice is the same in every process; except for ops whose measured ratio of
    int8 to float is clearly not the table's, also when they are measured again, and for ops that it does not know.
    """
    estimates = {op.key: _estimated(gm, op.key, regions, prober) for op in ops if op.source}
    apart = [op.key for op in ops if op.source and _are_apart(op, estimates[op.key])]
    prober.costs.settle(key for node in apart for key in prober.keys(regions[node]))  # type: ignore[index]
    again = {node: _priced(gm, node, regions, prober) for node in apart}
    found = []
    for op in ops:
        estimate, measured = estimates.get(op.key), again.get(op.key, op)
        if estimate is None:
            found.append(measured)
        else:
            counts = _are_apart(measured, estimate) and prober.is_sound(regions[op.key])  # type: ignore[index]
            found.append(measured if counts else estimate)
    values = priced_values(gm, nodes, regions, prober)
    leaning = [replace(op, real=MIN_SPEEDUP * op.real) for op in found]
    return found, values, cheapest(leaning, values)


def _are_apart(measured: Priced, estimate: Priced | None) -> bool:
    """Whether a measured ratio of int8 to float clearly differs from the price table's, or that knows none."""
    if estimate is None:
        return True
    ratio, wanted = measured.int8 * estimate.real, estimate.int8 * measured.real
    return not wanted / TABLE_MARGIN <= ratio <= wanted * TABLE_MARGIN


def _priced(gm: fx.GraphModule, node: Any, regions: Mapping[fx.Node, UnitRegion], prober: Prober) -> Priced:
    seconds = prober.kernel(gm, regions[node]) + _requantizing(gm, node, prober)
    return Priced(node, seconds, prober.real(gm, regions[node]))


def _estimated(gm: fx.GraphModule, node: Any, regions: Mapping[fx.Node, UnitRegion], prober: Prober) -> Priced | None:
    """An op with its seconds by the price table; None where that does not know it."""
    seconds = prober.estimate(gm, regions[node])
    if seconds is None:
        return None
    return Priced(node, seconds[0] + _requantizing(gm, node, prober), seconds[1], source="table")


def _requantizing(gm: fx.GraphModule, node: fx.Node, prober: Prober) -> float:
    """Seconds to bring what an op reads from one grid to another, shared with others that read it so."""
    regions = {read: read_region(gm, read) for read in node.all_input_nodes if is_op(read, "requantize")}
    return sum(
        prober.requantize(gm, region) / len(read.users) for read, region in regions.items() if region is not None
    )


def float_ops(gm: fx.GraphModule, nodes: Sequence[fx.Node], prober: Prober) -> Iterator[tuple[fx.Node, Cost]]:
    """The ops that run in float, with what they take: by the price table, else measured on random inputs."""
    for node in nodes:
        runs = precision_of(node) == "float" and not is_op(node, *CONVERSIONS)
        region = read_region(gm, node) if runs else None
        if region is None:
            continue
        seconds = prober.estimate_float(gm, region)
        if seconds is not None:
            yield node, Cost(1e6 * seconds, priced_by="table")
        elif prober.measures and prober.can_price(region):
            try:
                yield node, Cost(1e6 * prober.real(gm, region))
            except Exception as error:  # an op may ask more of its inputs than that they have a shape and a dtype
                log.debug("%s cannot be timed: %s: %s", node.name, type(error).__name__, error)


def weight_only_ops(gm: fx.GraphModule, nodes: Sequence[fx.Node], prober: Prober) -> Iterator[tuple[fx.Node, Cost]]:
    """The layers that compute in float with integer weights, and what each takes either way.

    Nothing is decided by it: they have these weights for their size.
    """
    for node in nodes:
        region = read_region(gm, node) if precision_of(node) == "weight-only" else None
        if region is not None and prober.measures and prober.can_price(region):
            try:
                yield node, Cost(1e6 * prober.real(gm, region), 1e6 * prober.kernel(gm, region))
            except Exception as error:  # as above
                log.debug("%s cannot be timed: %s: %s", node.name, type(error).__name__, error)


def slower_for_size(kept: Mapping[fx.Node, Cost], others: float) -> str | None:
    """What to say where integer weights make the model slower than it is in float; None where not.

    Args:
        kept: the layers with such weights, and what they take.
        others: seconds of all other ops in float.
    """
    real = others + sum(cost.float_us for cost in kept.values()) * 1e-6
    extra = {node: 1e-6 * ((cost.int8_us or cost.float_us) - cost.float_us) for node, cost in kept.items()}
    more = sum(extra.values())
    if real == 0.0 or more <= (_SLOWER - 1) * real:
        return None
    most = sorted(extra, key=lambda node: -extra[node])[:_NAMED]
    names = ", ".join(
        f"{_named(n)} ({_ms(1e-6 * (kept[n].int8_us or 0.0))}, in float {_ms(1e-6 * kept[n].float_us)})" for n in most
    )
    return (
        f"with its weights in integers, the model is estimated to take {1 + more / real:.1f} times as long as in float "
        f"on this machine: {_ms(real + more)} instead of {_ms(real)}. What loses most: {names}. "
        f"recipe.override({_named(most[0])!r}, fxq.FLOAT) leaves a layer as it is; print(qmodel.ledger) has them all."
    )


def priced_values(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], regions: dict[fx.Node, UnitRegion], prober: Prober
) -> list[PricedValue]:
    """The values between ops, with what it costs to convert them."""
    readers: dict[fx.Node, list[fx.Node | None]] = {}
    measured: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if is_op(node, *CONVERSIONS) or reads_only_metadata(node):
            continue
        for read in node.all_input_nodes:
            value = producer_of(read)
            if value.op == "get_attr" or not info(value).is_tensor:
                continue
            if (quantize := measuring(read)) is not None and node in regions:
                measured.setdefault(quantize, []).append(node)
                readers.setdefault(value, []).append(None)  # who measures a value reads floats
            else:
                readers.setdefault(value, []).append(node)
    values = [PricedValue(None, tuple(found), prober.measure(gm, q), 0.0) for q, found in measured.items()]
    for value, found in readers.items():
        maker = taken_from(value)
        if maker not in regions and not any(reader in regions for reader in found):
            continue
        elements = math.prod(info(value).shape or ())
        values.append(
            PricedValue(
                maker if maker in regions else None,
                tuple(reader if reader in regions else None for reader in found),
                prober.quantize(elements),
                prober.dequantize(elements),
                maker in regions and emits_float(gm, maker),
            )
        )
    return values


def measuring(value: fx.Node) -> fx.Node | None:
    """The quantize behind a dequantize, where its grid is measured at run time; else None."""
    source = value.args[0] if is_op(value, "dequantize") else None
    return source if isinstance(source, fx.Node) and dynamic_grid_ops(source) else None


def emits_float(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a unit is one layer with at most an activation behind it: its kernel can hand out floats."""
    plan = info(node).plan
    if plan is not None and plan.emits is not None:
        return False
    first, *rest = calls_of(gm, node)
    return first.op.traits.heavy and not any(call.op.traits.kind == "computes" for call in rest)


def slower_than_float(
    ops: Sequence[Priced], values: Sequence[PricedValue], integers: Collection[Any], left: float
) -> str | None:
    """What to say where the ops that run on integers make the model slower than it is in float; None where not.

    Args:
        ops: the ops that could run either way; those without a price are left out.
        values: the values between them.
        integers: the ops that run on integers.
        left: seconds of the ops that run in float anyway.
    """
    known = [op for op in ops if op.source]
    int8, real = left + seconds_of(integers, known, values), left + sum(op.real for op in known)
    if real == 0.0 or int8 <= _CLEARLY_SLOWER * real:
        return None
    losing = sorted((op for op in known if op.key in integers and op.int8 > op.real), key=lambda op: op.real - op.int8)
    names = ", ".join(f"{_named(op.key)} ({_ms(op.int8)}, in float {_ms(op.real)})" for op in losing[:_NAMED])
    return (
        f"with all that can on integers, the model is estimated to take {int8 / real:.1f} times as long as in float on "
        f"this machine: {_ms(int8)} instead of {_ms(real)}. "
        + (f"What loses most: {names}. " if names else "Its conversions cost more than its kernels save. ")
        + 'recipe.with_optimize("speed") leaves in float what is faster there.'
    )


_SLOWER, _CLEARLY_SLOWER, _NAMED = 1.1, 1.25, 3
"""How much slower is worth a warning, as measured, and as the price table estimates; how many ops it names."""


def _named(node: Any) -> str:
    return info(node).path or str(node.name)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
