"""Conversions between float32 and uint8, and from one grid to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.kernel import Kernel
from fxq.quant.qparams import QParams, as_float32

# Elements per step and thread: 512 KiB of float32 stay in a core's L2 cache between the operations on them.
CHUNK = 131072
# Up to here a tensor is converted whole: two steps lose more than the cache wins.
WHOLE = 2 * CHUNK
# Floats in [2**23, 2**24) are the integers: adding 2**23 rounds (half to even), and the low byte is the result.
MAGIC = 2.0**23


def _layout(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format


def is_dense(x: Tensor) -> bool:
    """Whether `x` has no gaps in memory; with 4 dimensions: whether it is channels-last."""
    return x.is_contiguous(memory_format=_layout(x))


def dense(x: Tensor) -> Tensor:
    """`x` without gaps in memory; with 4 dimensions channels-last."""
    return x.contiguous(memory_format=_layout(x))


def is_image(x: Tensor) -> bool:
    """Whether `x` is (N, C, H, W) and channels-last, as image kernels take it."""
    return x.dim() == 4 and is_dense(x)


def _flat(x: Tensor) -> tuple[Tensor, list[int]] | None:
    """`x` as a 1-d view in memory order, and that order of its dimensions; None if it has gaps."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
    x = x.permute(order)
    return (x.view(-1), order) if x.is_contiguous() else None


