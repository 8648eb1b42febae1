"""Prices of the ops and values of a qdq graph, for the choice in `fxq/cost/min_cut.py`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxq.backends.loops.code import compiler
from fxq.backends.plain.bfloat16_linear import bfloat16_refused
from fxq.backends.plain.few_rows import MAX_ROWS
from fxq.backends.plain.stored_weight import StoredWeight
from fxq.cost.min_cut import Key, PricedOp, PricedValue, cheapest, seconds_of
from fxq.cost.probe import MIN_SPEEDUP, Prober
from fxq.graph.info import Cost, info, precision_of
from fxq.graph.query import CONVERSIONS, dynamic_grid_ops, is_op, producer_of, reads_only_metadata, taken_from
from fxq.graph.region import Region, integer_weight, read_region
from fxq.graph.unit import calls_of, emits_float

log = logging.getLogger("fxq")
TABLE_MARGIN = 2.0
"""Factor by which a measured ratio of int8 to float must differ from the price table's to override it. Other programs
slow integer kernels down by up to this factor, also in CPU time."""


def regions_of(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> dict[fx.Node, Region]:
    """Return the regions of the ops and units that run on integers and could run in float."""
    regions = {}
    for node in nodes:
        runs = precision_of(node) in ("int8", "moves") and not is_op(node, *CONVERSIONS)
        region = read_region(gm, node) if runs else None
        if region is not None:
            regions[node] = region
    return regions


def priced_ops(
    gm: fx.GraphModule, regions: dict[fx.Node, Region], prober: Prober, advance: Callable[[], None]
) -> list[PricedOp]:
    """Return the prices of ops on integers and in float, without the conversions around them.

    Requantizing an input counts as part of the op's integer form. Ops that cannot be measured stay on integers
    (verify-lowering finds out whether their kernels are wrong), except ops that only move data: they get the same price
    either way, so that their neighbours decide. If the prober does not measure, prices come from the price table.

    Args:
        gm: module of the qdq graph.
        regions: regions of the ops.
        prober: source of the prices.
        advance: called after each op that was measured.
    """
    ops = []
    for node, region in regions.items():
        unmeasured = PricedOp(node, 0.0, 0.0 if precision_of(node) == "moves" else math.inf, source="")
        if not prober.can_price(region):
            ops.append(unmeasured)
            continue
        if not prober.measures and prober.own_cost(region) is None:
            ops.append(_estimated(gm, node, regions, prober) or unmeasured)
            continue
        is_measured = prober.knows(region)
        try:
            ops.append(_priced(gm, node, regions, prober))
        except Exception as error:  # kernels may raise anything on random inputs
            log.warning("%s cannot be timed (%s: %s).", node.name, type(error).__name__, error)
            ops.append(unmeasured)
        if not is_measured:
            advance()
    return ops


def least_share(gm: fx.GraphModule, prober: Prober) -> tuple[float, list[fx.Node]]:
    """Return the least time that a choice of ops in float can give, and these ops, by prices; nothing is measured.

    Args:
        gm: module of the qdq graph.
        prober: source of the prices, which does not measure.

    Returns:
        The time, with the conversions between integers and floats, relative to that with all possible ops on integers,
        or 0 if no op has a price; and the nodes that run in float.
    """
    nodes = list(gm.graph.nodes)
    regions = regions_of(gm, nodes)
    ops = [op for op in priced_ops(gm, regions, prober, lambda: None) if op.source]
    if not ops:
        return 0.0, []
    keys = {op.key for op in ops}
    priced = {node: region for node, region in regions.items() if node in keys}
    values = priced_values(gm, nodes, priced, prober)
    integers = cheapest(ops, values)
    every, least = (seconds_of(choice, ops, values) for choice in (keys, integers))
    return (least / every if every else 0.0), [node for node in priced if node not in integers]


def choose_by_price(
    gm: fx.GraphModule,
    nodes: Sequence[fx.Node],
    regions: dict[fx.Node, Region],
    prober: Prober,
    ops: list[PricedOp],
) -> tuple[list[PricedOp], list[PricedValue], set[Key]]:
    """Choose the ops that run on integers by price.

    The price table decides, so that the choice is reproducible. Measurements replace it for ops that it does not have,
    and for ops whose measured ratio of int8 to float clearly differs, also when it is measured again.

    Args:
        gm: module of the qdq graph.
        nodes: its nodes.
        regions: regions of the ops.
        prober: source of the prices.
        ops: measured prices of the ops.

    Returns:
        The ops and values with the prices that decided, and the ops that run on integers.
    """
    estimates = {op.key: _estimated(gm, op.key, regions, prober) for op in ops if op.source}
    apart = [op.key for op in ops if op.source and _are_apart(op, estimates[op.key])]
    prober.costs.settle(key for node in apart for key in prober.keys(regions[node]))  # type: ignore[index]
    again = {node: _priced(gm, node, regions, prober) for node in apart}
    chosen = []
    for op in ops:
        estimate, measured = estimates.get(op.key), again.get(op.key, op)
        if estimate is None:
            chosen.append(measured)
        else:
            counts = _are_apart(measured, estimate) and prober.is_sound(regions[op.key])  # type: ignore[index]
            chosen.append(measured if counts else estimate)
    values = priced_values(gm, nodes, regions, prober)
    biased = [replace(op, real=MIN_SPEEDUP * op.real) for op in chosen]
    return chosen, values, cheapest(biased, values)


def _are_apart(measured: PricedOp, estimate: PricedOp | None) -> bool:
    """Whether a measured ratio of int8 to float clearly differs from the price table's, or the table has none."""
    if estimate is None:
        return True
    ratio, wanted = measured.int8 * estimate.real, estimate.int8 * measured.real
    return not wanted / TABLE_MARGIN <= ratio <= wanted * TABLE_MARGIN


