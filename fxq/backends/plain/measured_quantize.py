"""Quantize with a scale that is measured on the values themselves."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fxq.backends.kernel import Kernel
from fxq.backends.plain.converters import MAGIC, dense
from fxq.quant.measured import MeasuredGrid, measured_scale
from fxq.quant.qparams import as_float32


class MeasuredQuantize(Kernel):
    """float32 -> a scale, one for the tensor or one for each row, and uint8.

    Args:
        qmin: smallest integer of the grid.
        qmax: largest integer of the grid.
        axis: the first axis of a row, counted from the end; None: one scale.
    """

    name: ClassVar[str] = "measured_quantize"
    kind: ClassVar[str] = "convert"
    options: ClassVar[tuple[str, ...]] = ("qmin", "qmax", "axis")

    def __init__(self, qmin: int, qmax: int, axis: int | None = None) -> None:
        super().__init__()
        self.qmin, self.qmax, self.axis = qmin, qmax, axis
        grid = MeasuredGrid(qmin, qmax, torch.uint8, axis)
        self._steps, self._zero = grid.steps, torch.tensor(MAGIC + grid.zero_point, device="cpu")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """float32, any shape -> the scale, and uint8 of the shape (channels-last with four dimensions)."""
        x = x.detach() if x.requires_grad else x
        x = x if x.dtype == torch.float32 else as_float32(x)
        scale = measured_scale(x, self._steps, self.axis)
        # Nothing is to be clamped: no value is further from zero than the scale was made for.
        return scale, dense((x / scale).add_(self._zero).view(torch.int32).to(torch.uint8))
