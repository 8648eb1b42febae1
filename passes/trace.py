"""trace: trace the user's model into a graph with shapes."""

from __future__ import annotations

import copy
import glob
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.graph_module import _copy_attr

from fxq.common.data import first_of, samples_in
from fxq.common.globs import path_matches
from fxq.common.hooks import forward_hooks
from fxq.common.isolation import computed_tensors, copied, seeded, untouched
from fxq.common.metrics import tensors
from fxq.common.source import source_of
from fxq.errors import FxqError, InputError, RecipeError, TraceError, warn, words_of
from fxq.graph.analysis.macs import macs_of
from fxq.graph.info import Decision, info
from fxq.graph.query import is_check, read_attribute
from fxq.graph.run import Runner
from fxq.graph.uncompiled import UncompiledModule
from fxq.pipeline.context import Context
from fxq.pipeline.manager import is_own
from fxq.recipe.pass_base import Pass, Stage
from fxq.recipe.selector import Selector, ancestors
from fxq.rewriting.cannot_trace import CannotTrace, around
from fxq.rewriting.functionalize import Functionalization
from fxq.rewriting.rewriter import Rewriter
from fxq.tracing.failure import StatefulForwardError, locate_failure
from fxq.tracing.fidelity import first_difference, part_for, same_values
from fxq.tracing.float_run import FloatRun, KeptState
from fxq.tracing.proxies import is_value
from fxq.tracing.tracer import Tracer, is_kept
from fxq.tracing.weight_norm import is_normed


@dataclass(frozen=True)
class Trace(Pass):
    """Trace the model with `torch.fx` while it runs on one batch. Modules that cannot be traced become leaves.

    Before: nothing    After: the model's calls in any spelling, with `torch.nn` modules as leaves
    Keeps: what the model computes. Parameters are shared with the model, not copied.
    Source: Reed et al. 2022, section 4.
    """

    name: ClassVar[str] = "trace"
    needs: ClassVar[Stage] = Stage.NONE
    gives: ClassVar[Stage] = Stage.TRACED

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Replace the rewriter's empty module by the traced one."""
        context = rewriter.context
        _check_leaves(context.recipe.leaf_modules, context.types)
        _check_hooks(context.model)
        broken: dict[str, str] = {}
        run = FloatRun(context.model, context.example, context.recipe.concrete_args)
        context.outside = run.code.bindings
        try:
            while isinstance(traced := _traced(context, broken, run), dict):
                broken |= traced
        except TraceError:
            _check_example(context, run)
            # a leaf cannot take the argument of a module with a loop over rows, such as a cache: unroll the loop
            if context.recipe.strict_trace or not any(_LOOP in why for why in broken.values()):
                raise
            broken = {}
            while isinstance(traced := _traced(context, broken, run, unroll=True), dict):
                broken |= traced
        if broken:
            warn(_kept(broken, context, traced.gm))
        rewriter.gm, rewriter.edits, rewriter.touched = traced.gm, traced.edits, traced.touched
        own_pipeline = all(map(is_own, context.recipe.pipeline))
        context.runs_model_code = run.changes_state or not own_pipeline or _runs_model_code(traced.gm)


def _runs_model_code(gm: fx.GraphModule) -> bool:
    """Whether a traced graph runs hooks, code that is neither PyTorch's nor Python's, or ops that change a weight."""
    for node in gm.graph.nodes:
        if node.op == "call_module":
            leaf = gm.get_submodule(str(node.target))
            if not type(leaf).__module__.startswith("torch.nn.") or forward_hooks(leaf) or is_normed(leaf):
                return True
        elif isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            if str(node.target).partition(".")[0] not in ("aten", "prims"):
                return True
        elif node.op == "call_function":
            owner = (getattr(node.target, "__module__", None) or "").partition(".")[0]
            is_known = owner in ("torch", "_operator", "builtins", "math", "fxq")
            norms = node.target in (F.embedding, F.embedding_bag) and (*node.args[3:4], node.kwargs.get("max_norm"))
            if not is_known or (norms and any(norms)):
                return True
    return False


