"""Pooling of plain uint8 tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fxq.backends.convert import quantize
from fxq.backends.kernel import Kernel, activation_refused, first_reason, pair, refuse
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


class Mean2d(Kernel):
    """Mean over height and width, summed in integers.

    Args:
        x: grid of the input.
        out: grid of the output; None for float32.
        keepdim: whether height and width stay, with size 1.
    """

    name: ClassVar[str] = "cpu.mean2d"
    options: ClassVar[tuple[str, ...]] = ("x", "out", "keepdim")

    def __init__(self, x: QParams, out: QParams | None, keepdim: bool = False) -> None:
        super().__init__()
        refuse(self.name, self.refuses(x=x, out=out))
        self.x, self.out, self.keepdim = x, out, keepdim

    @classmethod
    def refuses(cls, *, x: QParams | None = None, out: QParams | None = None) -> str | None:
        """Why no such kernel can be built, or None."""
        return first_reason([activation_refused("the input", x), activation_refused("the output", out)])

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (..., H, W) -> (...) or (..., 1, 1), on `out`'s grid or float32."""
        count = x.shape[-1] * x.shape[-2]
        total = x.sum((-2, -1), keepdim=self.keepdim, dtype=torch.int32).sub_(count * self.x.z)
        if self.out is None:
            return total.to(torch.float32).mul_(self.x.s / count)
        step = self.out.s * count / self.x.s
        return quantize(total, step, self.out.z, self.out.qmax, self.out.qmin)
