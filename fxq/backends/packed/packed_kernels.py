"""`PackedBackend`: base class of the backends of PyTorch's packed kernels, and their kernel table."""

from __future__ import annotations

import platform
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from fxq.backends.packed.packed_conv import PackedConv, PackedConvTranspose
from fxq.backends.packed.packed_linear import PackedAdd, PackedLinear, PackedMul
from fxq.backends.packed.quantized_tensors import has_engine
from fxq.backends.table.kernel_table import CLAMPS, PLAIN_ROWS, KernelRow, binary_kernel
from fxq.backends.table.layer_rows import layer_row
from fxq.backends.table.lowering import RowBackend
from fxq.graph.unit import Calls
from fxq.ops import OPS


class PackedBackend(RowBackend):
    """Backend with uint8 activations and int8 weights. A unit has only ops that one kernel runs.

    Its kernels emit no float, which further ops of a unit would need.
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    @property
    @abstractmethod
    def rows(self) -> Mapping[str, KernelRow]:
        """The kernel table."""

    def available(self) -> str | None:
        if has_engine(self.name):
            return None
        return (
            f"backend={self.name!r} needs PyTorch's engine of that name, which torch {torch.__version__} on "
            f'{platform.machine()} does not have. Use backend="auto".'
        )

    def fuses(self, calls: Calls) -> bool:
        """Whether one kernel runs all these ops."""
        return any(len(match.calls) == len(calls) for match in self.matching_rows(calls))


def table(
    conv: type[PackedConv],
    transpose: type[PackedConvTranspose],
    linear: type[PackedLinear],
) -> dict[str, KernelRow]:
    """Return the kernel table of an engine, from its kernels."""
    convolution, transposed = layer_row(conv), layer_row(transpose)
    return {
        **PLAIN_ROWS,
        **dict.fromkeys(OPS.family("conv"), convolution),
        **dict.fromkeys(OPS.family("conv_transpose"), transposed),
        "linear": layer_row(linear),
        "add": KernelRow(binary_kernel(PackedAdd), posts=CLAMPS, emits_float=False),
        "mul": KernelRow(binary_kernel(PackedMul), posts=CLAMPS, emits_float=False),
    }
