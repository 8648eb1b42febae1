"""Rewrite rules that move quantize and dequantize across ops that only copy or compare values.

Such an op (`layout` in its row) computes the same on integers of one grid as on floats, so that each rule keeps the
values of the graph; those that leave out a rounding say so. `explain("push_dequantize", gm, node)` tells why one does
not match. Which ops run in float is decided elsewhere: `passes/fallback.py` and `fxq/pipeline/float_moves.py` apply
these rules where that pays, which depends on the whole graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxq.graph.grid import grid_of
from fxq.graph.info import info, precision_of
from fxq.graph.query import (
    CONVERSIONS,
    DYNAMIC_GRID_OPS,
    activation_nodes,
    dynamic_grid_ops,
    is_op,
    options_of,
    plan_of,
    reads_only_metadata,
    swapped,
    taken_from,
)
from fxq.graph.unit import emits_float
from fxq.rewriting.match import Match
from fxq.rewriting.pattern import rewrite
from fxq.rewriting.rewriter import Builder

# ---- towards integers


@rewrite(exclusive=False)
def push_dequantize(op: Any, q: Any) -> Any:
    """Let an op move integers: op(dequantize(q), ...) becomes dequantize(op(q, ...))."""
    return op.any_op(layout=True)(op.each(op.dequantize(q)))


@push_dequantize.unless
def op_is_planned_to_move_floats(m: Match) -> bool:
    """Whether `annotate` did not decide that the op moves integers."""
    return precision_of(m.root.node) != "moves"


@push_dequantize.unless
def inputs_have_no_common_grid(m: Match) -> bool:
    """Whether two inputs have different grids, or one has a grid per channel, per row or computed in the graph."""
    first, *others = (grid_of(m.gm, read) for read in activation_nodes(m.root.node))
    return first is None or first.axis is not None or not all(map(first.same_as, others))


@push_dequantize.becomes
def _dequantized_after(op: Builder, m: Match) -> fx.Node:
    mover, rewriter = m.root.node, op.rewriter
    read = activation_nodes(mover)
    grid = grid_of(m.gm, read[0])
    assert grid is not None  # a guard
    rewriter.update(mover, args=swapped(mover.args, {node: node.args[0] for node in read}))
    rewriter.describe(mover, dtype=grid.dtype)
    typed = info(mover).shape, torch.float32
    dq = rewriter.call("dequantize", mover, after=mover, name=f"{mover.name}_dq", typed=typed, **options_of(read[0]))
    rewriter.describe(dq, path=info(mover).path, source=info(mover).source)
    return dq


@rewrite
def pull_quantize(op: Any, x: Any) -> Any:
    """Let an op that repeats values repeat integers: quantize(op(x)) becomes op(quantize(x)), with fewer values."""
    return op.quantize(op.any_op(layout=True)(x))


@pull_quantize.unless
def scale_is_no_number(m: Match) -> bool:
    """Whether the scale is per channel, per row or computed in the graph."""
    return not _has_one_scale(m.options("quantize"))


@pull_quantize.unless
def op_does_not_enlarge_its_input(m: Match) -> bool:
    """Whether quantizing the input of the op would not be less work, or the op changes the dtype."""
    mover = _mover(m)
    return _size(mover) <= _size(m.x.node) or m.x.dtype != info(mover).dtype


@pull_quantize.becomes
def _quantized_before(op: Builder, m: Match) -> fx.Node:
    quantize, mover, x, rewriter = m.root.node, _mover(m), m.x.node, op.rewriter
    q = rewriter.node("call_function", quantize.target, (x,), dict(quantize.kwargs), after=x, name=f"{x.name}_q")
    rewriter.describe(q, path=info(x).path, source=info(x).source)
    rewriter.update(mover, args=swapped(mover.args, {x: q}))
    rewriter.describe(mover, dtype=options_of(quantize)["dtype"])
    return mover


def _mover(m: Match) -> fx.Node:
    """The op whose value the matched quantize reads."""
    (mover,) = activation_nodes(m.root.node)
    return mover


def _size(node: fx.Node) -> int:
    return math.prod(info(node).shape or ())


@rewrite(exclusive=False)
def cancel_pair(op: Any, x: Any) -> Any:
    """Quantize that directly reads a dequantize."""
    return op.quantize(op.dequantize(x))


def _has_one_scale(grid: Mapping[str, Any]) -> bool:
    """Whether the scale of a grid is a number, and not per channel, per row or computed in the graph."""
    return isinstance(grid["scale"], (int, float))


@cancel_pair.unless
def has_scales_that_are_no_numbers(m: Match) -> bool:
    """Whether one of two grids has a scale per channel or row, or one that the graph computes."""
    return not _have_one_grid(m) and not all(_has_one_scale(m.options(op)) for op in ("quantize", "dequantize"))


def _have_one_grid(m: Match) -> bool:
    target, source = m.options("quantize"), m.options("dequantize")
    return all(target[key] == source[key] for key in source.keys() & target.keys())  # activations are never packed


@cancel_pair.becomes
def _cancelled(op: Any, m: Match) -> Any:
    """Return x if both have one grid, else one requantize of it."""
    if _have_one_grid(m):
        return m.x
    target, source = m.options("quantize"), m.options("dequantize")
    del target["axis"]
    return op.requantize(m.x, from_scale=source["scale"], from_zero_point=source["zero_point"], **target)


# ---- towards floats


@rewrite(exclusive=False)
def move_in_float(op: Any, q: Any) -> Any:
    """Let an op move floats: op(q, ...) becomes quantize(op(dequantize(q), ...)). Undoes `push_dequantize`."""
    return op.any_op(layout=True)(op.each(q))


@move_in_float.unless
def op_moves_no_integers(m: Match) -> bool:
    """Whether the op reads floats already."""
    return grid_of(m.gm, m.root.node) is None


@move_in_float.becomes
def _between_conversions(op: Builder, m: Match) -> fx.Node:
    mover, rewriter = m.root.node, op.rewriter
    about, grid, real = info(mover), grid_of(m.gm, mover), {}
    for value in m.q.value:
        # an input that was requantized for the op is dequantized from its original grid
        original = value.args[0] if is_op(value, "requantize") else value
        own = grid_of(m.gm, original)
        assert own is not None and grid is not None  # the op moves integers of one grid
        real[value] = rewriter.call(
            "dequantize", original, before=mover, name=f"{original.name}_dq",
            typed=(info(original).shape, torch.float32),
            scale=own.s, zero_point=own.z, qmin=own.qmin, qmax=own.qmax,
        )  # fmt: skip
        rewriter.describe(real[value], path=about.path, source=about.source)
    assert grid is not None
    rewriter.update(mover, args=swapped(mover.args, real))
    q = rewriter.call(
        "quantize", mover, after=mover, name=f"{mover.name}_q", typed=(about.shape, about.dtype),
        scale=grid.s, zero_point=grid.z, qmin=grid.qmin, qmax=grid.qmax, dtype=grid.dtype,
    )  # fmt: skip
    rewriter.describe(q, path=about.path, source=about.source)
    rewriter.describe(mover, dtype=info(real[m.q.value[0]]).dtype)
    return q


@rewrite(exclusive=False)
def move_unrounded(op: Any, x: Any) -> Any:
    """Let an op move values before they are rounded: op(dequantize(quantize(x))) becomes op(x).

    Shape queries of the integers read x, too. Leaves out a rounding. `fxq/pipeline/float_moves.py` decides where.
    """
    return op.any_op(layout=True)(op.dequantize(op.quantize(x)))


@move_unrounded.unless
def op_moves_floats(m: Match) -> bool:
    """Whether `annotate` did not decide that the op moves integers."""
    return precision_of(m.root.node) != "moves"


@move_unrounded.unless
def integers_have_another_reader(m: Match) -> bool:
    """Whether an op reads the integers of `x`, or a second one their floats, so that they are computed anyway."""
    (dequantize,) = activation_nodes(m.root.node)
    return len(dequantize.users) != 1 or has_integer_reader(m.x.node, dequantize)


@move_unrounded.becomes
def _reading_floats(op: Builder, m: Match) -> fx.Node:
    (dequantize,) = activation_nodes(m.root.node)
    (quantize,) = activation_nodes(dequantize)
    op.rewriter.update(m.root.node, args=swapped(m.root.node.args, {dequantize: m.x.node}))
    op.rewriter.reroute(quantize, m.x.node, only=reads_only_metadata)
    return m.root.node


def has_integer_reader(node: fx.Node, dequantize: fx.Node | None = None) -> bool:
    """Whether a node reads the integers of a value on a static grid; `dequantize` and shape queries do not count."""
    readers = {reader for user in node.users if _is_static_quantize(user) for reader in user.users}
    return any(reader is not dequantize and not reads_only_metadata(reader) for reader in readers)


def _is_static_quantize(node: fx.Node) -> bool:
    """Whether a node quantizes to a grid that is known before the model runs."""
    return is_op(node, "quantize") and not dynamic_grid_ops(node)


@rewrite(exclusive=False)
def read_float(op: Any, x: Any) -> Any:
    """Let float ops and shape queries that read dequantize(quantize(x)) read x, if x is float anyway.

    It is float if a float op computes it, or if a layer computes it and has no integer reader: its kernel emits floats.
    Leaves out a rounding.
    """
    return op.quantize(x)


@read_float.unless
def value_has_no_float_reader(m: Match) -> bool:
    """Whether only ops that read integers depend on the quantize."""
    return not has_float_reader(m.root.node)


def has_float_reader(quantize: fx.Node) -> bool:
    """Whether a float op or a shape query reads the integers of a quantize, or what is dequantized from them."""
    copies, shapes = _float_forms(quantize)
    return bool(shapes) or any(reads_float(user) for copy in copies for user in copy.users)


@read_float.unless
def value_is_integers_for_another_reader(m: Match) -> bool:
    """Whether an integer kernel computes the value, and has to emit integers."""
    quantize, x = m.root.node, m.x.node
    if _is_float(x) or dynamic_grid_ops(quantize):  # dynamic ranges are computed from floats
        return False
    copies, shapes = _float_forms(quantize)
    readers = [user for copy in copies for user in copy.users]
    read_alone = len(x.users) == 1 and len(copies) + len(shapes) == len(quantize.users)
    return not (read_alone and all(map(reads_float, readers)) and emits_float(m.gm, taken_from(x)))


@read_float.becomes
def _rerouted(op: Builder, m: Match) -> fx.Node:
    quantize, x = m.root.node, m.x.node
    copies, shapes = _float_forms(quantize)
    for copy in copies:
        if any(map(reads_float, copy.users)):
            op.rewriter.reroute(copy, x, only=reads_float)
    if shapes:
        op.rewriter.reroute(quantize, x, only=reads_only_metadata)
    return quantize


def _float_forms(quantize: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Dequantizes of a quantize, and shape queries of it."""
    users = quantize.users
    return [user for user in users if is_op(user, "dequantize")], [user for user in users if reads_only_metadata(user)]


def reads_float(node: fx.Node) -> bool:
    """Whether a node of the qdq graph reads floats: it computes in float, or quantizes with a dynamic range."""
    return (
        _is_float(node) or is_op(node, *DYNAMIC_GRID_OPS) or (is_op(node, "quantize") and bool(dynamic_grid_ops(node)))
    )


def _is_float(node: fx.Node) -> bool:
    """Whether a node of the qdq graph computes in float: an input, an output, or an op with a float plan."""
    if is_op(node, *CONVERSIONS):
        return False
    plan = plan_of(node)
    return plan is None or plan.in_float
