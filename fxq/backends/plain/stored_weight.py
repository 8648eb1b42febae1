"""A weight that is kept as integers, or in float16, and becomes floats when it is read: whole, or some of its rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fxq.quant.packing import halves

Part = tuple[tuple[int, ...] | None, tuple[int, int, int] | None, Tensor, Tensor | None]
"""A part of a weight: its shape as blocks, or None; where it lies, or None: all; its scales and zero points."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight, (N, ...).

    Attributes:
        values: int8, uint8 or float16, in its shape; or packed, uint8, (N, bytes of a row).
        scale: float32, as `QParams.scale`; None: 1.
        zero_point: of the scale's shape; None: 0.
        axis, block: as in `QParams`.
        packed: the shape of a row of packed values; else None.
        signed: whether packed values may be below zero.
    """

    values: Tensor
    scale: Tensor | None
    zero_point: Tensor | None = None
    axis: int | None = None
    block: int | None = None
    packed: tuple[int, ...] | None = None
    signed: bool = False

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of a row."""
        return tuple(self.values.shape[1:]) if self.packed is None else self.packed

    @property
    def numel(self) -> int:
        """How many values it has."""
        return len(self.values) * math.prod(self.row)

    @property
    def scales_results(self) -> bool:
        """Whether scaling the result of a layer is the same: each channel has one scale, and zero is 0."""
        return self.block is None and self.zero_point is None

    def some(self, rows: Callable[[Tensor], Tensor]) -> StoredWeight:
        """Some of its rows; `rows` takes them from a tensor (N, ...)."""
        scale, zero = self.scale, self.zero_point
        if self.axis == 0 or (self.block is not None and self.axis == 1):
            scale, zero = (None if t is None else rows(t) for t in (scale, zero))
        return replace(self, values=rows(self.values), scale=scale, zero_point=zero)

    def integers(self, out: Tensor) -> Tensor:
        """Its values as they are, in `out`, float32, dense, of its shape. Nothing is scaled."""
        if self.packed is None:
            return out.copy_(self.values)
        low, high = halves(self.values, self.signed)
        flat = out.view(len(out), math.prod(self.packed))
        size = low.shape[1]
        flat[:, size:].copy_(high[:, : flat.shape[1] - size])
        flat[:, :size].copy_(low)
        return out

    def floats(self, out: Tensor) -> Tensor:
        """Its real values, in `out`, float32, dense, of its shape."""
        self.integers(out)
        for shape, whole, scale, zero in self._parts:
            part = out if shape is None else out.view(shape) if whole is None else out.narrow(*whole).view(shape)
            if zero is not None:
                part.sub_(zero.to(torch.float32))
            part.mul_(scale)
        return out

    def empty(self) -> Tensor:
        """Room for its values as floats."""
        return torch.empty(len(self.values), *self.row, device=self.values.device)

    @cached_property
    def _parts(self) -> list[Part]:
        """What its scales are for."""
        axis, block, scale, zero = self.axis, self.block, self.scale, self.zero_point
        if scale is None:
            return []
        if axis is None:
            return [(None, None, scale, zero)]
        size = (len(self.values), *self.row)
        if block is None:
            shape = [-1 if i == axis else 1 for i in range(len(size))]
            return [(None, None, scale.view(shape), None if zero is None else zero.view(shape))]

        def of(first: int, count: int) -> tuple[Tensor, Tensor | None]:
            parts = (None if t is None else t.narrow(axis, first, count).unsqueeze(axis + 1) for t in (scale, zero))
            return tuple(parts)  # type: ignore[return-value]

        blocks, rest = divmod(size[axis], block)
        before, behind = size[:axis], size[axis + 1 :]
        found: list[Part] = []
        if blocks:
            whole = (axis, 0, blocks * block) if rest else None
            found.append(((*before, blocks, block, *behind), whole, *of(0, blocks)))
        if rest:
            found.append(((*before, 1, rest, *behind), (axis, blocks * block, rest), *of(blocks, 1)))
        return found