def _traced(
    context: Context, broken: Mapping[str, str], run: FloatRun, unroll: bool = False
) -> Rewriter | dict[str, str]:
    """Trace the model with the `broken` modules as leaves. `unroll`: unroll loops over the rows of tensors at once.

    Returns:
        The traced model; or, if further modules cannot be traced, the reason for each by its path.
    """
    recipe = context.recipe
    leaves = (*recipe.leaf_modules, *map(glob.escape, broken))
    tracer, gm = _graph(context, leaves, run, unroll)
    if gm is None:
        return tracer.broken
    _take_copies(gm, run.written)
    traced = Rewriter(gm, context, Trace.name, source_of(Trace.run))
    for node in gm.graph.nodes:
        facts = info(node).traced._replace(kept=_kept_leaf(node, recipe, broken))
        traced.describe(node, origins=(node.name,) if _is_call(node) else (), traced=facts)
    states = list(_check_state_of(run, leaves))
    hidden = [
        CannotTrace(kept.path, kept.why) for kept in states if kept.hidden
    ]  # errors of the others name a source line
    writers = {node: info(node).source for node in gm.graph.nodes if info(node).traced.changes}
    written = _written_inputs(gm) if context.selecting is None else []  # programs write them back
    edit_count = len(traced.edits)
    functionalization = Functionalization(traced, tracer.watch, tracer.new_constants)
    divisible: bool | None = None
    breaks = [*hidden, *functionalization.run()]
    breaks += [CannotTrace(kept.path, kept.why) for kept in states if not kept.hidden]
    if not breaks:
        context.outputs, differs = _compared(context, tracer, run)
        breaks += [differs] if differs is not None else []
        if not breaks and len(traced.edits) > edit_count:
            divisible = _counts_samples(context, gm) if functionalization.only_whole else None
            breaks += [] if divisible else _functionalized(context, gm, run, writers)
    if not breaks and not run.computes_alike(_callable(gm)):
        # modules known to have state are leaves already: try the suspects next, then the enclosing modules
        more = [CannotTrace(kept.path, kept.why) for kept in run.suspects if not _is_inside(kept.path, leaves)]
        above = [CannotTrace(kept.path.rpartition(".")[0], kept.why) for kept in run.kept]
        breaks += more or [stop for stop in above if not stop.path or not _is_inside(stop.path, leaves)]
    kept = {stop.path: f"cannot be traced: {stop.why}".rstrip(".") for stop in reversed(breaks) if stop.path}
    if kept and not recipe.strict_trace:
        return kept
    if breaks:
        why = breaks[0].why
        # with a cause, parts of the model are tried: code that stays in Python keeps the state
        raise TraceError(why) from (StatefulForwardError(why) if run.has_state_of_its_own() else None)
    context.divisible = _counts_samples(context, gm) if divisible is None else divisible
    if written:
        warn(_UNWRITTEN.format(names=", ".join(written), model=type(context.model).__name__))
    return traced


def _written_inputs(gm: fx.GraphModule) -> list[str]:
    """Names of the inputs that the forward writes into."""
    changes = {block for node in gm.graph.nodes for block in info(node).traced.changes}
    inputs = gm.graph.find_nodes(op="placeholder")
    return [str(node.target) for node in inputs if not changes.isdisjoint(info(node).traced.memory)]


_UNWRITTEN = (
    "{model} writes into its input {names} in place, as nn.ReLU(inplace=True) does. The quantized model computes the "
    "same outputs, but leaves the tensor of the caller unchanged. If the caller needs the new values, return them."
)


