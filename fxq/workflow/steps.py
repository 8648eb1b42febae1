"""Steps of `quantize`: passes before calibration, to the qdq graph and to kernels, for one recipe or several."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

from torch import fx, nn

import fxq.passes
import fxq.patterns  # registers the fusion patterns
from fxq.backends.by_name import get_backend
from fxq.backends.engine import EngineBackend, RegionTimes
from fxq.backends.lower_graph import lowered_copy
from fxq.calibration.calibration_state import summary
from fxq.calibration.hand_over import AGAIN, check_computes_alike, check_traced_alike, hand_over, nodes_of
from fxq.common.data import Batch, as_batch, check_batch, device_of
from fxq.common.ranks import Ranks
from fxq.cost.cache import machine_costs
from fxq.cost.prices import least_share
from fxq.cost.probe import Prober
from fxq.cost.whole import time_ratio
from fxq.errors import InputError, RecipeError, warn
from fxq.graph.info import info, set_info
from fxq.graph.program import IsolatedGraph
from fxq.graph.text.text_writer import same_graph
from fxq.ledger.build import ledger_of
from fxq.ledger.comparison import Baseline
from fxq.ledger.float_record import checksums
from fxq.ledger.float_states import warn_of_float_states, warn_without_states
from fxq.ledger.ledger import ReducedRange
from fxq.ledger.output_check import check_output, output_sqnrs
from fxq.ledger.reduce_range import run_with_reduced_range
from fxq.model import QuantizedModel
from fxq.passes.fallback import MIN_PRICED_GAIN, move_to_float
from fxq.passes.observe_all import ObserveAll
from fxq.pipeline.context import Context
from fxq.pipeline.manager import PassManager, is_own
from fxq.pipeline.samples import has_enough, record, wanted
from fxq.quant.spec import TensorSpec
from fxq.recipe.pass_base import Pass, Stage
from fxq.recipe.recipe import Recipe
from fxq.tracing.exported_program import Exported
from fxq.tracing.part_shell import ONE_OF_SEVERAL, PartShell
from fxq.workflow.observed_model import ObservedModel


def manager_for(model: nn.Module, recipe: Recipe, example_inputs: Any) -> PassManager:
    """Create the pass manager of a checked model (see `check_model`). Raises `InputError` for an unusable example."""
    if example_inputs is None:
        raise InputError("example_inputs is missing: one batch of inputs to infer shapes from.")
    example = as_batch(example_inputs, model, "example_inputs")
    check_batch(example, model, "example_inputs")
    types: Any = model.types if isinstance(model, Exported) else {}
    is_one_of_several = isinstance(model, PartShell) or hasattr(model, ONE_OF_SEVERAL)
    selecting: set[int] | None = set() if is_one_of_several else None
    backend = get_backend(recipe.backend, device_of(model))
    return PassManager(Context(recipe, backend, model, example, types, selecting=selecting))


def _fork_for(manager: PassManager, recipe: Recipe, **changes: Any) -> PassManager:
    """Fork a manager for another recipe and its backend, without recorded samples."""
    backend = get_backend(recipe.backend, device_of(manager.context.model))
    return manager.fork(recipe=recipe, backend=backend, samples=[], **changes)


def up_to(recipe: Recipe, stage: Stage) -> Sequence[Pass]:
    """Passes of a recipe before the first one whose result is at `stage` or later."""
    line = recipe.pipeline
    return line[: next((i for i, step in enumerate(line) if step.gives >= stage), len(line))]


def phases(recipe: Recipe) -> tuple[Sequence[Pass], Sequence[Pass], Sequence[Pass]]:
    """Passes of a recipe in three phases: before calibration, from there to the qdq graph, from there to kernels."""
    line = recipe.pipeline
    calibrated = next((i for i, step in enumerate(line) if step.needs >= Stage.OBSERVED), len(line))
    lowered = next((i for i, step in enumerate(line) if step.gives >= Stage.LOWERED), len(line))
    lowered = max(calibrated, lowered)
    return line[:calibrated], line[calibrated:lowered], line[lowered:]


@dataclass
class SharedGraphs:
    """Graphs of one model that is prepared for several backends, as far as they do not depend on the backend.

    Attributes:
        traced: pipeline after tracing; None before the first backend.
        canonical: pipeline before fusion; None before the first backend.
        checked: graphs with observers that were compared with the model.
    """

    traced: PassManager | None = None
    canonical: PassManager | None = None
    checked: list[fx.GraphModule] = field(default_factory=list)

    def is_checked(self, gm: fx.GraphModule) -> bool:
        """Whether an equal graph was compared with the model."""
        return any(same_graph(graph, gm, facts=False) for graph in self.checked)


def prepared(
    model: nn.Module, recipe: Recipe, example_inputs: Any, observe_all: bool, shared: SharedGraphs | None = None
) -> ObservedModel:
    """Prepare a model for one backend, see `fxq.prepare`.

    Args:
        model: the model.
        recipe: the recipe.
        example_inputs: one batch of inputs.
        observe_all: as in `fxq.prepare`.
        shared: graphs of the model for other backends, with recipes that differ in nothing else.
    """
    before, _, _ = phases(recipe)
    shared = SharedGraphs() if shared is None else shared
    count, fused = len(up_to(recipe, Stage.CANONICAL)), len(up_to(recipe, Stage.FUSED))
    if shared.traced is not None:
        start = _fork_for(shared.traced, recipe)
    else:
        start = manager_for(model, recipe, example_inputs)
        _check_observes(recipe)
        start.run(before[:count])
        shared.traced = start if all(map(is_own, before[:count])) else None
    if shared.canonical is not None:
        manager = _fork_for(shared.canonical, recipe)
    else:
        manager = start.fork()
        manager.run(before[count:fused])
        shared.canonical = manager.fork() if all(map(is_own, before[:fused])) else None
    unfused = nodes_of(manager.gm.graph)
    configs = (recipe.config, *(config for _, config in recipe.overrides))
    specs = [spec for config in configs for spec in (config.activation, config.state) if spec is not None]
    observers = dict.fromkeys(spec.observer for spec in specs if spec.range == "calibrated")
    manager.run([ObserveAll(tuple(observers))] if observe_all else before[fused:])
    if not shared.is_checked(manager.gm):
        manager.check_float()
        shared.checked.append(manager.gm)
    return ObservedModel.from_manager(manager, start, unfused)


def _check_observes(recipe: Recipe) -> None:
    """Raise `RecipeError` if no pass before calibration inserts observers."""
    before, _, _ = phases(recipe)
    if any(step.gives >= Stage.OBSERVED for step in before):
        return
    left = recipe.pipeline[len(before) :]
    later = any(step.needs < Stage.OBSERVED <= step.gives for step in left)
    why = f"{left[0].name} needs observers and comes before it" if later else "insert-observers was removed"
    raise RecipeError(f"the pipeline has no pass that inserts observers: {why}.")


def observed_with(observed: ObservedModel, recipe: Recipe | None) -> PassManager:
    """Insert the observers of a recipe, with the statistics that the observers of a prepared model have collected.

    Args:
        observed: the calibrated model.
        recipe: the recipe; None: the one that the model was prepared with.

    Returns:
        The manager of the graph with these observers.

    Raises:
        RecipeError: the collected statistics do not suffice; the message says why, and what to do.
    """
    own = observed.manager
    recipe = own.context.recipe if recipe is None else recipe
    if recipe == own.context.recipe and own.stage >= Stage.OBSERVED:
        return own.fork()
    before = own.context.recipe
    check_traced_alike(before, recipe)
    first, first_before = phases(recipe)[0], phases(before)[0]
    if tuple(first) != tuple(first_before):
        both = (*first, *first_before)
        changed = next((step for step in both if step not in first or step not in first_before), first[0])
        raise RecipeError(f"before calibration, the recipe has other passes, or in another order: {changed}. {AGAIN}")
    if wanted(recipe) > wanted(before):
        raise RecipeError(
            f"a pass of the recipe reads {wanted(recipe)} calibration samples, and {wanted(before)} are kept. {AGAIN}"
        )
    manager = _fork_for(observed.traced, recipe, floats=own.context.floats, progress=own.context.progress)
    traced, fused = len(up_to(recipe, Stage.CANONICAL)), len(up_to(recipe, Stage.FUSED))
    manager.run(first[traced:fused])
    check_computes_alike(observed.unfused, nodes_of(manager.gm.graph))
    manager.run(first[fused:])
    calibrated = hand_over(own.gm, manager.gm, AGAIN if own.stage < Stage.OBSERVED else f"{AGAIN} {_OBSERVE_ALL}")
    for batch in own.context.samples:
        if calibrated or not has_enough(manager.context):  # as `quantize` shows them
            record(manager.context, batch)
    return manager


_OBSERVE_ALL = "Or prepare once for all recipes: fxq.prepare(model, recipe, example_inputs=x, observe_all=True)."


QdqCache = list[tuple[PassManager, PassManager, ReducedRange | None, Sequence[warnings.WarningMessage]]]
"""Cached qdq graphs: calibrated graph, qdq graph, the role that has 7 bits in it, and the warnings of the passes.

