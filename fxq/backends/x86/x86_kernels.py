"""Kernel table of the x86 backend: which op starts a kernel, which ops it includes, and how it is made."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from fxq.backends.kernel import Kernel
from fxq.backends.table.kernel_table import (
    CLAMPS,
    LOOKUP_ROW,
    PLAIN_ROWS,
    KernelRequest,
    KernelRow,
    binary_kernel,
    global_mean,
    lookup_kernel,
    rule_key,
)
from fxq.backends.table.layer_rows import layer_row, linear_row
from fxq.backends.table.layer_spec import LayerSpec, weight_refused
from fxq.backends.table.recurrent_kernel import recurrent_rows
from fxq.backends.x86.onednn_binary import OnednnAdd, OnednnMul
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.backends.x86.onednn_conv3d import Conv3d
from fxq.backends.x86.onednn_linear import OnednnLinear
from fxq.backends.x86.onednn_pool import AdaptiveAvgPool2d, AvgPool2d
from fxq.backends.x86.recurrent_loop import RecurrentLoop
from fxq.backends.x86.squeeze_excite import FUNCTIONS, GATES, SqueezeExcite
from fxq.backends.x86.transposed_conv import ConvTranspose1d, ConvTranspose2d
from fxq.errors import BackendError
from fxq.graph.info import info
from fxq.graph.region import Weight
from fxq.quant.qparams import QParams


def _as_image_layer(layer: LayerSpec) -> LayerSpec:
    """Turn a layer of signals into a layer of images of height 1."""
    sizes: dict[str, Any] = {name: (1, *getattr(layer, name)) for name in ("stride", "dilation")}
    sizes |= {name: (0, *getattr(layer, name)) for name in ("padding", "output_padding")}
    return replace(layer, weight=layer.weight.unsqueeze(2), **sizes)


def _batch_norm(request: KernelRequest) -> Kernel:
    """Scale and shift per channel: a depthwise convolution for large tensors, otherwise a look-up table."""
    shape = info(request.calls[0].tensors["x"]).shape or ()
    if len(shape) not in (3, 4) or math.prod(shape) < MIN_AFFINE_ELEMENTS:
        return lookup_kernel(request)
    mean, var, gamma, beta = map(request.captures.get, ("running_mean", "running_var", "weight", "bias"))
    gamma = torch.ones(shape[1], device="cpu") if gamma is None else gamma
    beta = torch.zeros(shape[1], device="cpu") if beta is None else beta
    scale = gamma.double() * torch.rsqrt(torch.as_tensor(var).double() + request.options["eps"])
    weight = torch.ones(shape[1], *[1] * (len(shape) - 1), dtype=torch.int8, device="cpu")
    qparams = QParams(scale.float(), torch.zeros(shape[1], dtype=torch.int32, device="cpu"), -128, 127, torch.int8, 0)
    shift = (beta.double() - torch.as_tensor(mean).double() * scale).float()
    return OnednnConv(
        LayerSpec(weight, qparams, shift, request.grids[0], request.out, groups=shape[1], post=request.post)
    )


MIN_AFFINE_ELEMENTS = 65536
"""Elements from which a depthwise convolution scales faster than a look-up table per channel."""


def _avg_pool_refuses(request: KernelRequest) -> str | None:
    options = request.options
    limits = {k: options[k] for k in ("padding", "ceil_mode", "count_include_pad", "divisor_override") if k in options}
    return AvgPool2d.refuses(dims=len(options["kernel_size"]), **limits)


def _avg_pool(request: KernelRequest) -> Kernel:
    sizes = {k: request.options[k] for k in ("kernel_size", "stride", "padding")}
    return AvgPool2d(request.grids[0], request.out, **sizes, dims=len(sizes["kernel_size"]))


def _adaptive_avg_pool(request: KernelRequest) -> Kernel:
    size = request.options["output_size"]
    return global_mean(request) if all(n == 1 for n in size) else AdaptiveAvgPool2d(request.grids[0], request.out, size)


def _excite(request: KernelRequest) -> Kernel:
    tensors: dict[str, Any] = {}
    for name in ("squeeze", "excite"):
        weight, bias = (request.captures[f"{name}_{part}"] for part in ("weight", "bias"))
        reason = weight_refused(weight.qparams, 0) if isinstance(weight, Weight) else "its weight is not quantized"
        if reason is not None:
            raise BackendError(reason)
        tensors |= {name: weight.values.flatten(1), f"{name}_scale": weight.qparams.scale, f"{name}_bias": bias}
    function, gate = (request.calls[i].op.name for i in (2, 4))
    return SqueezeExcite(**tensors, x=request.grids[0], out=request.out, function=function, gate=gate)


SQUEEZE_EXCITE_KEYS = [
    rule_key(rule, ("x", "squeeze_weight", "squeeze_bias", "excite_weight", "excite_bias"))
    for function in FUNCTIONS
    for gate in GATES
    for rule in (f"squeeze_excite_{function}_{gate}", f"squeeze_excite_mean_{function}_{gate}")
]
"""Keys of the fusions of `patterns/fusions/excite.py`."""
ROWS: dict[str, KernelRow] = {
    **PLAIN_ROWS,
    **dict.fromkeys(("conv1d", "conv2d"), layer_row(OnednnConv)),
    "conv3d": layer_row(Conv3d),
    "conv_transpose1d": layer_row(ConvTranspose1d, _as_image_layer),
    "conv_transpose2d": layer_row(ConvTranspose2d),
    "linear": linear_row(OnednnLinear),
    "batch_norm": KernelRow(_batch_norm, LOOKUP_ROW.refuses, CLAMPS),
    "avg_pool1d": KernelRow(_avg_pool, _avg_pool_refuses),
    "avg_pool2d": KernelRow(_avg_pool, _avg_pool_refuses),
    "adaptive_avg_pool2d": KernelRow(_adaptive_avg_pool),
    "add": KernelRow(binary_kernel(OnednnAdd), posts=CLAMPS),
    "sub": KernelRow(binary_kernel(OnednnAdd, sign=-1), posts=CLAMPS),
    "mul": KernelRow(binary_kernel(OnednnMul), posts=CLAMPS),
    **dict.fromkeys(SQUEEZE_EXCITE_KEYS, KernelRow(_excite)),
    **recurrent_rows(RecurrentLoop),
}
