"""Construction of the ledger: matches each op of the float model with the nodes of the final graph that compute it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import fx

from fxq.backends.kernel import Kernel
from fxq.backends.table.dynamic_linear import DynamicLinear
from fxq.common.isolation import seeded
from fxq.errors import PassError
from fxq.graph.info import Cost, Decision, info
from fxq.graph.precision import SPLIT_OP_PRECISIONS
from fxq.graph.query import CONVERSIONS, is_op, submodule, taken_from, values_of
from fxq.graph.region import weight_sizes
from fxq.graph.unit import calls_of, unit_of
from fxq.graph.view import NodeView
from fxq.ledger.float_record import FloatRecord, record_of
from fxq.ledger.layer_error import LayerErrors, measure, measured_with
from fxq.ledger.ledger import Entry, Ledger, rows_by_node
from fxq.ledger.remedies import IntegerEdges, Remedies
from fxq.pipeline.context import Context
from fxq.pipeline.float_ops import FloatModelOp, FloatModelOps
from fxq.pipeline.history import History


def ledger_of(history: History, gm: fx.GraphModule, context: Context) -> tuple[Ledger, FloatRecord]:
    """Return the ledger of a finished pipeline with final graph `gm`, and the record of the float model.

    Runs both models on a recorded batch.
    """
    original = context.original
    if original is None:
        raise PassError("the ledger needs the ops of the float model, which canonicalize keeps; it did not run.")
    views = history[-1].graph.by_name
    nodes = [n for n in gm.graph.nodes if info(n).origins and views[n.name].kind not in _NO_OPS]
    lowered = context.backend.has_kernels and any(step.name == "lower" for step in history)
    workers = [worker for n in nodes for worker in _workers(gm, n, views[n.name], original, lowered)]
    runs: dict[str, list[_Worker]] = {}
    absorbed: dict[str, _Worker] = {}
    for worker in workers:
        for name in worker.runs:
            runs.setdefault(name, []).append(worker)
        absorbed.update(dict.fromkeys(worker.absorbs, worker))
    entries = [_entry(op, runs.get(op.name, []), absorbed.get(op.name), context) for op in original.ops]
    node_rows, edges = rows_by_node(entries), IntegerEdges(gm)
    with context.untouched(), seeded():  # both graphs share modules with the user's model
        errors = measure(original, gm, node_rows, measured_with(context), edges.read)
    remedies = Remedies(edges, entries)
    lines = {node_rows[n.name].row.name: remedies.line(n) for n in nodes if n.name in node_rows}
    costs = {w.runs[0]: w.cost for w in reversed(workers) if w.runs}
    first = {w.node: w.runs[0] for w in reversed(workers) if w.runs}  # the row that reports the size of the kernel
    sizes: dict[str, tuple[int, int]] = {}
    for node, name in first.items():
        (values, size), (more_values, more) = sizes.get(name, (0, 0)), _weight_sizes(gm, node)
        sizes[name] = values + more_values, size + more
    entries = [replace(e, remedy=lines.get(e.name, ""), **_size_columns(*sizes.get(e.name, (0, 0)))) for e in entries]
    ledger = Ledger(tuple(_with_numbers(entry, errors, costs.get(entry.name)) for entry in entries))
    return ledger, record_of(context.model, context.example, errors.values, context.scaled)


def _with_numbers(entry: Entry, errors: LayerErrors, cost: Cost | None) -> Entry:
    """Return an entry with its errors and times. In a unit, the last op has the SQNR and the first has the times."""
    times = {f.name: getattr(cost, f.name) for f in fields(Cost)} if cost is not None else {}
    sqnr, own, fault = (d.get(entry.name) for d in (errors.sqnr, errors.own_sqnr, errors.fault_sqnr))
    return replace(entry, sqnr=sqnr, own_sqnr=own, fault_sqnr=fault, **times)


_NO_OPS = ("convert", "size", "constant", "io", "observer")


@dataclass(frozen=True)
class _Worker:
    """Node of the final graph, with the ops of the float model that it computes.

    Attributes:
        node: the node.
        decision: its precision, and the reason.
        cost: times of its ops, if they were measured.
        ops: names of the ops that the node runs in the op table, such as "linear".
        runs: names of the float model's ops that it computes, in execution order.
        absorbs: names of the ops that were folded into the weights of these.
    """

    node: fx.Node
    decision: Decision
    cost: Cost | None
    ops: tuple[str, ...]
    runs: tuple[str, ...]
    absorbs: tuple[str, ...]


def _workers(
    gm: fx.GraphModule, node: fx.Node, view: NodeView, original: FloatModelOps, lowered: bool
) -> Iterator[_Worker]:
    """Workers of a node: one, or for a kernel of several units or several outputs, one for each op.

    Each unit has a decision of its own. If the node returns several values, an op's worker has the node of its value.
    """
    node_info = info(node)
    if taken_from(node) is not node:
        return
    inside = node_info.lowered.body or tuple(call.op.name for call in calls_of(gm, node)) or (view.label,)
    origins = node_info.fused.parts or (node_info.origins,)
    values = {info(value).origins: value for value in reversed(values_of(node)) if value is not node}
    decisions = [(plan.decision, plan.cost) for plan in node_info.lowered.plans]
    if not decisions:
        decision, cost = (
            _decision(gm, node, view.kind, lowered),
            node_info.plan.cost if node_info.plan is not None else None,
        )
        if not values or len(origins) != len(inside):
            yield _Worker(node, decision, cost, inside, *_ops_of(origins, inside, original))
            return
        decisions = [(decision, cost), *[(decision, None)] * (len(origins) - 1)]
    for part, op, (decision, cost) in zip(origins, inside, decisions, strict=True):
        yield _Worker(values.get(part, node), decision, cost, (op,), *_ops_of((part,), (op,), original))


def _ops_of(
    parts: tuple[tuple[str, ...], ...], inside: tuple[str, ...], original: FloatModelOps
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the ops that parts of a node run, and of the ops that were folded into their weights.

    Args:
        parts: origins of each part.
        inside: op that each part runs.
        original: the ops of the float model.
    """
    by_origin = original.by_origin
    runs: list[str] = []
    absorbs: list[str] = []
    for i, part in enumerate(parts):
        names = list(dict.fromkeys(by_origin[o] for o in part if by_origin.get(o) in original.by_name))
        named = [name for name in names if len(parts) == len(inside) and original.by_name[name].op == inside[i]]
        runs += named or names
        absorbs += [name for name in names if named and name not in named]
    return tuple(runs), tuple(absorbs)


