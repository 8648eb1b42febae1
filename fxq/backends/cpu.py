"""Int8 features of this CPU, and whether PyTorch's kernels compute correctly on it."""

from __future__ import annotations

import os
import platform
from functools import cache
from typing import Any

import torch


def _flag(name: str) -> bool:
    """Result of a feature check of `torch.cpu`; False if this version of torch does not have the check."""
    check = getattr(torch.cpu, name, None)
    return bool(check()) if callable(check) else False


def _has_avx512_vnni() -> bool:
    """Whether the CPU has AVX512-VNNI. The check has another name in older versions of torch."""
    return _flag("_is_vnni_supported") or _flag("_is_avx512_vnni_supported")


def is_x86() -> bool:
    """Whether this is a 64-bit x86 CPU."""
    return platform.machine().lower() in ("x86_64", "amd64")


@cache
def has_vnni() -> bool:
    """Whether oneDNN sums u8 x s8 products in int32. Without VNNI, pairs of products saturate in int16.

    If oneDNN has int8 kernels, one is run on the largest integers. So the answer respects the instruction set that
    oneDNN is limited to: `ONEDNN_MAX_CPU_ISA=AVX2` makes a newer machine behave like an older one.
    """
    if not has_onednn_int8():
        return _has_avx512_vnni()
    return bool((_products(255, 127) == 255 * 127 * _DEPTH).all())


_DEPTH = 64
"""Number of products per sum in `_products`."""


def _products(activation: int, weight: int) -> torch.Tensor:
    """Output of oneDNN's linear layer, float32 (4, 16), if all activations and all weights are these integers."""
    rows, columns = 4, 16
    weights = torch.full((columns, _DEPTH), weight, dtype=torch.int8, device="cpu")
    scale, zero = torch.ones(columns, device="cpu"), torch.zeros(columns, dtype=torch.int32, device="cpu")
    packed = torch.ops.onednn.qlinear_prepack(weights, [rows, _DEPTH])
    x = torch.full((rows, _DEPTH), activation, dtype=torch.uint8, device="cpu")
    epilogue: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
    sums: torch.Tensor = torch.ops.onednn.qlinear_pointwise(x, 1.0, 0, packed, scale, zero, *epilogue)
    return sums


def without_vnni() -> str | None:
    """Warning for users of an x86 backend on a CPU without VNNI; None if the CPU has VNNI."""
    if has_vnni():
        return None
    return (
        "this CPU has no VNNI: its int8 kernels add pairs of products in 16 bits, which overflow if activations and "
        "weights both have 8 bits. fxq uses 7 bits for one of them here (see Recipe.reduce_range, and the ledger for "
        "the choice); expect slightly lower accuracy."
    )


@cache
def has_int_mm() -> bool:
    """Whether `torch._int_mm` is vectorized: it needs AVX512-VNNI, whatever instruction set oneDNN is limited to.

    Otherwise it is slower than oneDNN's linear layer.
    """
    return _has_avx512_vnni()


@cache
def has_integer_matmul() -> bool:
    """Whether oneDNN has a dedicated kernel for integer matrix products: with AVX512 or VNNI.

    Otherwise its linear layer is slower than a convolution with a 1 x 1 kernel, and much slower for few rows.
    """
    return has_avx512() or has_vnni()


@cache
def has_exact_depthwise() -> bool:
    """Whether oneDNN sums the products of a depthwise convolution in int32, even if other sums saturate in int16.

    This has been the case with AVX2 and AVX512, for any shape. As in `has_vnni`, a kernel is run to find out.
    """
    if has_vnni() or not has_onednn_int8():
        return has_vnni()
    channels, size = 32, [8, 8]
    weight = torch.full((channels, 1, 3, 3), 127, dtype=torch.int8, device="cpu")
    scale, zero = torch.ones(channels, device="cpu"), torch.zeros(channels, dtype=torch.int32, device="cpu")
    shape: tuple[Any, ...] = ([1, 1], [0, 0], [1, 1], channels)
    packed = torch.ops.onednn.qconv_prepack(weight, scale, 1.0, 0, *shape, [1, channels, *size])
    x = torch.full((1, channels, *size), 255, dtype=torch.uint8, device="cpu")
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.ops.onednn.qconv2d_pointwise(
        x, 1.0, 0, packed, scale, zero, None, *shape, 1.0, 0, torch.float32, "none", [], ""
    )
    return bool((y == 255 * 127 * 9).all())


@cache
def has_avx2_vnni() -> bool:
    """Whether oneDNN uses VNNI with 256-bit vectors, as on Intel client CPUs."""
    return has_vnni() and not has_avx512()


@cache
def has_amx() -> bool:
    """Whether the CPU has AMX int8, and oneDNN may use it (`onednn_isa`)."""
    return _flag("_is_amx_tile_supported") and _onednn_may_use("AMX")


@cache
def has_avx512() -> bool:
    """Whether the CPU has AVX-512, and oneDNN may use it (`onednn_isa`)."""
    return _flag("_is_avx512_supported") and _onednn_may_use("AVX512", "AVX10_1_512", "AMX")


def onednn_isa() -> str:
    """Highest instruction set that oneDNN may use, such as "AVX2", or "DEFAULT" if it is not limited.

    Read as in oneDNN: the first non-empty of `ONEDNN_MAX_CPU_ISA` and the older `DNNL_MAX_CPU_ISA`. Unknown names do
    not limit it.
    """
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    word = next((value.upper() for value in map(os.environ.get, names) if value), "")
    return word if word.startswith(("SSE", "AVX")) else "DEFAULT"


def _onednn_may_use(*names: str) -> bool:
    """Whether oneDNN's instruction set is not limited, or limited to one with any of these in its name."""
    allowed = onednn_isa()
    return allowed == "DEFAULT" or any(name in allowed for name in names)


@cache
def has_onednn_int8() -> bool:
    """Whether this build of PyTorch has oneDNN's int8 kernels on plain tensors. Runs a linear layer to find out."""
    ops = ("qconv2d_pointwise", "qconv_prepack", "qlinear_pointwise", "qlinear_prepack")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.onednn, op) for op in ops):
        return False
    try:
        return bool((_products(1, 1) == _DEPTH).all())
    except (NotImplementedError, RuntimeError):  # the op is registered without a CPU kernel
        return False


def machine() -> dict[str, str]:
    """Facts about this machine that decide which kernels run correctly, by name. Equal facts mean equal kernels."""
    return {
        "CPU": cpu_name(),
        "VNNI": "yes" if has_vnni() else "no",
        "AMX": "yes" if has_amx() else "no",
        "oneDNN's instructions": onednn_isa(),
        "torch": str(torch.__version__),
    }


def kind() -> str:
    """CPU kind, the key of the price table: "amx", "avx512_vnni", "avx512", "avx2_vnni", "avx2" or "neon"."""
    if not is_x86():
        return "neon"
    if has_amx():
        return "amx"
    return ("avx512" if has_avx512() else "avx2") + ("_vnni" if has_vnni() else "")


@cache
def cpu_name() -> str:
    """CPU model as the system names it, e.g. "Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz".

    Linux has no names of ARM's CPUs, but numbers: "implementer 0x41, part 0xd40" is a Neoverse V1.
    """
    facts: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                facts.setdefault(name.strip(), value.strip())
    except OSError:
        facts.clear()
    if "CPU part" in facts:
        return f"implementer {facts.get('CPU implementer')}, part {facts['CPU part']}"
    return facts.get("model name") or platform.processor() or platform.machine()
