"""The qnnpack backend: PyTorch's packed quantized kernels for ARM, in versions of PyTorch that have them."""

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
    """Mixin of qnnpack's kernels with weights."""

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
        """Why it cannot run a layer; None if it can.

        In torch 2.13 results in three dimensions are wrong, and grouped layers with per-channel scales are read beyond
        the end of the scales.
        """
        if spec.dims == 3:
            return "qnnpack's transposed convolution of three dimensions is wrong"
        scales = "qnnpack's grouped transposed convolution takes one scale for the whole weight"
        return super().refuses(spec) or (scales if spec.groups > 1 and spec.weight_qparams.axis is not None else None)


class QnnpackLinear(_Qnnpack, packed_linear.PackedLinear):
    """Linear layer."""

    name: ClassVar[str] = "qnnpack.linear"


ROWS: dict[str, KernelRow] = table(QnnpackConv, QnnpackConvTranspose, QnnpackLinear)


class Qnnpack(PackedBackend):
    """Backend of qnnpack: uint8 activations, int8 per-channel weights; per-tensor if transposed and grouped."""

    name: ClassVar[str] = "qnnpack"

    @property
    def rows(self) -> Mapping[str, KernelRow]:
        return ROWS

    def faulty_kernels(self) -> tuple[FaultyKernel, ...]:
        """The three-dimensional transposed convolution."""
        return (FaultyKernel("quantized::conv_transpose3d", "it runs in float", packed.transposed_3d_is_right),)

    def config(self, gm: fx.GraphModule, config: QuantConfig, calls: tuple[OpCall, ...]) -> QuantConfig:
        """Return the config of a unit, with per-tensor weights for grouped transposed convolutions."""
        call = calls[0]
        if call.op.name.startswith("conv_transpose") and call.options["groups"] > 1 and config.weight is not None:
            config = replace(config, weight=replace(config.weight, per="tensor"))
        return config
