"""The op table `OPS`, and helpers that its rows share."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fxq.ops.table import Arguments, OpTable, spell
from fxq.ops.traits import OpTraits

OPS = OpTable()
row = OPS.row
aten = torch.ops.aten

RANKS = (1, 2, 3)
"""Numbers of spatial axes of the ops of a family, such as conv1d, conv2d and conv3d."""
_ROOTS = SimpleNamespace(torch=torch, nn=torch.nn, F=torch.nn.functional, aten=aten)


def named(names: str, *ranks: int) -> list[Any]:
    """Look up names in torch for some ranks, by default all three: `named("nn.Conv{n}d F.conv{n}d", 2)`."""
    return [attrgetter(name)(_ROOTS) for n in ranks or RANKS for name in names.format(n=n).split()]


def as_tuple(value: Any, n: int) -> tuple[Any, ...]:
    """Return an option of an n-dimensional op as an n-tuple; a single number is repeated."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * n if len(values) == 1 else values


def pick_values(bound: Arguments, index: Any) -> Arguments | str:
    """`Spelling.pick` of a spelling that returns (values, ...): only the values are the op."""
    return bound if index in (0, "values") else "returns indices or statistics that are read"


def unary_function(
    module: str, traits: OpTraits, name: str, meaning: str, function: Callable[[Tensor], Tensor], *spellings: Any
) -> Callable[[Tensor], Tensor]:
    """Register a function of one tensor without options as a row of the op table.

    Args:
        module: module in which the canonical function is assigned to `name`; torch.fx imports it from there.
        traits: how the op takes part in quantization.
        name: name of the op.
        meaning: docstring of the canonical function.
        function: computes the op; it is also one of its spellings.
        *spellings: its other spellings, which may have the option `inplace`.

    Returns:
        The canonical function.
    """

    def canonical(x: Tensor) -> Tensor:
        return function(x)

    canonical.__name__ = canonical.__qualname__ = name
    canonical.__module__, canonical.__doc__ = module, meaning
    row(*(spell(t, "x inplace") for t in (function, *spellings)), traits=traits)(canonical)
    return canonical
