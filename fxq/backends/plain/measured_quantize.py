"""Quantize with a grid that is measured on the values themselves.

Rows whose zero point need not be whole go through `embedding_bag_byte_prepack`, PyTorch's kernel that makes bytes of
the rows of a table: it measures and rounds in one go.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fxq.backends.kernel import Kernel, refuse
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
        whole: whether a measured zero point is an integer. Else axis is -1, and the grid 0..255.
    """

    name: ClassVar[str] = "measured_quantize"
    kind: ClassVar[str] = "convert"
    options: ClassVar[tuple[str, ...]] = ("qmin", "qmax", "axis", "symmetric", "whole")

    def __init__(
        self, qmin: int, qmax: int, axis: int | None = None, symmetric: bool = True, whole: bool = True
    ) -> None:
        super().__init__()
        is_table = (qmin, qmax, axis, symmetric) == (0, 255, -1, False)
        refuse(self.name, "only rows of bytes have zero points between two integers" if not whole | is_table else None)
        self.qmin, self.qmax, self.axis, self.symmetric, self.whole = qmin, qmax, axis, symmetric, whole
        grid = MeasuredGrid(qmin, qmax, torch.uint8, axis, symmetric, whole)
        self._steps, self._middle = grid.steps, torch.tensor(_MAGIC + grid.middle, device="cpu")

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """float32, any shape -> scale, zero point, both float32; uint8 of the shape (4-d: channels-last).

        Rows of bytes have a gap behind each, of 8 bytes.
        """
        x = x.detach() if x.requires_grad else x
        x = x if x.dtype == torch.float32 else as_float32(x)
        if not self.whole:
            return _bytes_of(x)
        low, high = measured_range(x, self.axis)
        scale = measured_scale(low, high, self._steps, self.symmetric)
        if self.symmetric:
            return scale, _rounded(x, scale, self._middle)
        zero_point = measured_zero_point(low, scale, self.qmin, nearest=self.axis is None)
        last = _MAGIC + self.qmax if self.axis is None else None
        return scale, zero_point, _rounded(x, scale, zero_point + _MAGIC, last)


_GAP = 8
"""How many bytes PyTorch's kernel puts behind a row: scale and smallest value, float32 each."""
_LEAST = 1e-3
"""It adds 1e-8 to what it measures: from this range on that is less than a hundredth of a step."""
_pack = torch.ops.quantized.embedding_bag_byte_prepack.default


def _bytes_of(x: Tensor) -> tuple[Tensor, ...]:
    """Scales, zero points and integers of rows: from the smallest value of each, and zero, to the largest."""
    if x.numel() == 0 or torch.compiler.is_compiling():  # which values are in a row is not known then
        return _bytes_by_steps(x)
    packed, high = _pack(x), x.amax(-1, keepdim=True)  # of NaN, which it passes over, the largest is NaN
    count = x.shape[-1]
    end = packed if count % 4 == 0 else packed[..., count:].clone(memory_format=torch.contiguous_format)
    grid = end.view(torch.float32)
    scale, low = grid[..., -2:-1], grid[..., -1:]
    if not (low.max().item() <= 0.0 and high.min().item() >= _LEAST):  # a row without zero, a tiny one, or NaN
        return _bytes_by_steps(x)
    return scale, (low / scale).neg_(), packed[..., :count]


def _bytes_by_steps(x: Tensor) -> tuple[Tensor, ...]:
    """The same, for any values."""
    low, high = measured_range(x, -1)
    scale = measured_scale(low, high, 255, symmetric=False)
    steps = (x - low).div_(scale).add_(_MAGIC).clamp_(max=_MAGIC + 255)
    q = torch.empty((*x.shape[:-1], x.shape[-1] + _GAP), dtype=torch.uint8, device=x.device)[..., : x.shape[-1]]
    return scale, measured_zero_point(low, scale, 0, whole=False), q.copy_(steps.view(torch.int32))


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
