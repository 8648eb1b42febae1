"""The table of the x86 backend: which op starts a kernel, what the kernel takes along, and how it is made."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from fxq.backends.kernel import Kernel, weight_refused
from fxq.backends.kernel_table import (
    CLAMPS,
    LOOKED_UP,
    PLAIN,
    KernelRow,
    Operands,
    Parts,
    global_mean,
    kernel_size_of,
    looked_up,
    never,
    second,
    wanted,
    weighted,
)
from fxq.backends.whole_units import EXCITE
from fxq.backends.x86.onednn_binary import OnednnAdd, OnednnMul
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.backends.x86.onednn_conv3d import Conv3d
from fxq.backends.x86.onednn_linear import OnednnLinear
from fxq.backends.x86.onednn_pool import AdaptiveAvgPool2d, AvgPool2d
from fxq.backends.x86.squeeze_excite import Excite
from fxq.backends.x86.transposed_conv import ConvTranspose1d, ConvTranspose2d
from fxq.errors import BackendError
from fxq.graph.info import info
from fxq.quant.qparams import QParams


def _conv_refuses(parts: Parts, node: fx.Node) -> str | None:
    options = parts.first.options
    return OnednnConv.refuses(
        kernel_size=kernel_size_of(parts), padding=options["padding"], padding_mode=options["padding_mode"],
        dilation=options["dilation"], post=parts.post, residual=parts.residual is not None,
    )  # fmt: skip


def _conv(parts: Parts, operands: Operands) -> Kernel:
    options = {k: v for k, v in parts.first.options.items() if k != "padding_mode"}
    return OnednnConv(*weighted(operands), **options, post=parts.post, residual=second(operands), slope=operands.slope)


def _linear_refuses(parts: Parts, node: fx.Node) -> str | None:
    return OnednnLinear.refuses(post=parts.post, residual=parts.residual is not None)


def _linear(parts: Parts, operands: Operands) -> Kernel:
    return OnednnLinear(*weighted(operands), post=parts.post, residual=second(operands))


def _transpose_refuses(parts: Parts, node: fx.Node) -> str | None:
    options = parts.first.options
    return ConvTranspose2d.refuses(kernel_size=kernel_size_of(parts), dilation=options["dilation"], post=parts.post)


def _transpose(parts: Parts, operands: Operands) -> Kernel:
    options = {k: v for k, v in parts.first.options.items() if k != "dilation"}
    return ConvTranspose2d(*weighted(operands), **options, post=parts.post, slope=operands.slope)


def _transpose1d_refuses(parts: Parts, node: fx.Node) -> str | None:
    options = parts.first.options
    size = (1, *kernel_size_of(parts))
    return ConvTranspose1d.refuses(kernel_size=size, dilation=(1, *options["dilation"]), post=parts.post)


def _transpose1d(parts: Parts, operands: Operands) -> Kernel:
    weight, scale, bias, x, out = weighted(operands)
    options = parts.first.options
    return ConvTranspose1d(
        weight.unsqueeze(2), scale, bias, x, out, stride=(1, *options["stride"]), padding=(0, *options["padding"]),
        output_padding=(0, *options["output_padding"]), groups=options["groups"], post=parts.post, slope=operands.slope,
    )  # fmt: skip


def _conv3d_refuses(parts: Parts, node: fx.Node) -> str | None:
    options = parts.first.options
    if parts.residual is not None:
        return "it adds a residual"
    return Conv3d.refuses(
        kernel_size=kernel_size_of(parts), padding=options["padding"], padding_mode=options["padding_mode"],
        dilation=options["dilation"], post=parts.post,
    )  # fmt: skip


def _conv3d(parts: Parts, operands: Operands) -> Kernel:
    options = {k: v for k, v in parts.first.options.items() if k != "padding_mode"}
    return Conv3d(*weighted(operands), **options, post=parts.post, slope=operands.slope)


def _batch_norm(parts: Parts, operands: Operands) -> Kernel:
    """Scale and shift per channel: a depthwise convolution where the tensor is large, otherwise a table."""
    shape = info(parts.first.tensors["x"]).shape or ()
    if len(shape) not in (3, 4) or math.prod(shape) < AFFINE:
        return looked_up(parts, operands)
    fixed, ones = operands.fixed, torch.ones(shape[1], device="cpu")
    mean, var = (torch.as_tensor(fixed[name]).double() for name in ("running_mean", "running_var"))
    gamma, beta = (
        torch.as_tensor(fixed.get(name, default)) for name, default in (("weight", ones), ("bias", 0 * ones))
    )
    scale = gamma.double() * torch.rsqrt(var + parts.first.options["eps"])
    weight = torch.ones(shape[1], *[1] * (len(shape) - 1), dtype=torch.int8, device="cpu")
    qparams = QParams(scale.float(), torch.zeros(shape[1], dtype=torch.int32, device="cpu"), -128, 127, torch.int8, 0)
    shift = (beta.double() - mean * scale).float()
    return OnednnConv(weight, qparams, shift, operands.grids[0], operands.out, groups=shape[1], post=parts.post)


AFFINE = 65536
"""From how many elements on a depthwise convolution scales faster than a table per channel. Measured (AVX512-VNNI, one
thread, us, convolution / table): 56,448 elements 55 / 45, 94,080 81 / 88, 401,408 145 / 330."""


def _avg_pool_refuses(parts: Parts, node: fx.Node) -> str | None:
    options = parts.first.options
    asked = {k: options[k] for k in ("padding", "ceil_mode", "count_include_pad", "divisor_override") if k in options}
    return AvgPool2d.refuses(dims=len(options["kernel_size"]), **asked)


def _avg_pool(parts: Parts, operands: Operands) -> Kernel:
    options = parts.first.options
    sizes = {k: options[k] for k in ("kernel_size", "stride", "padding")}
    return AvgPool2d(operands.grids[0], operands.out, **sizes, dims=len(options["kernel_size"]))


def _adaptive(parts: Parts, operands: Operands) -> Kernel:
    size = parts.first.options["output_size"]
    if all(n == 1 for n in size):
        return global_mean(parts, operands)
    return AdaptiveAvgPool2d(operands.grids[0], operands.out, size)


def _of_two_refuses(parts: Parts, node: fx.Node) -> str | None:
    return OnednnAdd.refuses(post=parts.post)


def _add(parts: Parts, operands: Operands) -> Kernel:
    sign = -1 if parts.first.op.name == "sub" else 1
    return OnednnAdd(operands.grids[0], operands.grids[-1], wanted(operands), post=parts.post, sign=sign)


def _mul(parts: Parts, operands: Operands) -> Kernel:
    return OnednnMul(operands.grids[0], operands.grids[-1], wanted(operands), post=parts.post)


def _excite(parts: Parts, operands: Operands) -> Kernel:
    tensors: dict[str, Tensor | None] = {}
    for name, (weight, bias) in zip(("squeeze", "excite"), operands.layers, strict=True):
        reason = "its weight is not in integers" if weight is None else weight_refused(weight.qparams, 0)
        if weight is None or reason is not None:
            raise BackendError(str(reason))
        tensors |= {name: weight.values.flatten(1), f"{name}_scale": weight.qparams.scale, f"{name}_bias": bias}
    function, gate = (parts.calls[i].op.name for i in (2, 4))
    return Excite(**tensors, x=operands.grids[0], out=operands.out, function=function, gate=gate)  # type: ignore[arg-type]


_CONV_ROW = KernelRow(_conv, _conv_refuses, OnednnConv.posts, adds=True, twice=OnednnConv.twice)
ROWS: dict[str, KernelRow] = {
    **PLAIN,
    "conv1d": _CONV_ROW,
    "conv2d": _CONV_ROW,
    "linear": KernelRow(_linear, _linear_refuses, OnednnLinear.posts, adds=True),
    "conv_transpose2d": KernelRow(_transpose, _transpose_refuses, OnednnConv.posts, twice=OnednnConv.twice),
    "conv_transpose1d": KernelRow(_transpose1d, _transpose1d_refuses, OnednnConv.posts, twice=OnednnConv.twice),
    "conv3d": KernelRow(_conv3d, _conv3d_refuses, OnednnConv.posts, twice=OnednnConv.twice),
    "batch_norm": KernelRow(_batch_norm, LOOKED_UP.refuses, CLAMPS),
    "avg_pool1d": KernelRow(_avg_pool, _avg_pool_refuses),
    "avg_pool2d": KernelRow(_avg_pool, _avg_pool_refuses),
    "adaptive_avg_pool2d": KernelRow(_adaptive, never),
    "add": KernelRow(_add, _of_two_refuses, CLAMPS),
    "sub": KernelRow(_add, _of_two_refuses, CLAMPS),
    "mul": KernelRow(_mul, _of_two_refuses, CLAMPS),
    EXCITE: KernelRow(_excite, never),
}
