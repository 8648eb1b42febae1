"""Quantize with a dynamic range."""

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
from fxq.graph.precision import NodeKind
from fxq.quant.dynamic_grid import DynamicGrid, dynamic_range, dynamic_scale, dynamic_zero_point
from fxq.quant.qparams import as_float32

_ROUNDING_OFFSET = 1.5 * 2.0**23
"""Offset that rounds half to even: floats within 2**22 of it are whole, and its own low byte is 0."""


class DynamicQuantize(Kernel):
    """float32 -> scale, zero point (unless symmetric) and uint8, with one grid per tensor or per row.

    Args:
        qmin: smallest integer of the grid.
        qmax: largest integer of the grid.
        axis: first axis of a row, counted from the end; None: one grid for the tensor.
        symmetric: whether the zero point is fixed to the middle of the grid.
    """

    name: ClassVar[str] = "dynamic_quantize"
    kind: ClassVar[NodeKind] = "convert"
    options: ClassVar[tuple[str, ...]] = ("qmin", "qmax", "axis", "symmetric")

    def __init__(self, qmin: int, qmax: int, axis: int | None = None, symmetric: bool = True) -> None:
        super().__init__()
        self.qmin, self.qmax, self.axis, self.symmetric = qmin, qmax, axis, symmetric
        grid = DynamicGrid(qmin, qmax, torch.uint8, axis, symmetric)
        self._steps, self._middle = grid.steps, torch.tensor(_ROUNDING_OFFSET + grid.middle, device="cpu")

    def bind(self, x: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """Return the function for inputs like these: one compiled loop if there is one. See `Bindable.bind`."""
        loops = loops_for("row_loops", x.numel(), x)
        return self.forward if loops is None or x.numel() == 0 else self._in_one_loop(x, loops)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """float32, any shape -> scale and zero point, float32, and integers, uint8, same shape (4-d: channels-last)."""
        loops = loops_for("row_loops", x.numel(), x)
        if loops is not None and x.numel():
            return self._in_one_loop(x, loops)(x)
        x = _plain(x)
        low, high = dynamic_range(x, self.axis)
        scale = dynamic_scale(low, high, self._steps, self.symmetric)
        if self.symmetric:
            return scale, _rounded(x, scale, self._middle)
        zero_point = dynamic_zero_point(low, scale, self.qmin, nearest=self.axis is None)
        largest = _ROUNDING_OFFSET + self.qmax if self.axis is None else None
        return scale, zero_point, _rounded(x, scale, zero_point + _ROUNDING_OFFSET, largest)

    @property
    def row_grid(self) -> tuple[int, int, int, int]:
        """Arguments of the loop that rounds rows: kind of the grid, steps, and smallest and largest integer."""
        loops = loops_for("row_loops", 0)
        assert loops is not None  # the caller has compiled loops
        return loops.SYMMETRIC if self.symmetric else loops.ROW, self._steps, self.qmin, self.qmax

    def _in_one_loop(self, x: Tensor, loops: ModuleType) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """Return a compiled loop that computes `forward` for inputs like `x`."""
        whole, symmetric, quantize_rows = self.axis is None, self.symmetric, loops.quantize_rows
        grids = () if self.axis is None else (*x.shape[: self.axis], *[1] * -self.axis)
        kind = loops.SYMMETRIC if symmetric else loops.NEAREST if whole else loops.ROW
        rows = math.prod(grids)
        numbers = rows, x.numel() // rows, kind, self._steps, self.qmin, self.qmax
        # The values of a row must be adjacent in memory, in any order. If a row is a whole sample, any layout will do.
        any_layout = whole or self.axis == 1 - x.dim()

        def run(x: Tensor) -> tuple[Tensor, ...]:
            x = _plain(x)
            x = dense(x) if any_layout else x.contiguous()
            scale = torch.empty(grids, dtype=torch.float32, device="cpu")
            zero_point, integers = torch.empty_like(scale), torch.empty_like(x, dtype=torch.uint8)
            addresses = x.data_ptr(), scale.data_ptr(), zero_point.data_ptr(), integers.data_ptr()
            quantize_rows(*addresses, *numbers)
            integers = dense(integers)
            return (scale, integers) if symmetric else (scale, zero_point, integers)

        return run


def _plain(x: Tensor) -> Tensor:
    """Return `x` detached, as float32. Raises `InputError` for dtypes that `torch.autocast` does not produce."""
    x = x.detach() if x.requires_grad else x
    return x if x.dtype == torch.float32 else as_float32(x)


def _rounded(x: Tensor, scale: Tensor, zero: Tensor, largest: float | None = None) -> Tensor:
    """Quantize `x` to its dynamic grid. No value is below the grid, and with `largest` none is left above it.

    Args:
        x: float32.
        scale: dynamic scale, float32.
        zero: zero point plus `_ROUNDING_OFFSET`, float32.
        largest: largest integer plus `_ROUNDING_OFFSET`, to clamp values that may be a step above the grid; else None.
    """
    steps = (x / scale).add_(zero)
    steps = steps if largest is None else steps.clamp_(max=largest)
    return dense(steps.view(torch.int32).to(torch.uint8))
