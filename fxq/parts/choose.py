"""Choice of the parts of a model: the largest submodules that can be traced, with the calls that they get."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fxq.common.code_state import CodeState
from fxq.common.data import Batch
from fxq.common.globs import path_matches
from fxq.common.isolation import autocast_on, copied, seeded, snapshot_of, untouched, without_autocast
from fxq.common.state import StateSnapshot
from fxq.errors import FxqError, InputError, RecipeError, TraceError, words_of
from fxq.graph.analysis.macs import macs_of
from fxq.graph.info import info
from fxq.graph.text.text_writer import write_graph
from fxq.parts.counting import MacCounter, counting_macs
from fxq.parts.part import kind_of
from fxq.programs.fitting import first_fitting
from fxq.recipe.recipe import Recipe
from fxq.recipe.recipe_checks import check_selectors
from fxq.recipe.selector import Selector, ancestors
from fxq.tracing.failure import locate_failure
from fxq.tracing.part_shell import PartShell
from fxq.tracing.tracer import is_kept
from fxq.workflow.observed_model import ObservedModel

Prepare = Callable[[nn.Module, Recipe, Batch], ObservedModel]
"""Function that prepares a float model with a recipe and an example, as `fxq.prepare`."""

MAX_PROGRAMS = 4
"""Maximum number of graphs of one part. A module that is called in more ways is divided further."""
MAX_RECORDED_CALLS = 8
"""Maximum number of different calls of one module that are kept to trace it."""
MAX_UNTRACED_SHARE = 0.05
"""Share of the multiply-accumulates of a part in modules that cannot be traced, above which it is divided further."""
MAX_LEAF_SHARE = 0.5
"""Share of the multiply-accumulates of a model in modules that cannot be traced, above which it is quantized in parts.

Up to this share, one graph with float leaves is faster than many parts.
"""


@dataclass
class RecordedCalls:
    """Calls of one module during a run of the float model.

    Attributes:
        batches: copied arguments of one call of each kind, by kind.
        macs: multiply-accumulates of all calls.
        refused: why the module cannot be replaced by a graph, if its calls show that; otherwise empty.
        state: the module's attributes and buffers at the start of the run.
        running: arguments of the calls that have not returned yet.
    """

    batches: dict[Any, Batch] = field(default_factory=dict)
    macs: int = 0
    refused: str = ""
    state: StateSnapshot = field(default_factory=StateSnapshot)
    running: list[StateSnapshot] = field(default_factory=list)

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a call that begins."""
        kind = kind_of(args, kwargs)
        if kind not in self.batches and len(self.batches) < MAX_RECORDED_CALLS:
            self.batches[kind] = copied(Batch(args, kwargs))
        if autocast_on():
            self.refused = "it runs under torch.autocast, which integers do not follow"
        self._check_state()
        inputs = StateSnapshot(_room=0)
        inputs.add("", {"args": args, **kwargs})
        self.running.append(inputs)

    def leave(self) -> None:
        """Note that the last call that began has returned."""
        changed = next(self.running.pop().changes(), None)
        if changed is not None:
            self.refused = f"it changes its input {changed.name} in place"
        self._check_state()

    def _check_state(self) -> None:
        """Refuse the module if its attributes or buffers differ from those at the start of the run.

        A graph has state of its own: code outside would not see its changes, nor would it see those of code outside.
        """
        change = None if self.refused else next((c for c in self.state.changes() if c.has_other_values), None)
        if change is not None:
            path = f"{change.owner}.{change.name}".lstrip(".")
            self.refused = (
                f"its attribute {path!r} changes during a run, which code outside of a graph can neither see nor do"
            )


