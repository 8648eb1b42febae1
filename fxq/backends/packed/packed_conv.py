"""Convolutions and transposed convolutions of PyTorch's packed quantized kernels."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from fxq.backends.packed.packed_kernel import PackedKernel
from fxq.backends.packed.quantized_tensors import as_qint8, as_quint8, quantized
from fxq.backends.plain.converters import dense


class PackedConv(PackedKernel):
    """conv1d, conv2d and conv3d: uint8 in, uint8 out."""

    options: ClassVar[tuple[str, ...]] = ("x", "out", "stride", "padding", "dilation", "groups", "post")

    def _pack(self) -> Any:
        prepack = getattr(quantized, f"conv{self.weight.dim() - 2}d_prepack")
        sizes = map(list, (self.stride, self.padding, self.dilation))
        return prepack(as_qint8(self.weight.contiguous(), self.weight_scale, 0), self.bias, *sizes, self.groups)

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C, *size) or (C, *size), any strides -> uint8; images channels-last."""
        dims = self.weight.dim() - 2
        if x.dim() == dims + 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        self._check(x.shape[1], self.weight.shape[1] * self.groups)
        op = getattr(quantized, f"conv{dims}d{'_relu' if self._finish.relu else ''}")
        weight = self._weight()  # first, since it refuses tensors that are not plain
        return self._finish(op(as_quint8(x, *self._input), weight, *self._output))


class PackedConvTranspose(PackedKernel):
    """Transposed convolution of 1 to 3 dimensions: uint8 in, uint8 out."""

    layer: ClassVar[str] = "transposed convolution"
    options: ClassVar[tuple[str, ...]] = (
        "x", "out", "stride", "padding", "output_padding", "dilation", "groups", "post",
    )  # fmt: skip
    channel_axis: ClassVar[int] = 1
    has_relu: ClassVar[bool] = False
    runs_2d_as_3d: ClassVar[bool] = False
    """Whether two-dimensional layers run in the three-dimensional kernel, with a first dimension of size 1."""

    def _pack(self) -> Any:
        weight = self.weight.unsqueeze(2) if self._adds_dim else self.weight
        options = (self.stride, 1), (self.padding, 0), (self.output_padding, 0), (self.dilation, 1)
        sizes = [[default] * self._adds_dim + list(size) for size, default in options]
        prepack = getattr(quantized, f"conv_transpose{weight.dim() - 2}d_prepack")
        return prepack(as_qint8(weight.contiguous(), self.weight_scale, 1), self.bias, *sizes, self.groups)

    @property
    def _adds_dim(self) -> bool:
        return self.runs_2d_as_3d and self.weight.dim() == 4

    def forward(self, x: Tensor) -> Tensor:
        """uint8 (N, C_in, *size) or (C_in, *size), any strides -> uint8."""
        dims = self.weight.dim() - 2
        if x.dim() == dims + 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        self._check(x.shape[1], self.weight.shape[0])
        if self._adds_dim:
            q = as_quint8(dense(x).unsqueeze(2), *self._input)
            return self._finish(quantized.conv_transpose3d(q, self._weight(), *self._output)).squeeze(2)
        op = getattr(quantized, f"conv_transpose{dims}d")
        weight = self._weight()  # first, since it refuses tensors that are not plain
        return self._finish(op(as_quint8(x, *self._input), weight, *self._output))