The passes between the two are slow, and most graphs are the same for several backends.
"""


def to_qdq(
    manager: PassManager, qdq_cache: QdqCache | None = None, is_trial: bool = False
) -> tuple[PassManager, ReducedRange | None, Sequence[Pass]]:
    """Run the passes from calibration to the qdq graph, up to the first pass that uses prices.

    Args:
        manager: manager of the calibrated graph.
        qdq_cache: qdq graphs of the same model for other backends; the new one is added.
        is_trial: whether the graph is only timed: passes that run it on samples, to fit its numbers, are left out.

    Returns:
        The manager of the resulting graph, the role that has 7 bits in it, and the passes that are left.
    """
    context = manager.context
    _, passes, to_kernels = phases(context.recipe)
    priced = next((i for i, step in enumerate(passes) if isinstance(step, fxq.passes.Fallback)), len(passes))
    left = [*passes[priced:], *to_kernels]
    emits = _emits(manager.gm)
    for before, after, reduced, heard in qdq_cache or ():
        if _emits(before.gm) != emits:
            if any(shot.name in _READ_EMITS and shot.edits for shot in after.history):
                continue
            before = before.fork()
            _let_emit(before.gm, emits)
        if same_graph(before.gm, manager.gm):
            shared = after.fork(recipe=context.recipe, backend=context.backend)
            _let_emit(shared.gm, emits)
            warn_again(heard)
            return shared, reduced, left
    slow = next((i for i, step in enumerate(passes[:priced]) if step.samples_read and step.needs >= Stage.QDQ), priced)

    def run() -> tuple[PassManager, ReducedRange | None]:
        if is_trial:
            manager.run([step for step in passes[:priced] if not _runs_samples(step)])
            return manager, None
        after, reduced = run_with_reduced_range(manager, passes[:slow])
        after.run(passes[slow:priced])
        return after, reduced

    if qdq_cache is None:
        return *run(), left
    before = manager.fork()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        after, reduced = run()
    qdq_cache.append((before, after.fork(), reduced, heard))
    warn_again(heard)
    return after, reduced, left


def _runs_samples(step: Pass) -> bool:
    return bool(step.samples_read) or isinstance(step, fxq.passes.KeepSmallValues)


def warn_again(heard: Iterable[warnings.WarningMessage]) -> None:
    """Issue recorded warnings."""
    for warning in heard:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


_READ_EMITS = (fxq.passes.SmoothDepthwise.name, fxq.passes.Smooth.name)
"""Names of the passes before prices that read the specs of kernels that can only emit integers."""


def _emits(gm: fx.GraphModule) -> dict[str, TensorSpec]:
    """Specs of the outputs of kernels that can only emit integers, by node.

    This is the part of plans in which backends differ most, and only `_READ_EMITS` read it before ops are priced.
    """
    plans = {node.name: plan for node in gm.graph.nodes if (plan := info(node).plan) is not None}
    return {name: plan.emits for name, plan in plans.items() if plan.emits is not None}


def _let_emit(gm: fx.GraphModule, emits: Mapping[str, TensorSpec]) -> None:
    """Set the specs of kernels that can only emit integers to `emits`, and those of all other nodes to None."""
    for node in gm.graph.nodes:
        plan = info(node).plan
        if plan is not None and plan.emits != emits.get(node.name):
            set_info(node, plan=replace(plan, emits=emits.get(node.name)))


def converted(
    observed: ObservedModel,
    recipe: Recipe | None = None,
    qdq_cache: QdqCache | None = None,
    ranks: Ranks | None = None,
) -> QuantizedModel:
    """Convert a calibrated model for one backend, see `fxq.convert`.

    Args:
        observed: the model.
        recipe: the recipe; None: the one that the model was prepared with.
        qdq_cache: qdq graphs of the same model for other backends, see `to_qdq`.
        ranks: processes that convert the model together, which divide the work of some passes; None: this one alone.
    """
    manager = observed_with(observed, recipe)
    if ranks is not None:
        context = manager.context
        context.ranks, context.progress = ranks, context.progress if ranks.rank == 0 else bool(context.progress)
        state = summary(observed, observed.manager.context)
        list(ranks.exchanged(lambda: None, about=f"the conversion of the weights, ranges and samples {state}"))
    manager, reduced, left = to_qdq(manager, qdq_cache)
    return finished(manager, left, reduced)


@dataclass(frozen=True)
class Trial:
    """Model lowered for one backend with all possible ops on integers, to time it; unverified, with unfitted biases.

    Attributes:
        lowered: the lowered graph.
        manager: manager of its qdq graph.
    """

    lowered: fx.GraphModule
    manager: PassManager

    @cached_property
    def _integer_times(self) -> list[RegionTimes] | None:
        """Profiles of the graph's regions on integers; None if the backend is no engine, or has prices of its own."""
        backend = self.manager.context.backend
        if not isinstance(backend, EngineBackend) or type(backend).prices is not EngineBackend.prices:
            return None
        return backend.integer_times(self.manager.gm)

    def share_bound(self) -> float:
        """Lower bound of `least_share` for which nothing is timed in float; 0 if unknown.

        It is reached if all nodes but large layers, which would not be faster in float, took no time.
        """
        backend = self.manager.context.backend
        if not isinstance(backend, EngineBackend) or not backend.large_layers_gain or self._integer_times is None:
            return 0.0
        return backend.share_of_large_layers(self.manager.gm, self._integer_times)

    def least_share(self) -> float:
        """Share of its time that is left if ops run in float where that is faster; 0 if unknown.

        The price table gives the share itself. An engine's own prices only give the ops: the engine fuses ops, so that
        the time of the whole is no sum of prices, and is measured with these ops in float.
        """
        gm, context = self.manager.gm, self.manager.context
        prober = Prober(context.backend, context.recipe, machine_costs(), measures=False)
        if isinstance(context.backend, EngineBackend) and self._integer_times is not None:
            prober.own = context.backend.prices_beside(gm, self._integer_times)
        else:
            prober.own = context.backend.prices(gm, context.example)
        share, floats = least_share(gm, prober)
        if prober.own is None or not floats or share * MIN_PRICED_GAIN > 1:
            return share
        return time_ratio(gm, context, partial(move_to_float, floats))


