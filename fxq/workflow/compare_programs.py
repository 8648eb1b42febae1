"""Comparison of a model with several programs with its float model, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxq.common.data import Batch, naming_batch
from fxq.common.isolation import copied, seeded, without_autocast
from fxq.ledger.comparison import Comparison, RunningComparison
from fxq.ledger.output_check import rank
from fxq.programs.call_form import form_of
from fxq.programs.flat_model import flat_batch, flat_model
from fxq.report.report import write_comparison
from fxq.workflow.obstacles import check_model
from fxq.workflow.steps import float_reference


def compare_programs(
    model: nn.Module, quantized: Any, batches: Iterable[Batch], advance: Callable[[], None]
) -> Comparison:
    """Compare a model with several programs with its float model, see `fxq.compare`.

    Each batch is run by the program that serves it. Rows have the name of their program.

    Args:
        model: the float model.
        quantized: the quantized model, a `QuantizedPrograms`.
        batches: the data.
        advance: called after each batch.

    Raises:
        InputError: `quantized` was not made from `model`, or no program fits a batch.
    """
    check_model(model)
    running: dict[str, RunningComparison] = {}
    count = 0
    with without_autocast(), torch.no_grad(), seeded():
        for count, batch in enumerate(batches, 1):
            with naming_batch(count - 1, batch):
                form, leaves, _ = form_of(quantized.signature, batch)
                program, _ = quantized.run(form, copied(leaves))
                flat = flat_batch(form, leaves)
                if program.name not in running:
                    reference = float_reference(flat_model(model, form, leaves)[0], program.qmodel, copied(flat))
                    running[program.name] = RunningComparison(reference, program.qmodel)
                running[program.name].add(flat)
            advance()
    by_program = {name: comparison.result(write_comparison) for name, comparison in running.items()}
    rows = [replace(row, name=f"{name}: {row.name}") for name, own in by_program.items() for row in own]
    sqnrs = [own.output_sqnr for own in by_program.values()]

    def write(comparison: Comparison, path: Any) -> Path:
        pages = quantized.report(path, by_program)
        return next(iter(pages.values()))

    return Comparison(tuple(rows), min(sqnrs, key=rank, default=None), count, (quantized,), write)
