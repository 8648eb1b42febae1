"""The fbgemm backend: PyTorch's packed quantized kernels for x86 servers, in versions of PyTorch that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import fx

from fxq.backends import cpu
from fxq.backends.base import FaultyKernel
from fxq.backends.packed import packed_conv, packed_linear
from fxq.backends.packed import quantized_tensors as packed
from fxq.backends.packed.packed_kernels import PackedBackend, table
from fxq.backends.table.kernel_table import KernelRow
from fxq.backends.table.layer_rows import is_depthwise_call
from fxq.backends.table.layer_spec import LayerSpec
from fxq.graph.unit import OpCall
from fxq.quant.spec import QuantConfig


class _Fbgemm:
    """Mixin of fbgemm's kernels with weights."""

    engine: ClassVar[str] = "fbgemm"

    @classmethod
    def adds_in_int16(cls, depthwise: bool) -> bool:
        """Whether pairs of products are added in int16: in depthwise convolutions, and in all layers without VNNI."""
        return depthwise or not cpu.has_vnni()


class FbgemmConv(_Fbgemm, packed_conv.PackedConv):
    """conv1d, conv2d, conv3d."""

    name: ClassVar[str] = "fbgemm.conv"


class FbgemmConvTranspose(_Fbgemm, packed_conv.PackedConvTranspose):
    """conv_transpose1d, conv_transpose2d, conv_transpose3d.

    In torch 2.13 the two-dimensional kernel is wrong for kernel height 2, stride 1 or 2, no padding and channels in
    multiples of 8, such as a U-Net's `ConvTranspose2d(64, 32, 2, stride=2)`. So two dimensions run in the
    three-dimensional kernel, which is correct.
    """

    name: ClassVar[str] = "fbgemm.conv_transpose"
    runs_2d_as_3d: ClassVar[bool] = True

    @classmethod
    def refuses(cls, spec: LayerSpec) -> str | None:
        """Why it cannot run a layer; None if it can. PyTorch cannot pack transposed weights with per-channel scales."""
        scales = "fbgemm's transposed convolution takes one scale for the whole weight"
        return super().refuses(spec) or (scales if spec.weight_qparams.axis is not None else None)


class FbgemmLinear(_Fbgemm, packed_linear.PackedLinear):
    """Linear layer that emits uint8 or float32."""

    name: ClassVar[str] = "fbgemm.linear"
    emits_float: ClassVar[bool] = True


ROWS: dict[str, KernelRow] = table(FbgemmConv, FbgemmConvTranspose, FbgemmLinear)


class Fbgemm(PackedBackend):
    """Backend of fbgemm: uint8 activations, int8 per-channel weights; per-tensor weights in transposed convolutions.

    Activations or weights have 7 bits (reduce_range) in layers where fbgemm adds products in int16: depthwise
    convolutions, and all layers on a CPU without VNNI.
    """

    name: ClassVar[str] = "fbgemm"

    @property
    def rows(self) -> Mapping[str, KernelRow]:
        return ROWS

    def drawback(self) -> str | None:
        return cpu.without_vnni()

    def faulty_kernels(self) -> tuple[FaultyKernel, ...]:
        """The two-dimensional transposed convolution, see `FbgemmConvTranspose`."""
        kernel = "quantized::conv_transpose2d, kernel 2 high"
        return (FaultyKernel(kernel, "it runs in three dimensions", packed.transposed_2_high_is_right),)

    def config(self, gm: fx.GraphModule, config: QuantConfig, calls: tuple[OpCall, ...]) -> QuantConfig:
        """Return the config of a unit, with per-tensor weights for transposed convolutions."""
        if calls[0].op.name.startswith("conv_transpose") and config.weight is not None:
            config = replace(config, weight=replace(config.weight, per="tensor"))
        return config

    def adds_in_int16(self, calls: tuple[OpCall, ...]) -> bool:
        """Whether the unit is a depthwise convolution, or a layer on a CPU without VNNI."""
        return bool(calls[0].op.traits.weight) and _Fbgemm.adds_in_int16(is_depthwise_call(calls[0]))
