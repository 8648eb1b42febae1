"""Warnings about specs for growing states, such as key-value caches, that store none as integers."""

from __future__ import annotations

from collections.abc import Iterable

from fxq.errors import warn
from fxq.ledger.ledger import Entry
from fxq.ops import OPS
from fxq.recipe.recipe import Recipe


def warn_of_float_states(entries: Iterable[Entry]) -> None:
    """Warn of states that stay in float, although the recipe has a spec for them."""
    for entry in entries:
        if entry.op == "append" and entry.kind == "unsupported":
            place = f"{entry.path or 'the model'} ({entry.source})" if entry.source else entry.path or "the model"
            warn(f"{place}: a state stays in float, although the recipe has a spec for it: {entry.reason}.")


def warn_without_states(recipe: Recipe, entries: Iterable[Entry]) -> None:
    """Warn if a recipe has a spec for growing states and a model has none, nor a recurrent layer.

    Args:
        recipe: the recipe.
        entries: rows of the ledgers of all programs or parts of the model.
    """
    configs = (recipe.config, *(config for _, config in recipe.overrides))
    if not any(config.state is not None and config.state.is_for_growing_states for config in configs):
        return
    if not any(entry.op == "append" or _is_recurrent(entry.op) for entry in entries):
        warn(
            "the recipe has a spec for states that grow, but the model has none, so the spec has no effect. Such a "
            "state is an input that forward only concatenates to, torch.cat([past, new], dim), and returns, or returns "
            "a slice of."
        )


def _is_recurrent(op: str) -> bool:
    return op in OPS and OPS[op].traits.recurrence is not None