def _priced(gm: fx.GraphModule, node: Any, regions: Mapping[fx.Node, Region], prober: Prober) -> PricedOp:
    seconds = prober.kernel(gm, regions[node]) + _requantizing(gm, node, prober)
    return PricedOp(node, seconds, prober.real(gm, regions[node]))


def _estimated(gm: fx.GraphModule, node: Any, regions: Mapping[fx.Node, Region], prober: Prober) -> PricedOp | None:
    """Price of an op by the price table; None if the table does not have it."""
    seconds = prober.estimate(gm, regions[node])
    if seconds is None:
        return None
    return PricedOp(node, seconds[0] + _requantizing(gm, node, prober), seconds[1], source="table")


def _requantizing(gm: fx.GraphModule, node: fx.Node, prober: Prober) -> float:
    """Seconds to requantize the inputs of an op, divided among all ops that read the result."""
    regions = {read: read_region(gm, read) for read in node.all_input_nodes if is_op(read, "requantize")}
    return sum(
        prober.requantize(gm, region) / len(read.users) for read, region in regions.items() if region is not None
    )


def float_ops(gm: fx.GraphModule, nodes: Sequence[fx.Node], prober: Prober) -> Iterator[tuple[fx.Node, Cost]]:
    """Ops that run in float with their times: by the price table, or measured on random inputs."""
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
            except Exception as error:  # an op may require more of its inputs than a shape and dtype
                log.debug("%s cannot be timed: %s: %s", node.name, type(error).__name__, error)


def weight_only_ops(gm: fx.GraphModule, nodes: Sequence[fx.Node], prober: Prober) -> Iterator[tuple[fx.Node, Cost]]:
    """Layers that compute in float with integer weights, with their times for float and integer weights.

    The times do not decide anything: integer weights are chosen for their size.
    """
    for node in nodes:
        region = read_region(gm, node) if precision_of(node) == "weight-only" else None
        if region is not None and prober.measures and prober.can_price(region):
            try:
                yield node, Cost(1e6 * prober.real(gm, region), 1e6 * prober.kernel(gm, region))
            except Exception as error:  # see `float_ops`
                log.debug("%s cannot be timed: %s: %s", node.name, type(error).__name__, error)
            prober.costs.release(prober.keys(region))  # with the float weights, which files may hold