def all_on_integers(
    observed: ObservedModel, recipe: Recipe | None = None, qdq_cache: QdqCache | None = None
) -> Trial | None:
    """Lower a calibrated model for one backend with all possible ops on integers, to time it.

    Args:
        observed: the model.
        recipe: the recipe; None: the one that the model was prepared with.
        qdq_cache: qdq graphs of other trials, see `to_qdq`.

    Returns:
        The trial; None if the recipe measures no prices, so that a conversion takes hardly longer.
    """
    if (recipe or observed.manager.context.recipe).optimize != "speed":
        return None
    manager, _, _ = to_qdq(observed_with(observed, recipe), qdq_cache, is_trial=True)
    context = replace(manager.context, units={}, regions={})
    return Trial(lowered_copy(manager.gm, manager.gm.graph, context, lambda rewriter, copies: None), manager)


def finished(manager: PassManager, left: Sequence[Pass], reduced: ReducedRange | None = None) -> QuantizedModel:
    """Run the remaining passes and return the quantized model with its ledger.

    Args:
        manager: manager of the graph so far.
        left: the remaining passes.
        reduced: the role that has 7 bits, if any.
    """
    manager.run(left)
    context = manager.context
    ledger, float_record = ledger_of(manager.history, manager.gm, context)
    (output_sqnr,) = output_sqnrs([manager.gm], context)
    ledger = replace(ledger, output_sqnr=output_sqnr, reduced_range=reduced if ledger.count("int8") else None)
    if ledger and not ledger.count("int8"):
        if not ledger.count("weight-only"):
            reason = ledger.main_reason()
            remedy = " Convert the model and its inputs to float32 first." if "not float32" in reason else ""
            warn(f"nothing runs on integers; {reason}.{remedy} print(qmodel.ledger) shows all ops.")
        elif not ledger.weight_coverage and any(entry.macs and entry.kind == "unsupported" for entry in ledger):
            warn(f"only embeddings have integer weights; {ledger.main_reason()}. print(qmodel.ledger) shows all ops.")
    warn_of_float_states(ledger)
    if context.selecting is None:
        warn_without_states(context.recipe, ledger)
    if not context.recipe.trains:  # trained weights are only good after rounding: the float form is no reference
        check_output(ledger, context)
    return QuantizedModel.from_manager(manager, ledger, float_record)


