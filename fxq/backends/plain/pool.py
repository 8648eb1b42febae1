"""Pooling and reductions of plain uint8 tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fxq.backends.kernel import Kernel, activation_refused, pair, refuse, scale_and_zero_point
from fxq.backends.plain.converters import ROUNDING_OFFSET, dense, is_image
from fxq.backends.plain.windows import Window, largest
from fxq.errors import BackendError, InputError
from fxq.quant.qparams import QParams


class MaxPool2d(Kernel):
    """Max pooling in 1 to 3 dimensions, on one grid for input and output.

    Args:
        kernel_size: int or one per spatial dimension.
        stride: int or one per spatial dimension; None: as `kernel_size`.
        padding: int or one per spatial dimension.
        dilation: int or one per spatial dimension.
        ceil_mode: as in `torch.nn.MaxPool2d`.
        dims: number of spatial dimensions, 1 to 3.
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
        refuse(self.name, f"{dims}-d max pooling has no kernel" if dims not in (1, 2, 3) else None)
        self.kernel_size, self.padding = pair(kernel_size, dims), pair(padding, dims)
        self.stride = self.kernel_size if stride is None else pair(stride, dims)
        self.dilation, self.ceil_mode, self.dims = pair(dilation, dims), ceil_mode, dims

    def bind(self, x: Tensor) -> Callable[..., Tensor]:
        """Function for inputs like these that reads channels-last images without a copy, see `Bindable`."""
        if self.dims != 2 or not is_image(x):
            return self.forward
        run = self._largest((x.shape[0], *x.shape[2:], x.shape[1]))
        return lambda x: run(x).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C, *sizes) or (C, *sizes), any strides -> uint8, channels-last."""
        batched = x.dim() == self.dims + 2
        if not batched and x.dim() != self.dims + 1:
            raise InputError(
                f"{self.name}: the input has shape {tuple(x.shape)}; it must have {self.dims} spatial dimensions."
            )
        x = (x if batched else x.unsqueeze(0)).movedim(1, -1).contiguous()
        y = self._largest(x.shape)(x).movedim(-1, 1)
        return y if batched else y.squeeze(0)

    def _largest(self, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """Return the max pooling function for images of `shape` (N, *sizes, C)."""
        sizes = zip(self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        make = partial(largest, shape, [Window(*size, self.ceil_mode) for size in sizes])
        run: Callable[[Tensor], Tensor] = self._cached_for_size(tuple(shape), make)
        return run


class MaxPool3d(MaxPool2d):
    """Max pooling in 3 dimensions, see `MaxPool2d`."""

    name: ClassVar[str] = "cpu.max_pool3d"
    options: ClassVar[tuple[str, ...]] = MaxPool2d.options[:-1]

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(kernel_size, stride, padding, dilation, ceil_mode, 3)


class AdaptiveMaxPool(Kernel):
    """Adaptive max pooling in 1 to 3 dimensions, on one grid for input and output.

    It runs as max pooling with adjacent windows. If windows overlap or differ in size, the values of each window are
    copied, and its last value is repeated up to the largest size.

    Args:
        output_size: output size of each spatial dimension; None: as the input's.
    """

    name: ClassVar[str] = "cpu.adaptive_max_pool"
    options: ClassVar[tuple[str, ...]] = ("output_size",)

    def __init__(self, output_size: Sequence[int | None]) -> None:
        super().__init__()
        self.output_size = tuple(output_size)
        refuse(self.name, self.refuses(output_size=self.output_size))

    @classmethod
    def refuses(cls, *, output_size: Sequence[int | None] = ()) -> str | None:
        """Why the kernel cannot be made; None if it can."""
        return "adaptive pooling to no value" if 0 in output_size else None

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C, *spatial) or (C, *spatial) -> uint8."""
        dims = len(self.output_size)
        sizes = x.shape[-dims:]
        indices, pool = self._cached_for_size(sizes, lambda: self._plan(sizes))
        y = x.movedim(-dims - 1, -1)
        for axis, index in enumerate(indices, -dims - 1):
            y = y if index is None else y.index_select(axis, index)
        pooled: Tensor = pool(y.movedim(-1, -dims - 1))
        return pooled

    def _plan(self, sizes: Sequence[int]) -> tuple[list[Tensor | None], Kernel]:
        """Indices to copy along each axis (None: no copy is needed), and the max pooling kernel of the result."""
        windows = [_windows(n, n if size is None else size) for n, size in zip(sizes, self.output_size, strict=True)]
        copied = [w.flatten() if w.numel() != n else None for w, n in zip(windows, sizes, strict=True)]
        return copied, _pool_of(tuple(w.shape[1] for w in windows))


