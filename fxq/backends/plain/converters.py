"""Conversions between float32 and uint8, and from one grid to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.kernel import Kernel
from fxq.graph.precision import NodeKind
from fxq.quant.qparams import QParams, as_float32

CHUNK_ELEMENTS = 131072
"""Elements per chunk and thread. As float32 they are 512 KiB, which stay in the L2 cache of a core between ops."""
MAX_UNCHUNKED_ELEMENTS = 2 * CHUNK_ELEMENTS
"""Number of elements up to which a tensor is converted at once, since the calls of a second chunk cost too much."""
ROUNDING_OFFSET = 2.0**23
"""Offset that rounds half to even: floats in [2**23, 2**24) are whole, and their low byte is the integer."""


def _layout(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format


def is_dense(x: Tensor) -> bool:
    """Whether `x` is contiguous; with 4 dimensions: whether it is channels-last."""
    return x.is_contiguous(memory_format=_layout(x))


def dense(x: Tensor) -> Tensor:
    """Return `x` contiguous; with 4 dimensions channels-last."""
    return x.contiguous(memory_format=_layout(x))


def is_image(x: Tensor) -> bool:
    """Whether `x` is (N, C, H, W) in channels-last memory."""
    return x.dim() == 4 and is_dense(x)


def _flat(x: Tensor) -> tuple[Tensor, list[int]] | None:
    """Return a 1-d view of `x` in memory order, and the dimensions in that order; None if `x` has gaps in memory."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
    x = x.permute(order)
    return (x.view(-1), order) if x.is_contiguous() else None


