"""Convolution of the x86 backend: oneDNN's int8 kernel on plain tensors.

Activations are uint8 with one scale and zero point, weights int8 with zero point 0. oneDNN's packed weights cannot be
copied or pickled, so a kernel keeps the plain tensors and packs on first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fxq.backends.kernel import scale_and_zero_point
from fxq.backends.plain.converters import dequantize, is_image, quantize
from fxq.backends.table.layer_spec import LayerSpec, is_depthwise
from fxq.backends.x86.conv_padding import Padding
from fxq.backends.x86.conv_shape import Geometry, geometry, sum_is_misread
from fxq.backends.x86.onednn import OnednnLayer, PackedWeight, check_image, epilogue, target
from fxq.errors import BackendError
from fxq.ops import OPS

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


class OnednnConv(OnednnLayer):
    """conv1d and conv2d: uint8 in, uint8 or float32 out, channels-last out.

    The kernel is told that the input's zero point is 0: it is folded into the bias, and unless it
    really is 0 the padding is done before.
    With a zero point, oneDNN (of torch 2.13, on AVX512 and AMX) returns wrong numbers or crashes for many shapes, such
    as 35 output channels in each of 3 groups, or padding wider than the kernel; and it is slower.

    With AMX, a kernel that `conv_shape.misread` names gets one more row or column, of zeros: oneDNN is wrong for it as
    it is. With AVX2-VNNI, the residual is added to a float result where `conv_shape.sum_is_misread`.

    `prelu` and `leaky_relu` are not among oneDNN's. With slopes a <= 1, prelu(y) = max(y, a * y), and rounding is
    monotone: y and a * y are both computed by the convolution, as twice as many channels (one after the other where
    there are groups), and the larger integer is the rounded result; with a >= 1 the smaller one.

    Args:
        spec: weight (C_out, C_in / groups, *kernel) with 1 or 2 dimensions; post None or one of `posts`, after a
            residual a clamp.

    Raises:
        BackendError: for what `refuses` names.
    """

    name: ClassVar[str] = "x86.conv"
    options: ClassVar[tuple[str, ...]] = (
        "x", "out", "stride", "padding", "dilation", "groups", "post", "residual", "inplace",
    )  # fmt: skip
    dims: ClassVar[tuple[int, ...]] = (1, 2)
    posts: ClassVar[tuple[str, ...]] = (*OPS.fused_after("conv"), "prelu")
    slow_posts: ClassVar[tuple[str, ...]] = ("leaky_relu", "prelu")

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._dims = spec.dims
        self._doubles = self._slopes is not None
        self._epilogue = epilogue(None if self._doubles else self.post, self.out, fused=self.residual is None)
        self._input, self._sum = scale_and_zero_point(self.x), scale_and_zero_point(self.residual)
        self._output = target(self.out)

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
        forms = self._cached(("forms", found.weight.shape), lambda: self._forms(found.weight))
        calls = [self._call(form, found, i) for i, form in enumerate(forms)]
        run = self._epilogue.behind(self._prelu(calls, found.shape) if self._doubles else calls[0])
        if any(found.pad):
            run = _padded(run, Padding(shape, found.pad, self.x.z))
        return ConvPlan(found.shape, run)

    def _call(self, form: tuple[Tensor, Tensor, Tensor], call_geometry: Geometry, which: int) -> Callable[..., Tensor]:
        """oneDNN's convolution with the weight, scale and bias of one of the forms."""
        *packed, bias = self._pack(*form, call_geometry, which)
        before: tuple[Any, ...] = (self._input[0], 0, *packed)
        after: tuple[Any, ...] = (bias, *call_geometry.arguments, *self._output)
        if self.residual is None:
            op, rest = _onednn.qconv2d_pointwise.default, (*before, *after, *self._epilogue[:3])
            return lambda x: op(x, *rest)
        if sum_is_misread(call_geometry.weight, call_geometry.arguments[2], call_geometry.arguments[3]):
            return self._added_in_float((*before, bias, *call_geometry.arguments))
        add, behind = _onednn.qconv2d_pointwise.binary, (*after, *self._sum, "sum", 1.0, *self._epilogue[:3])
        return lambda x, residual: add(x, *before, residual, *behind)

    def _added_in_float(self, arguments: tuple[Any, ...]) -> Callable[..., Tensor]:
        """oneDNN's convolution with float32 output, plus the residual, then quantized."""
        assert self.out is not None  # no kernel adds a residual and emits float32
        op, rest = _onednn.qconv2d_pointwise.default, (*arguments, *target(None), "none", [], "")
        lowest = self.out.z if self._epilogue.name == "relu" else 0
        grid = self.out.s, self.out.z, 255, lowest
        return lambda x, residual: quantize(op(x, *rest).add_(dequantize(residual, *self._sum)), *grid)

    @property
    def _slopes(self) -> Tensor | None:
        """The slopes of prelu or leaky_relu, (1,) or (C_out,); None for another post."""
        if self.post is None or self.post.name not in self.slow_posts:
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
        packs: dict[tuple[int, ...], Tensor] = self._cached(key, dict)
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
        plan: ConvPlan = self._cached_for_size((shape, torch.get_num_threads()), lambda: self._plan(shape))
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
