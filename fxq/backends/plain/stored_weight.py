"""`StoredWeight`: weight stored in integers or float16, which is converted to float32 when it is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fxq.graph.region import Weight
from fxq.quant.packing import Packing, halves
from fxq.quant.qparams import as_float32

ScaledPart = tuple[tuple[int, ...] | None, tuple[int, int, int] | None, Tensor, Tensor | None]
"""Part of a weight: its shape as blocks, or None; arguments of `narrow`, or None: all; its scales and zero points."""


@dataclass(frozen=True)
class StoredWeight:
    """Weight (N, ...) that is stored in integers or float16.

    Attributes:
        values: int8, uint8 or float16, (N, ...); or packed, uint8 (N, bytes per row).
        scale: float32, or for blocks float16, in the shape of `QParams.scale`; None: 1.
        zero_point: in the shape of `scale`; None: 0.
        axis, block: as in `QParams`.
        packing: form of packed values; None if they are not packed.
    """

    values: Tensor
    scale: Tensor | None
    zero_point: Tensor | None = None
    axis: int | None = None
    block: int | None = None
    packing: Packing | None = None

    @classmethod
    def of(cls, weight: Weight, scale: Tensor | None = None, zero_point: Tensor | None = None) -> StoredWeight:
        """Return a weight of the qdq graph. `scale` and `zero_point` are the graph's tensors, if it has several."""
        qp = weight.qparams
        zero = (qp.zero_point if zero_point is None else zero_point) if bool(qp.zero_point.any()) else None
        scale = qp.scale if scale is None else scale
        scale = None if weight.stored.dtype == torch.float16 else scale
        return cls(weight.stored, scale, zero, qp.axis, qp.block, weight.packing)

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of a row."""
        return tuple(self.values.shape[1:]) if self.packing is None else self.packing.row

    @property
    def numel(self) -> int:
        """Number of values."""
        return len(self.values) * math.prod(self.row)

    @property
    def scales_results(self) -> bool:
        """Whether scaling a layer's result equals scaling the weight: one scale per channel, and no zero point."""
        return self.block is None and self.zero_point is None

    def some(self, rows: Callable[[Tensor], Tensor]) -> StoredWeight:
        """Return some rows as a weight. `rows` selects them from a tensor (N, ...)."""
        scale, zero = self.scale, self.zero_point
        if self.axis == 0 or (self.block is not None and self.axis == 1):
            scale, zero = (None if t is None else rows(t) for t in (scale, zero))
        return replace(self, values=rows(self.values), scale=scale, zero_point=zero)

    def integers(self, out: Tensor) -> Tensor:
        """Write the stored integers to `out`, contiguous float32 in the weight's shape, without scaling them."""
        if self.packing is None or self.packing.bits != 4:
            return out.copy_(self.values if self.packing is None else self.packing.unpack(self.values))
        low, high = halves(self.values, self.packing.signed)
        flat = out.view(len(out), math.prod(self.row))
        size = low.shape[1]
        flat[:, size:].copy_(high[:, : flat.shape[1] - size])
        flat[:, :size].copy_(low)
        return out

    def floats(self, out: Tensor) -> Tensor:
        """Write the real values to `out`, contiguous float32 in the weight's shape."""
        self.integers(out)
        for shape, place, scale, zero in self._parts:
            part = out if shape is None else out.view(shape) if place is None else out.narrow(*place).view(shape)
            if zero is not None:
                part.sub_(zero.to(torch.float32))
            part.mul_(scale)
        return out

    def empty(self) -> Tensor:
        """Return an uninitialized float32 tensor in the weight's shape."""
        return torch.empty(len(self.values), *self.row, dtype=torch.float32, device=self.values.device)

    @cached_property
    def _parts(self) -> list[ScaledPart]:
        """Parts of the weight with their scales: all full blocks, and the shorter last block."""
        axis, block, scale, zero = self.axis, self.block, self.scale, self.zero_point
        if scale is None:
            return []
        if axis is None:
            return [(None, None, scale, zero)]
        size = (len(self.values), *self.row)
        if block is None:
            shape = [-1 if i == axis else 1 for i in range(len(size))]
            return [(None, None, scale.view(shape), None if zero is None else zero.view(shape))]

        def grids(first: int, count: int) -> tuple[Tensor, Tensor | None]:
            tensors = (None if t is None else t.narrow(axis, first, count).unsqueeze(axis + 1) for t in (scale, zero))
            return tuple(tensors)  # type: ignore[return-value]

        blocks, remainder = divmod(size[axis], block)
        outer, inner = size[:axis], size[axis + 1 :]
        parts: list[ScaledPart] = []
        if blocks:
            place = (axis, 0, blocks * block) if remainder else None
            parts.append(((*outer, blocks, block, *inner), place, *grids(0, blocks)))
        if remainder:
            parts.append(((*outer, 1, remainder, *inner), (axis, blocks * block, remainder), *grids(blocks, 1)))
        return parts


def float_input(x: Tensor) -> Tensor:
    """Return the input of a weight-only layer detached, as float32. Raises `InputError` for other dtypes."""
    x = x.detach() if x.requires_grad else x
    return x if x.dtype == torch.float32 else as_float32(x)
