"""The arguments of a forward, as its signature and one batch give them: which become inputs of the graph, and how."""

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
    """One argument of forward.

    Attributes:
        name: its name in the graph; with a star for `*args`, the keyword itself for one that `**kwargs` takes.
        value: what the example gives, or the default.
        default: a tuple with the default, or empty.
        positional: whether the example gives it by position.
        left_out: whether the example does not give it.
        keyword_only: whether it can only be given by name.
        fixed: whether the recipe fixes its value.
        late: whether it has no default of its own, but the graph must give one, as others before it have them.
    """

    name: str
    value: Any
    default: tuple[Any, ...] = ()
    positional: bool = False
    left_out: bool = False
    keyword_only: bool = False
    fixed: bool = False
    late: bool = False

    @property
    def checked(self) -> bool:
        """Whether the graph checks it: its value, or how it is built, decides how the graph looks."""
        nested = isinstance(self.value, (tuple, list, Mapping))
        return self.fixed or self.late or is_plain(self.value) or nested or self.name.startswith("*")


def arguments(model: nn.Module, example: Batch, fixed: Mapping[str, Any]) -> list[Argument]:
    """The arguments of a model's forward, in the order of the graph's inputs.

    Args:
        model: the model.
        example: one batch.
        fixed: values that the recipe fixes, by name.

    Raises:
        InputError: the batch does not give all that are needed.
        RecipeError: a fixed value is of no argument, is no plain value, or is another one than the batch gives.
    """
    found: list[Argument] = []
    parameters = inspect.signature(model.forward).parameters.values()
    given, named = list(example.args), dict(example.kwargs)
    _check_concrete(fixed, [p.name for p in parameters])
    missing, late = [], False
    for p in sorted(parameters, key=lambda p: p.kind is p.VAR_POSITIONAL):
        if p.kind is p.VAR_POSITIONAL:
            found.append(Argument(f"*{p.name}", tuple(given)))
            continue
        if p.kind is p.VAR_KEYWORD:
            found.extend(Argument(name, value, (None,), keyword_only=True, late=True) for name, value in named.items())
            continue
        default = () if p.default is p.empty else (p.default,)
        if p.name in fixed:
            default = (fixed[p.name],)
        positional = bool(given) and p.kind is not p.KEYWORD_ONLY
        left_out = not positional and p.name not in named
        if positional:
            value = given.pop(0)
        elif not left_out:
            value = named.pop(p.name)
        elif default:
            value = default[0]
        else:
            missing.append(p.name)
            continue
        if p.name in fixed and value != fixed[p.name]:
            raise RecipeError(f"concrete_args fixes {p.name}={fixed[p.name]!r}, and the data gives {value!r}.")
        behind, late = late and not default, late or bool(default)
        found.append(
            Argument(
                p.name,
                value,
                (None,) if behind else default,
                positional,
                left_out and p.name not in fixed,
                p.kind is p.KEYWORD_ONLY,
                p.name in fixed,
                behind,
            )
        )
    if missing:
        names = ", ".join(f"{name!r}: ..." for name in (*(a.name for a in found if not a.default), *missing))
        raise InputError(
            f"the data gives {example}, but the model also needs {', '.join(missing)}. "
            f"A batch is a tensor, a tuple of the inputs in order, or a dict of them by name: {{{names}}}."
        )
    return _in_order(found)


def _in_order(found: list[Argument]) -> list[Argument]:
    """`*args` last. Refuses keyword-only arguments besides it: positional ones would be taken for them."""
    if any(a.name.startswith("*") for a in found) and any(a.keyword_only for a in found):
        given = [a for a in found if a.keyword_only and not a.left_out]
        if given:
            raise InputError(
                f"forward takes any number of inputs and {given[0].name} besides, which a graph cannot; "
                "name the inputs in its signature, or give a module that calls this one."
            )
        found = [a for a in found if not a.keyword_only]
    return sorted(found, key=lambda a: a.name.startswith("*"))


def _check_concrete(fixed: Mapping[str, Any], names: list[str]) -> None:
    for name, value in fixed.items():
        if name not in names:
            raise RecipeError(unknown("argument in concrete_args", name, names))
        if not is_plain(value) and not isinstance(value, (int, float, complex)):
            raise RecipeError(f"concrete_args: {name} is a {type(value).__name__}, not a plain value.")


def can_be_default(value: Any) -> bool:
    """Whether a graph can hold this as the default of an argument."""
    if isinstance(value, (tuple, list)):
        return all(can_be_default(v) for v in value)
    return is_plain(value) or isinstance(value, (int, float, complex, torch.device, Enum))
