"""Convolution of the x86 backend on oneDNN's int8 kernel.

Activations are uint8 with one scale and zero point, weights int8 with zero point 0. oneDNN's packed weights cannot be
copied or pickled, so a kernel stores plain tensors and packs them on first use.
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
from fxq.backends.x86.onednn import OnednnLayer, PackedWeight, check_image, epilogue, output_grid
from fxq.errors import BackendError
from fxq.ops import OPS

_onednn = torch.ops.onednn
MAX_PACKED_SIZES = 4
"""Image sizes that a weight is packed for."""


class ConvPlan(NamedTuple):
    """Prepared call of a convolution for one input shape.

    Attributes:
        shape: shape of the output, (N, C, H, W).
        run: function of a channels-last image that returns a channels-last result. Its second argument is the residual,
            if the kernel adds one: channels-last, of the output's shape. It is overwritten.
    """

    shape: torch.Size
    run: Callable[..., Tensor]


class OnednnConv(OnednnLayer):
    """conv1d and conv2d: uint8 in, uint8 or float32 out, channels-last out.

    oneDNN is called with zero point 0. The input's zero point is folded into the bias, and the input is padded with it
    before the call. With another zero point, oneDNN (torch 2.13, AVX512 and AMX) is slower, and it crashes or is wrong
    for many shapes, such as 35 output channels in each of 3 groups, or padding wider than the kernel.

    With AMX, a weight that `conv_shape.misread` names gets an extra row or column of zeros, because oneDNN is wrong
    without it. With AVX2-VNNI, the residual is added in float if `conv_shape.sum_is_misread`.

    oneDNN has no functions with slopes. For slopes a <= 1, they are max(y, a * y), and rounding is monotone. The
    convolution computes y and a * y as twice as many channels (as two convolutions if it has groups), and the larger
    integer is the rounded result. For slopes a >= 1 it is the smaller one.

    Args:
        spec: weight (C_out, C_in / groups, *kernel) with 1 or 2 dimensions; post None or one of `posts`, after a
            residual a clamp.

    Raises:
        BackendError: `refuses` gives a reason.
    """

    name: ClassVar[str] = "x86.conv"
    options: ClassVar[tuple[str, ...]] = (
        "x", "out", "stride", "padding", "dilation", "groups", "post", "residual", "inplace",
    )  # fmt: skip
    dims: ClassVar[tuple[int, ...]] = (1, 2)
    posts: ClassVar[tuple[str, ...]] = (*OPS.fused_after("conv"), *OPS.with_slopes(tensors=True))
    slow_posts: ClassVar[tuple[str, ...]] = OPS.with_slopes()

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._dims = spec.dims
        self._doubles = self._slopes is not None
        self._epilogue = epilogue(None if self._doubles else self.post, self.out, fused=self.residual is None)
        self._input, self._output, self._sum = (
            scale_and_zero_point(self.x),
            output_grid(self.out),
            scale_and_zero_point(self.residual),
        )

    def _plan(self, shape: torch.Size) -> ConvPlan:
        """Prepare the call for inputs of `shape` (N, C, H, W)."""
        check_image(self.name, shape, 2, self.weight.shape[1] * self.groups)
        conv = geometry(
            self.weight,
            shape,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            native=self._pads_natively(),
        )
        forms = self._cached(("forms", conv.weight.shape), lambda: self._forms(conv.weight))
        calls = [self._call(form, conv, i) for i, form in enumerate(forms)]
        run = self._epilogue.appended_to(self._with_slopes(calls, conv.shape) if self._doubles else calls[0])
        if any(conv.pad):
            run = _padded(run, Padding(shape, conv.pad, self.x.z))
        return ConvPlan(conv.shape, run)

    def _call(self, form: tuple[Tensor, Tensor, Tensor], conv: Geometry, number: int) -> Callable[..., Tensor]:
        """Return a call of oneDNN's convolution with one entry of `_forms`, given with its number there."""
        *packed, bias = self._pack(*form, conv, number)
        before: tuple[Any, ...] = (self._input[0], 0, *packed)
        after: tuple[Any, ...] = (bias, *conv.arguments, *self._output)
        if self.residual is None:
            op, rest = _onednn.qconv2d_pointwise.default, (*before, *after, *self._epilogue[:3])
            return lambda x: op(x, *rest)
        if sum_is_misread(conv.weight, conv.arguments[2], conv.arguments[3]):
            return self._added_in_float((*before, bias, *conv.arguments))
        add, after = _onednn.qconv2d_pointwise.binary, (*after, *self._sum, "sum", 1.0, *self._epilogue[:3])
        return lambda x, residual: add(x, *before, residual, *after)

    def _added_in_float(self, arguments: tuple[Any, ...]) -> Callable[..., Tensor]:
        """Return a call of oneDNN's convolution with float32 output that adds the residual and quantizes the sum."""
        assert self.out is not None  # no kernel adds a residual and emits float32
        op, rest = _onednn.qconv2d_pointwise.default, (*arguments, *output_grid(None), "none", [], "")
        lowest = self.out.z if self._epilogue.name == "relu" else 0
        grid = self.out.s, self.out.z, 255, lowest
        return lambda x, residual: quantize(op(x, *rest).add_(dequantize(residual, *self._sum)), *grid)

    @property
    def _slopes(self) -> Tensor | None:
        """Slopes of the activation function, float32, (1,) or (C_out,); None if it has none."""
        if self.post is None or self.post.name not in self.slow_posts:
            return None
        return torch.tensor(self.post.args, dtype=torch.float32, device="cpu") if self.slope is None else self.slope

    def _forms(self, weight: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Weight, scale and bias of each convolution to run, with the input's zero point folded into the bias.

        With slopes there are two: of y and of a * y; without groups they are joined in one.
        """
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

        It pads with the integer 0, so the zero point must be 0. It was right in all tests (3,700 random shapes,
        AVX512-VNNI and AMX) for plain and depthwise convolutions that pad by at most half of the kernel.
        """
        kernel = self.weight.shape[2:]
        half = all(p <= (d * (k - 1) + 1) // 2 for p, k, d in zip(self.padding, kernel, self.dilation, strict=True))
        return self.x.z == 0 and half and (self.groups == 1 or is_depthwise(self.weight.shape, self.groups))

    def _pack(self, weight: Tensor, scale: Tensor, bias: Tensor, conv: Geometry, number: int) -> PackedWeight:
        """Pack a weight for images of this size, or after the first `MAX_PACKED_SIZES` sizes, reuse the nearest one.

        oneDNN takes a weight in any layout, and reorders it in every call if it needs another layout. That is rare, and
        much cheaper than packing.
        """
        arguments = tuple(map(str, conv.arguments))
        # Packing depends on the number of threads; with another number, oneDNN reorders the weight in every call.
        key = "packed", number, weight.shape, arguments, torch.get_num_threads()
        packs: dict[tuple[int, ...], Tensor] = self._cached(key, dict)
        image = tuple(conv.image)
        if image not in packs:
            if len(packs) < MAX_PACKED_SIZES:
                packs[image] = _onednn.qconv_prepack(weight, scale, self.x.s, 0, *conv.arguments, conv.image)
            else:
                image = min(list(packs), key=lambda size: abs(math.prod(size) - math.prod(conv.image)))
        return PackedWeight(packs[image], scale, torch.zeros(len(scale), dtype=torch.int32, device="cpu"), bias)

    def bind(self, x: Tensor, residual: Tensor | None = None) -> Callable[..., Tensor]:
        """Return a function for inputs like `x` that calls oneDNN directly for channels-last images."""
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
        """Plan for images of a shape, from the cache or new."""
        plan: ConvPlan = self._cached_for_size((shape, torch.get_num_threads()), lambda: self._plan(shape))
        return plan

    def _with_slopes(self, calls: list[Callable[..., Tensor]], shape: torch.Size) -> Callable[..., Tensor]:
        """Return a function that applies slopes to two calls, or to one call with both forms as channels."""
        slopes = self._slopes
        assert slopes is not None  # asked for functions with slopes only
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
        """Residual in memory that the kernel may overwrite.

        Raises:
            BackendError: the residual is missing, or has another shape than the result.
        """
        if residual is None:
            raise BackendError(f"{self.name}: this kernel adds a residual, but was called without one.")
        residual = _image(residual, self._dims, batched, copy=not self.inplace)
        if residual.shape != shape:
            raise BackendError(f"{self.name}: the residual is {tuple(residual.shape)}, the result {tuple(shape)}.")
        return residual


def _padded(run: Callable[..., Tensor], padding: Padding) -> Callable[..., Tensor]:
    """Return a function that pads an image and calls `run` with it."""

    def padded(x: Tensor, *residual: Tensor) -> Tensor:
        image = padding.take(x)
        y = run(image.image, *residual)
        padding.give_back(image)
        return y

    return padded


def _image(x: Tensor, dims: int, batched: bool, copy: bool = False) -> Tensor:
    """Return `x` as a channels-last (N, C, H, W) tensor; if `copy` is set, in new memory."""
    x = x if batched else x.unsqueeze(0)
    x = x if dims == 2 else x.unsqueeze(2)
    y = x.contiguous(memory_format=torch.channels_last)
    return y.clone() if copy and y.data_ptr() == x.data_ptr() else y
