"""Convolution over depth, height and width, computed as a two-dimensional convolution."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.onednn import OnednnLayer, check_image
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.errors import BackendError


class Conv3d(OnednnLayer):
    """conv3d: uint8 in, uint8 or float32 out.

    For each depth of the output, the input images under the kernel become channels of one image. A two-dimensional
    convolution with `depth` times as many input channels then computes the result. oneDNN's `qconv3d_pointwise` is not
    used: it applies no activation function, and some of its results are off by one step.

    Args:
        spec: weight (C_out, C_in / groups, depth, height, width); post None or one of `posts`.

    Raises:
        BackendError: `refuses` gives a reason.
    """

    name: ClassVar[str] = "x86.conv3d"
    options: ClassVar[tuple[str, ...]] = ("x", "out", "stride", "padding", "dilation", "groups", "post")
    dims: ClassVar[tuple[int, ...]] = (3,)
    posts: ClassVar[tuple[str, ...]] = OnednnConv.posts
    slow_posts: ClassVar[tuple[str, ...]] = OnednnConv.slow_posts

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._conv()  # raises early if its sums may overflow, though those of the depthwise convolution do not

    def _conv(self) -> OnednnConv:
        """Two-dimensional convolution whose input channels are (channel, depth in the kernel)."""
        sizes = {"stride": self.stride[1:], "padding": self.padding[1:], "dilation": self.dilation[1:]}
        return OnednnConv(replace(self.spec(), weight=self.weight.flatten(1, 2), **sizes))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C, D, H, W) or (C, D, H, W), any strides -> `out`'s grid or float32, channels-last in memory."""
        check_image(self.name, x.shape, 3, self.weight.shape[1] * self.groups)
        if x.dim() == 4:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        conv = self._cached("conv", self._conv)
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
