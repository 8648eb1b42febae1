"""The x86 backend's sums, clamps and padding on plain uint8 tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fxq.backends.convert import dense
from fxq.backends.kernel import Kernel, Post, activation_refused, bounds, first_reason, refuse, saturation_refused
from fxq.backends.x86_conv import Conv
from fxq.errors import BackendError
from fxq.qparams import QParams


class Add(Kernel):
    """a + b, uint8 with two different grids, through a convolution that only adds.

    An identity depthwise 1 x 1 convolution of `a` with `b` as its residual. Measured (AVX512-VNNI, one thread, us):

    ================  ==========================  ===============  =============  ==============
    shape             dequantize, add, quantize   float, 3 passes  int32 products  identity conv
    ================  ==========================  ===============  =============  ==============
    1 x 64 x 56 x 56  298                         184              157            79
    1 x 96 x 28 x 28  91                          51               55             48
    1 x 64 x 112^2    1739                        1191             1217           275
    ================  ==========================  ===============  =============  ==============

    `onednn::qadd` would do, but on AVX512 torch 2.13 reads values above 127 as int8 there.

    Args:
        a: grid of the first tensor.
        b: grid of the second.
        out: grid of the sum.
        post: None or a clamp.
        inplace: the kernel may overwrite the second tensor.
    """

    name: ClassVar[str] = "x86.add"
    options: ClassVar[tuple[str, ...]] = ("a", "b", "out", "post", "inplace")
    _channels: ClassVar[int] = 64

    def __init__(self, a: QParams, b: QParams, out: QParams, post: Post | None = None, inplace: bool = False) -> None:
        super().__init__()
        refuse(self.name, self.refuses(a=a, b=b, out=out, post=post))
        self.a, self.b, self.out, self.post, self.inplace = a, b, out, post, inplace

    @classmethod
    def refuses(
        cls,
        *,
        a: QParams | None = None,
        b: QParams | None = None,
        out: QParams | None = None,
        post: Post | None = None,
        broadcasts: bool = False,
    ) -> str | None:
        """Why no such kernel can be built, or None. `broadcasts`: whether the two shapes differ."""
        reasons = [
            "the shapes differ; broadcasting has no kernel" if broadcasts else None,
            f"{post.name} is not a clamp" if post is not None and bounds(post) is None else None,
            activation_refused("the first input", a),
            activation_refused("the second input", b),
            activation_refused("the output", out),
            saturation_refused(a),
        ]
        return first_reason(reasons)

    def _conv(self, channels: int) -> Conv:
        one = torch.ones(channels, 1, 1, 1, dtype=torch.int8)
        unit = QParams.per_tensor(1.0, 0, -128, 127, torch.int8)
        options: dict[str, Any] = {"groups": channels, "post": self.post, "residual": self.b, "inplace": self.inplace}
        return Conv(one, unit, None, self.a, self.out, **options)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """uint8, uint8, same shape, any strides -> uint8, four dimensions channels-last."""
        if a.shape != b.shape:
            raise BackendError(f"{self.name}: the inputs are {tuple(a.shape)} and {tuple(b.shape)}.")
        if a.numel() == 0:
            return dense(b.clone())
        # Which channel an element belongs to is of no importance: take as many channels as fill a vector register.
        channels = next(c for c in (self._channels, 32, 16, 8, 4, 2, 1) if a.numel() % c == 0)
        key = channels, self.inplace
        conv = self._packed.get(key) or self._remember(key, self._conv(channels))
        y = conv(_as_image(a, channels), _as_image(b, channels)).permute(0, 2, 3, 1)
        n, *rest = a.shape
        return y.reshape(n, *rest[1:], rest[0]).permute(0, 3, 1, 2) if a.dim() == 4 else y.reshape(a.shape)


def _as_image(x: Tensor, channels: int) -> Tensor:
    """A tensor as a channels-last image (1, channels, 1, n / channels), in the order of `dense`."""
    x = dense(x).permute(0, 2, 3, 1) if x.dim() == 4 else dense(x)
    return x.view(1, 1, -1, channels).permute(0, 3, 1, 2)
