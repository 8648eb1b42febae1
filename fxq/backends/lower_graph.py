"""Lowering: replaces regions of the qdq graph by kernels of any backend."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Protocol

from torch import fx

from fxq.backends.base import Backend
from fxq.backends.kernel import Kernel
from fxq.backends.qdq_form import QdqForm
from fxq.errors import BackendError, InputError
from fxq.graph.analysis.integer_sums import node_refused
from fxq.graph.info import Decision, EngineLayer, FusedInfo, LoweredInfo, Plan, info, set_info
from fxq.graph.precision import PRECISIONS
from fxq.graph.query import CONVERSIONS, is_op, is_size, module_of, op_of, producer_of, submodule
from fxq.graph.region import Region, read_region
from fxq.graph.unit import calls_of
from fxq.rewriting.editor import EditContext
from fxq.rewriting.rewriter import Rewriter
from fxq.rewriting.unit_edits import open_unit


class LoweringContext(EditContext, Protocol):
    """Context that lowering needs.

    Attributes:
        regions: region of each lowered node, with its q/dq form; added to.
        backend: the backend that lowers.
    """

    regions: dict[fx.Node, Region]
    backend: Backend

    def override_line(self, path: str, op: str, config: str) -> str:
        """Line of a recipe that gives one op another config."""
        ...


def lower_graph(rewriter: Rewriter[LoweringContext]) -> None:
    """Replace the regions of the backend by its kernels, then decide which kernels overwrite their residual."""
    backend: Backend = rewriter.context.backend
    for region in backend.regions(rewriter.gm):
        _lower(rewriter, backend, region)
    _allow_inplace(rewriter)


def _lower(rewriter: Rewriter[LoweringContext], backend: Backend, region: Region) -> None:
    """Replace a region by its kernel. If a unit of several ops has none, open it and try its first op alone."""
    try:
        for node in region.nodes:
            if (reason := node_refused(rewriter.gm, node)) is not None:
                raise BackendError(reason if region.calls else f"%{node.name}: {reason}")
        kernel = backend.lower(rewriter.gm, region)
    except BackendError as error:
        if len(region.calls) > 1:
            _open_and_lower(rewriter, backend, region.node, str(error))
        else:
            _leave_in_float(rewriter, region.nodes, f"stays in qdq form: {error}")
        return
    if kernel is None:
        return
    if not isinstance(kernel, Kernel):
        raise InputError(
            f"lower() of the backend {backend.name!r} must return a fxq.extend.Kernel or None; it returned {kernel!r}."
        )
    _replace(rewriter, region, kernel)


def _open_and_lower(rewriter: Rewriter[LoweringContext], backend: Backend, node: fx.Node, reason: str) -> None:
    """Open a unit that no kernel runs whole: lower its first op, and leave the others in float."""
    plan = info(node).plan
    first, *rest = open_unit(rewriter, node)
    rewriter.describe(first, plan=plan)
    _leave_in_float(rewriter, rest, reason)
    region = read_region(rewriter.gm, first)
    if region is not None:
        _lower(rewriter, backend, region)


def _leave_in_float(rewriter: Rewriter[LoweringContext], nodes: Sequence[fx.Node], reason: str) -> None:
    """Record the decision that nodes run in float, unless their plan says so already."""
    plan = Plan(Decision("float", "unsupported", reason, decided_by=rewriter.name))
    for node in nodes:
        old_plan = info(node).plan
        if not is_op(node, *CONVERSIONS) and (old_plan is None or old_plan.precision != "float"):
            rewriter.describe(node, plan=plan)


def _replace(rewriter: Rewriter[LoweringContext], region: Region, kernel: Kernel) -> None:
    """Replace a region by a kernel, and record the region for verification."""
    read = region.inputs if kernel.reads is None else tuple(region.inputs[i] for i in kernel.reads)
    if kernel.form is None:
        kernel.form = QdqForm.of(rewriter.gm, region, kernel, read)
    ops = {node: calls_of(rewriter.gm, node) for node in region.nodes if not is_op(node, *CONVERSIONS)}
    units = [node for node, calls in ops.items() if calls] or [*region.nodes]
    name = units[0].name if len(units) == 1 else f"{units[0].name}_to_{units[-1].name}"
    names = [node.name for node in region.outputs]
    first = min([region.nodes[-1], *(user for node in region.outputs for user in node.users)])
    with rewriter.attributed(kernel.name, kernel.defined_as()):
        target = rewriter.module(kernel, name)
        node = rewriter.node("call_module", target, read, like=units, before=first)
        body = tuple(call.op.name for calls in ops.values() for call in calls)
        rewriter.describe(node, lowered=LoweredInfo(body))
        _describe_units(rewriter, node, [unit for unit in units if unit in ops])
        results = [node] if len(names) == 1 else _result_nodes(rewriter, region, node, first)
        for old, new in zip(region.outputs, results, strict=True):
            rewriter.describe(new, shape=info(old).shape, dtype=info(old).dtype)
            rewriter.reroute(old, new)
        inside = set(region.nodes)
        for old in (step.node for step in reversed(region.steps)):
            if old in inside or (is_size(old) and not old.users):
                rewriter.erase(old)
        for result, result_name in zip(results, names if len(names) > 1 else [name], strict=True):
            rewriter.rename(result, result_name)
        if len(names) > 1:  # one of the results may have taken the name
            rewriter.rename(node, name if name not in names else f"{name}_region")
    rewriter.context.regions[node] = region


def _describe_units(rewriter: Rewriter[LoweringContext], node: fx.Node, units: Sequence[fx.Node]) -> None:
    """Set the metadata of a kernel's node that follow from its units; for several units, also the plan of each op."""
    if len(units) < 2:
        kernel = submodule(rewriter.gm, node)
        for unit in units:
            notes = filter(None, (info(unit).note, kernel.note if isinstance(kernel, Kernel) else ""))
            rewriter.describe(node, fused=FusedInfo(info(unit).fused.parts), note="; ".join(notes))
        return
    plans, parts, paths = list[Plan](), list[tuple[str, ...]](), list[str]()
    for unit_info in map(info, units):
        plan, count = unit_info.plan or Plan(Decision("float", "undecided")), max(len(unit_info.fused.parts), 1)
        plan = plan.decided(text=unit_info.note) if unit_info.note and plan.precision == "int8" else plan
        plans += [plan, *[replace(plan, cost=None)] * (count - 1)]  # the first op has the cost of the whole unit
        parts += unit_info.fused.parts or (unit_info.origins,)
        paths += unit_info.fused.paths or (unit_info.path,) * count
    precisions = {plan.precision for plan in plans}
    joint_precision = next(precision for precision in PRECISIONS if precision in precisions)
    plan = Plan(Decision(joint_precision, decided_by=rewriter.name))
    rewriter.describe(
        node,
        path=_common_module(paths),
        plan=plan,
        fused=FusedInfo(tuple(parts), paths=tuple(paths)),
        lowered=info(node).lowered._replace(plans=tuple(plans)),
    )


