"""What a plan knows of the tensors of a region, and the table of what computes each op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxq.backends.loops.programs.areas import Area, ByteGrid
from fxq.backends.loops.programs.program_steps import ProgramStep


class NotPlannedError(Exception):
    """A node that no step computes; the message says why.

    Attributes:
        node: its name in the region; empty where it is none alone.
    """

    node: str = ""


def refuse(when: Any, reason: str) -> None:
    """Raise `NotPlannedError` with this reason, if there is one."""
    if when:
        raise NotPlannedError(reason)


@dataclass(frozen=True)
class PlannedWeight:
    """A weight, int8, and its scale, float32 (O,) along an axis, or 0-d; or float32 without one."""

    values: Tensor
    scale: Tensor | None = None
    axis: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.values.shape)

    @property
    def real(self) -> Tensor:
        """Its values in float32."""
        if self.scale is None:
            return self.values.float()
        by_axis = [-1 if k == self.axis else 1 for k in range(self.values.dim())]
        return self.values.float() * (self.scale.reshape(by_axis) if self.scale.dim() else self.scale)


@dataclass(eq=False)
class PlannedValue:
    """A tensor of the region.

    Attributes:
        area: where it lies.
        rank: how many axes it has.
        axis: which of them has the channels: the last one, or of an image perhaps the second.
        grid: of integers that stand for floats; integers without one count for themselves.
        step: what makes it, where it is not decided yet whether it is float; None: it is.
    """

    area: Area
    rank: int
    axis: int
    grid: ByteGrid | None = None
    step: ProgramStep | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape as PyTorch has it."""
        n, h, w, c = self.area.shape
        if self.rank == 4:
            return (n, c, h, w) if self.axis == 1 else (n, h, w, c)
        return (n, w, c) if self.rank == 3 else (n, c)


@dataclass(eq=False)
class PlannedHeads:
    """A tensor whose channels are split into heads; it lies in memory as before.

    Attributes:
        joined: (N, L, heads * depth).
        heads: how many.
        transposed: whether it is (N, heads, L, depth), and not (N, L, heads, depth).
    """

    joined: PlannedValue
    heads: int
    transposed: bool = False

    @property
    def area(self) -> Area:
        """Where it lies."""
        return self.joined.area

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Its shape as PyTorch has it."""
        n, _, length, channels = self.joined.area.shape
        middle = (self.heads, length) if self.transposed else (length, self.heads)
        return n, *middle, channels // self.heads


@dataclass(frozen=True)
class OtherInput:
    """An input of a type that steps do not compute with. Its sizes are read, or it is a mask.

    Attributes:
        index: which input.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def as_images(shape: Sequence[int], axis: int) -> tuple[int, int, int, int]:
    """The (N, H, W, C) of a shape; see `PlannedValue`."""
    if len(shape) == 4:
        n, a, b, c = shape
        return (n, b, c, a) if axis == 1 else (n, a, b, c)
    if len(shape) == 3:
        return shape[0], 1, shape[1], shape[2]
    refuse(len(shape) != 2, f"it has {len(shape)} axes")
    return shape[0], 1, 1, shape[1]


def constant_of(value: Any, what: str) -> Tensor | None:
    """A constant that an op reads, in float32; None where it has none."""
    refuse(value is not None and not isinstance(value, PlannedWeight), f"its {what} is no constant")
    return None if value is None else value.real


def dequantized_weight(
    q: PlannedWeight,
    *,
    scale: Any,
    zero_point: Any,
    axis: int | None = None,
    block: Any = None,
    packed: Any = None,
    **_: Any,
) -> PlannedWeight:
    """A weight of int8 that is made float."""
    refuse(block is not None or packed is not None or q.values.dtype != torch.int8, "its weight is not of int8")
    zero = zero_point.values if isinstance(zero_point, PlannedWeight) else torch.tensor(zero_point)
    refuse(bool(zero.any()), "its weight has zero points")
    of = scale.values if isinstance(scale, PlannedWeight) else torch.tensor(float(scale))
    return PlannedWeight(q.values, of.reshape(-1) if of.numel() > 1 else of.reshape(()), axis or 0)


RAW = ByteGrid(1.0, 0)
"""Of integers that are taken for what they are."""

Row = TypeVar("Row", bound=Callable[..., Any])
ROWS: dict[str, Callable[..., Any]] = {}
"""What computes each op, by its name: takes the plan, the op's tensors in order, and its options by name."""


def plans(*names: str) -> Callable[[Row], Row]:
    """Decorator: the function below plans the ops of these names."""

    def register(function: Row) -> Row:
        ROWS.update(dict.fromkeys(names, function))
        return function

    return register
