"""`LayerSpec`: description of a convolution or linear layer on integers, and the reasons why kernels refuse one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from fxq.backends.kernel import PostOp, activation_refused, bounds, first_reason, pair
from fxq.quant.qparams import QParams
from fxq.quant.spec import fits_int16


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """Convolution, transposed convolution or linear layer on integers, with its fused residual and activation function.

    Attributes:
        weight: int8, (C_out, C_in / groups, *kernel); transposed (C_in, C_out / groups, *kernel); of a linear layer
            (C_out, C_in).
        weight_qparams: grid of the weight, per tensor or per output channel, with zero point 0.
        bias: float32, (C_out,), or None.
        x: grid of the input.
        out: grid of the output; None for float32.
        stride, padding, output_padding, dilation: int, or one per spatial dimension; stored as a tuple. Padding may
            also be "valid" or "same". Asymmetric "same" padding, which no kernel supports, is stored as the string.
        padding_mode, groups: as in `torch.nn.Conv2d`.
        post: activation function after the layer, or None.
        slope: slopes of prelu, float32, (C_out,) or (1,); None for any other `post`.
        residual: grid of a uint8 tensor of the output's shape that is added before `post`, or None.
        inplace: whether the kernel may overwrite the residual.
    """

    weight: Tensor
    weight_qparams: QParams
    bias: Tensor | None
    x: QParams
    out: QParams | None
    _: KW_ONLY
    stride: int | Sequence[int] = 1
    padding: int | Sequence[int] | str = 0
    output_padding: int | Sequence[int] = 0
    dilation: int | Sequence[int] = 1
    padding_mode: str = "zeros"
    groups: int = 1
    post: PostOp | None = None
    slope: Tensor | None = None
    residual: QParams | None = None
    inplace: bool = False

    def __post_init__(self) -> None:
        for name in ("stride", "output_padding", "dilation"):
            object.__setattr__(self, name, pair(getattr(self, name), self.dims))
        padding = self.padding
        if padding == "valid":
            padding = 0
        if padding == "same":
            spread = [d * (k - 1) for k, d in zip(self.weight.shape[2:], pair(self.dilation), strict=True)]
            padding = padding if any(n % 2 for n in spread) else [n // 2 for n in spread]
        if not isinstance(padding, str):
            object.__setattr__(self, "padding", pair(padding, self.dims))

    @property
    def dims(self) -> int:
        """Number of spatial dimensions; 0: a linear layer."""
        return self.weight.dim() - 2

    def refused(self) -> str | None:
        """Why no kernel can run the layer; None if one can."""
        symmetric = isinstance(self.padding, tuple) and len(self.padding) == self.dims
        adds, post = self.residual is not None, self.post
        reasons = [
            f"pads with mode {self.padding_mode!r}" if self.padding_mode != "zeros" else None,
            None if symmetric else "pads asymmetrically",
            f"{post.name} after a residual" if adds and post is not None and bounds(post) is None else None,
            "it adds a residual and emits float32; the sum is uint8" if adds and self.out is None else None,
            slope_refused(self.slope),
            activation_refused("the input", self.x),
            activation_refused("the output", self.out),
            activation_refused("the residual", self.residual),
        ]
        return first_reason(reasons)


def weight_refused(qp: QParams, axis: int) -> str | None:
    """Why a weight on the grid `qp` cannot be used; None if it can. `axis` is the axis of its output channels."""
    if qp.dtype != torch.int8:
        return f"the weight is {str(qp.dtype).removeprefix('torch.')}, the kernels take int8"
    if bool((qp.zero_point != 0).any()):
        return "the weight has a zero point other than 0, which the kernels ignore"
    if qp.axis not in (None, axis):
        return f"the weight is quantized along axis {qp.axis}, the kernels need axis {axis}"
    return None


def slope_refused(slope: Tensor | None) -> str | None:
    """Why kernels cannot apply prelu with these slopes; None if they can.

    Kernels compute prelu as max(y, slope * y), or as min(y, slope * y), in all channels.
    """
    if slope is None:
        return None
    if not bool(slope.isfinite().all()):
        return "prelu has slopes that are not finite"
    if bool((slope <= 1).all()) or bool((slope >= 1).all()):
        return None
    return "prelu has slopes above 1 in some channels and below 1 in others"


def post_refused(post: PostOp | None, posts: Sequence[str]) -> str | None:
    """Why a kernel that can apply the activation functions `posts` cannot apply `post`; None if it can."""
    if post is None:
        return None
    if post.name not in posts:
        return f"the kernel has no {post.name}"
    if post.name == "gelu" and post.algorithm not in ("none", "tanh"):
        return f"gelu with approximate={post.algorithm!r}"
    return None


def overflow_refused(x: QParams, weight: Tensor) -> str | None:
    """Why a kernel that adds pairs of products in int16 would overflow, for activations on the grid `x`; else None."""
    low, high = weight.aminmax() if weight.numel() else (0, 0)
    largest = max(-int(low), int(high))
    if fits_int16(x.qmax, largest):
        return None
    return (
        f"on this machine the kernel adds pairs of products in int16, so activations up to {x.qmax} and weights up to "
        f"{largest} overflow; use 7 bits for one of them"
    )


def is_depthwise(shape: Sequence[int], groups: int) -> bool:
    """Whether a convolution with a weight of this shape is depthwise: one input and one output channel per group."""
    return groups > 1 and shape[0] == groups and shape[1] == 1