def _weight_sizes(gm: fx.GraphModule, node: fx.Node) -> tuple[int, int]:
    """Number of values of the integer weights of a node, or of its kernel, and their bytes with scales."""
    kernel = submodule(gm, node)
    if not isinstance(kernel, Kernel):
        return weight_sizes(gm, node)
    if isinstance(kernel, DynamicLinear):  # may store two values to a byte, unlike its q/dq form
        weight = kernel.stored_weight()
        return weight.numel, sum(t.nbytes for name, t in kernel.named_buffers() if name.startswith("weight"))
    form = kernel.form.module(kernel) if kernel.form is not None else None
    sizes = [weight_sizes(form, inside) for inside in form.graph.nodes] if form is not None else []
    return sum(values for values, _ in sizes), sum(size for _, size in sizes)


def _size_columns(values: int, size: int) -> dict[str, Any]:
    """Columns of the ledger for weights with this number of values and these bytes."""
    return {"weight_values": values, "saved_bytes": 4 * values - size}


def _decision(gm: fx.GraphModule, node: fx.Node, kind: str, lowered: bool) -> Decision:
    """Decision for a node: its precision, and the reason for float, also if no pass recorded one."""
    plan, kept = info(node).plan, info(node).traced.kept
    undecided = Decision("float", "undecided", info(node).note or "no pass has planned it")
    decision = plan.decision if plan is not None else kept or undecided
    if kind not in ("int8", "weight-only", "moves"):
        return replace(decision, precision="float") if decision.text else replace(undecided, fix=decision.fix)
    if lowered and _is_in_qdq_form(gm, node) and kind != "weight-only":
        why = "stays in qdq form: the backend has no kernel for it"
        return replace(decision, precision="float", text=decision.text or why, kind=decision.kind or "unsupported")
    return Decision(decision.precision, text=info(node).note, decided_by=decision.decided_by)


def _is_in_qdq_form(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node of a lowered graph computes in float, between a dequantize and a quantize."""
    module = submodule(gm, node)
    if is_op(node, "quantized_rows", "rotate_rows"):
        return False
    if module is not None and unit_of(gm, node) is None:  # a kernel, whether its output is integer or float
        return False
    dtype = info(values_of(node)[0]).dtype
    return dtype is not None and dtype.is_floating_point


def _entry(op: FloatModelOp, workers: Sequence[_Worker], absorber: _Worker | None, context: Context) -> Entry:
    plain = Entry(op.name, op.path, op.op, "folded", source=op.source, macs=op.macs)
    if not workers and absorber is not None:
        return replace(plain, into=absorber.node.name, reason=f"into {absorber.node.name}")
    if not workers and not op.gone and op.op in CONVERSIONS:
        return replace(plain, reason="converts between floats and integers")
    if not workers:
        return replace(plain, reason=op.gone or "has no effect on the output")
    own = [worker for worker in workers if op.op in worker.ops]  # the others only add parts of its value
    worker = min(own or workers, key=lambda w: SPLIT_OP_PRECISIONS.index(w.decision.precision))
    decision, into = worker.decision, workers[-1].node.name
    plain = replace(plain, precision=decision.precision, into=into, kind=decision.kind, decided_by=decision.decided_by)
    if decision.precision == "float":
        later = worker.runs[0] != op.name and context.config_for(op.path, op.op)[0].is_float
        fix = "" if later else decision.fix  # the override of a unit's first op does not affect its other ops
        return replace(plain, reason=decision.text, fix=fix)
    return replace(plain, reason=decision.text, fix=context.override_line(op.path, op.op, "fxq.FLOAT"))
