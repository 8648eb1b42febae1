"""What this CPU can do for int8, and whether PyTorch's kernels are right on it."""

from __future__ import annotations

import platform
from functools import cache

import torch


def _flag(name: str) -> bool:
    """A yes/no question of `torch.cpu` that some torch versions do not have; no answer counts as no."""
    ask = getattr(torch.cpu, name, None)
    return bool(ask()) if callable(ask) else False


def is_x86() -> bool:
    """Whether this is a 64-bit x86 CPU."""
    return platform.machine().lower() in ("x86_64", "amd64")


@cache
def has_vnni() -> bool:
    """Whether u8 x s8 products are summed in int32. Without it, pairs of products saturate in int16."""
    return _flag("_is_vnni_supported") or _flag("_is_avx512_vnni_supported")


@cache
def has_amx() -> bool:
    """Whether the CPU multiplies tiles of integers."""
    return _flag("_is_amx_tile_supported")


def saturates(qmax: int) -> bool:
    """Whether int8 convolutions of activations up to `qmax` may saturate in int16 on this CPU.

    Two products u8 x s8 fit into int16 while qmax <= 128: 2 * 128 * 127 = 32512 < 32768.
    """
    return qmax > 128 and not has_vnni()


@cache
def has_onednn_int8() -> bool:
    """Whether this build of PyTorch has the oneDNN int8 kernels on plain tensors."""
    ops = ("qconv2d_pointwise", "qconv_prepack", "qlinear_pointwise", "qlinear_prepack")
    return bool(torch.backends.mkldnn.is_available()) and all(hasattr(torch.ops.onednn, op) for op in ops)


@cache
def cpu_name() -> str:
    """The model of this CPU as the system names it, e.g. "Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz"."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
