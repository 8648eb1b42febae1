"""The x86 backend: oneDNN's int8 kernels, one per unit.

`x86_kernels.py` lists which op starts a kernel and which ops after it the kernel includes. Other ops run in float.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import ClassVar

import torch

from fxq.backends import cpu
from fxq.backends.base import FaultyKernel
from fxq.backends.table.kernel_table import KernelRow
from fxq.backends.table.layer_rows import is_depthwise_call
from fxq.backends.table.lowering import RowBackend
from fxq.backends.x86.onednn import OnednnLayer
from fxq.backends.x86.x86_kernels import ROWS
from fxq.graph.unit import OpCall


class X86(RowBackend):
    """Backend for x86 CPUs: uint8 activations, int8 per-channel weights. It needs PyTorch built with oneDNN."""

    name: ClassVar[str] = "x86"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def available(self) -> str | None:
        if cpu.is_x86() and cpu.has_onednn_int8():
            return None
        return (
            f'backend="x86" needs an x86-64 CPU and PyTorch built with oneDNN; this is {platform.machine()} '
            f'with torch {torch.__version__}. Use backend="auto".'
        )

    def drawback(self) -> str | None:
        return cpu.without_vnni()

    def adds_in_int16(self, calls: tuple[OpCall, ...]) -> bool:
        """Whether sums of a unit saturate at 16 bits: for layers on CPUs without VNNI, except depthwise convolutions.

        Transposed and three-dimensional convolutions run as plain ones, so they are never depthwise. The layers of a
        squeeze-and-excitation compute in float.
        """
        depthwise = calls[0].op.name in ("conv1d", "conv2d") and is_depthwise_call(calls[0])
        return bool(calls[0].op.traits.weight) and OnednnLayer.adds_in_int16(depthwise)

    def faulty_kernels(self) -> tuple[FaultyKernel, ...]:
        """Known wrong results of PyTorch on this CPU: oneDNN's sum."""
        return (FaultyKernel("onednn::qadd, values above 127", "sums run in other kernels", _qadd_is_right),)

    @property
    def rows(self) -> Mapping[str, KernelRow]:
        return ROWS


def _qadd_is_right() -> bool:
    """Whether `onednn::qadd` is right; with AVX512, torch 2.13 reads its uint8 values above 127 as int8."""
    x = torch.full((64,), 200, dtype=torch.uint8, device="cpu")
    y = torch.ops.onednn.qadd.tensor(x, 1.0, 0, torch.zeros_like(x), 1.0, 0, 1.0, 0, torch.uint8)
    return bool((y == 200).all())