def _graph(
    context: Context, leaves: tuple[str, ...], run: FloatRun, unroll: bool
) -> tuple[Tracer, fx.GraphModule | None]:
    """Trace the model. Returns the tracer, and the graph if the whole model can be traced.

    Loops over the rows of a tensor are unrolled only if the model cannot be traced otherwise. Branches on sizes that
    give the same graph and change the same state either way are not checked at run time.
    """
    model, recipe, free = context.model, context.recipe, list[str]()
    created, state = False, dict[tuple[str, str], Any]()
    while True:
        gm: fx.GraphModule | None = None
        fixed, strict = recipe.concrete_args, recipe.strict_trace
        tracer = Tracer(leaves, context.example, fixed, strict=strict, unroll=unroll, free=free, created=created)
        with run.untouched() as changes, seeded():
            try:
                gm = UncompiledModule(model, tracer.trace_model(model), class_name=type(model).__name__)
                state = run.read_changes(changes) if _branches(tracer) else {}
            except TraceError:
                if not tracer.broken and (unroll or recipe.strict_trace or not tracer.loops):
                    raise
        if tracer.broken:
            return tracer, None
        if gm is not None and not created and tracer.changes_plain_tensors():
            created = True
        elif gm is None:
            unroll = True
        elif free or not (
            free := [p for p in _branches(tracer) if _makes_no_difference(p, context, tracer, gm.graph, run, state)]
        ):
            _restore_attributes(gm, model)
            return tracer, gm


def _restore_attributes(gm: fx.GraphModule, model: nn.Module) -> None:
    """Give a graph the attributes that forward read before it assigned a traced value to them."""
    for path in {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}:
        if is_value(read_attribute(gm, path)):
            owner, _, name = path.rpartition(".")
            delattr(gm.get_submodule(owner), name)
            _copy_attr(model, gm, path)


_LOOP = "a loop over the rows of a tensor"
"""Reason why a module cannot be traced (`Tracer.rows`)."""
_MAX_TRIED_BRANCHES = 4
"""Maximum number of lines with branches for which both directions are traced: each costs two traces."""


def _branches(tracer: Tracer) -> list[str]:
    """Lines that branch on sizes and ran once; none if there are too many to try."""
    once = [place for place, times in tracer.assumptions.branches.items() if times == 1]
    return once if len(once) <= _MAX_TRIED_BRANCHES else []


def _makes_no_difference(
    place: str,
    context: Context,
    tracer: Tracer,
    graph: fx.Graph,
    run: FloatRun,
    state: Mapping[tuple[str, str], Any],
) -> bool:
    """Whether the graph and the changed state are the same whichever way the branches of one line go.

    A graph keeps no state: without the check, a branch that only counts would be lost for inputs that take it.
    """

    def written(traced_graph: fx.Graph, by: Tracer) -> list[tuple[str, ...]]:
        nodes = [n for n in traced_graph.nodes if not (is_check(n) and n.kwargs.get("place") == place)]
        values: dict[fx.Node, Any] = {n: f"%{i}" for i, n in enumerate(nodes)}
        values |= {n: way for n, (line, way) in by.assumptions.answers.items() if line == place}
        return [(n.op, str(n.target), str(fx.node.map_arg((n.args, n.kwargs), values.get))) for n in nodes]

    model, fixed = context.model, context.recipe.concrete_args
    ways = {way for line, way in tracer.assumptions.answers.values() if line == place}
    for way in {True, False} - (ways if len(ways) == 1 else set()):  # the trace itself went one way
        forced = Tracer(
            tracer.leaves,
            context.example,
            fixed,
            strict=True,
            unroll=tracer.unroll,
            forced={place: way},
            created=tracer.created,
            expected=tracer.calls,
        )
        try:
            with run.untouched() as changes, seeded():
                if written(forced.trace_model(model), forced) != written(graph, tracer) or forced.broken:
                    return False
                if run.read_changes(changes) != state:
                    return False
        except FxqError:
            return False
    return True


