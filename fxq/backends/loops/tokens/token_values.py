"""`TokenValue`: strided view of float32 values in the memory of a token program, with the layout ops on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

AXES = 3
"""Axes of a step."""


@dataclass(frozen=True)
class TokenValue:
    """View of values in memory.

    Attributes:
        buffer: number of the buffer that holds them.
        offset: values from the start of the buffer to the first one.
        shape: sizes of its axes.
        strides: strides of its axes, in values. Those of axes of size 1 do not matter.
    """

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, buffer: int, shape: Sequence[int]) -> TokenValue:
        """All values of a buffer, in order."""
        return cls(buffer, 0, tuple(shape), row_major(shape))

    @property
    def is_contiguous(self) -> bool:
        """Whether the values are side by side, in order."""
        pairs = zip(self.shape, self.strides, row_major(self.shape), strict=True)
        return all(size == 1 or stride == wanted for size, stride, wanted in pairs)

    def reshaped(self, shape: Sequence[int]) -> TokenValue | None:
        """View in another shape; None if the values are not side by side."""
        return replace(self, shape=tuple(shape), strides=row_major(shape)) if self.is_contiguous else None

    def transposed(self, dim0: int, dim1: int) -> TokenValue:
        """View with two axes swapped."""
        order = list(range(len(self.shape)))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.permuted(order)

    def permuted(self, order: Sequence[int]) -> TokenValue:
        """View with its axes in another order."""
        return replace(self, shape=tuple(self.shape[d] for d in order), strides=tuple(self.strides[d] for d in order))

    def sliced(self, index: Sequence[object]) -> TokenValue | None:
        """View of x[index]; None unless the index has only slices with a step of 1."""
        offset, shape = self.offset, list(self.shape)
        for axis, part in enumerate(index):
            if not isinstance(part, slice) or axis >= len(shape):
                return None
            start, stop, step = part.indices(shape[axis])
            if step != 1 or stop <= start:
                return None
            offset, shape[axis] = offset + start * self.strides[axis], stop - start
        return replace(self, offset=offset, shape=tuple(shape))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of contiguous values."""
    strides, size = list[int](), 1
    for extent in reversed(shape):
        strides.append(size)
        size *= extent
    return tuple(reversed(strides))


def step_axes(shape: Sequence[int], *operands: TokenValue) -> tuple[tuple[int, ...], list[tuple[int, ...]]] | None:
    """Sizes of three axes in place of those of `shape`, and the strides of each operand along them, 0 where it repeats.

    None if three axes are not enough, or if values along the last axis are not side by side.
    """
    sizes, strides = list[int](), [list[int]() for _ in operands]
    for axis in range(-len(shape), 0):
        if shape[axis] == 1:
            continue
        own = [value.strides[axis] if len(value.shape) >= -axis and value.shape[axis] != 1 else 0 for value in operands]
        joined = bool(sizes) and all(of[-1] == stride * shape[axis] for of, stride in zip(strides, own, strict=True))
        sizes = [*sizes[:-1], sizes[-1] * shape[axis]] if joined else [*sizes, shape[axis]]
        strides = [[*(of[:-1] if joined else of), stride] for of, stride in zip(strides, own, strict=True)]
    missing = AXES - len(sizes)
    if missing < 0 or any(of and of[-1] > 1 for of in strides):
        return None
    if not sizes:  # one value
        return (1,) * AXES, [(0,) * AXES for _ in operands]
    return (*(1,) * missing, *sizes), [(*(0,) * missing, *of) for of in strides]


def view_of(name: str, x: TokenValue, options: Mapping[str, Any], shape: tuple[int, ...]) -> TokenValue | None:
    """View that a layout op returns; None if the op has to move values."""
    if name in ("reshape", "unsqueeze"):
        return x.reshaped(shape)
    if name == "transpose":
        return x.transposed(options["dim0"], options["dim1"])
    if name == "permute":
        return x.permuted(options["dims"])
    if name == "getitem":
        index = options["index"]
        return x.sliced(index if isinstance(index, tuple) else (index,))
    if name == "cast":
        return x if options["dtype"] == torch.float32 else None
    return (
        x if x.is_contiguous and options["memory_format"] in (torch.contiguous_format, torch.preserve_format) else None
    )