def _windows(n: int, count: int) -> Tensor:
    """Indices of the values in each of `count` adaptive windows over n values, int64 (count, longest window).

    Shorter windows repeat their last index. If there are n indices in total, they are 0 to n - 1 in order.
    """
    starts = torch.arange(count) * n // count
    ends = -(-(torch.arange(count) + 1) * n // count)
    steps = torch.arange(int((ends - starts).max()))
    return torch.minimum(starts[:, None] + steps, ends[:, None] - 1)


def _pool_of(window: tuple[int, ...]) -> Kernel:
    """Return the max pooling kernel with adjacent windows of this size."""
    return MaxPool3d(window) if len(window) == 3 else MaxPool2d(window, dims=len(window))


_MAX_EXACT_TERMS = 2**16
"""Number of uint8 values up to which their sum is exact in float32."""


class Mean(Kernel):
    """Mean or sum over any axes. The integer sum is exact, so the result is rounded once.

    Args:
        x: grid of the input.
        out: grid of the output; None for float32.
        dim: the axes, at least one.
        keepdim: whether the axes are kept with size 1.
        total: whether to return the sum instead of the mean.
    """

    name: ClassVar[str] = "cpu.mean"
    options: ClassVar[tuple[str, ...]] = ("x", "out", "dim", "keepdim", "total")

    def __init__(
        self, x: QParams, out: QParams | None, dim: int | Sequence[int], keepdim: bool = False, total: bool = False
    ) -> None:
        super().__init__()
        refuse(self.name, activation_refused("the input", x), activation_refused("the output", out))
        self.x, self.out, self.keepdim, self.total = x, out, keepdim, total
        self.dim = (dim,) if isinstance(dim, int) else tuple(dim)
        self._input, self._output = scale_and_zero_point(x), scale_and_zero_point(out)
        self._zero = torch.tensor(ROUNDING_OFFSET + self._output[1], dtype=torch.float32, device="cpu")

    def bind(self, x: Tensor) -> Callable[..., Tensor]:
        dim, keepdim = self.dim, self.keepdim
        count = math.prod(x.shape[d] for d in dim)
        scale, zero = self._input
        if not self.total:
            if count == 0:
                raise BackendError(f"{self.name}: the mean of no elements: axes {dim} of {tuple(x.shape)}.")
            scale /= count
        shift = count * zero
        dtype = torch.float32 if count <= _MAX_EXACT_TERMS else torch.int64

        def summed(x: Tensor) -> Tensor:
            return x.sum(dim, keepdim=keepdim, dtype=dtype).sub_(shift).to(torch.float32)

        if self.out is None:
            return lambda x: summed(x).mul_(scale)
        zero_offset, low, high = self._zero, ROUNDING_OFFSET + self.out.qmin, ROUNDING_OFFSET + self.out.qmax
        factor = scale / self._output[0]

        def rounded(x: Tensor) -> Tensor:
            y = torch.add(zero_offset, summed(x), alpha=factor).clamp_(low, high)
            return dense(y.view(torch.int32).to(torch.uint8))

        return rounded

    def forward(self, x: Tensor) -> Tensor:
        """uint8, any shape -> `out`'s grid or float32."""
        run: Callable[..., Tensor] = self._cached_for_size(x.shape, lambda: self.bind(x))
        return run(x)
