"""Transposed convolution of the x86 backend, computed as a convolution at the resolution of the input."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.onednn import OnednnLayer, check_image
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.errors import BackendError
from fxq.quant.qparams import QParams


class AxisPlan(NamedTuple):
    """Parameters of a stride-1 convolution that computes one axis of a transposed convolution.

    Output o of the transposed convolution sums x[i] * w[o + padding - stride * i]. With o + crop = stride * q + phase,
    a phase reads the inputs i = q - m for m from `first` to `last`: a convolution with `last - first + 1` taps.

    Attributes:
        first: smallest m of any phase.
        last: largest m of any phase.
        crop: outputs to drop at the start.
        pad: padding of the convolution, equal on both sides.
        skip: results q to drop at the start, where `pad` is larger than needed.
        extra: number of results q to keep, minus the number of inputs; may be negative.
    """

    first: int
    last: int
    crop: int
    pad: int
    skip: int
    extra: int


def axis_plan(kernel: int, stride: int, padding: int, output_padding: int) -> AxisPlan:
    """Return the cheapest plan of one axis: with the fewest taps, then the smallest crop."""
    plans = []
    for crop in range(stride):
        shift = padding - crop
        first, last = -((stride - 1 + shift) // stride), (kernel - 1 - shift) // stride
        extra = -((padding + shift - kernel - output_padding) // stride) - 1
        before, after = last, extra - first
        pad = max(before, after, 0)
        plans.append(AxisPlan(first, last, crop, pad, pad - before, extra))
    return min(plans, key=lambda plan: (plan.last - plan.first, plan.crop))


class ConvTranspose2d(OnednnLayer):
    """Transposed convolution with dilation 1: uint8 in, uint8 or float32 out, channels-last out.

    Output pixels with the same remainder modulo the stride (the same phase) use the same weights. So one int8
    convolution computes the phases as output channels, which are then interleaved.

    Args:
        spec: weight (C_in, C_out / groups, kh, kw), per tensor or per channel along axis 1, where every group uses the
            same scales; post None or one of `posts`.

    Raises:
        BackendError: `refuses` gives a reason.

    Source: Shi et al. 2016, "Is the deconvolution layer the same as a convolutional layer?".
    """

    name: ClassVar[str] = "x86.conv_transpose2d"
    options: ClassVar[tuple[str, ...]] = ("x", "out", "stride", "padding", "output_padding", "groups", "post")
    channel_axis: ClassVar[int] = 1
    layer: ClassVar[str] = "transposed convolution"
    dims: ClassVar[tuple[int, ...]] = (2,)
    posts: ClassVar[tuple[str, ...]] = OnednnConv.posts
    slow_posts: ClassVar[tuple[str, ...]] = OnednnConv.slow_posts

    @classmethod
    def refuses(cls, spec: LayerSpec) -> str | None:
        dilated = any(d != 1 for d in spec.dilation)  # type: ignore[union-attr]
        return super().refuses(spec) or ("dilated transposed convolution has no kernel" if dilated else None)

    def _plan(self) -> list[AxisPlan]:
        sizes = self.weight.shape[2:], self.stride, self.padding, self.output_padding
        return [axis_plan(*axis) for axis in zip(*sizes, strict=True)]

    def _conv(self) -> OnednnConv:
        """Convolution whose output channels are (group, phase in height, phase in width, channel of the group)."""
        weight, plan = self.weight, self._plan()
        for axis, (tap, stride, padding) in enumerate(zip(plan, self.stride, self.padding, strict=True), start=2):
            weight = _phases(weight, axis, tap, stride, padding)  # (C_in, C_out / groups, taps, phases, ...)
        inputs, channels, height, phases_h, width, phases_w = weight.shape
        weight = weight.reshape(self.groups, inputs // self.groups, channels, height, phases_h, width, phases_w)
        weight = weight.permute(0, 4, 6, 2, 1, 3, 5).reshape(-1, inputs // self.groups, height, width).contiguous()
        repeat = self.groups, phases_h * phases_w
        scale = self.weight_scale.expand(channels).repeat(self.groups)
        zero = torch.zeros(len(weight), dtype=torch.int32, device="cpu")
        qparams = QParams(_per_phase(scale, *repeat), zero, -128, 127, torch.int8, 0)
        bias = None if self.bias is None else _per_phase(self.bias, *repeat)
        slope = self.slope if self.slope is None or len(self.slope) == 1 else _per_phase(self.slope, *repeat)
        pad = [tap.pad for tap in plan]
        layer = LayerSpec(
            weight, qparams, bias, self.x, self.out, padding=pad, groups=self.groups, post=self.post, slope=slope
        )
        return OnednnConv(layer)

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C_in, H, W) or (C_in, H, W), any strides -> `out`'s grid or float32, channels-last."""
        if x.dim() == 3:
            return ConvTranspose2d.forward(self, x.unsqueeze(0)).squeeze(0)
        if x.dim() != 4:
            check_image(self.name, x.shape, 2, self.weight.shape[0])
        conv, plan = self._cached("conv", lambda: (self._conv(), self._plan()))
        size = x.shape[2:]
        results = [max(length + tap.extra, 0) for length, tap in zip(size, plan, strict=True)]
        sizes = [
            (length - 1) * s - 2 * p + k + more
            for length, s, p, k, more in zip(
                size, self.stride, self.padding, self.weight.shape[2:], self.output_padding, strict=True
            )
        ]
        if min(sizes) <= 0:
            raise BackendError(f"{self.name}: an input of {tuple(size)} gives an output of {tuple(sizes)} pixels.")
        y = conv(x).permute(0, 2, 3, 1)
        for axis, (tap, count) in enumerate(zip(plan, results, strict=True), start=1):
            y = y.narrow(axis, tap.skip, count)
        y = _interleave(y, self.groups, self.stride)
        for axis, (tap, count) in enumerate(zip(plan, sizes, strict=True), start=1):
            y = y.narrow(axis, tap.crop, count)
        return y.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


