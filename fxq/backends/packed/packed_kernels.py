"""What the backends of PyTorch's packed kernels share: their table, and when ops become one unit."""

from __future__ import annotations

import platform
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from fxq.backends.captures import op_names
from fxq.backends.kernel import Kernel
from fxq.backends.kernel_table import CLAMPS, PLAIN, KernelRow, Operands, Parts, never
from fxq.backends.layer_rows import layer_row
from fxq.backends.lowering import RowBackend
from fxq.backends.packed.packed_conv import PackedConv, PackedConvTranspose
from fxq.backends.packed.packed_linear import PackedBinary, PackedLinear
from fxq.backends.packed.quantized_tensors import has_engine
from fxq.errors import BackendError
from fxq.ops import OPS
from fxq.ops.table import Op


class PackedBackend(RowBackend):
    """uint8 activations, int8 weights. Units are what one kernel runs: the kernels emit no float for the rest."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    @property
    @abstractmethod
    def rows(self) -> Mapping[str, KernelRow]:
        """The table."""

    def available(self) -> str | None:
        """As in `Backend`."""
        if has_engine(self.name):
            return None
        return (
            f"backend={self.name!r} needs PyTorch's engine of that name; torch {torch.__version__} on "
            f'{platform.machine()} does not have it. Use backend="auto".'
        )

    def fuses(self, ops: Sequence[Op]) -> bool:
        """Only what one kernel takes whole."""
        row, names = self.rows.get(ops[0].name), sorted(op.name for op in ops)
        if any(own.fusion is not None and op_names(own.fusion) == names for own in self.rows.values()):
            return True
        return row is not None and [op.name in row.posts for op in ops[1:]] == [True]


def table(
    conv: type[PackedConv],
    transpose: type[PackedConvTranspose],
    linear: type[PackedLinear],
    add: type[PackedBinary],
    mul: type[PackedBinary],
) -> dict[str, KernelRow]:
    """The rows of an engine, from its kernels."""

    def binary(kernel: type[PackedBinary]) -> Any:
        def make(parts: Parts, operands: Operands) -> Kernel:
            if operands.out is None:
                raise BackendError("its result is wanted in float")
            return kernel(operands.grids[0], operands.grids[-1], operands.out, post=parts.post)

        return make

    convolution, transposed = layer_row(conv), layer_row(transpose)
    return {
        **PLAIN,
        **dict.fromkeys(OPS.family("conv"), convolution),
        **dict.fromkeys(OPS.family("conv_transpose"), transposed),
        "linear": layer_row(linear),
        "add": KernelRow(binary(add), never, CLAMPS, emits_float=False),
        "mul": KernelRow(binary(mul), never, CLAMPS, emits_float=False),
    }
