"""Kernels of convolutions and linear layers: each is made from a `LayerSpec`, and says which of them it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fxq.backends.kernel import Kernel, PostOp, decode, first_reason, refuse
from fxq.backends.table.layer_spec import LayerSpec, is_depthwise, overflow_refused, post_refused, weight_refused
from fxq.graph.analysis.integer_sums import beyond_int32, largest_sum
from fxq.quant.qparams import QParams

if TYPE_CHECKING:
    from typing_extensions import Self

OTHER_COLUMNS = (3, 29)
"""Output widths that kernels are verified at, in addition to that of the calibration data."""


class LayerKernel(Kernel):
    """A kernel of a layer. Its options are those fields of the layer that it keeps; the tensors are its buffers.

    They are `weight` (int8), `weight_scale` (float32, 0-d or (C,)), `bias` and `slope` (float32 or None).

    Args:
        spec: the layer.

    Raises:
        BackendError: for what `refuses` names, or the products would overflow on this machine, or their sums anywhere.
    """

    layer: ClassVar[str] = "convolution"
    dims: ClassVar[tuple[int, ...]] = (1, 2, 3)
    """Of how many spatial dimensions it runs layers."""
    posts: ClassVar[tuple[str, ...]] = ()
    """The activation functions that it applies itself."""
    slow_posts: ClassVar[tuple[str, ...]] = ()
    """Those of them that cost as much again as the kernel without them."""
    emits_float: ClassVar[bool] = True
    channel_axis: ClassVar[int] = 0
    """The axis of the weight's output channels; 1: a transposed convolution."""
    sums_bias: ClassVar[bool] = False
    """Whether the bias goes into the integer sums, as int32 with the scale of the products."""
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    slope: Tensor | None
    x: QParams
    out: QParams | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    post: PostOp | None
    residual: QParams | None = None

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        refuse(self.name, self.refuses(spec))
        if self.adds_in_int16(not self.channel_axis and is_depthwise(spec.weight.shape, spec.groups)):
            refuse(self.name, overflow_refused(spec.x, spec.weight))
        self.register_buffer("weight", spec.weight.detach().contiguous())  # oneDNN packs a transposed one wrongly
        self.register_buffer("weight_scale", spec.weight_qparams.scale.detach().to(torch.float32))
        for name, tensor in (("bias", spec.bias), ("slope", spec.slope)):
            self.register_buffer(name, None if tensor is None else tensor.detach().to(torch.float32, copy=True))
        for name in self.options:
            setattr(self, name, getattr(spec, name))
        refuse(self.name, beyond_int32(self._largest_sum()))

    @property
    def axes(self) -> int:
        """How many axes its result has behind that of the channels."""
        return self.weight.dim() - 2

    def at_other_sizes(self, *inputs: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Inputs for outputs of two rows, narrower than one vector and wider than two, see `Kernel.at_other_sizes`.

        They are cropped from the first sample or repeat it.
        """
        dims = self.axes
        for columns in OTHER_COLUMNS if dims else ():
            sizes, results = [], []
            for axis, wanted in enumerate([2] * (dims - 1) + [columns], 2):
                size = wanted
                if not self.channel_axis:
                    extent, pad = self.dilation[axis - 2] * (self.weight.shape[axis] - 1) + 1, self.padding[axis - 2]
                    size = max((wanted - 1) * self.stride[axis - 2] + extent - 2 * pad, 1)
                    wanted = (size + 2 * pad - extent) // self.stride[axis - 2] + 1
                sizes.append(size)
                results.append(wanted)
            yield tuple(_resized(x, sizes if i == 0 else results) for i, x in enumerate(inputs))

    def is_integer_product(self, rows: int) -> bool:
        """Whether it is `torch._int_mm` of so many rows with the weight and no more, and that the quickest way."""
        return False

    @classmethod
    def refuses(cls, spec: LayerSpec) -> str | None:
        """Why it cannot run such a layer, or None. Values of the weight are not looked at."""
        reasons = [
            spec.refused(),
            f"{spec.dims}-d {cls.layer} has no kernel" if spec.dims not in cls.dims else None,
            "it adds a residual" if spec.residual is not None and "residual" not in cls.options else None,
            post_refused(spec.post, cls.posts),
            weight_refused(spec.weight_qparams, cls.channel_axis),
            None if spec.out or cls.emits_float else "its result is wanted in float32, the kernel emits uint8",
        ]
        return first_reason(reasons) or cls._slope_refused(spec)

    @classmethod
    def _slope_refused(cls, spec: LayerSpec) -> str | None:
        channels = spec.weight.shape[cls.channel_axis] * (spec.groups if cls.channel_axis else 1)
        takes = spec.post is not None and spec.post.name == "prelu"
        fits = spec.slope.shape in ((1,), (channels,)) if spec.slope is not None else not takes
        return (
            None
            if fits and takes == (spec.slope is not None)
            else (f"prelu takes slopes of shape (1,) or ({channels},), and only prelu")
        )

    @classmethod
    def adds_in_int16(cls, depthwise: bool) -> bool:
        """Whether it adds pairs of products in int16 on this machine."""
        return False

    def spec(self) -> LayerSpec:
        """The layer, with the tensors as they are now."""
        return self._spec({name: getattr(self, name) for name in self.options}, self._buffers)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Inverse of `config()` and `dict(kernel.named_buffers())`."""
        return cls(cls._spec({name: decode(value) for name, value in config.items()}, tensors))

    @classmethod
    def _spec(cls, options: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> LayerSpec:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        assert weight is not None and scale is not None  # every layer has them
        axis = cls.channel_axis if scale.dim() else None
        qparams = QParams(scale, torch.zeros_like(scale, dtype=torch.int32), -128, 127, torch.int8, axis)
        return LayerSpec(weight, qparams, tensors.get("bias"), slope=tensors.get("slope"), **options)

    def _largest_sum(self) -> float:
        """Largest magnitude of the kernel's integer sums, including the bias if it is added in int32."""
        axis = self.channel_axis
        rows = self.weight.unflatten(0, (self.groups if axis else 1, -1)).movedim(1 + axis, 1).flatten(2)
        bias = None
        if self.bias is not None and self.sums_bias:
            bias = self.bias.double() / (self.weight_scale.double() * self.x.s)
            bias = bias.reshape(rows.shape[:2] if bias.numel() == rows.shape[0] * rows.shape[1] else (1, -1))
        return largest_sum(rows, self.x, bias)


def _resized(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The first sample of `x` (N, C, *sizes), or `x` (C, *sizes), cut or repeated to other sizes."""
    x = x[:1] if x.dim() == len(sizes) + 2 else x
    for axis, size in enumerate(sizes, x.dim() - len(sizes)):
        x = x.index_select(axis, torch.arange(size, device=x.device) % x.shape[axis])
    return x