def line(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` without gaps in memory (copied only where it has some), and a 1-d view of it in memory order.

    `y.as_strided(x.shape, x.stride())` gives a 1-d result the layout of that `x`.
    """
    if not (x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))):
        x = dense(x)
    return x, x.as_strided((x.numel(),), (1,))


def chunks(total: int, row: int = 1) -> Iterator[slice]:
    """Slices of about one chunk each, every length a multiple of `row`."""
    step = max(CHUNK * torch.get_num_threads() // row, 1) * row
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def _rounded(x: Tensor, zero: Tensor, factor: float, low: float, high: float) -> Tensor:
    """float32 -> uint8, whole: `x * factor` on a grid whose ends, and whose integer for 0, have `MAGIC` added."""
    return torch.add(zero, x, alpha=factor).clamp_(low, high).view(torch.int32).to(torch.uint8)


def _real(q: Tensor, scale: float, zero_point: int) -> Tensor:
    """uint8 -> float32, whole."""
    return q.to(torch.float32).sub_(zero_point).mul_(scale)


def quantize(
    x: Tensor, scale: float, zero_point: int, qmax: int = 255, qmin: int = 0, zero: Tensor | None = None
) -> Tensor:
    """float32 -> uint8 of the same shape; four dimensions come out channels-last.

    As `fxq.quant.qparams.quantize`, but multiplies with the reciprocal of the scale, so that a value within float32's
    precision of a tie may land one step away. Infinities saturate. `zero` is `MAGIC + zero_point` as a tensor, for
    who has it: making it and what needs not be called takes longer than to quantize a small tensor.

    Raises:
        InputError: `x` is not float32, nor what `torch.autocast` makes of it.
    """
    x = x.detach() if x.requires_grad else x
    x = x if x.dtype == torch.float32 else as_float32(x)
    low, high = MAGIC + qmin, MAGIC + qmax
    zero = x.new_tensor(MAGIC + zero_point) if zero is None else zero
    if x.numel() <= WHOLE:
        return dense(_rounded(x, zero, 1.0 / scale, low, high))
    flat = _flat(x)
    if flat is None:
        x = dense(x)
        flat = _flat(x)
        assert flat is not None  # a dense tensor has no gaps
    source, order = flat
    out = torch.empty_like(x, dtype=torch.uint8)
    target = out.permute(order).view(-1)
    buffer = x.new_empty(min(len(source), CHUNK * torch.get_num_threads()))
    for step in chunks(len(source)):
        y = buffer[: step.stop - step.start]
        torch.add(zero, source[step], alpha=1.0 / scale, out=y).clamp_(low, high)
        target[step].copy_(y.view(torch.int32))
    return dense(out)


def dequantize(q: Tensor, scale: float, zero_point: int) -> Tensor:
    """uint8 -> float32, same shape and layout. Exactly `(q - zero_point) * scale` in float32."""
    flat = _flat(q) if q.numel() > WHOLE else None
    if flat is None:
        return _real(q, scale, zero_point)
    source, order = flat
    out = torch.empty_like(q, dtype=torch.float32)
    target = out.permute(order).view(-1)
    for step in chunks(len(source)):
        target[step].copy_(source[step]).sub_(zero_point).mul_(scale)
    return out


def prelu_quantize(x: Tensor, weight: Tensor, scale: float, zero_point: int, qmax: int = 255, qmin: int = 0) -> Tensor:
    """`quantize(F.prelu(x, weight), ...)` in one sweep through memory.

    Args:
        x: float32, (N, C, ...).
        weight: float32, (C,) or (1,): the slopes.
        scale: float units per step of the result.
        zero_point: the integer for float zero.
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
    zero, low, high = x.new_tensor(MAGIC + zero_point), MAGIC + qmin, MAGIC + qmax
    for step in chunks(rows.numel(), channels):
        part = slice(step.start // channels, step.stop // channels)
        y = F.prelu(source[part], weight).to(torch.float32)  # torch.autocast computes it in bfloat16
        torch.add(zero, y, alpha=1.0 / scale, out=y).clamp_(low, high)
        target[part].copy_(y.view(torch.int32))
    out = out.movedim(-1, 1)
    return out if x.dim() == 4 else out.contiguous()


class Quantize(Kernel):
    """float32 -> uint8 on the grid `out`; four dimensions come out channels-last."""

    name: ClassVar[str] = "cpu.quantize"
    kind: ClassVar[str] = "convert"
    options: ClassVar[tuple[str, ...]] = ("out",)

    def __init__(self, out: QParams) -> None:
        super().__init__()
        self.out = out
        self._grid = (out.s, out.z, out.qmax, out.qmin, torch.tensor(MAGIC + out.z, dtype=torch.float32, device="cpu"))

    def bind(self, x: Tensor) -> Callable[..., Tensor]:
        """As in `Bindable`: a small tensor takes four calls."""
        if x.numel() > WHOLE or x.dtype != torch.float32 or x.requires_grad or not is_dense(x):
            return self.forward
        scale, _, qmax, qmin, zero = self._grid
        return partial(_rounded, zero=zero, factor=1.0 / scale, low=MAGIC + qmin, high=MAGIC + qmax)

    def forward(self, x: Tensor) -> Tensor:
        """float32, any shape -> uint8, the same shape."""
        return quantize(x, *self._grid)


class Dequantize(Kernel):
    """uint8 on the grid `x` -> float32."""

    name: ClassVar[str] = "cpu.dequantize"
    kind: ClassVar[str] = "convert"
    options: ClassVar[tuple[str, ...]] = ("x",)

    def __init__(self, x: QParams) -> None:
        super().__init__()
        self.x = x
        self._grid = (x.s, x.z)

    def bind(self, x: Tensor) -> Callable[..., Tensor]:
        """As in `Bindable`: a small tensor takes three calls."""
        if x.numel() > WHOLE:
            return self.forward
        scale, zero_point = self._grid
        return partial(_real, scale=scale, zero_point=zero_point)

    def forward(self, x: Tensor) -> Tensor:
        """uint8, any shape -> float32, the same shape."""
        return dequantize(x, *self._grid)


class Requantize(Kernel):
    """uint8 on the grid `x` -> uint8 on the grid `out`."""

    name: ClassVar[str] = "cpu.requantize"
    kind: ClassVar[str] = "convert"
    options: ClassVar[tuple[str, ...]] = ("x", "out")

    def __init__(self, x: QParams, out: QParams) -> None:
        super().__init__()
        self.x, self.out = x, out

    def forward(self, x: Tensor) -> Tensor:
        """uint8, any shape -> uint8, the same shape."""
        return quantize(dequantize(x, self.x.s, self.x.z), self.out.s, self.out.z, self.out.qmax, self.out.qmin)


class PReLUQuantize(Kernel):
    """PReLU in float, then quantize, in one walk over the tensor; the value is rounded once."""

    name: ClassVar[str] = "cpu.prelu_quantize"
    kind: ClassVar[str] = "float"
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
