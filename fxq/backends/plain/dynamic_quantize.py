"""Quantize with a grid that is measured on the values themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from fxq.backends.kernel import Kernel
from fxq.backends.loops.code.compiler import loops_for
from fxq.backends.plain.converters import dense
from fxq.quant.dynamic_grid import DynamicGrid, dynamic_range, dynamic_scale, dynamic_zero_point
from fxq.quant.qparams import as_float32

_MAGIC = 1.5 * 2.0**23
"""Floats from half as much below to half as much above it are the integers; its own low byte is 0."""


class DynamicQuantize(Kernel):
    """float32 -> a scale, if not symmetric a zero point, and uint8: one grid for the tensor, or one for each row.

    Args:
        qmin: smallest integer of the grid.
        qmax: largest integer of the grid.
        axis: the first axis of a row, counted from the end; None: one grid.
        symmetric: whether the zero point is known before: the middle.
    """

    name: ClassVar[str] = "dynamic_quantize"
    kind: ClassVar[str] = "convert"
    options: ClassVar[tuple[str, ...]] = ("qmin", "qmax", "axis", "symmetric")

    def __init__(self, qmin: int, qmax: int, axis: int | None = None, symmetric: bool = True) -> None:
        super().__init__()
        self.qmin, self.qmax, self.axis, self.symmetric = qmin, qmax, axis, symmetric
        grid = DynamicGrid(qmin, qmax, torch.uint8, axis, symmetric)
        self._steps, self._middle = grid.steps, torch.tensor(_MAGIC + grid.middle, device="cpu")

    def bind(self, x: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """As in `Bindable`: where one loop does all of it, nothing of the shapes is left to compute."""
        loops = loops_for("row_loops", x.numel(), x)
        return self.forward if loops is None or x.numel() == 0 else self._in_one_loop(x, loops)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """float32, any shape -> scale, zero point, both float32; uint8 of the shape (4-d: channels-last)."""
        loops = loops_for("row_loops", x.numel(), x)
        if loops is not None and x.numel():
            return self._in_one_loop(x, loops)(x)
        x = _plain(x)
        low, high = dynamic_range(x, self.axis)
        scale = dynamic_scale(low, high, self._steps, self.symmetric)
        if self.symmetric:
            return scale, _rounded(x, scale, self._middle)
        zero_point = dynamic_zero_point(low, scale, self.qmin, nearest=self.axis is None)
        last = _MAGIC + self.qmax if self.axis is None else None
        return scale, zero_point, _rounded(x, scale, zero_point + _MAGIC, last)

    def _in_one_loop(self, x: Tensor, loops: ModuleType) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """As `forward`, for inputs like `x`."""
        whole, symmetric, quantize_rows = self.axis is None, self.symmetric, loops.quantize_rows
        grids = () if self.axis is None else (*x.shape[: self.axis], *[1] * -self.axis)
        kind = loops.SYMMETRIC if symmetric else loops.NEAREST if whole else loops.ROW
        rows = math.prod(grids)
        numbers = rows, x.numel() // rows, kind, self._steps, self.qmin, self.qmax
        # The values of a row have to lie together, in any order: where that is a sample, the order is free.
        is_free = whole or self.axis == 1 - x.dim()

        def run(x: Tensor) -> tuple[Tensor, ...]:
            x = _plain(x)
            x = dense(x) if is_free else x.contiguous()
            scale = torch.empty(grids, dtype=torch.float32, device="cpu")
            zero_point, integers = torch.empty_like(scale), torch.empty_like(x, dtype=torch.uint8)
            addresses = x.data_ptr(), scale.data_ptr(), zero_point.data_ptr(), integers.data_ptr()
            quantize_rows(*addresses, *numbers)
            integers = dense(integers)
            return (scale, integers) if symmetric else (scale, zero_point, integers)

        return run


def _plain(x: Tensor) -> Tensor:
    """float32 that no gradient is wanted of. Raises `InputError` for other types."""
    x = x.detach() if x.requires_grad else x
    return x if x.dtype == torch.float32 else as_float32(x)


def _rounded(x: Tensor, scale: Tensor, zero: Tensor, last: float | None = None) -> Tensor:
    """`x` on a grid that was measured on it, so that nothing lies outside, or at most a step above the `last` integer.

    Args:
        x: float32.
        scale: what was measured.
        zero: its zero point, with `_MAGIC` added.
        last: the same of the largest integer, where values may lie above it.
    """
    steps = (x / scale).add_(zero)
    steps = steps if last is None else steps.clamp_(max=last)
    return dense(steps.view(torch.int32).to(torch.uint8))
