"""`LayerKernel`: base class of the kernels of convolutions and linear layers, which are made from a `LayerSpec`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fxq.backends.kernel import Kernel, PostOp, decode, first_reason, refuse
from fxq.backends.table.layer_spec import LayerSpec, is_depthwise, overflow_refused, post_refused, weight_refused
from fxq.graph.analysis.integer_sums import beyond_int32, largest_sum
from fxq.ops import OPS
from fxq.quant.qparams import QParams

if TYPE_CHECKING:
    from typing_extensions import Self

OTHER_COLUMNS = (3, 29)
"""Output widths at which kernels are verified, in addition to the width of the calibration data."""


class LayerKernel(Kernel):
    """Kernel of a convolution or linear layer.

    Its options are fields of the `LayerSpec`. Its buffers are `weight` (int8), `weight_scale` (float32, 0-d or (C,)),
    `bias` and `slope` (float32 or None).

    Args:
        spec: the layer.

    Raises:
        BackendError: `refuses` gives a reason, pairs of products would overflow int16 on this machine, or sums of
            products would overflow int32.
    """

    layer: ClassVar[str] = "convolution"
    dims: ClassVar[tuple[int, ...]] = (1, 2, 3)
    """Numbers of spatial dimensions that it supports."""
    posts: ClassVar[tuple[str, ...]] = ()
    """Names of the activation functions that it can apply."""
    slow_posts: ClassVar[tuple[str, ...]] = ()
    """Names of those in `posts` that double its time."""
    emits_float: ClassVar[bool] = True
    channel_axis: ClassVar[int] = 0
    """Axis of the weight's output channels. 1: a transposed convolution."""
    sums_bias: ClassVar[bool] = False
    """Whether the bias is added to the integer sums, as int32 with the scale of the products."""
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
        """Number of spatial axes, which follow the channel axis."""
        return self.weight.dim() - 2

    def at_other_sizes(self, *inputs: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Inputs for outputs with 2 rows and `OTHER_COLUMNS` columns, see `Kernel.at_other_sizes`.

        They crop or repeat the first sample. The widths are below one vector and above two vectors of a CPU.
        """
        dims = self.axes
        for columns in OTHER_COLUMNS if dims else ():
            sizes, results = [], []
            for axis, result in enumerate([2] * (dims - 1) + [columns], 2):
                size = result
                if not self.channel_axis:
                    extent, pad = self.dilation[axis - 2] * (self.weight.shape[axis] - 1) + 1, self.padding[axis - 2]
                    size = max((result - 1) * self.stride[axis - 2] + extent - 2 * pad, 1)
                    result = (size + 2 * pad - extent) // self.stride[axis - 2] + 1
                sizes.append(size)
                results.append(result)
            yield tuple(_resized(x, sizes if i == 0 else results) for i, x in enumerate(inputs))

    def is_integer_product(self, rows: int) -> bool:
        """Whether the layer is one `torch._int_mm` of `rows` rows with the weight, and this is the fastest kernel."""
        return False

    @classmethod
    def refuses(cls, spec: LayerSpec) -> str | None:
        """Why it cannot run a layer; None if it can. The values of the weight are not read."""
        reasons = [
            spec.refused(),
            f"{spec.dims}-d {cls.layer} has no kernel" if spec.dims not in cls.dims else None,
            "it adds a residual" if spec.residual is not None and "residual" not in cls.options else None,
            post_refused(spec.post, cls.posts),
            weight_refused(spec.weight_qparams, cls.channel_axis),
            None if spec.out or cls.emits_float else "its result is float32, the kernel emits uint8",
        ]
        return first_reason(reasons) or cls._slope_refused(spec)

    @classmethod
    def _slope_refused(cls, spec: LayerSpec) -> str | None:
        channels = spec.weight.shape[cls.channel_axis] * (spec.groups if cls.channel_axis else 1)
        names = OPS.with_slopes(tensors=True)
        is_sloped = spec.post is not None and spec.post.name in names
        fits = spec.slope.shape in ((1,), (channels,)) if spec.slope is not None else not is_sloped
        if fits and is_sloped == (spec.slope is not None):
            return None
        return f"{' or '.join(names)} takes slopes of shape (1,) or ({channels},), and no other function"

    @classmethod
    def adds_in_int16(cls, depthwise: bool) -> bool:
        """Whether the kernel adds pairs of products in int16 on this machine."""
        return False

    def spec(self) -> LayerSpec:
        """Return the layer, with the current tensors."""
        return self._spec({name: getattr(self, name) for name in self.options}, self._buffers)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Make a kernel from `config()` and `dict(kernel.named_buffers())`."""
        return cls(cls._spec({name: decode(value) for name, value in config.items()}, tensors))

    @classmethod
    def _spec(cls, options: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> LayerSpec:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        assert weight is not None and scale is not None  # every layer has them
        axis = cls.channel_axis if scale.dim() else None
        qparams = QParams(scale, torch.zeros_like(scale, dtype=torch.int32), -128, 127, torch.int8, axis)
        return LayerSpec(weight, qparams, tensors.get("bias"), slope=tensors.get("slope"), **options)

    def _largest_sum(self) -> float:
        """Largest possible magnitude of the kernel's integer sums, with the bias if it is added in int32."""
        axis = self.channel_axis
        rows = self.weight.unflatten(0, (self.groups if axis else 1, -1)).movedim(1 + axis, 1).flatten(2)
        bias = None
        if self.bias is not None and self.sums_bias:
            bias = self.bias.double() / (self.weight_scale.double() * self.x.s)
            bias = bias.reshape(rows.shape[:2] if bias.numel() == rows.shape[0] * rows.shape[1] else (1, -1))
        return largest_sum(rows, self.x, bias)


def _resized(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the first sample of `x` (N, C, ...), or `x` (C, ...), cropped or repeated to other spatial sizes."""
    x = x[:1] if x.dim() == len(sizes) + 2 else x
    for axis, size in enumerate(sizes, x.dim() - len(sizes)):
        x = x.index_select(axis, torch.arange(size, device=x.device) % x.shape[axis])
    return x