def line(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x`, copied if it has gaps in memory, and a 1-d view of it in memory order.

    `y.as_strided(x.shape, x.stride())` gives a 1-d result `y` the layout of the returned `x`.
    """
    if not (x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))):
        x = dense(x)
    return x, x.as_strided((x.numel(),), (1,))


def chunks(total: int, row: int = 1) -> Iterator[slice]:
    """Slices of `total` elements into chunks, whose lengths are multiples of `row`."""
    step = max(CHUNK_ELEMENTS * torch.get_num_threads() // row, 1) * row
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def _rounded(x: Tensor, zero: Tensor, factor: float, low: float, high: float) -> Tensor:
    """Quantize at once, float32 -> uint8: `x * factor`, clamped. `zero`, `low`, `high` include `ROUNDING_OFFSET`."""
    return torch.add(zero, x, alpha=factor).clamp_(low, high).view(torch.int32).to(torch.uint8)


def _real(q: Tensor, scale: float, zero_point: int) -> Tensor:
    """Dequantize at once, uint8 -> float32."""
    return q.to(torch.float32).sub_(zero_point).mul_(scale)


def quantize(
    x: Tensor, scale: float, zero_point: int, qmax: int = 255, qmin: int = 0, zero: Tensor | None = None
) -> Tensor:
    """Quantize float32 to uint8 of the same shape; with four dimensions channels-last.

    It differs from `fxq.quant.qparams.quantize` in that it multiplies by the reciprocal of the scale, so a value within
    float32's precision of a tie may be rounded to the other integer. Infinities saturate.

    Args:
        x: float32, any shape.
        scale: real units per step.
        zero_point: integer of 0.
        qmax: largest integer.
        qmin: smallest integer.
        zero: `ROUNDING_OFFSET + zero_point` as a float32 scalar tensor. Pass it to quantize small tensors faster.

    Raises:
        InputError: `x` is neither float32 nor a dtype that `torch.autocast` produces.
    """
    x = x.detach() if x.requires_grad else x
    x = x if x.dtype == torch.float32 else as_float32(x)
    low, high = ROUNDING_OFFSET + qmin, ROUNDING_OFFSET + qmax
    zero = x.new_tensor(ROUNDING_OFFSET + zero_point) if zero is None else zero
    if x.numel() <= MAX_UNCHUNKED_ELEMENTS:
        return dense(_rounded(x, zero, 1.0 / scale, low, high))
    flat = _flat(x)
    if flat is None:
        x = dense(x)
        flat = _flat(x)
        assert flat is not None  # a dense tensor has no gaps
    source, order = flat
    out = torch.empty_like(x, dtype=torch.uint8)
    target = out.permute(order).view(-1)
    buffer = x.new_empty(min(len(source), CHUNK_ELEMENTS * torch.get_num_threads()))
    for step in chunks(len(source)):
        y = buffer[: step.stop - step.start]
        torch.add(zero, source[step], alpha=1.0 / scale, out=y).clamp_(low, high)
        target[step].copy_(y.view(torch.int32))
    return dense(out)


def dequantize(q: Tensor, scale: float, zero_point: int) -> Tensor:
    """Dequantize uint8 to float32 of the same shape and layout: exactly `(q - zero_point) * scale` in float32."""
    flat = _flat(q) if q.numel() > MAX_UNCHUNKED_ELEMENTS else None
    if flat is None:
        return _real(q, scale, zero_point)
    source, order = flat
    out = torch.empty_like(q, dtype=torch.float32)
    target = out.permute(order).view(-1)
    for step in chunks(len(source)):
        target[step].copy_(source[step]).sub_(zero_point).mul_(scale)
    return out


def prelu_quantize(x: Tensor, weight: Tensor, scale: float, zero_point: int, qmax: int = 255, qmin: int = 0) -> Tensor:
    """Compute `quantize(F.prelu(x, weight), ...)` in one pass over memory.

    Args:
        x: float32, (N, C, ...).
        weight: slopes, float32, (C,) or (1,).
        scale: real units per step of the result.
        zero_point: integer of 0.
        qmax: largest integer of the result.
        qmin: smallest integer of the result.
    """
    x, weight = as_float32(x).detach(), weight.detach()
    if x.dim() < 2 or x.numel() == 0:
        return quantize(F.prelu(x, weight), scale, zero_point, qmax, qmin)
    rows = x.movedim(1, -1)
    if not rows.is_contiguous():
        rows = rows.contiguous()
    out = rows.new_empty(rows.shape, dtype=torch.uint8)
    channels = rows.shape[-1]
    source, target = rows.view(-1, channels), out.view(-1, channels)
    zero, low, high = x.new_tensor(ROUNDING_OFFSET + zero_point), ROUNDING_OFFSET + qmin, ROUNDING_OFFSET + qmax
    for step in chunks(rows.numel(), channels):
        part = slice(step.start // channels, step.stop // channels)
        y = F.prelu(source[part], weight).to(torch.float32)  # torch.autocast computes it in bfloat16
        torch.add(zero, y, alpha=1.0 / scale, out=y).clamp_(low, high)
        target[part].copy_(y.view(torch.int32))
    out = out.movedim(-1, 1)
    return out if x.dim() == 4 else out.contiguous()


class Quantize(Kernel):
    """float32 -> uint8 on the grid `out`; with four dimensions channels-last."""

    name: ClassVar[str] = "cpu.quantize"
    kind: ClassVar[NodeKind] = "convert"
    options: ClassVar[tuple[str, ...]] = ("out",)

    def __init__(self, out: QParams) -> None:
        super().__init__()
        self.out = out
        zero = torch.tensor(ROUNDING_OFFSET + out.z, dtype=torch.float32, device="cpu")
        self._grid = (out.s, out.z, out.qmax, out.qmin, zero)

    def bind(self, x: Tensor) -> Callable[..., Tensor]:
        """Return the function for inputs like these, which skips checks for small tensors. See `Bindable.bind`."""
        if x.numel() > MAX_UNCHUNKED_ELEMENTS or x.dtype != torch.float32 or x.requires_grad or not is_dense(x):
            return self.forward
        scale, _, qmax, qmin, zero = self._grid
        return partial(_rounded, zero=zero, factor=1.0 / scale, low=ROUNDING_OFFSET + qmin, high=ROUNDING_OFFSET + qmax)

    def forward(self, x: Tensor) -> Tensor:
        """float32, any shape -> uint8, the same shape."""
        return quantize(x, *self._grid)


class Dequantize(Kernel):
    """uint8 on the grid `x` -> float32."""

    name: ClassVar[str] = "cpu.dequantize"
    kind: ClassVar[NodeKind] = "convert"
    options: ClassVar[tuple[str, ...]] = ("x",)

    def __init__(self, x: QParams) -> None:
        super().__init__()
        self.x = x
        self._grid = (x.s, x.z)

    def bind(self, x: Tensor) -> Callable[..., Tensor]:
        """Return the function for inputs like these, which skips checks for small tensors. See `Bindable.bind`."""
        if x.numel() > MAX_UNCHUNKED_ELEMENTS:
            return self.forward
        scale, zero_point = self._grid
        return partial(_real, scale=scale, zero_point=zero_point)

    def forward(self, x: Tensor) -> Tensor:
        """uint8, any shape -> float32, the same shape."""
        return dequantize(x, *self._grid)


class Requantize(Kernel):
    """uint8 on the grid `x` -> uint8 on the grid `out`."""

    name: ClassVar[str] = "cpu.requantize"
    kind: ClassVar[NodeKind] = "convert"
    options: ClassVar[tuple[str, ...]] = ("x", "out")

    def __init__(self, x: QParams, out: QParams) -> None:
        super().__init__()
        self.x, self.out = x, out

    def forward(self, x: Tensor) -> Tensor:
        """uint8, any shape -> uint8, the same shape."""
        return quantize(dequantize(x, self.x.s, self.x.z), self.out.s, self.out.z, self.out.qmax, self.out.qmin)


class PReLUQuantize(Kernel):
    """PReLU in float, then quantize, in one pass over memory."""

    name: ClassVar[str] = "cpu.prelu_quantize"
    kind: ClassVar[NodeKind] = "float"
    options: ClassVar[tuple[str, ...]] = ("out",)

    weight: Tensor

    def __init__(self, weight: Tensor, out: QParams) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().clone())
        self.out = out
        self._grid = (out.s, out.z, out.qmax, out.qmin)

    def forward(self, x: Tensor) -> Tensor:
        """float32 (N, C, ...) -> uint8, the same shape."""
        return prelu_quantize(x, self.weight, *self._grid)
