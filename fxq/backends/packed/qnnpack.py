"""The qnnpack backend: PyTorch's packed quantized kernels for ARM, as long as PyTorch has them. x86 runs them, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import fx

from fxq.backends.base import FaultyKernel
from fxq.backends.packed import packed_conv, packed_linear
from fxq.backends.packed import quantized_tensors as packed
from fxq.backends.packed.packed_kernels import PackedBackend, table
from fxq.backends.table.kernel_table import KernelRow
from fxq.backends.table.layer_spec import LayerSpec
from fxq.graph.unit import OpCall
from fxq.quant.spec import QuantConfig


class _Qnnpack:
    """What all its kernels with weights have in common."""

    engine: ClassVar[str] = "qnnpack"
    sums_bias: ClassVar[bool] = True


class QnnpackConv(_Qnnpack, packed_conv.PackedConv):
    """conv1d, conv2d, conv3d."""

    name: ClassVar[str] = "qnnpack.conv"


class QnnpackConvTranspose(_Qnnpack, packed_conv.PackedConvTranspose):
    """conv_transpose1d, conv_transpose2d."""

    name: ClassVar[str] = "qnnpack.conv_transpose"

    @classmethod
    def refuses(cls, spec: LayerSpec) -> str | None:
        """In torch 2.13 three dimensions come out wrong; with groups, it reads behind the end of several scales."""
        if spec.dims == 3:
            return "qnnpack's transposed convolution of three dimensions is wrong"
        scales = "qnnpack's grouped transposed convolution takes one scale for the whole weight"
        return super().refuses(spec) or (scales if spec.groups > 1 and spec.weight_qparams.axis is not None else None)


class QnnpackLinear(_Qnnpack, packed_linear.PackedLinear):
    """A linear layer."""

    name: ClassVar[str] = "qnnpack.linear"


ROWS: dict[str, KernelRow] = table(QnnpackConv, QnnpackConvTranspose, QnnpackLinear)


class Qnnpack(PackedBackend):
    """uint8 activations, int8 per-channel weights; per tensor in transposed convolutions with groups."""

    name: ClassVar[str] = "qnnpack"

    @property
    def rows(self) -> Mapping[str, KernelRow]:
        return ROWS

    def faulty_kernels(self) -> tuple[FaultyKernel, ...]:
        """Transposed convolution of three dimensions."""
        return (FaultyKernel("quantized::conv_transpose3d", "it runs in float", packed.transposed_3d_is_right),)

    def config(self, gm: fx.GraphModule, config: QuantConfig, calls: tuple[OpCall, ...]) -> QuantConfig:
        """Per-tensor weights for transposed convolutions with groups."""
        call = calls[0]
        if call.op.name.startswith("conv_transpose") and call.options["groups"] > 1 and config.weight is not None:
            config = replace(config, weight=replace(config.weight, per="tensor"))
        return config