def _is_inside(path: str, leaves: tuple[str, ...]) -> bool:
    return any(is_kept(above, leaves) for above in ancestors(path))


def _take_copies(gm: fx.GraphModule, written: Collection[str]) -> None:
    """Copy the leaves that change their parameters in place, so that they do not change those of the model."""
    for node in gm.graph.find_nodes(op="call_module"):
        path = str(node.target)
        if any(name.startswith(f"{path}.") for name in written):
            try:
                leaf = gm.get_submodule(path)
                gm.set_submodule(path, copy.deepcopy(leaf, computed_tensors(leaf)))
            except Exception as error:  # attributes of the module may raise any type of error
                why = f'layer "{path}" changes its parameters in place, but cannot be copied: {words_of(error)}'
                raise TraceError(f"{why}. Change them in eval mode before quantizing, not in forward.") from error


def _check_state_of(run: FloatRun, leaves: tuple[str, ...]) -> Iterator[KeptState]:
    """Yield state that a graph would lose, except state of leaves.

    Raises:
        TraceError: the state is outside of the modules, so that the float and the quantized model would share it. State
            that is only suspected to affect later calls counts where a leaf uses it.
    """
    shared = [kept for kept in run.suspects if kept.outside and _is_inside(kept.path, leaves)]
    for kept in (*run.kept, *shared):
        if kept.outside:
            raise TraceError(f'layer "{kept.path}": {kept.why}' if kept.path else kept.why)
        if not _is_inside(kept.path, leaves):
            yield kept


def _check_example(context: Context, run: FloatRun) -> None:
    """Raise `InputError` if the float model does not run on the example."""
    if run.error is not None:
        place = locate_failure(context.model, run.error).place
        problem = f"the model does not run on the example {context.example}: {place}: {words_of(run.error)}"
        raise InputError(problem) from run.error


def _compared(context: Context, tracer: Tracer, run: FloatRun) -> tuple[Any, CannotTrace | None]:
    """Output of the float model for the example; and the place where the traced graph differs, or None."""
    model, example, fixed = context.model, context.example, context.recipe.concrete_args
    _check_example(context, run)
    if same_values(tracer.returned, run.outputs):
        return run.outputs, None
    again = Tracer(tracer.leaves, example, fixed, unroll=tracer.unroll, record=True, created=tracer.created)
    with run.untouched(), seeded():
        again.trace_model(model)
    with run.untouched():
        return run.outputs, CannotTrace(first_difference(model, example, fixed, again.outputs), _DIFFERS)


def _functionalized(
    context: Context, gm: fx.GraphModule, run: FloatRun, writers: Mapping[fx.Node, str]
) -> Iterator[CannotTrace]:
    """Yield the changes in place without which the graph computes something else on the example, if it does."""
    example = copied(context.example)
    try:
        with run.untouched(), untouched(gm), seeded(), torch.inference_mode(False), torch.no_grad():
            got = _callable(gm)(*example.args, **example.kwargs)
        if same_values(got, run.outputs):
            return
        wrong = "computes something else than the model"
    except Exception as error:  # ops raise errors of any type for a wrong value
        wrong = f"does not run: {words_of(error)}"
    shown = ", ".join(f"%{node.name} ({source})" for node, source in list(writers.items())[:_MAX_SHOWN])
    yield CannotTrace(
        around(*writers),
        f"{shown} change{'' if len(writers) > 1 else 's'} memory in place, and on the example the graph without such "
        f"changes {wrong}. Write the change out of place (x = x + y, nn.ReLU(inplace=False)).",
    )


