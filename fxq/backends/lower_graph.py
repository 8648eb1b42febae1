"""Regions of the qdq graph become kernels: what is done for every backend."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from torch import fx

from fxq.backends.base import Backend
from fxq.backends.kernel import Kernel
from fxq.backends.qdq_form import Form
from fxq.errors import BackendError, InputError
from fxq.graph.analysis.integer_sums import node_refused
from fxq.graph.info import Decision, EngineLayer, Plan, Precision, info, set_info
from fxq.graph.query import CONVERSIONS, is_op, is_size, op_of, producer_of, submodule
from fxq.graph.region import Region, UnitRegion, read_region
from fxq.graph.unit import calls_of
from fxq.rewriting.rewriter import Rewriter
from fxq.rewriting.unit_edits import open_unit

_PRECISIONS: tuple[Precision, ...] = ("int8", "weight-only", "moves", "float")
"""What a kernel counts as that runs ops of each: the first that there is."""


def lower_graph(rewriter: Rewriter) -> None:
    """Replace the regions of the backend by its kernels; last, say which residuals these may overwrite."""
    backend: Backend = rewriter.context.backend
    for region in backend.regions(rewriter.gm):
        _lower(rewriter, backend, region)
    _settle_inplace(rewriter)


def _lower(rewriter: Rewriter, backend: Backend, region: Region) -> None:
    """Replace a region by its kernel. Of a unit that has none, the first op is tried alone."""
    try:
        for node in region.nodes:
            if (reason := node_refused(rewriter.gm, node)) is not None:
                raise BackendError(reason if isinstance(region, UnitRegion) else f"%{node.name}: {reason}")
        kernel = backend.lower(rewriter.gm, region)
    except BackendError as error:
        if isinstance(region, UnitRegion) and len(region.calls) > 1:
            _open(rewriter, backend, region.node, str(error))
        else:
            _leave_in_float(rewriter, region.nodes, f"stays in qdq form: {error}")
        return
    if kernel is None:
        return
    if not isinstance(kernel, Kernel):
        raise InputError(f"lower of the backend {backend.name!r} returns a fxq.extend.Kernel or None, not {kernel!r}.")
    _replace(rewriter, region, kernel)


def _open(rewriter: Rewriter, backend: Backend, node: fx.Node, why: str) -> None:
    """Run the first op of a unit on integers and the others in float, where no kernel takes the unit whole."""
    plan = info(node).plan
    first, *rest = open_unit(rewriter, node)
    rewriter.describe(first, plan=plan)
    _leave_in_float(rewriter, rest, why)
    region = read_region(rewriter.gm, first)
    if region is not None:
        _lower(rewriter, backend, region)


def _leave_in_float(rewriter: Rewriter, nodes: Sequence[fx.Node], why: str) -> None:
    """Say so of what has been decided otherwise."""
    plan = Plan(Decision("float", "unsupported", why, decided_by=rewriter.name))
    for node in nodes:
        before = info(node).plan
        if not is_op(node, *CONVERSIONS) and (before is None or before.precision != "float"):
            rewriter.describe(node, plan=plan)


def _replace(rewriter: Rewriter, region: Region, kernel: Kernel) -> None:
    """Put a kernel in the place of a region, and remember the region for verification."""
    read = region.inputs if kernel.reads is None else tuple(region.inputs[i] for i in kernel.reads)
    if kernel.form is None:
        kernel.form = Form.of(rewriter.gm, region, kernel, read)
    ops = {node: calls_of(rewriter.gm, node) for node in region.nodes if not is_op(node, *CONVERSIONS)}
    units = [node for node, calls in ops.items() if calls] or [*region.nodes]
    name = units[0].name if len(units) == 1 else f"{units[0].name}_to_{units[-1].name}"
    names = [node.name for node in region.outputs]
    first = min([region.nodes[-1], *(user for node in region.outputs for user in node.users)])
    with rewriter.attributed(kernel.name, kernel.defined_as()):
        target = rewriter.module(kernel, name)
        node = rewriter.node("call_module", target, read, like=units, before=first)
        body = tuple(call.op.name for calls in ops.values() for call in calls)
        rewriter.describe(node, body=body, **_known_of(rewriter, [u for u in units if u in ops]))
        results = [node] if len(names) == 1 else _results(rewriter, region, node, first)
        for old, new in zip(region.outputs, results, strict=True):
            rewriter.describe(new, shape=info(old).shape, dtype=info(old).dtype)
            rewriter.reroute(old, new)
        inside = set(region.nodes)
        for old in (step.node for step in reversed(region.steps)):
            if old in inside or (is_size(old) and not old.users):
                rewriter.erase(old)
        for part, of_part in zip(results, names if len(names) > 1 else [name], strict=True):
            rewriter.rename(part, of_part)
        if len(names) > 1:  # one of its values may have the name of its unit
            rewriter.rename(node, name if name not in names else f"{name}_region")
    rewriter.context.regions[node] = region


def _known_of(rewriter: Rewriter, units: Sequence[fx.Node]) -> dict[str, Any]:
    """What a kernel's node knows of the units that it runs; of several, what was decided of each op."""
    if len(units) < 2:
        return {"parts": info(units[0]).parts, "note": info(units[0]).note} if units else {}
    plans, parts, paths = list[Plan](), list[tuple[str, ...]](), list[str]()
    for about in map(info, units):
        plan, count = about.plan or Plan(Decision("float", "undecided")), max(len(about.parts), 1)
        plan = plan.decided(text=about.note) if about.note and plan.precision == "int8" else plan
        plans += [plan, *[replace(plan, cost=None)] * (count - 1)]  # what it costs, the first stands for
        parts += about.parts or (about.origins,)
        paths += about.paths or (about.path,) * count
    precisions = {plan.precision for plan in plans}
    plan = Plan(
        Decision(next(precision for precision in _PRECISIONS if precision in precisions), decided_by=rewriter.name)
    )
    return {"path": _common(paths), "plan": plan, "parts": tuple(parts), "paths": tuple(paths), "plans": tuple(plans)}


