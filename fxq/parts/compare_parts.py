"""Comparison of a model in parts with its float model, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxq.common.data import Batch, naming_batch
from fxq.common.isolation import copied, seeded, untouched, without_autocast
from fxq.common.metrics import Agreement, tensors
from fxq.errors import InputError
from fxq.ledger.comparison import Comparison, RunningComparison
from fxq.ledger.output_check import rank
from fxq.parts.choose import call, hooked_run
from fxq.parts.part import Part, Programs, parts_in
from fxq.parts.parts_report import write_parts_report
from fxq.report.report import write_comparison
from fxq.tracing.part_shell import PartShell
from fxq.workflow.obstacles import check_model
from fxq.workflow.steps import float_reference


def compare_parts(model: Any, quantized: Any, batches: Iterable[Batch], advance: Callable[[], None]) -> Comparison:
    """Compare a model in parts with its float model, see `fxq.compare`.

    The float model runs, and each part gets the inputs that the float model's module got; errors of a layer include
    those of the layers before it in its part. The output's SQNR is that of the whole models.

    Args:
        model: the float model.
        quantized: the quantized model.
        batches: the data.
        advance: called after each batch.

    Raises:
        InputError: `quantized` was not made from `model`, or a model does not run on a batch.
    """
    check_model(model)
    parts = dict(parts_in(quantized))
    modules = {path: _float_module(model, path, part) for path, part in parts.items()}
    running: dict[str, RunningComparison] = {}
    outputs: dict[int, Agreement] | None = {}
    count = 0
    with without_autocast():
        for count, batch in enumerate(batches, 1):
            with naming_batch(count - 1, batch):
                calls, wants = _calls(model, modules, batch)
                with torch.no_grad(), seeded():
                    for path, own in calls:
                        _add(running, path, modules[path], parts[path], own)
                with untouched(quantized):
                    gots = list(tensors(call(quantized, batch)))
                outputs = _with_outputs(outputs, wants, gots)
            advance()
    by_part = {name: comparison.result(write_comparison) for name, comparison in running.items()}
    rows = [replace(row, name=f"{name}: {row.name}") for name, own in by_part.items() for row in own]
    sqnr = min((output.sqnr for output in (outputs or {}).values()), key=rank, default=None)

    def write(comparison: Comparison, path: Any) -> Path:
        return write_parts_report(quantized, path, by_part)

    return Comparison(tuple(rows), sqnr, count, (quantized,), write)


def _float_module(model: nn.Module, path: str, part: Part) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = nn.Module()
    if type(module) is not part.float_class:
        raise InputError(
            f"b was not made from a: its part {path!r} is for a {part.float_class.__name__}, which a does not have."
        )
    return module


def _calls(model: nn.Module, modules: dict[str, nn.Module], batch: Batch) -> tuple[list[tuple[str, Batch]], Any]:
    """Run the float model on a batch. Returns the calls of some of its modules, in order, and the output's tensors."""
    calls: list[tuple[str, Batch]] = []

    def note(path: str, module: Any, args: Any, kwargs: Any) -> None:
        calls.append((path, copied(Batch(args, kwargs))))

    with hooked_run(model) as (handles, _):
        for path, module in modules.items():
            hook = partial(note, path)
            handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        wants = list(tensors(call(model, batch)))
    return calls, wants


def _add(running: dict[str, RunningComparison], path: str, module: nn.Module, part: Part, batch: Batch) -> None:
    programs = part.fxq_programs
    assert isinstance(programs, Programs)
    example = copied(batch)
    name = programs.fitting(example.args, example.kwargs)
    if name is None:
        return
    if name not in running:
        graph = dict(programs.named_graphs())[name]
        running[name] = RunningComparison(float_reference(PartShell(path, module), graph, copied(batch)), graph)
    running[name].add(batch)


def _with_outputs(outputs: dict[int, Agreement] | None, wants: Any, gots: Any) -> dict[int, Agreement] | None:
    """Add the outputs of a batch; None if their number or shapes depend on values, so that they cannot be compared."""
    if outputs is None or [w.shape for w in wants] != [g.shape for g in gots]:
        return None
    for i, (want, got) in enumerate(zip(wants, gots, strict=True)):
        if want.is_floating_point():
            outputs.setdefault(i, Agreement()).add(want, got)
    return outputs
