"""The recipes that demo_sequence.py and bench_sequence.py compare, and what their tables say of a model."""

from __future__ import annotations

from collections.abc import Callable

import torch

import fxq

RECIPES: dict[str, Callable[[], fxq.Recipe]] = {
    "fxq dynamic": lambda: fxq.Recipe.dynamic(),
    "fxq dynamic, fastest": lambda: fxq.Recipe.dynamic(backend="fastest"),
    "fxq static": lambda: fxq.Recipe.static(),
    "fxq int8 weights": lambda: fxq.Recipe.weight_only(),
    "fxq int4 weights": lambda: fxq.Recipe.weight_only(bits=4),
    "fxq float16 weights": lambda: fxq.Recipe.weight_only(dtype=torch.float16),
}
"""Made when asked for: one that this version does not have is a row of the table like what else fails."""


def on_integers(qmodel: fxq.results.QuantizedModel) -> str:
    """How many ops compute on integers, or have integer weights, and their share of the multiply-accumulates."""
    ledger = qmodel.ledger
    counts = [
        f"{len(entries)} {precision}"
        for precision in ("int8", "weight-only")
        if (entries := ledger.where(precision=precision))
    ]
    return f"{', '.join(counts) or 'all float'}: {100 * ledger.coverage:.0f} % of MACs int8"