def float_reference(model: nn.Module, b: QuantizedModel, first: Batch) -> Baseline:
    """Trace the float model as for `b`, and return its canonical graph as a baseline.

    Raises:
        InputError: `b` was not made from `model`, or its recipe has no canonicalize pass.
    """
    manager = manager_for(model, b.recipe, first)
    manager.run(up_to(manager.context.recipe, Stage.FUSED))
    original = manager.context.original
    if original is None:
        raise InputError("the recipe of b has no canonicalize pass, so layers of the float model have other names.")
    ours = [f"{op.op} {op.name!r} of {op.path!r}" for op in original.ops]
    theirs = [f"{e.op} {e.name!r} of {e.path!r}" for e in b.ledger]
    for i, (mine, its) in enumerate(zip_longest(ours, theirs, fillvalue="nothing")):
        if mine != its:
            raise InputError(
                f"a is not the model that b was made from, or traces to other ops on inputs of this size: op {i} is "
                f"{mine}, where the ledger of b has {its}."
            )
    now, then = checksums(manager.context.model), b.record.weights
    changed = [name for name in now if now[name] != then.get(name)]
    if changed:
        warn(
            f"a has other weights than the model that b was made from, for instance {changed[0]!r} ({len(changed)} of "
            f"{len(now)} parameters): the errors are not those of quantization alone."
        )
    divisible, is_large = manager.context.divisible, original.is_large
    nodes = {name: node for name, node in original.nodes.items() if name not in b.record.scaled}
    return Baseline(IsolatedGraph(original.gm, original.graph), nodes, divisible=divisible, is_large=is_large)
