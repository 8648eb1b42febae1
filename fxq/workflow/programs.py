"""Quantization of a model that is called in several forms, or with containers: one program for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxq.common.containers import Leaves, holds_registered
from fxq.common.data import Batch, as_batch, batches, naming_batch
from fxq.common.progress import progress_bar
from fxq.errors import InputError
from fxq.pipeline.samples import has_enough
from fxq.programs.call_form import CallForm, form_of
from fxq.programs.flat_model import ResultForm, flat_batch, flat_model
from fxq.programs.quantized_programs import Program, QuantizedPrograms
from fxq.recipe.recipe import Recipe
from fxq.workflow.fastest import converted_for_recipe, prepared_for_recipe

Around = Callable[[], AbstractContextManager[Any]]


def needs_programs(examples: Sequence[Batch]) -> bool:
    """Whether a model is to be quantized as `QuantizedPrograms`: for several examples, or with containers."""
    values = [value for batch in examples for value in (*batch.args, *batch.kwargs.values())]
    return len(examples) > 1 or any(map(holds_registered, values))


def examples_of(example_inputs: Any, model: nn.Module) -> dict[str, Batch]:
    """Examples of calls by the names of their programs.

    Args:
        example_inputs: one batch; a list of dicts, each a batch of keyword inputs; or a dict of batches by the name of
            their program.
        model: the float model.
    """
    names = set(inspect.signature(model.forward).parameters)
    are_several = isinstance(example_inputs, list) and len(example_inputs) > 1
    if are_several and all(isinstance(item, Mapping) and set(item) <= names for item in example_inputs):
        return {f"program_{i}": as_batch(item, model, "example_inputs") for i, item in enumerate(example_inputs)}
    by_name = isinstance(example_inputs, Mapping) and example_inputs and not names & set(example_inputs)
    if by_name and all(isinstance(item, (Mapping, tuple)) for item in example_inputs.values()):
        return {str(name): as_batch(item, model, "example_inputs") for name, item in example_inputs.items()}
    return {"program_0": as_batch(example_inputs, model, "example_inputs")}


@dataclass
class _Prepared:
    """Program before it is converted."""

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
) -> QuantizedPrograms:
    """Quantize a model with a program for each example.

    Args:
        model: the float model.
        recipe: the recipe.
        examples: one batch for each program, by name.
        data: calibration batches. Each is run by the program that fits its form and sizes.
        around: context in which forward is traced.
        progress: whether to show a progress bar.

    Raises:
        InputError: a batch of the data fits no example, or a program with calibrated ranges gets no batch.
    """
    signature = inspect.signature(model.forward)
    prepared: list[_Prepared] = []
    for name, batch in examples.items():
        form, leaves, _ = form_of(signature, batch)
        if any(program.form == form and _runs(program, leaves) for program in prepared):
            continue  # an earlier program serves this call
        flat, results = flat_model(model, form, leaves, around)
        observed = prepared_for_recipe(flat, recipe, flat_batch(form, leaves))
        observed.manager.context.progress = progress
        prepared.append(_Prepared(name, form, results, flat, observed))
    if data is not None:
        _calibrate(prepared, batches(data, model), signature, progress)
    idle = [program for program in prepared if program.observed.calibrated and not program.observed.batches_seen]
    if idle:
        raise InputError(
            f"the recipe {recipe.preset!r} needs data to calibrate with, and no batch is a call of the form "
            f"{idle[0].name}({idle[0].form}): give batches of every form, fxq.quantize(model, recipe, data=loader)."
        )
    programs = [Program(p.name, p.form, p.results, converted_for_recipe(p.observed)) for p in prepared]
    return QuantizedPrograms(tuple(programs), signature)


def _runs(program: _Prepared, leaves: Leaves) -> bool:
    """Whether the graph of a prepared program holds for these inputs."""
    graph = program.observed.traced.gm
    try:
        with torch.no_grad():
            nn.Module.__call__(graph, **leaves)
    except InputError:
        return False
    return True


def _calibrate(
    prepared: Sequence[_Prepared], data: Iterable[Batch], signature: inspect.Signature, progress: bool | None
) -> None:
    """Run each batch through the observed model of the program that serves it."""
    with torch.no_grad(), progress_bar("calibrating", None, progress) as advance:
        for i, batch in enumerate(data):
            form, leaves, _ = form_of(signature, batch)
            fitting = [program for program in prepared if program.form == form]
            if len(fitting) > 1:
                fitting = [program for program in fitting if _runs(program, leaves)]
            if not fitting:
                raise InputError(f"data, batch {i}: no example is a call of the form ({form}) with such sizes.")
            observed = fitting[0].observed
            if observed.calibrated or not has_enough(observed.manager.context):
                with naming_batch(i, batch):
                    nn.Module.__call__(observed, **leaves)
            advance()
