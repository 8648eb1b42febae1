"""The op table itself, and what its rows share."""

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
"""Of the ops of a family, such as conv1d, conv2d and conv3d: how many axes they work along."""
_ROOTS = SimpleNamespace(torch=torch, nn=torch.nn, F=torch.nn.functional, aten=aten)


def named(names: str, *ranks: int) -> list[Any]:
    """What torch has under these names for one rank, or for all three: `named("nn.Conv{n}d F.conv{n}d", 2)`."""
    return [attrgetter(name)(_ROOTS) for n in ranks or RANKS for name in names.format(n=n).split()]


def as_tuple(value: Any, n: int) -> tuple[Any, ...]:
    """An option of an n-dimensional op as an n-tuple."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * n if len(values) == 1 else values


def pick_values(bound: Arguments, index: Any) -> Arguments | str:
    """Of a spelling that returns (values, ...): the op makes the values."""
    return bound if index in (0, "values") else "returns indices or statistics that are read"


def function_of_one(
    module: str, traits: OpTraits, name: str, meaning: str, function: Callable[[Tensor], Tensor], *spellings: Any
) -> Callable[[Tensor], Tensor]:
    """The row of a function of one tensor that has no options.

    Args:
        module: where its canonical function is known under `name`, as torch.fx imports it from there.
        traits: how it takes part in quantization.
        name: of the op.
        meaning: what it computes.
        function: what computes it; one of its spellings.
        *spellings: the others; they may take `inplace` besides.

    Returns:
        Its canonical function.
    """

    def canonical(x: Tensor) -> Tensor:
        return function(x)

    canonical.__name__ = canonical.__qualname__ = name
    canonical.__module__, canonical.__doc__ = module, meaning
    row(*(spell(t, "x inplace") for t in (function, *spellings)), traits=traits)(canonical)
    return canonical