Change = Callable[[Rewriter[LoweringContext], Mapping[fx.Node, fx.Node]], None]
"""Function that edits a copy of a graph. The mapping has the copy of each node but the output."""


def lowered_copy(gm: fx.GraphModule, graph: fx.Graph, context: LoweringContext, change: Change) -> fx.GraphModule:
    """Return a changed and lowered copy of a qdq graph, which uses the modules and tensors of `gm`."""
    copied, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copied.output(copied.graph_copy(graph, copies))
    rewriter = Rewriter(module_of(copied, gm), context, "trial")
    change(rewriter, copies)
    lower_graph(rewriter)
    rewriter.erase_unused()
    rewriter.gm.recompile()
    return rewriter.gm


def record_engine_layers(rewriter: Rewriter[LoweringContext], node: fx.Node, layers: tuple[EngineLayer, ...]) -> None:
    """Record the layers that the engine of a kernel runs, and set units that it runs in float to float precision.

    The plan of an op without a layer of its own, because the engine has fused it into another, stays as it is.
    """
    rewriter.describe(node, lowered=info(node).lowered._replace(layers=layers))
    kernel: Any = submodule(rewriter.gm, node)
    inside = kernel.form.module(kernel)
    ops = {n: calls for n in inside.graph.nodes if (calls := calls_of(inside, n))}
    units = [unit for unit in ops if not is_op(unit, *CONVERSIONS)]
    has_changed = False
    for unit in units:
        plan = info(unit).plan
        ignored = ("convert",) if plan is not None and plan.precision == "moves" else ("convert", "moves")
        own_layers = [layer for layer in layers if unit.name in layer.nodes and layer.kind not in ignored]
        runs_in_float = bool(own_layers) and all(layer.kind == "float" for layer in own_layers)
        if plan is None or plan.precision == "float" or not runs_in_float:
            continue
        has_changed, slowest = True, max(own_layers, key=lambda layer: layer.us)
        name = rewriter.context.backend.name
        reason = f"{name} runs it in {slowest.dtype}, as {slowest.op}: its conversions gain nothing"
        path, op = (info(unit).fused.paths or (info(unit).path,))[0], ops[unit][0].op.name
        line = rewriter.context.override_line(path, op, "fxq.FLOAT")
        decided = plan.decided(precision="float", kind="unsupported", text=reason, fix=line, decided_by=rewriter.name)
        set_info(unit, plan=decided)
    if has_changed:
        rewriter.describe(node, plan=info(units[0]).plan)
        _describe_units(rewriter, node, units)


