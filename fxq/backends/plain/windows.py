"""The largest value of each window of plain uint8 tensors, by PyTorch's own ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxq.errors import InputError

_LONG, _MANY = 256, 8
"""From how many neighbouring bytes, or values under a window, one reduction is faster than maxima of pairs."""


class Window(NamedTuple):
    """The windows of a pooling along one axis.

    Attributes:
        kernel: how many values are under one.
        stride: how far the next one is.
        padding: how many values before the first, and behind the last, count as the smallest.
        dilation: how far the next value under it is.
        ceil_mode: whether a last window may begin inside that reaches past the padding.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int
    ceil_mode: bool

    def count(self, size: int) -> int:
        """How many there are over `size` values. Raises `InputError` where there is none."""
        room = size + 2 * self.padding - self.dilation * (self.kernel - 1) - 1
        count = (room + (self.stride - 1 if self.ceil_mode else 0)) // self.stride + 1
        if self.ceil_mode and (count - 1) * self.stride >= size + self.padding:
            count -= 1
        if size == 0 or count < 1:
            raise InputError(f"{size} values along an axis are fewer than a pooling window of {self.kernel} takes.")
        return count

    def parts(self, size: int) -> list[_Part]:
        """What the windows take of `size` values, tap by tap; first of those taps that are inside of every window."""
        count, parts = self.count(size), []
        for tap in range(self.kernel):
            start = tap * self.dilation - self.padding
            first, end = max(-(start // self.stride), 0), min((size - 1 - start) // self.stride + 1, count)
            if first < end:
                parts.append(_Part(first, end - first, first * self.stride + start))
        return sorted(parts, key=lambda part: part.windows < count)


class _Part(NamedTuple):
    """The values that one tap of the windows takes: of window `first` and those behind it.

    Attributes:
        first: the number of the first window in which the tap is inside.
        windows: of how many it is.
        start: where its value for the first of them is.
    """

    first: int
    windows: int
    start: int


def largest(shape: Sequence[int], windows: Sequence[Window]) -> Callable[[Tensor], Tensor]:
    """A function that takes the largest values of windows, one axis after the other.

    Args:
        shape: of the tensors that it takes, (N, *sizes, C), without gaps in memory, in this order. What it returns has
            the same axes.
        windows: one for each of the sizes.

    Raises:
        InputError: a size that is smaller than its window.
    """
    steps, result = [], tuple(shape)
    for axis, window in enumerate(windows, 1):
        if window[:3] != (1, 1, 0):
            steps.append(_along(result, axis, window))
            result = (*result[:axis], window.count(result[axis]), *result[axis + 1 :])
    steps = steps or [_along(shape, 1, windows[0])]  # windows of single values: a copy

    def run(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x.view(result)

    return run


def _along(shape: Sequence[int], axis: int, window: Window) -> Callable[[Tensor], Tensor]:
    """The function for one axis: from a tensor of `shape` without gaps to one of (before, windows, behind)."""
    outer, size, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    count, parts = window.count(size), window.parts(size)
    steps = size * inner, window.stride * inner, 1
    whole = [part.start * inner for part in parts if part.windows == count]
    if len(whole) == window.kernel > 2 and (inner >= _LONG or window.kernel > _MANY):
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
        else:  # of few values each tap is outside of some window
            y = x.new_zeros(result)
        for sizes, to, start in others:
            part = y.as_strided(sizes, own, to)
            torch.maximum(part, x.as_strided(sizes, steps, base + start), out=part)
        return y

    return take