class ConvTranspose1d(ConvTranspose2d):
    """Transposed convolution of signals as images of height 1; its weight is (C_in, C_out / groups, 1, length)."""

    name: ClassVar[str] = "x86.conv_transpose1d"

    @property
    def axes(self) -> int:
        """Number of axes of the result after the channels, see `LayerKernel`: 1 for signals."""
        return 1

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C_in, L) or (C_in, L) -> `out`'s grid or float32."""
        return super().forward(x.unsqueeze(-2)).squeeze(-2)


def _phases(weight: Tensor, axis: int, tap: AxisPlan, stride: int, padding: int) -> Tensor:
    """Split a kernel axis (2 or 3 of the original weight) into (taps, phases), filled with zeros."""
    axis = 2 * axis - 2  # the axis before is already split
    kernel = weight.shape[axis]
    # Tap t of a phase reads x[q - last + t], so m = last - t, and its weight is w[stride * m + phase + padding - crop].
    m = torch.arange(tap.last, tap.first - 1, -1, device="cpu")
    index = stride * m[:, None] + torch.arange(stride, device="cpu") + padding - tap.crop
    inside = (index >= 0) & (index < kernel)
    picked = weight.index_select(axis, index.clamp(0, kernel - 1).reshape(-1)).unflatten(axis, tuple(index.shape))
    return picked * inside.view(*index.shape, *([1] * (picked.dim() - axis - 2)))


def _per_phase(values: Tensor, groups: int, phases: int) -> Tensor:
    """Repeat per-channel values (C_out,) for every phase: (groups * phases * C_out / groups,)."""
    return values.view(groups, 1, -1).expand(groups, phases, -1).reshape(-1)


def _interleave(y: Tensor, groups: int, stride: tuple[int, ...]) -> Tensor:
    """Interleave the phases: (N, H, W, groups * sh * sw * c) -> (N, H * sh, W * sw, groups * c)."""
    n, h, w, channels = y.shape
    sh, sw = stride
    group_channels = channels // (groups * sh * sw)
    y = y.unflatten(3, (groups, sh, sw, group_channels)).permute(0, 1, 4, 2, 5, 3, 6)
    return y.reshape(n, h * sh, w * sw, groups * group_channels)