def _common_module(paths: Iterable[str]) -> str:
    """Path of the innermost module that contains all of these modules."""
    split = [path.split(".") for path in paths] or [[]]
    first, last = min(split), max(split)  # all paths between them in sorted order have their common prefix
    return ".".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))


def _result_nodes(rewriter: Rewriter[LoweringContext], region: Region, node: fx.Node, before: fx.Node) -> list[fx.Node]:
    """Insert a getitem node for each output of a kernel. Its metadata are those of the op that computes the output."""
    results, inside = [], set(region.nodes)
    for i, old in enumerate(region.outputs):
        maker = producer_of(old)
        like = maker if maker in inside else old
        result = rewriter.node("call_function", operator.getitem, (node, i), like=like, before=before)
        rewriter.describe(result, origins=(info(like).fused.parts or (info(like).origins,))[-1])
        results.append(result)
    return results


def _allow_inplace(rewriter: Rewriter[LoweringContext]) -> None:
    """Let a kernel overwrite its residual if no later node reads that value.

    The residual must be the result of a kernel in memory of its own, not an input and not a view. The kernel must not
    read it as another argument, too.
    """
    order = {node: i for i, node in enumerate(rewriter.graph.nodes)}
    last_uses: dict[fx.Node, float] = {}  # cached, since a value may have very many readers
    for node in order:
        kernel = submodule(rewriter.gm, node)
        if not isinstance(kernel, Kernel) or kernel.inplace is None or len(node.args) < 2:
            continue
        residual = node.args[1]
        if not isinstance(residual, fx.Node) or residual is node.args[0] or not _is_fresh(rewriter, residual):
            continue
        if residual not in last_uses:
            alive = any(_may_alias(rewriter, user) for user in residual.users)
            last_uses[residual] = math.inf if alive else max(order[user] for user in residual.users)
        kernel.inplace = last_uses[residual] <= order[node]


def _is_fresh(rewriter: Rewriter[LoweringContext], node: fx.Node) -> bool:
    """Whether a node's value is the result of a kernel that shares no memory with another tensor."""
    module = submodule(rewriter.gm, node)
    return isinstance(module, Kernel) and not module.returns_view


def _may_alias(rewriter: Rewriter[LoweringContext], user: fx.Node) -> bool:
    """Whether the result of a node may share memory with its input."""
    module = submodule(rewriter.gm, user)
    if isinstance(module, Kernel):
        return module.returns_view
    op = op_of(user)
    return op is None or op.traits.view or user.op == "output"
