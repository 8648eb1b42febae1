"""Convolution of the x86 backend: oneDNN's int8 kernel on plain tensors.

Activations are uint8 with one scale and zero point, weights int8 with zero point 0. oneDNN's packed weights cannot be
copied or pickled, so a kernel keeps the plain tensors and packs on first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.kernel import (
    Post,
    WeightedKernel,
    activation_refused,
    first_reason,
    is_depthwise,
    numbers,
    padding_refused,
    pair,
    post_refused,
    refuse,
    slope_refused,
    weight_refused,
)
from fxq.backends.plain.converters import is_image
from fxq.backends.x86.conv_padding import Padding
from fxq.backends.x86.conv_shape import Geometry, geometry
from fxq.backends.x86.onednn import PackedWeight, check_image, check_overflow, epilogue, target
from fxq.errors import BackendError
from fxq.quant.qparams import QParams

_onednn = torch.ops.onednn
PACKED = 4
"""Sizes of images that a weight is packed for."""


class ConvPlan(NamedTuple):
    """How a convolution runs for one input shape.

    Attributes:
        shape: the output's, (N, C, H, W).
        run: channels-last image -> channels-last result. Where there is a residual it comes second, channels-last, of
            the output's shape, and is overwritten.
    """

    shape: torch.Size
    run: Callable[..., Tensor]


class OnednnConv(WeightedKernel):
    """conv1d and conv2d: uint8 in, uint8 or float32 out, channels-last out.

    The kernel is told that the input's zero point is 0: it is folded into the bias, and unless it
    really is 0 the padding is done before.
    With a zero point, oneDNN (of torch 2.13, on AVX512 and AMX) returns wrong numbers or crashes for many shapes, such
    as 35 output channels in each of 3 groups, or padding wider than the kernel; and it is slower (64 channels, 56 x 56,
    3 x 3: 148 us; this way 123 us).

    With AMX, a kernel that `x86_conv_shape.misread` names gets one more row or column, of zeros: oneDNN is wrong for it
    as it is. That costs about a fifth (16 -> 16 channels, 1 x 8, 4,000 pixels: 59 us instead of 47 for wrong numbers;
    the same as rows of a linear layer 79, with 32 channels, of which 16 are zeros, 71).

    `prelu` and `leaky_relu` are not among oneDNN's. With slopes a <= 1, prelu(y) = max(y, a * y), and rounding is
    monotone: y and a * y are both computed by the convolution, as twice as many channels (one after the other where
    there are groups), and the larger integer is the rounded result; with a >= 1 the smaller one. Against a convolution
    that emits float, with PReLU and rounding behind it (AVX512-VNNI, one thread, us; channels, kernel, pixels):

    =====================  ======  ======
    layer                  float   twice
    =====================  ======  ======
    64 -> 64, 3, 112 x 112   1484    1037
    64 -> 64, 3, 56 x 56      311     200
    128 -> 128, 3, 28 x 28    314     226
    256 -> 256, 3, 14 x 14    269     246
    512 -> 512, 3, 7 x 7      426     437
    12 -> 56, 1, 96 x 96      554     295
    =====================  ======  ======

    Args:
        weight: int8, (C_out, C_in / groups, *kernel), kernel of 1 or 2 dimensions.
        weight_qparams: per tensor or per channel along axis 0, zero point 0.
        bias: float32, (C_out,), or None.
        x: grid of the input.
        out: grid of the output; None for float32.
        stride, padding, dilation: int or one per spatial dimension; padding also "valid" or "same".
        groups: as in `torch.nn.Conv2d`.
        post: None or one of `posts`; after a residual only clamps.
        residual: grid of a uint8 tensor of the output's shape that is added before `post`.
        inplace: the kernel may overwrite the residual.
        slope: float32, (C_out,) or (1,), for the post "prelu".

    Raises:
        BackendError: for what `refuses` names.
    """

    name: ClassVar[str] = "x86.conv"
    options: ClassVar[tuple[str, ...]] = (
        "x",
        "out",
        "stride",
        "padding",
        "dilation",
        "groups",
        "post",
        "residual",
        "inplace",
    )
    posts: ClassVar[tuple[str, ...]] = ("relu", "relu6", "hardtanh", "hardswish", "silu", "leaky_relu", "prelu")
    twice: ClassVar[tuple[str, ...]] = ("leaky_relu", "prelu")
    """The posts that take twice the arithmetic."""
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
        residual: QParams | None = None,
        inplace: bool = False,
        slope: Tensor | None = None,
    ) -> None:
        super().__init__(weight, weight_qparams, bias)
        self.register_buffer("slope", None if slope is None else slope.detach().to(torch.float32, copy=True))
        kernel = tuple(weight.shape[2:])
        reason = self.refuses(
            kernel_size=kernel, weight=weight_qparams, x=x, out=out, padding=padding, dilation=dilation, post=post,
            residual=residual is not None, to_float=out is None, slope=slope,
        )  # fmt: skip
        refuse(self.name, reason or activation_refused("the residual", residual))
        check_overflow(self.name, x, weight, is_depthwise(weight.shape, groups))
        if (slope is not None) != (post is not None and post.name == "prelu") or (
            slope is not None and slope.shape not in ((1,), (len(weight),))
        ):
            raise BackendError(f"{self.name}: prelu takes slopes of shape (1,) or ({len(weight)},), and only prelu.")
        dims = self._dims = len(kernel)
        self.x, self.out, self.residual, self.post, self.inplace, self.groups = x, out, residual, post, inplace, groups
        self.stride, self.dilation = pair(stride, dims), pair(dilation, dims)
        if isinstance(padding, str):
            padding = [d * (k - 1) // 2 if padding == "same" else 0 for k, d in zip(kernel, self.dilation, strict=True)]
        self.padding = pair(padding, dims)
        self._doubles = self._slopes is not None
        self._epilogue = epilogue(None if self._doubles else post, out, fused=residual is None)
        self._input, self._output, self._sum = numbers(x), target(out), numbers(residual)

    @classmethod
    def refuses(
        cls,
        *,
        kernel_size: Sequence[int] | None = None,
        weight: QParams | None = None,
        x: QParams | None = None,
        out: QParams | None = None,
        padding: int | Sequence[int] | str = 0,
        padding_mode: str = "zeros",
        dilation: int | Sequence[int] = 1,
        post: Post | None = None,
        residual: bool = False,
        to_float: bool = False,
        slope: Tensor | None = None,
    ) -> str | None:
        """Why no such kernel can be built, or None. What is not given counts as unknown and is not judged."""
        dims = len(kernel_size) if kernel_size is not None else 2
        reasons = [
            f"{dims}-d convolution has no kernel" if dims not in (1, 2) else None,
            padding_refused(padding, padding_mode, kernel_size, dilation),
            post_refused(post, cls.posts, residual),
            slope_refused(slope),
            "it adds a residual and emits float32; the sum is uint8" if residual and to_float else None,
        ]
        reasons += [
            weight_refused(weight, 0),
            activation_refused("the input", x),
            activation_refused("the output", out),
        ]
        return first_reason(reasons)

    def _plan(self, shape: torch.Size) -> ConvPlan:
        """The plan for inputs of `shape` (N, C, H, W)."""
        check_image(self.name, shape, 2, self.weight.shape[1] * self.groups)
        found = geometry(
            self.weight,
            shape,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            native=self._pads_natively(),
        )
        forms = self._kept(("forms", found.weight.shape), lambda: self._forms(found.weight))
        calls = [self._call(form, found, i) for i, form in enumerate(forms)]
        run = self._epilogue.behind(self._prelu(calls, found.shape) if self._doubles else calls[0])
        if any(found.pad):
            run = _padded(run, Padding(shape, found.pad, self.x.z))
        return ConvPlan(found.shape, run)

    def _call(self, form: tuple[Tensor, Tensor, Tensor], found: Geometry, which: int) -> Callable[..., Tensor]:
        """oneDNN's convolution with the weight, scale and bias of one of the forms."""
        *packed, bias = self._pack(*form, found, which)
        before: tuple[Any, ...] = (self._input[0], 0, *packed)
        after: tuple[Any, ...] = (bias, *found.arguments, *self._output)
        if self.residual is None:
            op, rest = _onednn.qconv2d_pointwise.default, (*before, *after, *self._epilogue[:3])
            return lambda x: op(x, *rest)
        add, behind = _onednn.qconv2d_pointwise.binary, (*after, *self._sum, "sum", 1.0, *self._epilogue[:3])
        return lambda x, residual: add(x, *before, residual, *behind)

    @property
    def _slopes(self) -> Tensor | None:
        """The slopes of prelu or leaky_relu, (1,) or (C_out,); None for another post."""
        if self.post is None or self.post.name not in self.twice:
            return None
        return torch.tensor(self.post.args, dtype=torch.float32, device="cpu") if self.slope is None else self.slope

    def _forms(self, weight: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """What to convolve with: weight, scale and bias, with the input's zero point folded into the bias."""
        scale = self.weight_scale.expand(weight.shape[0]).contiguous()
        shift = weight.sum((1, 2, 3)).double() * scale.double() * (self.x.s * self.x.z)
        bias = (-shift if self.bias is None else self.bias.double() - shift).float()
        slopes = self._slopes
        if slopes is None or self.out is None:
            return [(weight, scale, bias)]
        if self.groups == 1:
            return [(torch.cat([weight] * 2), torch.cat([scale, scale * slopes]), torch.cat([bias, bias * slopes]))]
        return [(weight, scale, bias), (weight, scale * slopes, bias * slopes)]

    def _pads_natively(self) -> bool:
        """Whether oneDNN's own padding is right.

        It pads with the integer 0, so that must be the zero point; and only for plain and depthwise convolutions that
        pad by half of the kernel at most has no wrong result been seen (3,700 random shapes, AVX512-VNNI and AMX).
        """
        kernel = self.weight.shape[2:]
        half = all(p <= (d * (k - 1) + 1) // 2 for p, k, d in zip(self.padding, kernel, self.dilation, strict=True))
        return self.x.z == 0 and half and (self.groups == 1 or is_depthwise(self.weight.shape, self.groups))

    def _pack(self, weight: Tensor, scale: Tensor, bias: Tensor, found: Geometry, which: int) -> PackedWeight:
        """The weight packed for images of this size or, behind the first few sizes, of the nearest of those.

        oneDNN takes any, and lays a weight out again at every call where it wants it otherwise. That is rare, and much
        less work than to pack it.
        """
        arguments = tuple(map(str, found.arguments))
        # It is packed for a number of threads, and laid out again at every call with another one.
        key = "packed", which, weight.shape, arguments, torch.get_num_threads()
        packs: dict[tuple[int, ...], Tensor] = self._kept(key, dict)
        image = tuple(found.image)
        if image not in packs:
            if len(packs) < PACKED:
                packs[image] = _onednn.qconv_prepack(weight, scale, self.x.s, 0, *found.arguments, found.image)
            else:
                image = min(list(packs), key=lambda known: abs(math.prod(known) - math.prod(found.image)))
        return PackedWeight(packs[image], scale, torch.zeros(len(scale), dtype=torch.int32, device="cpu"), bias)

    def bind(self, x: Tensor, residual: Tensor | None = None) -> Callable[..., Tensor]:
        """As in `Bindable`: channels-last images go straight to oneDNN."""
        if self._dims != 2 or not is_image(x):
            return self.forward
        plan = self._planned(x.shape)
        if self.residual is None:
            return plan.run
        if residual is None or residual.shape != plan.shape or not is_image(residual):
            return self.forward
        return plan.run if self.inplace else lambda x, residual: plan.run(x, residual.clone())

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """uint8 (N, C, H, W), (C, H, W), (N, C, L) or (C, L), any strides -> `out`'s grid or float32, channels-last."""
        dims = self._dims
        batched = x.dim() == dims + 2
        if not batched and x.dim() != dims + 1:
            check_image(self.name, x.shape, dims, self.weight.shape[1] * self.groups)
        x = _image(x, dims, batched)
        plan = self._planned(x.shape)
        y = plan.run(x) if self.residual is None else plan.run(x, self._scratch(residual, plan.shape, batched))
        y = y if dims == 2 else y.squeeze(2)
        return y if batched else y.squeeze(0)

    def _planned(self, shape: torch.Size) -> ConvPlan:
        """The plan for images of a shape."""
        plan: ConvPlan = self._kept_for((shape, torch.get_num_threads()), lambda: self._plan(shape))
        return plan

    def _prelu(self, calls: list[Callable[..., Tensor]], shape: torch.Size) -> Callable[..., Tensor]:
        """prelu of a convolution; one call gives both forms side by side where there are no groups."""
        slopes = self._slopes
        assert slopes is not None  # asked for prelu and leaky_relu only
        first = calls[0]
        if self.out is None:
            return lambda x: F.prelu(first(x), slopes)
        pick = torch.minimum if bool((slopes > 1).any()) else torch.maximum
        if len(calls) == 2:
            return lambda x: pick((y := first(x)), calls[1](x), out=y)
        n, channels, height, width = shape

        def run(x: Tensor) -> Tensor:
            y = first(x)
            plain, sloped = y.permute(0, 2, 3, 1).reshape(-1, 2, channels).unbind(1)
            picked = pick(plain, sloped, out=y.new_empty(plain.shape))
            return picked.view(n, height, width, channels).permute(0, 3, 1, 2)

        return run

    def _scratch(self, residual: Tensor | None, shape: torch.Size, batched: bool) -> Tensor:
        """The residual as the kernel takes it, which overwrites it and returns the sum in a tensor of its own."""
        if residual is None:
            raise BackendError(f"{self.name}: this kernel adds a residual; none was given.")
        residual = _image(residual, self._dims, batched, copy=not self.inplace)
        if residual.shape != shape:
            raise BackendError(f"{self.name}: the residual is {tuple(residual.shape)}, the result {tuple(shape)}.")
        return residual


def _padded(run: Callable[..., Tensor], padding: Padding) -> Callable[..., Tensor]:
    """`run` of a padded image."""

    def padded(x: Tensor, *residual: Tensor) -> Tensor:
        image = padding.take(x)
        y = run(image.image, *residual)
        padding.give_back(image)
        return y

    return padded


def _image(x: Tensor, dims: int, batched: bool, copy: bool = False) -> Tensor:
    """`x` as a channels-last (N, C, H, W) tensor, `copy`: in memory of its own."""
    x = x if batched else x.unsqueeze(0)
    x = x if dims == 2 else x.unsqueeze(2)
    y = x.contiguous(memory_format=torch.channels_last)
    return y.clone() if copy and y.data_ptr() == x.data_ptr() else y
