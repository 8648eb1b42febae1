"""The table of the x86 backend: which op starts a kernel, what the kernel takes along, and how it is made."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxq.backends.kernel import Kernel
from fxq.backends.kernel_table import (
    CLAMPS,
    LOOKED_UP,
    PLAIN,
    KernelRow,
    Operands,
    Parts,
    global_mean,
    looked_up,
    never,
    wanted,
)
from fxq.backends.layer_rows import layer_row
from fxq.backends.layer_spec import LayerSpec, weight_refused
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


def _of_images(layer: LayerSpec) -> LayerSpec:
    """A layer of signals as one of images of height 1."""
    sizes: dict[str, Any] = {name: (1, *getattr(layer, name)) for name in ("stride", "dilation")}
    sizes |= {name: (0, *getattr(layer, name)) for name in ("padding", "output_padding")}
    return replace(layer, weight=layer.weight.unsqueeze(2), **sizes)


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
    layer = LayerSpec(weight, qparams, shift, operands.grids[0], operands.out, groups=shape[1], post=parts.post)
    return OnednnConv(layer)


AFFINE = 65536
"""From how many elements on a depthwise convolution scales faster than a table per channel."""


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


ROWS: dict[str, KernelRow] = {
    **PLAIN,
    **dict.fromkeys(("conv1d", "conv2d"), layer_row(OnednnConv)),
    "conv3d": layer_row(Conv3d),
    "conv_transpose1d": layer_row(ConvTranspose1d, _of_images),
    "conv_transpose2d": layer_row(ConvTranspose2d),
    "linear": layer_row(OnednnLinear),
    "batch_norm": KernelRow(_batch_norm, LOOKED_UP.refuses, CLAMPS),
    "avg_pool1d": KernelRow(_avg_pool, _avg_pool_refuses),
    "avg_pool2d": KernelRow(_avg_pool, _avg_pool_refuses),
    "adaptive_avg_pool2d": KernelRow(_adaptive, never),
    "add": KernelRow(_add, _of_two_refuses, CLAMPS),
    "sub": KernelRow(_add, _of_two_refuses, CLAMPS),
    "mul": KernelRow(_mul, _of_two_refuses, CLAMPS),
    EXCITE: KernelRow(_excite, never),
}
