"""Max pooling of plain uint8 tensors with PyTorch ops, one axis after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxq.errors import InputError

_MIN_REDUCTION_BYTES, _MAX_PAIRWISE_TAPS = 256, 8
"""Contiguous bytes per value, and number of taps, beyond which one `amax` is faster than a chain of `maximum`."""


class Window(NamedTuple):
    """Pooling options along one axis, as in `torch.nn.MaxPool2d`.

    Attributes:
        kernel: values per window.
        stride: distance between windows.
        padding: values added on both sides, which never are the maximum.
        dilation: distance between the values of a window.
        ceil_mode: whether the number of windows is rounded up, so that the last one may reach past the padding.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int
    ceil_mode: bool

    def count(self, size: int) -> int:
        """Number of windows over `size` values. Raises `InputError` if there is none."""
        room = size + 2 * self.padding - self.dilation * (self.kernel - 1) - 1
        count = (room + (self.stride - 1 if self.ceil_mode else 0)) // self.stride + 1
        if self.ceil_mode and (count - 1) * self.stride >= size + self.padding:
            count -= 1
        if size == 0 or count < 1:
            raise InputError(f"{size} values along an axis are too few for a pooling window of {self.kernel}.")
        return count

    def parts(self, size: int) -> list[_Part]:
        """Positions that each tap of the windows reads among `size` values; taps inside every window come first."""
        count, parts = self.count(size), []
        for tap in range(self.kernel):
            start = tap * self.dilation - self.padding
            first, end = max(-(start // self.stride), 0), min((size - 1 - start) // self.stride + 1, count)
            if first < end:
                parts.append(_Part(first, end - first, first * self.stride + start))
        return sorted(parts, key=lambda part: part.windows < count)


class _Part(NamedTuple):
    """Values that one tap reads: an evenly spaced run, one value per window.

    Attributes:
        first: index of the first window for which the tap is not in the padding.
        windows: number of consecutive windows for which it is not.
        start: index of the value that the tap reads for the first of them.
    """

    first: int
    windows: int
    start: int


def largest(shape: Sequence[int], windows: Sequence[Window]) -> Callable[[Tensor], Tensor]:
    """Return the max pooling function for contiguous uint8 tensors of one shape.

    Args:
        shape: shape of the function's input, (N, *sizes, C). The output is uint8 with the same axes.
        windows: pooling options for each of the sizes.

    Raises:
        InputError: a size is smaller than its window.
    """
    steps, result = [], tuple(shape)
    for axis, window in enumerate(windows, 1):
        if window[:3] != (1, 1, 0):
            steps.append(_along(result, axis, window))
            result = (*result[:axis], window.count(result[axis]), *result[axis + 1 :])
    steps = steps or [_along(shape, 1, windows[0])]  # all windows hold one value: copy

    def run(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x.view(result)

    return run


def _along(shape: Sequence[int], axis: int, window: Window) -> Callable[[Tensor], Tensor]:
    """Return max pooling along one axis: from a contiguous tensor of `shape` to (outer, windows, inner)."""
    outer, size, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    count, parts = window.count(size), window.parts(size)
    steps = size * inner, window.stride * inner, 1
    whole = [part.start * inner for part in parts if part.windows == count]
    if len(whole) == window.kernel > 2 and (inner >= _MIN_REDUCTION_BYTES or window.kernel > _MAX_PAIRWISE_TAPS):
        sizes = outer, count, window.kernel, inner
        strides = (*steps[:2], window.dilation * inner, 1)
        return lambda x: x.as_strided(sizes, strides, x.storage_offset()).amax(2)

    result, own = (outer, count, inner), (count * inner, inner, 1)
    pair = whole[:2] if len(whole) > 1 else whole * 2
    others = [((outer, n, inner), first * inner, start * inner) for first, n, start in parts[len(whole[:2]) :]]

    def take(x: Tensor) -> Tensor:
        base = x.storage_offset()
        if pair:
            y = torch.maximum(*(x.as_strided(result, steps, base + start) for start in pair))
        else:  # each tap is in the padding for some window
            y = x.new_zeros(result)
        for sizes, to, start in others:
            part = y.as_strided(sizes, own, to)
            torch.maximum(part, x.as_strided(sizes, steps, base + start), out=part)
        return y

    return take
