"""Convolution and pooling over depth, height and width, through two-dimensional kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fxq.backends.kernel import Post, WeightedKernel, padding_refused, pair, refuse
from fxq.backends.x86.onednn import check_image
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.errors import BackendError
from fxq.quant.qparams import QParams


class Conv3d(WeightedKernel):
    """conv3d: uint8 in, uint8 or float32 out.

    The images that meet the same taps of the kernel's depth become channels of one image: a two-dimensional
    convolution with as many times more input channels, for each depth of the output. oneDNN's own
    (`qconv3d_pointwise`) applies no activation function and is off by one step on some elements. Measured against
    float32 (AVX512-VNNI, one thread, us, 3 x 3 x 3): 64 -> 64 channels, 8 x 28 x 28: 2235 / 113061; 128 -> 128,
    4 x 14 x 14: 785 / 10895.

    Args:
        weight: int8, (C_out, C_in / groups, depth, height, width).
        weight_qparams: per tensor or per channel along axis 0, zero point 0.
        bias: float32, (C_out,), or None.
        x: grid of the input.
        out: grid of the output; None for float32.
        stride, padding, dilation: int or (depth, height, width); padding also "valid" or "same".
        groups: as in `torch.nn.Conv3d`.
        post: None or one of `Conv.posts`.
        slope: float32, (C_out,) or (1,), for the post "prelu".

    Raises:
        BackendError: for what `refuses` names.
    """

    name: ClassVar[str] = "x86.conv3d"
    options: ClassVar[tuple[str, ...]] = ("x", "out", "stride", "padding", "dilation", "groups", "post")
    slope: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        weight_qparams: QParams,
        bias: Tensor | None,
        x: QParams,
        out: QParams | None,
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        post: Post | None = None,
        slope: Tensor | None = None,
    ) -> None:
        super().__init__(weight, weight_qparams, bias)
        self.register_buffer("slope", slope)
        kernel = tuple(weight.shape[2:])
        refuse(self.name, self.refuses(kernel_size=kernel, padding=padding, dilation=dilation))
        self.x, self.out, self.post, self.groups = x, out, post, groups
        self.stride, self.dilation = pair(stride, 3), pair(dilation, 3)
        if isinstance(padding, str):
            padding = [d * (k - 1) // 2 if padding == "same" else 0 for k, d in zip(kernel, self.dilation, strict=True)]
        self.padding = pair(padding, 3)
        self._conv()  # refuses what a two-dimensional convolution refuses

    @classmethod
    def refuses(
        cls,
        *,
        kernel_size: Sequence[int] | None = None,
        padding: int | Sequence[int] | str = 0,
        padding_mode: str = "zeros",
        dilation: int | Sequence[int] = 1,
        post: Post | None = None,
    ) -> str | None:
        """Why no such kernel can be built, or None. What is not given counts as unknown and is not judged."""
        return padding_refused(padding, padding_mode, kernel_size, dilation) or OnednnConv.refuses(post=post)

    def _conv(self) -> OnednnConv:
        """The convolution; its input channels are (channel, tap of the depth)."""
        weight = self.weight.flatten(1, 2)
        axis = 0 if self.weight_scale.dim() else None
        zero = self.weight_scale.new_zeros(self.weight_scale.shape).int()
        qparams = QParams(self.weight_scale, zero, -128, 127, weight.dtype, axis)
        return OnednnConv(
            weight, qparams, self.bias, self.x, self.out, stride=self.stride[1:], padding=self.padding[1:],
            dilation=self.dilation[1:], groups=self.groups, post=self.post, slope=self.slope,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C, D, H, W) or (C, D, H, W), any strides -> `out`'s grid or float32, channels last in memory."""
        check_image(self.name, x.shape, 3, self.weight.shape[1] * self.groups)
        if x.dim() == 4:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        conv = self._kept("conv", self._conv)
        stride, pad, dilation = self.stride[0], self.padding[0], self.dilation[0]
        span = dilation * (self.weight.shape[2] - 1) + 1
        if x.shape[2] + 2 * pad < span:
            raise BackendError(f"{self.name}: an input of depth {x.shape[2]} is smaller than the kernel.")
        if pad:
            x = F.pad(x, (0, 0, 0, 0, pad, pad), value=self.x.z)
        taps = x.unfold(2, span, stride)[..., ::dilation]  # (N, C, D', H, W, taps)
        n, _, depth = taps.shape[:3]
        images = taps.permute(0, 2, 3, 4, 1, 5).flatten(4, 5).flatten(0, 1).permute(0, 3, 1, 2)
        y = conv(images)
        return y.unflatten(0, (n, depth)).movedim(1, 2)