@dataclass
class PartPlan:
    """Part of a model that is being quantized.

    A part that the example does not call has no graph until calibration data calls it.

    Attributes:
        path: path of the submodule.
        module: the float submodule.
        recipe: recipe of its graphs.
        programs: prepared graphs by name, one for each kind of call.
        macs: multiply-accumulates of all its calls on the example.
        calls: number of these calls.
        why_float: why the float module runs for some calls, which cannot be traced; empty if there are none.
        is_late: whether the example does not call it.
    """

    path: str
    module: nn.Module
    recipe: Recipe
    programs: dict[str, ObservedModel] = field(default_factory=dict)
    macs: int = 0
    calls: int = 0
    why_float: str = ""
    is_late: bool = False

    def fitting(self, batch: Batch) -> ObservedModel | None:
        """Return the prepared graph that takes a call; None if there is none."""
        example = copied(batch)
        calls = ((name, partial(nn.Module.__call__, own.traced.gm)) for name, own in self.programs.items())
        with torch.no_grad():
            name = first_fitting(calls, example.args, example.kwargs).key
        return None if name is None else self.programs[name]

    def add_program(self, batch: Batch, prepare: Prepare) -> ObservedModel:
        """Trace and prepare a further graph for a call.

        Raises:
            FxqError: the module cannot be traced with this call, or has too many graphs.
        """
        if len(self.programs) == MAX_PROGRAMS:
            raise TraceError(f"it is called in more than {MAX_PROGRAMS} ways that need graphs of their own.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            observed = prepare(PartShell(self.path, self.module), self.recipe, batch)
        untraced = untraced_modules(observed)
        if self.path in untraced or share_of(observed, untraced) > MAX_UNTRACED_SHARE:
            raise TraceError(next(iter(untraced.values())))
        try:
            write_graph(observed.traced.gm, complete=True)
        except InputError as error:
            raise TraceError(f"its graph could not be saved: {error}") from None
        number = len(self.programs) + 1
        self.programs[self.path if number == 1 else f"{self.path} ({number})"] = observed
        return observed


def untraced_modules(observed: ObservedModel) -> dict[str, str]:
    """Return the modules that could not be traced, and stay float in the graph, with the reasons."""
    leaves = observed.manager.context.recipe.leaf_modules
    untraced = {}
    for node in observed.traced.gm.graph.find_nodes(op="call_module"):
        decision, path = info(node).traced.kept, str(node.target)
        if decision is not None and not is_kept(path, leaves):
            untraced[path] = decision.text
    return untraced


def share_of(observed: ObservedModel, paths: Mapping[str, str]) -> float:
    """Return the share of a graph's multiply-accumulates in some modules that it calls."""
    gm = observed.traced.gm
    macs = {node: macs_of(gm, node) for node in gm.graph.nodes}
    inside = sum(count for node, count in macs.items() if node.op == "call_module" and node.target in paths)
    return inside / (sum(macs.values()) or 1)


def why_in_parts(observed: ObservedModel) -> str:
    """Return why a prepared model should be quantized in parts; empty if one graph is better.

    Parts are better if more than `MAX_LEAF_SHARE` of the multiply-accumulates are in modules that cannot be traced but
    have submodules with weights.
    """
    untraced = untraced_modules(observed)
    model = observed.manager.context.model
    divisible = {p: why for p, why in untraced.items() if any(map(has_weights, model.get_submodule(p).children()))}
    share = share_of(observed, divisible)
    if share <= MAX_LEAF_SHARE:
        return ""
    path, why = next(iter(divisible.items()))
    return f'layer "{path}", with {share:.0%} of the multiply-accumulates, {why}.'


def why_not(model: nn.Module, error: FxqError) -> str:
    """Return where and why a trace failed, without the remedies that apply to a model as one graph."""
    cause = error.__cause__
    if isinstance(error, TraceError) and isinstance(cause, Exception):
        return f"{locate_failure(model, cause).note()}."
    return words_of(error)


def has_weights(module: nn.Module) -> bool:
    """Whether a module has a parameter with two or more axes, apart from embedding tables."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    return any(p.dim() >= 2 and id(p) not in tables for p in module.parameters())


@dataclass
class Choice:
    """Parts of a model, and what stays in Python.

    Attributes:
        parts: the parts, in the order of the model's modules.
        reasons: modules that stay in Python, with the reasons.
    """

    parts: list[PartPlan]
    reasons: dict[str, str]


def choose_parts(model: nn.Module, recipe: Recipe, example: Batch, prepare: Prepare) -> Choice:
    """Choose the parts of a model, and prepare them.

    A module becomes a part if it can be traced for all its calls. Otherwise its children are tried. A module with
    weights that the example does not call becomes a part without graphs.

    Args:
        model: the float model.
        recipe: the recipe of the whole model.
        example: one batch.
        prepare: function that prepares a model.

    Raises:
        RecipeError: a path of `Recipe.parts` or an override selects nothing.
    """
    pending = _first_candidates(model, recipe)
    choice, selecting, called = Choice([], {}), set[int](), called_modules(model, example)
    while pending:
        calls = recorded_calls(model, example, pending)
        divided: dict[str, nn.Module] = {}
        for path, module in pending.items():
            plan = PartPlan(path, module, recipe_of_part(recipe, path, module), macs=calls[path].macs)
            if _may_be_called_later(module, called) and not is_kept(path, recipe.leaf_modules):
                plan.is_late = True
                choice.parts.append(plan)
                continue
            refused = _refused(path, module, calls[path], recipe)
            if refused is None:
                try:
                    _add_programs(plan, calls[path], prepare)
                    choice.parts.append(plan)
                    selecting.update(*(p.manager.context.selecting or () for p in plan.programs.values()))
                    continue
                except RecipeError:
                    raise
                except FxqError as error:
                    refused = why_not(PartShell(path, module), error)
            if refused and calls[path].batches:
                choice.reasons[path] = refused
            if not is_kept(path, recipe.leaf_modules):
                divided |= {f"{path}.{name}": child for name, child in module.named_children()}
        pending = divided
    order = {id(module): i for i, module in enumerate(model.modules())}
    choice.parts.sort(key=lambda plan: order[id(plan.module)])
    check_part_overrides(model, recipe, selecting)
    return choice


def _first_candidates(model: nn.Module, recipe: Recipe) -> dict[str, nn.Module]:
    if not recipe.part_modules:
        return dict(model.named_children())
    types = {path: type(module) for path, module in model.named_modules()}
    for pattern in recipe.part_modules:
        if not any(path_matches(path, pattern) for path in types if path):
            near = Selector(path=pattern).near_misses(types, ())
            raise RecipeError(f"parts: {pattern!r} matches no module; near: {', '.join(near) or 'nothing'}.")
    paths = [p for p in types if p and any(path_matches(p, pattern) for pattern in recipe.part_modules)]
    return {p: model.get_submodule(p) for p in paths if not any(above in paths for above in ancestors(p) if above != p)}


def _refused(path: str, module: nn.Module, calls: RecordedCalls, recipe: Recipe) -> str | None:
    """Reason why a module is no part; empty if it has no arithmetic, so none is reported; None if it may be a part."""
    if is_kept(path, recipe.leaf_modules):
        return "the recipe keeps this module as it is"
    if not calls.batches or not (calls.macs or has_weights(module)):
        return ""
    return calls.refused or None


def _may_be_called_later(module: nn.Module, called: set[int]) -> bool:
    """Whether a module has weights and a forward, but the example calls neither it nor a module in it."""
    if isinstance(module, torch.jit.ScriptModule) or type(module).forward is nn.Module.forward:
        return False
    return has_weights(module) and not any(id(inner) in called for inner in module.modules())


def _add_programs(plan: PartPlan, calls: RecordedCalls, prepare: Prepare) -> None:
    for batch in calls.batches.values():
        if plan.fitting(batch) is None:
            plan.add_program(batch, prepare)


def recipe_of_part(recipe: Recipe, path: str, module: nn.Module) -> Recipe:
    """Recipe of one part: the model's, without leaves outside of the part and without the check of `min_sqnr`."""
    inside = [f"{path}.{name}".rstrip(".") for name, _ in module.named_modules()]
    leaves = tuple(glob for glob in recipe.leaf_modules if any(path_matches(p, glob) for p in inside))
    return replace(recipe, leaf_modules=leaves, part_modules=(), strict_trace=False, min_sqnr=None)


def check_part_overrides(model: nn.Module, recipe: Recipe, selecting: set[int]) -> None:
    """Raise `RecipeError` for an override that selects nothing in any part, and no module outside of them."""
    types = {path: type(module) for path, module in model.named_modules(remove_duplicate=False)}
    selectors = [selector for selector, _ in recipe.overrides]
    outside = {i for i, selector in enumerate(selectors) if any(selector.matches(path, (), types) for path in types)}
    check_selectors(selectors, types, selecting | outside, "the parts")


def recorded_calls(model: nn.Module, example: Batch, modules: Mapping[str, nn.Module]) -> dict[str, RecordedCalls]:
    """Run the float model on the example, and return the calls of some of its modules, by path."""
    calls = {path: RecordedCalls() for path in modules}
    with hooked_run(model) as (handles, counter):
        for path, module in modules.items():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks, and has no code to trace
                continue
            calls[path].state = snapshot_of(module)
            before, after = partial(_enter, counter, path, calls[path]), partial(_leave, counter, calls[path])
            handles += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True),
            ]
        call(model, example)
    for path in modules:
        calls[path].macs = counter.counts[path]
    return calls


