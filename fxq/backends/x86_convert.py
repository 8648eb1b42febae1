"""Conversions of the x86 backend: between float32 and uint8, and from one grid to another."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fxq.backends.x86_base import Kernel
from fxq.backends.x86_elementwise import dequantize, prelu_quantize, quantize
from fxq.qparams import QParams


class Quantize(Kernel):
    """float32 -> uint8 on the grid `out`; four dimensions come out channels-last."""

    name: ClassVar[str] = "x86.quantize"
    kind: ClassVar[str] = "convert"
    options: ClassVar[tuple[str, ...]] = ("out",)

    def __init__(self, out: QParams) -> None:
        super().__init__()
        self.out = out
        self._grid = (out.s, out.z, out.qmax, out.qmin)

    def forward(self, x: Tensor) -> Tensor:
        """float32, any shape -> uint8, the same shape."""
        return quantize(x, *self._grid)


class Dequantize(Kernel):
    """uint8 on the grid `x` -> float32."""

    name: ClassVar[str] = "x86.dequantize"
    kind: ClassVar[str] = "convert"
    options: ClassVar[tuple[str, ...]] = ("x",)

    def __init__(self, x: QParams) -> None:
        super().__init__()
        self.x = x
        self._grid = (x.s, x.z)

    def forward(self, x: Tensor) -> Tensor:
        """uint8, any shape -> float32, the same shape."""
        return dequantize(x, *self._grid)


class Requantize(Kernel):
    """uint8 on the grid `x` -> uint8 on the grid `out`."""

    name: ClassVar[str] = "x86.requantize"
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

    name: ClassVar[str] = "x86.prelu_quantize"
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
