"""Quantization of a model in parts: choose them, calibrate all in one run of the whole model, convert each."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fxq.common.code_state import CodeState
from fxq.common.data import Batch
from fxq.common.isolation import untouched
from fxq.common.metrics import Agreement, tensors
from fxq.errors import RecipeError, TraceError, warn
from fxq.ledger.float_states import warn_without_states
from fxq.ledger.output_check import rank
from fxq.model import QuantizedModel
from fxq.parts.absent import AbsentTensor
from fxq.parts.choose import (
    Choice,
    PartPlan,
    Prepare,
    call,
    check_part_overrides,
    choose_parts,
    hooked_run,
    recipe_of_part,
)
from fxq.parts.copying import copy_of
from fxq.parts.counting import MacCounter
from fxq.parts.part import Programs, graphs_in, tensors_of
from fxq.parts.parts_model import attach, ledger_of_parts, with_parts
from fxq.programs.quantized_programs import share_tensors
from fxq.recipe.recipe import Recipe
from fxq.recipe.selector import ancestors
from fxq.workflow.fastest import converted_for_recipe
from fxq.workflow.observed_model import ObservedModel

MAX_CHECKED_BATCHES = 4
"""Maximum number of batches on which the outputs of the quantized and the float model are compared."""


@dataclass
class PartsRun:
    """One quantization of a model in parts.

    Attributes:
        model: the float model.
        recipe: the recipe.
        example: one batch.
        prepare: function that prepares a part.
        why: why the model is quantized in parts.
        choice: the parts, and what stays in Python.
        python_macs: multiply-accumulates outside of the parts, by the path of the innermost module.
        weights: tensors that parts show for the float weights: placeholders, or copies that Python code reads.
        unreachable: for parts that the copy of the model does not call, the reason.
        checked: first batches of the data, on which the output is checked.
        keeps_state: whether code that stays in Python keeps a state between calls.
        is_fixed: whether no further graphs can be added, since a checkpoint holds the state of each graph.
        seen: data that the model was run on, for messages.
    """

    model: nn.Module
    recipe: Recipe
    example: Batch
    prepare: Prepare
    why: str = ""
    choice: Choice = field(init=False)
    python_macs: Counter[str] = field(default_factory=Counter)
    weights: dict[str, Tensor] = field(default_factory=dict)
    unreachable: dict[str, str] = field(default_factory=dict)
    checked: list[Batch] = field(default_factory=list)
    keeps_state: bool = False
    is_fixed: bool = False
    seen: str = "the data"

    def begin(self, why: str) -> PartsRun:
        """Choose the parts.

        Args:
            why: why the model is quantized in parts.

        Raises:
            TraceError: no submodule with arithmetic can be traced.
        """
        self.why = why
        self.choice = choose_parts(self.model, self.recipe, self.example, self.prepare)
        if not any(plan.programs or self.recipe.part_modules for plan in self.choice.parts):
            reasons = "; ".join(f"{path}: {reason}" for path, reason in list(self.choice.reasons.items())[:3])
            raise TraceError(f"{self.why} No submodule with arithmetic can be traced either. {reasons}".strip())
        self._find_reads()
        return self

    def has_parts_in(self, paths: Iterable[str]) -> bool:
        """Whether a part is inside one of the modules at these paths."""
        traced = [plan.path for plan in self.choice.parts if plan.programs]
        return any(own.startswith(f"{path}.") for own in traced for path in paths)

    def _find_reads(self) -> None:
        """Run the float model through the parts, to count its arithmetic and find weights that Python code reads."""
        real = {f"{plan.path}.{name}": tensor for plan in self.choice.parts for name, tensor in tensors_of(plan.module)}
        read: dict[str, Tensor] = {}

        def on_read(name: str) -> Tensor:
            return read.setdefault(name, real[name].detach())

        shown = {name: AbsentTensor.like(tensor, name, on_read) for name, tensor in real.items()}
        programs = {plan.path: FloatCalls(plan) for plan in self.choice.parts}
        trial = with_parts(self.model, programs, shown)
        with hooked_run(self.model) as (handles, counter):
            handles += [
                hook
                for path, module in trial.named_modules()
                if not isinstance(module, torch.jit.ScriptModule)
                for hook in (
                    module.register_forward_pre_hook(partial(_push, counter, path)),
                    module.register_forward_hook(partial(_pop, counter)),
                )
            ]
            for called in programs.values():
                called.counter = counter
            call(trial, self.example)
        for path, plan in ((plan.path, plan) for plan in self.choice.parts):
            plan.macs = counter.counts.pop(f"in {path}", 0)
            if plan.programs and not plan.calls:
                self.unreachable[path] = (
                    "code that is not copied with the model calls it, such as a function that was defined in __init__"
                )
        self.choice.parts = [  # without modules that are not called because code reads their weights
            plan
            for plan in self.choice.parts
            if not (plan.is_late and any(name.startswith(f"{plan.path}.") for name in read))
        ]
        self.python_macs = +counter.counts
        late = [plan for plan in self.choice.parts if plan.is_late]  # whether code reads their buffers is not known
        read |= {f"{plan.path}.{name}": buffer for plan in late for name, buffer in plan.module.named_buffers()}
        self.weights = {
            name: tensor.clone() if (tensor := read.get(name)) is not None else AbsentTensor.like(real[name], name)
            for name in real
        }

    @property
    def calibrated(self) -> str:
        """Name of the first value whose range needs calibration; empty if there is none."""
        return next((name for observed in self.graphs if (name := observed.calibrated)), "")

    @property
    def all_called(self) -> bool:
        """Whether the example or the data so far has called every part."""
        return all(plan.programs or plan.why_float for plan in self.choice.parts)

    @property
    def graphs(self) -> list[ObservedModel]:
        """Prepared graphs of all parts."""
        return [observed for plan in self.choice.parts for observed in plan.programs.values()]

    def convert(self, recipe: Recipe | None = None) -> Any:
        """Convert the parts, check the output, and return the quantized model. One warning sums up all parts.

        Args:
            recipe: a recipe other than that of the parts, see `fxq.convert`.

        Raises:
            CalibrationError: a part has seen no data.
            RecipeError: the recipe needs a new calibration, names other parts, or has an override that selects nothing.
        """
        chosen = self.recipe if recipe is None else recipe
        if chosen.part_modules != self.recipe.part_modules:
            raise RecipeError("parts are chosen before calibration: call fxq.prepare with recipe.parts(...).")
        if not self.graphs:
            names = _listed([plan.path for plan in self.choice.parts])
            raise TraceError(f"no part is quantized, because {self.seen} calls none of: {names}.")
        graphs: dict[str, dict[str, QuantizedModel]] = {}
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for plan in self.choice.parts:
                seen = {name: observed for name, observed in plan.programs.items() if observed.batches_seen}
                own = None if recipe is None else recipe_of_part(recipe, plan.path, plan.module)
                graphs[plan.path] = {}
                for name, observed in (seen or plan.programs).items():
                    graphs[plan.path][name] = converted_for_recipe(observed, own)
                share_tensors(list(graphs[plan.path].values()))
            share_tensors([graph for path in self._tied for graph in graphs[path].values()], tied=True)
        if recipe is not None:
            ops = [(entry.path, entry.op) for own in graphs.values() for g in own.values() for entry in g.ledger]
            types = {path: type(module) for path, module in self.model.named_modules()}
            selectors = [selector for selector, _ in recipe.overrides]
            selecting = {i for i, s in enumerate(selectors) if any(s.matches(path, (op,), types) for path, op in ops)}
            check_part_overrides(self.model, recipe, selecting)
        programs = self.programs_of(graphs)
        model = with_parts(self.model, programs, self.weights).eval()
        by_name = {name: graph for own in graphs.values() for name, graph in own.items()}
        checked = self.checked or [self.example]
        output_sqnr = outputs_sqnr(self.model, with_parts(self.model, programs, self.weights), checked)
        warn_without_states(chosen, (entry for graph in by_name.values() for entry in graph.ledger))
        ledger = ledger_of_parts(by_name, self._times(graphs), self._in_python(), output_sqnr)
        backend = next(iter(by_name.values())).backend
        attach(model, ledger, chosen, backend)
        self._warn(model, [str(w.message) for w in heard if issubclass(w.category, Warning)])
        return model

    @property
    def _tied(self) -> list[str]:
        """Paths of the parts that share float weights with other parts."""
        owned = {plan.path: {id(tensor) for _, tensor in tensors_of(plan.module)} for plan in self.choice.parts}
        times = Counter(chain.from_iterable(owned.values()))
        return [path for path, own in owned.items() if any(times[key] > 1 for key in own)]

    def programs_of(self, graphs: Mapping[str, Mapping[str, nn.Module]]) -> dict[str, Programs]:
        """Return what each part calls, by its path.

        Args:
            graphs: graphs of each part by name, by its path; a part without any stays the float module.
        """
        return {
            plan.path: Programs(graphs[plan.path], copy_of(plan.module, {}) if plan.why_float else None)
            for plan in self.choice.parts
            if graphs[plan.path]
        }

    def _times(self, graphs: dict[str, dict[str, QuantizedModel]]) -> dict[str, float]:
        """Arithmetic of each graph on the example, as a multiple of the call that it was traced from."""
        times: dict[str, float] = {}
        for plan in self.choice.parts:
            own = graphs[plan.path]
            once = sum(entry.macs for graph in own.values() for entry in graph.ledger)
            share = plan.macs / once if plan.macs and once else plan.calls / max(len(own), 1)
            times |= dict.fromkeys(own, share)
        return times

    def _calls_in_float(self) -> dict[str, str]:
        """Parts of which some calls run in float, with the reasons."""
        return self.unreachable | {p.path: p.why_float for p in self.choice.parts if p.why_float and p.programs}

    def _in_python(self) -> dict[str, tuple[str, int]]:
        """Modules whose code stays in Python, with the reason and their multiply-accumulates."""
        without_graphs = {
            plan.path: plan.why_float or f"{self.seen} does not call it"
            for plan in self.choice.parts
            if not plan.programs
        }
        reasons = {"": self.why, **self.choice.reasons, **self._calls_in_float(), **without_graphs}
        macs: Counter[str] = Counter()
        for path, count in self.python_macs.items():
            macs[next((above for above in ancestors(path) if above in reasons), "")] += count
        return {path: (why, macs[path]) for path, why in reasons.items()}

    def _warn(self, model: Any, heard: list[str]) -> None:
        ledger, graphs = vars(model)["_fxq_ledger"], graphs_in(model)
        min_sqnr, low = vars(model)["_fxq_recipe"].min_sqnr, ""
        if min_sqnr is not None:
            sqnrs = {"the output": ledger.output_sqnr, **{name: g.output_sqnr for name, g in graphs.items()}}
            bad = [f"{name} ({dB:.1f} dB)" for name, dB in sqnrs.items() if dB is not None and rank(dB) < min_sqnr]
            low = f" Below the {min_sqnr:g} dB of min_sqnr: {_listed(bad)}." if bad else ""
        weights = f" and {ledger.weight_coverage:.1%} with integer weights" if ledger.weight_coverage else ""
        in_float = "".join(
            f' Part "{path}" also gets calls that run in float: {why}' for path, why in self._calls_in_float().items()
        )
        not_called = [plan.path for plan in self.choice.parts if not plan.programs and not plan.why_float]
        if not_called:
            in_float += f" Modules in float, because {self.seen} does not call them: {_listed(not_called)}."
        texts = list(dict.fromkeys(heard))
        further = f" Warnings of parts: {len(texts)}, the first: {texts[0]}" if texts else ""
        warn(
            f"{type(self.model).__name__} is quantized in {len(graphs)} part{'' if len(graphs) == 1 else 's'}: "
            f"{_listed(list(graphs))}. The code around them stays in Python: {self.why} {ledger.coverage:.1%} of the "
            f"multiply-accumulates are on integers{weights}; print(q.ledger) shows the rest. recipe.parts(...) chooses "
            f"other parts.{in_float}{low}{further}"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    return f"{shown} and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else shown


_MAX_LISTED = 4


def _push(counter: MacCounter, path: str, module: Any, args: Any) -> None:
    counter.stack.append(path)


def _pop(counter: MacCounter, module: Any, args: Any, result: Any) -> None:
    counter.stack.pop()


class FloatCalls(nn.Module):
    """Module that calls the float module of a part, and counts the calls.

    Args:
        plan: the part.
    """

    counter: MacCounter

    def __init__(self, plan: PartPlan) -> None:
        super().__init__()
        vars(self)["plan"] = plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the float module."""
        vars(self)["plan"].calls += 1
        self.counter.stack.append(f"in {vars(self)['plan'].path}")
        try:
            return vars(self)["plan"].module(*args, **kwargs)
        finally:
            self.counter.stack.pop()


def outputs_sqnr(model: nn.Module, quantized: Any, batches: list[Batch]) -> float | None:
    """Return the SQNR of a quantized model against its float model, in dB: the minimum over the outputs.

    It is None if the number or shapes of outputs depend on values, such as detections, and so cannot be compared.

    Args:
        model: the float model.
        quantized: a copy of the quantized model, whose Python code may change its state.
        batches: inputs of both.
    """
    outputs: dict[int, Agreement] = {}
    outside = CodeState.of(model).bindings
    with untouched(model, outside):
        all_wants = [list(tensors(call(model, batch))) for batch in batches]
    with untouched(nn.Module(), outside):  # the quantized model runs the same code
        all_gots = [list(tensors(call(quantized, batch))) for batch in batches]
    for wants, gots in zip(all_wants, all_gots, strict=True):
        if [w.shape for w in wants] != [g.shape for g in gots]:
            return None
        for i, (want, got) in enumerate(zip(wants, gots, strict=True)):
            if want.is_floating_point():
                outputs.setdefault(i, Agreement()).add(want, got)
    return min((output.sqnr for output in outputs.values()), key=rank, default=None)
