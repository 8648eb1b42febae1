"""Tensors of a region while its program is planned, and the table of functions that plan each op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxq.backends.loops.programs.areas import Area
from fxq.backends.loops.programs.program_steps import ProgramStep
from fxq.quant.qparams import QParams


class NotPlannedError(Exception):
    """Error for a node that no step computes. The message says why.

    Attributes:
        node: Name of the node in the region; empty if the reason is not one node.
    """

    node: str = ""


def refuse(when: Any, reason: str) -> None:
    """Raise `NotPlannedError` with this reason if `when` is true."""
    if when:
        raise NotPlannedError(reason)


@dataclass(frozen=True)
class PlannedWeight:
    """Constant: an int8 weight with its scale, float32 (O,) along an axis or 0-d; or float32 without a scale."""

    values: Tensor
    scale: Tensor | None = None
    axis: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the constant."""
        return tuple(self.values.shape)

    @property
    def real(self) -> Tensor:
        """Dequantized values, float32."""
        if self.scale is None:
            return self.values.float()
        by_axis = [-1 if k == self.axis else 1 for k in range(self.values.dim())]
        return self.values.float() * (self.scale.reshape(by_axis) if self.scale.dim() else self.scale)


@dataclass(eq=False)
class PlannedValue:
    """Tensor of the region.

    Attributes:
        area: Memory of the tensor.
        rank: Number of axes.
        axis: Axis of the channels: the last one, or 1 for images (N, C, H, W) and sequences (N, C, L).
        grid: Grid of integers that represent floats. None for floats, and for integers that are numbers themselves.
        step: Step that computes it, as long as it is open whether the step writes floats or integers; then None.
    """

    area: Area
    rank: int
    axis: int
    grid: QParams | None = None
    step: ProgramStep | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of PyTorch's tensor."""
        n, h, w, c = self.area.shape
        if self.rank == 4:
            return (n, c, h, w) if self.axis == 1 else (n, h, w, c)
        if self.rank == 3:
            return (n, c, w) if self.axis == 1 else (n, w, c)
        return n, c


@dataclass(eq=False)
class PlannedHeads:
    """Tensor whose channels are split into heads. Its memory is that of the tensor before the split.

    Attributes:
        joined: Tensor (N, L, heads * depth).
        heads: Number of heads.
        transposed: True for (N, heads, L, depth), False for (N, L, heads, depth).
    """

    joined: PlannedValue
    heads: int
    transposed: bool = False

    @property
    def area(self) -> Area:
        """Memory of the joined tensor."""
        return self.joined.area

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of PyTorch's tensor."""
        n, _, length, channels = self.joined.area.shape
        middle = (self.heads, length) if self.transposed else (length, self.heads)
        return n, *middle, channels // self.heads


@dataclass(frozen=True)
class OtherInput:
    """Input of a dtype that steps do not compute with. Its sizes may be read, and it may be a mask.

    Attributes:
        index: Number of the input.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def as_images(shape: Sequence[int], axis: int) -> tuple[int, int, int, int]:
    """Return the (N, H, W, C) of a shape. `axis` is the axis of its channels; see `PlannedValue`."""
    if len(shape) == 4:
        n, a, b, c = shape
        return (n, b, c, a) if axis == 1 else (n, a, b, c)
    if len(shape) == 3:
        n, a, b = shape
        return (n, 1, b, a) if axis == 1 else (n, 1, a, b)
    refuse(len(shape) != 2, f"it has {len(shape)} axes")
    return shape[0], 1, 1, shape[1]


def constant_of(value: Any, name: str) -> Tensor | None:
    """Return a constant argument of an op in float32; None if it is absent. `name` is its name in the message."""
    refuse(value is not None and not isinstance(value, PlannedWeight), f"its {name} is no constant")
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
    """Plan the `dequantize` of an int8 weight: its values with their scale."""
    refuse(
        block is not None or packed is not None or q.values.dtype != torch.int8,
        "its weight is not int8, or is grouped or packed",
    )
    zero = zero_point.values if isinstance(zero_point, PlannedWeight) else torch.tensor(zero_point)
    refuse(bool(zero.any()), "its weight has zero points")
    scales = scale.values if isinstance(scale, PlannedWeight) else torch.tensor(float(scale))
    return PlannedWeight(q.values, scales.reshape(-1) if scales.numel() > 1 else scales.reshape(()), axis or 0)


RAW = QParams.per_tensor(1.0, 0)
"""Grid of integers that are numbers themselves."""

Planner = TypeVar("Planner", bound=Callable[..., Any])
PLANNERS: dict[str, Callable[..., Any]] = {}
"""Functions that plan each op, by its name. They take the builder, the op's tensors in order, and its options by name.
"""


def plans(*names: str) -> Callable[[Planner], Planner]:
    """Decorate a function that plans the ops of these names."""

    def register(function: Planner) -> Planner:
        PLANNERS.update(dict.fromkeys(names, function))
        return function

    return register
