"""Quantization of a model that is called in several forms, or with containers: one program for each."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fxq.common.checksums import checksum
from fxq.common.containers import Leaves
from fxq.common.data import Batch, as_batch, batches, naming_batch
from fxq.common.isolation import copied
from fxq.common.progress import progress_bar
from fxq.common.ranks import Ranks
from fxq.errors import InputError, warn
from fxq.ledger.float_record import checksums
from fxq.ledger.float_states import warn_without_states
from fxq.pipeline.samples import has_enough
from fxq.programs.call_form import CallForm, form_of
from fxq.programs.fitting import first_fitting
from fxq.programs.flat_model import ResultForm, changed_arguments, flat_batch, flat_model
from fxq.programs.quantized_programs import Program, QuantizedPrograms
from fxq.recipe.recipe import Recipe
from fxq.recipe.recipe_checks import check_selectors
from fxq.workflow.calibrate import calibrate_programs
from fxq.workflow.fastest import converted_for_recipe, prepared_for_recipe, without_slow
from fxq.workflow.obstacles import check_model

Around = Callable[[], AbstractContextManager[Any]]
"""Function that returns the context in which a model is traced."""


def needs_programs(model: nn.Module, recipe: Recipe, examples: Sequence[Batch]) -> bool:
    """Whether a model is to be quantized as `QuantizedPrograms`.

    It is for several examples, and for arguments that hold registered containers or that the model changes: its other
    forms deliver no changes. Parts that the recipe names are called by the float model, which changes its arguments.
    """
    return len(examples) > 1 or (not recipe.part_modules and bool(changed_arguments(model, examples[0])))


def examples_of(example_inputs: Any, model: nn.Module) -> dict[str, Batch]:
    """Examples of calls by the names of their programs.

    Args:
        example_inputs: one batch; a list of dicts, each a batch of keyword inputs; or a dict of batches by the name of
            their program.
        model: the float model.
    """
    names = set(inspect.signature(model.forward).parameters)
    are_calls = isinstance(example_inputs, list) and bool(example_inputs)
    if are_calls and all(isinstance(item, Mapping) and set(item) <= names for item in example_inputs):
        return {f"program_{i}": as_batch(item, model, "example_inputs") for i, item in enumerate(example_inputs)}
    by_name = isinstance(example_inputs, Mapping) and example_inputs and not names & set(example_inputs)
    if by_name and all(isinstance(item, (Mapping, tuple)) for item in example_inputs.values()):
        return {str(name): as_batch(item, model, "example_inputs") for name, item in example_inputs.items()}
    return {"program_0": as_batch(example_inputs, model, "example_inputs")}


def example_of_one_graph(example_inputs: Any, model: nn.Module) -> tuple[Batch, InputError | None]:
    """The example of a call, and why one graph cannot be made for it: None if one can.

    Args:
        example_inputs: see `examples_of`.
        model: the float model.
    """
    examples = list(examples_of(example_inputs, model).values())
    why = "it gets several examples"
    if len(examples) == 1:
        if not needs_programs(model, Recipe(), examples):
            return examples[0], None
        why = f"forward changes, or may change, its arguments: {', '.join(changed_arguments(model, examples[0]))}"
    return examples[0], InputError(
        f"fxq.prepare makes one graph, and the model needs programs: {why}. Use fxq.quantize(model, recipe, "
        "data=loader, example_inputs=...), which calibrates and converts. Training needs arguments that stay unchanged."
    )


@dataclass
class _Prepared:
    """Observed program, before it is converted."""

    name: str
    form: CallForm
    results: ResultForm
    flat: nn.Module
    observed: Any


def quantize_programs(
    model: nn.Module,
    recipe: Recipe,
    examples: Mapping[str, Batch],
    data: Iterable[Any] | None,
    *,
    around: Around = nullcontext,
    progress: bool | None = None,
    selecting: set[int] | None = None,
    ranks: Ranks | None = None,
) -> QuantizedPrograms:
    """Quantize a model with a program for each example.

    Args:
        model: the float model.
        recipe: the recipe.
        examples: one batch for each program, by name.
        data: calibration batches. Each is run by the program that fits its form and sizes. Without calibrated ranges,
            no more are read once every program has enough.
        around: context in which forward is traced.
        progress: whether to show a progress bar.
        selecting: numbers of the recipe's overrides that select something in other programs; those of these programs
            are added, and the caller checks them. None: they are checked here.
        ranks: processes that calibrate and convert together, each with its share of the data, and with equal models,
            recipes and examples; None: this one alone.

    Raises:
        InputError: a batch of the data fits no example, or a program with calibrated ranges gets no batch.
        RecipeError: an override selects nothing in any program.
        FxqError: an error on any of the ranks.
    """
    signature, ranks = inspect.signature(model.forward), ranks or Ranks()
    prepared = ranks.together(lambda: _all_prepared(model, recipe, examples, around, progress))
    selected = set() if selecting is None else selecting
    selected.update(*(program.observed.manager.context.selecting or () for program in prepared))
    if selecting is None:
        ranks.together(lambda: check_program_overrides(model, recipe, selected))
    if data is not None:
        if ranks.size == 1:  # ranks must calibrate the same models, and times differ
            for program in prepared:
                program.observed = without_slow(program.observed)
        shown = progress if ranks.rank == 0 else bool(progress)
        own = batches(data, model, may_be_empty=ranks.size > 1)
        observed = [program.observed for program in prepared]
        calibrate_programs(observed, ranks, lambda: _calibrate(prepared, own, signature, shown))
    idle = [program for program in prepared if program.observed.calibrated and not program.observed.batches_seen]
    if idle:
        raise InputError(
            f"the recipe {recipe.preset!r} needs data to calibrate with, and no batch is a call of the form "
            f"{idle[0].name}({idle[0].form}): give batches of every form, fxq.quantize(model, recipe, data=loader)."
        )
    programs = ranks.together(lambda: tuple(_converted(program, ranks) for program in prepared))
    if selecting is None:
        warn_without_states(recipe, (entry for program in programs for entry in program.qmodel.ledger))
    new_program = ProgramTracer(model, recipe, around, _all_checksums(model)) if recipe.new_kinds == "trace" else None
    return QuantizedPrograms(programs, signature, new_program)


def _all_prepared(
    model: nn.Module, recipe: Recipe, examples: Mapping[str, Batch], around: Around, progress: bool | None
) -> list[_Prepared]:
    """Observed programs for the examples that no earlier program serves."""
    signature = inspect.signature(model.forward)
    prepared: list[_Prepared] = []
    for name, batch in examples.items():
        form, leaves, _ = form_of(signature, batch)
        if _serving(prepared, form, leaves, runs=True) is None:
            prepared.append(_prepared(model, recipe, name, form, leaves, around))
            prepared[-1].observed.manager.context.progress = progress
    return prepared


def check_no_checkpoint(checkpoint: Any, data: Iterable[Any] | None) -> None:
    """Raise `InputError` for a checkpoint, which the calibration of models with several programs does not have.

    Args:
        checkpoint: path of a checkpoint; None: none.
        data: calibration batches; without, a checkpoint has no effect.
    """
    if data is not None and checkpoint is not None:
        raise InputError(
            "this model gets programs for several kinds of calls, whose calibration has no checkpoint: leave it out, "
            "fxq.quantize(model, recipe, data=loader)."
        )


def check_program_overrides(model: nn.Module, recipe: Recipe, selecting: Collection[int]) -> None:
    """Raise `RecipeError` for an override that selects nothing in any program.

    Args:
        model: the float model.
        recipe: the recipe.
        selecting: numbers of the overrides that select something.
    """
    types = {path: type(module) for path, module in model.named_modules()}
    check_selectors([selector for selector, _ in recipe.overrides], types, selecting, "any program")


def _prepared(model: nn.Module, recipe: Recipe, name: str, form: CallForm, leaves: Leaves, around: Around) -> _Prepared:
    flat, results = flat_model(model, form, leaves, around)
    return _Prepared(name, form, results, flat, prepared_for_recipe(flat, recipe, flat_batch(form, leaves)))


def _converted(program: _Prepared, ranks: Ranks | None = None) -> Program:
    return Program(program.name, program.form, program.results, converted_for_recipe(program.observed, ranks=ranks))


@dataclass(frozen=True)
class ProgramTracer:
    """Function that traces and quantizes a program for a call of a quantized model, see `Recipe.new_kinds`.

    Copies share it. It is left out of pickles.

    Attributes:
        model: the float model.
        recipe: the recipe, without calibrated ranges.
        around: context in which forward is traced.
        weights: checksums of the float model's parameters and buffers when it was quantized.
    """

    model: nn.Module
    recipe: Recipe
    around: Around
    weights: Mapping[str, int]

    def __call__(self, name: str, form: CallForm, leaves: Leaves) -> Program:
        """Trace and quantize a program.

        Args:
            name: name of the program.
            form: form of the call.
            leaves: tensors and numbers of the call by name.

        Raises:
            InputError: the float model was changed since it was quantized, or does not run on the call.
        """
        check_model(self.model)
        now = _all_checksums(self.model)
        changed = [name for name in {**self.weights, **now} if now.get(name) != self.weights.get(name)]
        if changed:
            raise InputError(
                f"no program fits a call of the form ({form}), and none can be traced: the weights of the float model "
                f"have changed since it was quantized, such as {changed[0]!r}. Quantize it again."
            )
        with torch.inference_mode(False):  # whose tensors a model cannot keep
            example = {key: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for key, leaf in leaves.items()}
            if self.around is not nullcontext:
                # Libraries install hooks at the first call that asks for inner values, and note it in attributes, which
                # `flat_model` restores. An error of this call is raised there.
                with contextlib.suppress(Exception), torch.no_grad():
                    form.called(self.model, form.call_arguments(copied(example)))
            return _converted(_prepared(self.model, self.recipe, name, form, example, self.around))

    def __deepcopy__(self, memo: Any) -> ProgramTracer:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()


def _all_checksums(model: nn.Module) -> dict[str, int]:
    """Checksum of each parameter and buffer, by name."""
    return {**checksums(model), **{name: checksum(tensor) for name, tensor in model.named_buffers()}}


def _serving(prepared: Sequence[_Prepared], form: CallForm, leaves: Leaves, runs: bool = False) -> _Prepared | None:
    """The first prepared program that takes a call; None if none does.

    Args:
        prepared: the programs.
        form: form of the call.
        leaves: tensors and numbers of the call by name.
        runs: whether to run the graph even if only one has this form.
    """
    candidates = [program for program in prepared if program.form == form]
    if len(candidates) == 1 and not runs:
        return candidates[0]
    calls = ((i, partial(nn.Module.__call__, program.observed.traced.gm)) for i, program in enumerate(candidates))
    with torch.no_grad():
        at = first_fitting(calls, kwargs=leaves).key
    return None if at is None else candidates[at]


def _calibrate(
    prepared: Sequence[_Prepared], data: Iterable[Batch], signature: inspect.Signature, progress: bool | None
) -> None:
    """Run each batch through the observed model of the program that serves it.

    Without calibrated ranges, data may be endless, although a program never gets a batch.
    """
    unused = 0
    with torch.no_grad(), progress_bar("calibrating", None, progress) as advance:
        for i, batch in enumerate(data):
            form, leaves, _ = form_of(signature, batch)
            program = _serving(prepared, form, leaves)
            if program is None:
                raise InputError(f"data, batch {i}: no example is a call of the form ({form}) with such sizes.")
            unused = 0 if _reads(program.observed) else unused + 1
            if not unused:
                with naming_batch(i, batch):
                    program.observed.calibrate_on(leaves)
            advance()
            waiting = [program for program in prepared if _reads(program.observed)]
            if not waiting:
                break
            if unused == MAX_UNUSED:
                warn(_too_few(waiting, f"{i + 1} batches were read, the last {unused} of them for other programs"))
                break
            idle = [program for program in waiting if not program.observed.batches_seen]
            if i + 1 == MAX_IDLE and idle:
                warn(_too_few(idle, f"none of the first {i + 1} batches is such a call, and calibration reads on"))


MAX_UNUSED = 256
"""Number of batches in succession that no program needs, after which no more are read."""
MAX_IDLE = 1024
"""Number of batches after which a program without a batch is named in a warning."""


def _too_few(programs: Sequence[_Prepared], why: str) -> str:
    """Message on programs that get too few batches."""
    forms = ", ".join(f"{program.name}({program.form})" for program in programs)
    return f"data has too few calls of the form {forms}: {why}. Give batches of every form."


def _reads(observed: Any) -> bool:
    """Whether a prepared program needs further batches."""
    return bool(observed.calibrated) or not has_enough(observed.manager.context)
