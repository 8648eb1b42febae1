"""The fbgemm backend: PyTorch's packed quantized kernels for x86 servers, as long as PyTorch has them."""

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
    """What all its kernels with weights have in common."""

    engine: ClassVar[str] = "fbgemm"

    @classmethod
    def adds_in_int16(cls, depthwise: bool) -> bool:
        """Without VNNI pairs of products are added in 16 bits; with it, depthwise convolutions still do that."""
        return depthwise or not cpu.has_vnni()


class FbgemmConv(_Fbgemm, packed_conv.PackedConv):
    """conv1d, conv2d, conv3d."""

    name: ClassVar[str] = "fbgemm.conv"


class FbgemmConvTranspose(_Fbgemm, packed_conv.PackedConvTranspose):
    """conv_transpose1d, conv_transpose2d, conv_transpose3d.

    In torch 2.13 the shortcut that two dimensions take is wrong, by up to 255 steps: kernels 2 high, stride 1 or 2,
    channels in multiples of 8, no padding, such as a U-Net's `ConvTranspose2d(64, 32, 2, stride=2)`. Three dimensions
    have no such shortcut.
    """

    name: ClassVar[str] = "fbgemm.conv_transpose"
    deepens: ClassVar[bool] = True

    @classmethod
    def refuses(cls, spec: LayerSpec) -> str | None:
        """PyTorch does not pack a weight with several scales."""
        scales = "fbgemm's transposed convolution takes one scale for the whole weight"
        return super().refuses(spec) or (scales if spec.weight_qparams.axis is not None else None)


class FbgemmLinear(_Fbgemm, packed_linear.PackedLinear):
    """A linear layer, into uint8 or float32."""

    name: ClassVar[str] = "fbgemm.linear"
    emits_float: ClassVar[bool] = True


ROWS: dict[str, KernelRow] = table(FbgemmConv, FbgemmConvTranspose, FbgemmLinear)


class Fbgemm(PackedBackend):
    """uint8 activations, int8 per-channel weights; per tensor in transposed convolutions.

    Activations or weights have 7 bits where fbgemm adds in 16 bits: in depthwise convolutions, and everywhere on a CPU
    without VNNI. (64 channels, 3 x 3, on AVX512-VNNI: with 8 bits each, results are off by up to 96 steps; with 7 bits
    of either by none.)
    """

    name: ClassVar[str] = "fbgemm"

    @property
    def rows(self) -> Mapping[str, KernelRow]:
        return ROWS

    def drawback(self) -> str | None:
        return cpu.without_vnni()

    def faulty_kernels(self) -> tuple[FaultyKernel, ...]:
        """The shortcut of the transposed convolution."""
        kernel = "quantized::conv_transpose2d, kernel 2 high"
        return (FaultyKernel(kernel, "it runs in three dimensions", packed.transposed_2_high_is_right),)

    def config(self, gm: fx.GraphModule, config: QuantConfig, calls: tuple[OpCall, ...]) -> QuantConfig:
        """Per-tensor weights for transposed convolutions."""
        if calls[0].op.name.startswith("conv_transpose") and config.weight is not None:
            config = replace(config, weight=replace(config.weight, per="tensor"))
        return config

    def adds_in_int16(self, calls: tuple[OpCall, ...]) -> bool:
        """Depthwise convolutions, and all layers on a CPU without VNNI."""
        return bool(calls[0].op.traits.weight) and _Fbgemm.adds_in_int16(is_depthwise_call(calls[0]))
