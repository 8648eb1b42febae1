"""Quantize with a grid that is measured on the values themselves."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from fxq.backends.jit.compiler import loops_for
from fxq.backends.kernel import Kernel
from fxq.backends.plain.converters import dense
from fxq.quant.measured import MeasuredGrid, measured_range, measured_scale, measured_zero_point
from fxq.quant.qparams import as_float32

_MAGIC = 1.5 * 2.0**23
"""Floats from half as much below to half as much above it are the integers; its own low byte is 0."""


class MeasuredQuantize(Kernel):
    """float32 -> a scale, if not symmetric a zero point, and uint8: one grid for the tensor, or one for each row.

    Args:
        qmin: smallest integer of the grid.
        qmax: largest integer of the grid.
        axis: the first axis of a row, counted from the end; None: one grid.
        symmetric: whether the zero point is known before: the middle.
    """

    name: ClassVar[str] = "measured_quantize"
    kind: ClassVar[str] = "convert"
    options: ClassVar[tuple[str, ...]] = ("qmin", "qmax", "axis", "symmetric")

    def __init__(self, qmin: int, qmax: int, axis: int | None = None, symmetric: bool = True) -> None:
        super().__init__()
        self.qmin, self.qmax, self.axis, self.symmetric = qmin, qmax, axis, symmetric
        grid = MeasuredGrid(qmin, qmax, torch.uint8, axis, symmetric)
        self._steps, self._middle = grid.steps, torch.tensor(_MAGIC + grid.middle, device="cpu")

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """float32, any shape -> scale, zero point, both float32; uint8 of the shape (4-d: channels-last)."""
        x = x.detach() if x.requires_grad else x
        x = x if x.dtype == torch.float32 else as_float32(x)
        loops = loops_for("row_loops", x.numel())
        if loops is not None and x.numel():
            return self._in_one_loop(x, loops)
        low, high = measured_range(x, self.axis)
        scale = measured_scale(low, high, self._steps, self.symmetric)
        if self.symmetric:
            return scale, _rounded(x, scale, self._middle)
        zero_point = measured_zero_point(low, scale, self.qmin, nearest=self.axis is None)
        last = _MAGIC + self.qmax if self.axis is None else None
        return scale, zero_point, _rounded(x, scale, zero_point + _MAGIC, last)

    def _in_one_loop(self, x: Tensor, loops: ModuleType) -> tuple[Tensor, ...]:
        """As `forward`. The values of a row have to lie together, in any order: that of a sample is free."""
        whole = self.axis is None
        x = dense(x) if whole or self.axis == 1 - x.dim() else x.contiguous()
        scale = x.new_empty(() if whole else (*x.shape[: self.axis], *[1] * -(self.axis or 0)))
        zero_point, integers = torch.empty_like(scale), torch.empty_like(x, dtype=torch.uint8)
        kind = loops.SYMMETRIC if self.symmetric else loops.NEAREST if whole else loops.ROW
        rows = scale.numel()
        loops.quantize_rows(
            *(tensor.data_ptr() for tensor in (x, scale, zero_point, integers)),
            *(rows, x.numel() // rows, kind, self._steps, self.qmin, self.qmax),
        )
        integers = dense(integers)
        return (scale, integers) if self.symmetric else (scale, zero_point, integers)


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