def supports_bfloat16(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether PyTorch has a kernel in bfloat16 for a weight-only layer, and its recipe does not allow it."""
    (call, *_), plan = calls_of(gm, node), info(node).plan
    if call.op.name != "linear" or plan is None or plan.compute != "float32":
        return False
    weight, source = integer_weight(gm, call.tensors["weight"]), call.tensors["x"]
    shape = info(source).shape if isinstance(source, fx.Node) else None
    fits = shape is not None and 0 < math.prod(shape[:-1]) <= MAX_ROWS
    return fits and weight is not None and bfloat16_refused(StoredWeight.of(weight)) is None


def slower_for_size(
    costs: Mapping[fx.Node, Cost], other_seconds: float, bfloat16: Collection[fx.Node] = ()
) -> str | None:
    """Return a warning if integer weights make the model slower than float; otherwise None.

    Args:
        costs: times of the layers with integer weights.
        other_seconds: seconds of all other ops in float.
        bfloat16: layers that the recipe could allow to compute in bfloat16, see `supports_bfloat16`.
    """
    real = other_seconds + sum(cost.float_us for cost in costs.values()) * 1e-6
    extra = {node: 1e-6 * ((cost.int8_us or cost.float_us) - cost.float_us) for node, cost in costs.items()}
    total_extra = sum(extra.values())
    if real == 0.0 or total_extra <= (_MIN_MEASURED_SLOWDOWN - 1) * real:
        return None
    slowest = sorted(extra, key=lambda node: -extra[node])[:_MAX_NAMED_OPS]
    names = ", ".join(
        f"{_name_of(n)} ({_ms(1e-6 * (costs[n].int8_us or 0.0))}, in float {_ms(1e-6 * costs[n].float_us)})"
        for n in slowest
    )
    return (
        f"with integer weights, the model is estimated to take {1 + total_extra / real:.1f} times as long as in float "
        f"on this machine: {_ms(real + total_extra)} instead of {_ms(real)}. The layers that lose the most: {names}. "
        f"{_without_loops(any(node in costs for node in bfloat16)) if compiler.installed() == 'none' else ''}"
        f"To keep a layer in float: recipe.override({_name_of(slowest[0])!r}, fxq.FLOAT). print(qmodel.ledger) shows "
        "all of them."
    )


def _without_loops(supports_bfloat16: bool) -> str:
    """Advice on faster linear layers where Numba is missing."""
    bfloat16 = 'in bfloat16 (fxq.Recipe.weight_only(compute="bfloat16")) or ' if supports_bfloat16 else ""
    return (
        "Numba is not installed, whose compiled loops multiply few rows faster than float: pip install fxq[jit]. "
        f'Without it, large linear layers are faster {bfloat16}with dynamic 8-bit activations (the preset "dynamic"). '
    )


def priced_values(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], regions: dict[fx.Node, Region], prober: Prober
) -> list[PricedValue]:
    """Values between ops, with the prices of their conversions."""
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
                readers.setdefault(value, []).append(None)  # a dynamic range is computed from floats
            else:
                readers.setdefault(value, []).append(node)
    values = [PricedValue(None, tuple(layers), prober.measure(gm, q), 0.0) for q, layers in measured.items()]
    for value, value_readers in readers.items():
        maker = taken_from(value)
        if maker not in regions and not any(reader in regions for reader in value_readers):
            continue
        elements = math.prod(info(value).shape or ())
        values.append(
            PricedValue(
                maker if maker in regions else None,
                tuple(reader if reader in regions else None for reader in value_readers),
                prober.quantize(elements),
                prober.dequantize(elements),
                maker in regions and emits_float(gm, maker),
            )
        )
    return values


def measuring(value: fx.Node) -> fx.Node | None:
    """Return the quantize node before a dequantize node if its grid is dynamic; otherwise None."""
    source = value.args[0] if is_op(value, "dequantize") else None
    return source if isinstance(source, fx.Node) and dynamic_grid_ops(source) else None


def slower_than_float(
    ops: Sequence[PricedOp], values: Sequence[PricedValue], integers: Collection[Any], left: float
) -> str | None:
    """Return a warning if the ops on integers make the model slower than float; otherwise None.

    Args:
        ops: the ops that could run either way; those without a price do not count.
        values: the values between them.
        integers: the ops that run on integers.
        left: seconds of the ops that run in float anyway.
    """
    priced = [op for op in ops if op.source]
    int8, real = left + seconds_of(integers, priced, values), left + sum(op.real for op in priced)
    if real == 0.0 or int8 <= _MIN_ESTIMATED_SLOWDOWN * real:
        return None
    losing = sorted((op for op in priced if op.key in integers and op.int8 > op.real), key=lambda op: op.real - op.int8)
    names = ", ".join(f"{_name_of(op.key)} ({_ms(op.int8)}, in float {_ms(op.real)})" for op in losing[:_MAX_NAMED_OPS])
    return (
        f"with all possible ops on integers, the model is estimated to take {int8 / real:.1f} times as long as in "
        f"float on this machine: {_ms(int8)} instead of {_ms(real)}. "
        + (f"The ops that lose the most: {names}. " if names else "Its conversions cost more than its kernels save. ")
        + 'recipe.with_optimize("speed") keeps ops in float that are faster there, but not with effort="fast".'
    )


_MIN_MEASURED_SLOWDOWN, _MIN_ESTIMATED_SLOWDOWN = 1.1, 1.25
"""Time relative to float from which there is a warning, for measured times and for those of the price table."""
_MAX_NAMED_OPS = 3
"""Number of ops that a warning names."""


def _name_of(node: Any) -> str:
    return info(node).path or str(node.name)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
