"""What this CPU can do for int8, and whether PyTorch's kernels are right on it."""

from __future__ import annotations

from functools import cache

import torch


def _flag(name: str) -> bool:
    """A yes/no question of `torch.cpu` that some torch versions do not have; no answer counts as no."""
    ask = getattr(torch.cpu, name, None)
    return bool(ask()) if callable(ask) else False


@cache
def isa() -> str:
    """The vector instruction set that PyTorch's own kernels use, for example "AVX512", "AVX2", "DEFAULT"."""
    return str(torch.backends.cpu.get_cpu_capability()).upper()


@cache
def has_vnni() -> bool:
    """Whether u8 x s8 products are summed in int32. Without it, pairs of products saturate in int16."""
    return _flag("_is_vnni_supported") or _flag("_is_avx512_vnni_supported")


@cache
def has_amx() -> bool:
    """Whether the CPU has matrix tiles (AMX)."""
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
def probe_qadd() -> bool:
    """Whether `onednn::qadd` adds uint8 values above 127 right. On AVX512, torch 2.13 reads them as int8."""
    x, zeros = torch.full((64,), 200, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    try:
        y = torch.ops.onednn.qadd.tensor(x, 1.0, 0, zeros, 1.0, 0, 1.0, 0, torch.uint8)
    except (AttributeError, RuntimeError):
        return False
    return bool((y == 200).all())


@cache
def probe_qconv() -> bool:
    """Whether `onednn::qconv2d_pointwise` is right for the largest activations and weights (a saturation test)."""
    if not has_onednn_int8():
        return False
    channels, ops = 64, torch.ops.onednn
    scale, zero = torch.ones(16), torch.zeros(16, dtype=torch.int32)
    weight = torch.full((16, channels, 1, 1), 127, dtype=torch.int8)
    x = torch.full((1, channels, 4, 4), 255, dtype=torch.uint8)
    geometry = [1, 1], [0, 0], [1, 1], 1
    try:
        packed = ops.qconv_prepack(weight, scale, 1.0, 0, *geometry, list(x.shape))
        y = ops.qconv2d_pointwise.default(
            x, 1.0, 0, packed, scale, zero, None, *geometry, 1.0, 0, torch.float32, "none", [], ""
        )
    except RuntimeError:
        return False
    return bool((y == 255.0 * 127.0 * channels).all())