def called_modules(model: nn.Module, example: Batch) -> set[int]:
    """Run the float model on the example, and return the ids of the modules that it calls."""
    called: set[int] = set()
    with hooked_run(model) as (handles, _):
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(lambda inner, _: called.add(id(inner))))
        call(model, example)
    return called


@contextmanager
def hooked_run(model: nn.Module) -> Iterator[tuple[list[Any], MacCounter]]:
    """Context for a run of the float model with hooks. It restores the state of the model and removes the hooks.

    Yields:
        The list to add hook handles to, and the counter of multiply-accumulates.
    """
    handles: list[Any] = []
    try:
        with untouched(model, CodeState.of(model).bindings), counting_macs() as counter:
            yield handles, counter
    finally:
        for handle in handles:
            handle.remove()


def call(model: nn.Module, batch: Batch, seed: int = 0) -> Any:
    """Run a model on a copy of a batch, with random numbers of a seed.

    Raises:
        InputError: the model does not run on it.
    """
    inputs = copied(batch)
    try:
        with seeded(seed), torch.inference_mode(False), torch.no_grad(), without_autocast():
            return model(*inputs.args, **inputs.kwargs)
    except FxqError:
        raise
    except Exception as error:  # the user's forward may raise any type of error
        raise InputError(f"the model does not run on the batch {batch}: {words_of(error)}") from error


def _enter(counter: MacCounter, path: str, calls: RecordedCalls, module: Any, args: Any, kwargs: Any) -> None:
    calls.enter(args, kwargs)
    counter.stack.append(path)


def _leave(counter: MacCounter, calls: RecordedCalls, module: Any, args: Any, kwargs: Any, result: Any) -> None:
    counter.stack.pop()
    calls.leave()
