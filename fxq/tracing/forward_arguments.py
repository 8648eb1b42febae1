"""Arguments of a forward, from its signature and one batch, as inputs of the graph."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from fxq.common.data import Batch
from fxq.errors import InputError, RecipeError, unknown
from fxq.graph.guards import is_plain


@dataclass(frozen=True)
class Argument:
    """Argument of a forward.

    Attributes:
        name: its name in the graph, with a star for `*args`; for an argument in `**kwargs`, its keyword.
        value: the example's value, or the default.
        default: tuple with the default, or empty.
        positional: whether the example passes it by position.
        left_out: whether the example does not pass it.
        keyword_only: whether it can only be passed by name.
        fixed: whether the recipe fixes its value.
        default_added: whether the graph gives it a default, since arguments before it have one, but forward does not.
    """

    name: str
    value: Any
    default: tuple[Any, ...] = ()
    positional: bool = False
    left_out: bool = False
    keyword_only: bool = False
    fixed: bool = False
    default_added: bool = False

    @property
    def checked(self) -> bool:
        """Whether the graph checks its value or structure, since the structure of the graph depends on it."""
        nested = isinstance(self.value, (tuple, list, Mapping))
        return self.fixed or self.default_added or is_plain(self.value) or nested or self.name.startswith("*")


def arguments(model: nn.Module, example: Batch, fixed: Mapping[str, Any]) -> list[Argument]:
    """Arguments of a model's forward, in the order of the graph's inputs.

    Args:
        model: the model.
        example: one batch.
        fixed: values that the recipe fixes, by name.

    Raises:
        InputError: the batch lacks an argument that has no default.
        RecipeError: a fixed value names no argument, is not a plain value, or differs from the batch's value.
    """
    entries: list[Argument] = []
    signature = inspect.signature(model.forward)
    passed = signature.bind_partial(*example.args, **example.kwargs).arguments
    _check_concrete(fixed, list(signature.parameters))
    missing, after_default = [], False
    for p in signature.parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            entries.append(Argument(f"*{p.name}", passed.get(p.name, ())))
            continue
        if p.kind is p.VAR_KEYWORD:
            named = passed.get(p.name, {})
            entries.extend(
                Argument(name, value, (None,), keyword_only=True, default_added=True) for name, value in named.items()
            )
            continue
        default = (fixed[p.name],) if p.name in fixed else () if p.default is p.empty else (p.default,)
        if p.name not in passed and not default:
            missing.append(p.name)
            continue
        value = passed.get(p.name, *default)
        if p.name in fixed and value != fixed[p.name]:
            raise RecipeError(f"concrete_args fixes {p.name}={fixed[p.name]!r}, but the data gives {value!r}.")
        default_added, after_default = after_default and not default, after_default or bool(default)
        entries.append(
            Argument(
                p.name,
                value,
                (None,) if default_added else default,
                positional=p.name in passed and p.name not in example.kwargs,
                left_out=p.name not in passed and p.name not in fixed,
                keyword_only=p.kind is p.KEYWORD_ONLY,
                fixed=p.name in fixed,
                default_added=default_added,
            )
        )
    if missing:
        names = ", ".join(f"{name!r}: ..." for name in (*(a.name for a in entries if not a.default), *missing))
        raise InputError(
            f"the data gives {example}, but the model also needs {', '.join(missing)}. "
            f"A batch is a tensor, a tuple of the inputs in order, or a dict of them by name: {{{names}}}."
        )
    return _in_order(entries)


def _in_order(entries: list[Argument]) -> list[Argument]:
    """Move `*args` to the end. Refuses keyword-only arguments beside it, which positional ones would be taken for."""
    if any(a.name.startswith("*") for a in entries) and any(a.keyword_only for a in entries):
        by_name = [a for a in entries if a.keyword_only and not a.left_out]
        if by_name:
            raise InputError(
                f"forward takes *args and the keyword {by_name[0].name!r}, and a graph cannot take both. "
                "Name the inputs in the signature of forward, or pass a module that calls this one."
            )
        entries = [a for a in entries if not a.keyword_only]
    return sorted(entries, key=lambda a: a.name.startswith("*"))


def _check_concrete(fixed: Mapping[str, Any], names: list[str]) -> None:
    for name, value in fixed.items():
        if name not in names:
            raise RecipeError(unknown("argument in concrete_args", name, names))
        if not is_plain(value) and not isinstance(value, (int, float, complex)):
            raise RecipeError(
                f"concrete_args: {name} is a {type(value).__name__}, not a plain value: a number, a bool, a string, a "
                "dtype or None."
            )


def can_be_default(value: Any) -> bool:
    """Whether a graph can hold a value as the default of an argument."""
    if isinstance(value, (tuple, list)):
        return all(can_be_default(v) for v in value)
    return is_plain(value) or isinstance(value, (int, float, complex, torch.device, Enum))