def _counts_samples(context: Context, gm: fx.GraphModule) -> bool:
    """Whether the first axis counts samples: one sample alone gives the same result as within the batch.

    The sample is from the middle, since the first or last step of a sequence may not depend on the others.
    """
    count = samples_in(context.example)
    if count is None:
        return False
    at = count // 2
    sample = copied(first_of(context.example, 1, at))
    try:
        with context.untouched(), untouched(gm), seeded(), torch.inference_mode(False), torch.no_grad():
            got = list(tensors(Runner(gm, sample).run()))  # generating code would take longer
        pairs = zip(tensors(context.outputs), got, strict=True)
        return same_values(got, [part_for(whole, alone, at, 1, count) for whole, alone in pairs])
    except Exception:  # models raise errors of any type for a wrong size
        return False


def _callable(gm: fx.GraphModule) -> nn.Module:
    """Plain module that runs a graph. A `GraphModule` would print errors to stderr."""
    gm.recompile()
    called = nn.Module()
    called._modules, called._parameters, called._buffers = gm._modules, gm._parameters, gm._buffers
    called.forward = gm.forward
    return called


_DIFFERS = (
    "the traced graph computes something else than the model on the example: the forward depends on something that a "
    "trace does not see, such as the type of a value, random numbers, or state from call to call. Rewrite it, or keep "
    'the module as a float leaf: recipe.leaf("path.of.module").'
)


def _is_call(node: fx.Node) -> bool:
    """Whether a node is a call of the model, and not a check of fxq."""
    return node.op.startswith("call") and not is_check(node)


def _kept_leaf(node: fx.Node, recipe: Any, broken: Mapping[str, str]) -> Decision | None:
    """Decision to keep a module as a leaf, with the reason; None for all other nodes."""
    path = str(node.target) if node.op == "call_module" else ""
    by_recipe = "the recipe keeps this module as it is" if path and is_kept(path, recipe.leaf_modules) else ""
    why = broken.get(path) or by_recipe
    return Decision("float", "leaf", why, decided_by=Trace.name) if why else None


def _kept(broken: Mapping[str, str], context: Context, gm: fx.GraphModule) -> str:
    """Warning about modules that cannot be traced."""
    first = list(broken.items())[:_MAX_SHOWN]
    shown = [f'layer "{path}" ({context.types[path].__name__}) {why}' for path, why in first]
    more = f"; and {len(broken) - _MAX_SHOWN} more, see the ledger" if len(broken) > _MAX_SHOWN else ""
    return (
        f"{len(broken)} module{'s' if len(broken) > 1 else ''} of the model cannot be traced and will run in float: "
        f"{'; '.join(shown)}{more}. {_share(broken, gm)}Recipe(strict_trace=True) makes it an error."
    )


def _share(broken: Mapping[str, str], gm: fx.GraphModule) -> str:
    """Sentence on the share of multiply-accumulates in modules that cannot be traced; empty if it is small."""
    macs = {node: macs_of(gm, node) for node in gm.graph.nodes}
    inside = sum(count for node, count in macs.items() if node.op == "call_module" and node.target in broken)
    share = inside / (sum(macs.values()) or 1)
    if share < _LARGE_SHARE:
        return ""
    return (
        f"They do about {share:.0%} of the model's multiply-accumulates: move the line that cannot be traced into a "
        "small module of its own, so that only that module stays in float. "
    )


_LARGE_SHARE = 0.5
_MAX_SHOWN = 3
"""Maximum number of modules or nodes that a message lists."""


def _check_leaves(leaves: tuple[str, ...], types: Any) -> None:
    for pattern in leaves:
        if not any(path_matches(path, pattern) for path in types if path):
            near = Selector(path=pattern).near_misses(types, ())
            raise RecipeError(
                f"leaf module {pattern!r} matches no module of the model; near: {', '.join(near) or 'nothing'}. "
                "Paths are those of model.named_modules()."
            )


def _check_hooks(model: nn.Module) -> None:
    if forward_hooks(model):
        raise TraceError(
            f"the model ({type(model).__name__}) has forward hooks, which a trace of its forward does not see. Remove "
            "them (handle.remove()), or quantize a module that calls this one: nn.Sequential(model)."
        )
