"""Pooling of plain uint8 tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fxq.backends.convert import MAGIC, dense
from fxq.backends.kernel import Kernel, activation_refused, first_reason, numbers, pair, refuse
from fxq.errors import BackendError
from fxq.qparams import QParams


class MaxPool2d(Kernel):
    """max_pool2d, or max_pool1d where `kernel_size` has one number in a sequence; same grid in and out.

    Args:
        kernel_size: int or one per spatial dimension.
        stride: int or one per spatial dimension; None: as `kernel_size`.
        padding: int or one per spatial dimension.
        dilation: int or one per spatial dimension.
        ceil_mode: as in `torch.nn.MaxPool2d`.
        dims: 1 or 2.
    """

    name: ClassVar[str] = "cpu.max_pool2d"
    options: ClassVar[tuple[str, ...]] = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "dims")

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        dims: int = 2,
    ) -> None:
        super().__init__()
        refuse(self.name, self.refuses(dims=dims))
        self.kernel_size, self.padding = pair(kernel_size, dims), pair(padding, dims)
        self.stride = self.kernel_size if stride is None else pair(stride, dims)
        self.dilation, self.ceil_mode, self.dims = pair(dilation, dims), ceil_mode, dims

    @classmethod
    def refuses(cls, *, dims: int = 2, return_indices: bool = False, x: QParams | None = None) -> str | None:
        """Why no such kernel can be built, or None."""
        reasons = [
            f"{dims}-d max pooling has no kernel" if dims not in (1, 2) else None,
            "returns indices" if return_indices else None,
            activation_refused("the input", x),
        ]
        return first_reason(reasons)

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C, H, W), (C, H, W), (N, C, L) or (C, L) -> uint8, channels-last."""
        batched = x.dim() == self.dims + 2
        x = x if batched else x.unsqueeze(0)
        x = x if self.dims == 2 else x.unsqueeze(2)
        # The op refuses an empty batch; one image of zeros gives the shape.
        y = self._pool(x) if x.shape[0] else self._pool(x.new_zeros((1, *x.shape[1:])))[:0]
        y = y if self.dims == 2 else y.squeeze(2)
        return y if batched else y.squeeze(0)

    def _pool(self, x: Tensor) -> Tensor:
        fill = 2 - self.dims
        return torch.ops.quantized.max_pool2d(
            x.contiguous(memory_format=torch.channels_last),
            [1] * fill + list(self.kernel_size),
            [1] * fill + list(self.stride),
            [0] * fill + list(self.padding),
            [1] * fill + list(self.dilation),
            self.ceil_mode,
        )


_EXACT = 2**16
"""Sums of up to this many bytes are exact in float32."""


class Mean(Kernel):
    """Mean or sum over any axes, summed exactly. Rounds once.

    Against dequantize, mean, quantize (AVX512-VNNI, one thread, us): 72 x 28 x 28 33 / 43, 960 x 7 x 7 31 / 41,
    32 x 112 x 112 115 / 232.

    Args:
        x: grid of the input.
        out: grid of the output; None for float32.
        dim: the axes, at least one.
        keepdim: whether the axes stay, with size 1.
        total: the sum instead of the mean.
    """

    name: ClassVar[str] = "cpu.mean"
    options: ClassVar[tuple[str, ...]] = ("x", "out", "dim", "keepdim", "total")

    def __init__(
        self, x: QParams, out: QParams | None, dim: int | Sequence[int], keepdim: bool = False, total: bool = False
    ) -> None:
        super().__init__()
        refuse(self.name, self.refuses(x=x, out=out))
        self.x, self.out, self.keepdim, self.total = x, out, keepdim, total
        self.dim = (dim,) if isinstance(dim, int) else tuple(dim)
        self._input, self._output = numbers(x), numbers(out)
        self._zero = torch.tensor(MAGIC + self._output[1], dtype=torch.float32, device="cpu")

    @classmethod
    def refuses(cls, *, x: QParams | None = None, out: QParams | None = None) -> str | None:
        """Why no such kernel can be built, or None."""
        return first_reason([activation_refused("the input", x), activation_refused("the output", out)])

    def forward(self, x: Tensor) -> Tensor:
        """uint8, any shape -> `out`'s grid or float32."""
        count = math.prod(x.shape[d] for d in self.dim)
        scale, zero = self._input
        if not self.total:
            if count == 0:
                raise BackendError(f"{self.name}: the mean of no elements: axes {self.dim} of {tuple(x.shape)}.")
            scale /= count
        if count <= _EXACT:
            y = x.sum(self.dim, keepdim=self.keepdim, dtype=torch.float32).sub_(count * zero)
        else:
            y = x.sum(self.dim, keepdim=self.keepdim, dtype=torch.int64).sub_(count * zero).to(torch.float32)
        if self.out is None:
            return y.mul_(scale)
        step, _ = self._output
        y = torch.add(self._zero, y, alpha=scale / step).clamp_(MAGIC + self.out.qmin, MAGIC + self.out.qmax)
        return dense(y.view(torch.int32).to(torch.uint8))