Change = Callable[[Rewriter, Mapping[fx.Node, fx.Node]], None]
"""Edits a copy of a graph, given what each node of the graph, but the output, is there."""


def lowered_copy(gm: fx.GraphModule, graph: fx.Graph, context: Any, change: Change) -> fx.GraphModule:
    """A copy of a qdq graph, `gm`'s own or another one that uses its weights, changed and then lowered."""
    copied, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copied.output(copied.graph_copy(graph, copies))
    rewriter = Rewriter(fx.GraphModule(gm, copied), context, "trial")
    change(rewriter, copies)
    lower_graph(rewriter)
    rewriter.erase_unused()
    rewriter.gm.recompile()
    return rewriter.gm


def describe_as_run(rewriter: Rewriter, node: fx.Node, layers: tuple[EngineLayer, ...]) -> None:
    """Keep with a kernel's node the layers that its engine runs. What these compute in float stays in float.

    An op that has no layer of its own, for the engine has joined it with another, is what was decided.
    """
    rewriter.describe(node, layers=layers)
    kernel: Any = submodule(rewriter.gm, node)
    inside = kernel.form.module(kernel)
    ops = {n: calls for n in inside.graph.nodes if (calls := calls_of(inside, n))}
    units = [unit for unit in ops if not is_op(unit, *CONVERSIONS)]
    found = False
    for unit in units:
        plan = info(unit).plan
        beside = ("convert",) if plan is not None and plan.precision == "moves" else ("convert", "moves")
        own = [layer for layer in layers if unit.name in layer.nodes and layer.kind not in beside]
        if plan is None or plan.precision == "float" or not own or any(layer.kind != "float" for layer in own):
            continue
        found, ran = True, max(own, key=lambda layer: layer.us)
        why = f"{rewriter.context.backend.name} runs it in {ran.dtype}, as {ran.op}: its conversions are for nothing"
        path, op = (info(unit).paths or (info(unit).path,))[0], ops[unit][0].op.name
        line = rewriter.context.override_line(path, op, "fxq.FLOAT")
        decided = plan.decided(precision="float", kind="unsupported", text=why, fix=line, decided_by=rewriter.name)
        set_info(unit, plan=decided)
    if found:
        rewriter.describe(node, **{"plan": info(units[0]).plan, **_known_of(rewriter, units)})


def _common(paths: Iterable[str]) -> str:
    """The innermost module that has all of these inside."""
    split = [path.split(".") for path in paths] or [[]]
    first, last = min(split), max(split)  # what these begin with, all do
    return ".".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))


def _results(rewriter: Rewriter, region: Region, node: fx.Node, before: fx.Node) -> list[fx.Node]:
    """The values of a kernel of several outputs: each is a node, which stands for the op that makes it."""
    made, inside = [], set(region.nodes)
    for i, old in enumerate(region.outputs):
        maker = producer_of(old)
        like = maker if maker in inside else old
        part = rewriter.node("call_function", operator.getitem, (node, i), like=like, before=before)
        rewriter.describe(part, origins=(info(like).parts or (info(like).origins,))[-1])
        made.append(part)
    return made


def _settle_inplace(rewriter: Rewriter) -> None:
    """Let a kernel overwrite its residual where nobody reads that value afterwards.

    The residual must be a kernel's own result: no input, no view of something else. It must not be read by the same
    kernel in another place, nor by anybody later in the graph.
    """
    order = {node: i for i, node in enumerate(rewriter.graph.nodes)}
    ends: dict[fx.Node, float] = {}  # a value may have very many readers: they are asked once
    for node in order:
        kernel = submodule(rewriter.gm, node)
        if not isinstance(kernel, Kernel) or kernel.inplace is None or len(node.args) < 2:
            continue
        residual = node.args[1]
        if not isinstance(residual, fx.Node) or residual is node.args[0] or not _is_fresh(rewriter, residual):
            continue
        if residual not in ends:
            alive = any(_may_alias(rewriter, user) for user in residual.users)
            ends[residual] = math.inf if alive else max(order[user] for user in residual.users)
        kernel.inplace = ends[residual] <= order[node]


def _is_fresh(rewriter: Rewriter, node: fx.Node) -> bool:
    """Whether a node's value is a tensor of its own."""
    module = submodule(rewriter.gm, node)
    return isinstance(module, Kernel) and not module.returns_view


def _may_alias(rewriter: Rewriter, user: fx.Node) -> bool:
    """Whether the result of a reader may share memory with what it read."""
    module = submodule(rewriter.gm, user)
    if isinstance(module, Kernel):
        return module.returns_view
    op = op_of(user)
    return op is None or op.traits.view or user.op == "output"
