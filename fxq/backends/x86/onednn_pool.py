"""Average pooling of the x86 backend on uint8 tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.kernel import Kernel, activation_refused, first_reason, pair, refuse
from fxq.backends.plain.converters import dequantize, quantize
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.quant.qparams import QParams


class AvgPool2d(Kernel):
    """avg_pool2d or avg_pool1d whose padding counts, as a depthwise convolution with weights of 1.

    Args:
        x: grid of the input.
        out: grid of the output; None for float32.
        kernel_size, stride, padding, dims: as for `MaxPool2d` of the plain kernels.
    """

    name: ClassVar[str] = "x86.avg_pool2d"
    options: ClassVar[tuple[str, ...]] = ("x", "out", "kernel_size", "stride", "padding", "dims")

    def __init__(
        self,
        x: QParams,
        out: QParams | None,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dims: int = 2,
    ) -> None:
        super().__init__()
        refuse(
            self.name,
            self.refuses(dims=dims),
            activation_refused("the input", x),
            activation_refused("the output", out),
        )
        self.x, self.out, self.dims = x, out, dims
        self.kernel_size, self.padding = pair(kernel_size, dims), pair(padding, dims)
        self.stride = self.kernel_size if stride is None else pair(stride, dims)

    @classmethod
    def refuses(
        cls,
        *,
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        dims: int = 2,
    ) -> str | None:
        """Reason why this kernel does not run a pooling with these options, or None if it does."""
        pads = any(pair(padding, dims))
        reasons = [
            f"{dims}-d average pooling has no kernel" if dims not in (1, 2) else None,
            "average pooling with ceil_mode=True" if ceil_mode else None,
            "average pooling with a divisor_override" if divisor_override is not None else None,
            "average pooling that does not count its padding" if pads and not count_include_pad else None,
        ]
        return first_reason(reasons)

    def _conv(self, channels: int) -> OnednnConv:
        ones = torch.ones(channels, 1, *self.kernel_size, dtype=torch.int8, device="cpu")
        scale = 1.0 / ones[0, 0].numel()
        options: dict[str, Any] = {"stride": self.stride, "padding": self.padding, "groups": channels}
        qparams = QParams.per_tensor(scale, 0, -128, 127, torch.int8)
        return OnednnConv(LayerSpec(ones, qparams, None, self.x, self.out, **options))

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C, H, W), (C, H, W), (N, C, L) or (C, L) -> `out`'s grid or float32, channels-last."""
        return self._conv_for(x).forward(x)

    def bind(self, x: Tensor) -> Callable[..., Tensor]:
        return self._conv_for(x).bind(x)

    def _conv_for(self, x: Tensor) -> OnednnConv:
        channels = x.shape[-1 - self.dims]
        conv: OnednnConv = self._cached(channels, lambda: self._conv(channels))
        return conv


class AdaptiveAvgPool2d(Kernel):
    """Adaptive average pooling: as `AvgPool2d` if all windows have one size, otherwise in float.

    Args:
        x: grid of the input.
        out: grid of the output; None for float32.
        output_size: height and width; None keeps the size of the input.
    """

    name: ClassVar[str] = "x86.adaptive_avg_pool2d"
    options: ClassVar[tuple[str, ...]] = ("x", "out", "output_size")

    def __init__(self, x: QParams, out: QParams | None, output_size: Sequence[int | None]) -> None:
        super().__init__()
        refuse(self.name, activation_refused("the input", x), activation_refused("the output", out))
        self.x, self.out, self.output_size = x, out, tuple(output_size)

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C, H, W) or (C, H, W) -> `out`'s grid or float32, channels-last."""
        sizes = tuple(n if wanted is None else wanted for n, wanted in zip(x.shape[-2:], self.output_size, strict=True))
        if 0 in sizes or any(n % wanted for n, wanted in zip(x.shape[-2:], sizes, strict=True)):
            y = F.adaptive_avg_pool2d(dequantize(x, self.x.s, self.x.z), (sizes[0], sizes[1]))
            return y if self.out is None else quantize(y, self.out.s, self.out.z, self.out.qmax, self.out.qmin)
        window = tuple(n // wanted for n, wanted in zip(x.shape[-2:], sizes, strict=True))
        pool = self._cached_for_size(window, lambda: AvgPool2d(self.x, self.out, window))
        return pool(x)
