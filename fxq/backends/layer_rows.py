"""The rows of layers in a table of kernels: an op with a weight becomes a `LayerSpec`, and that a kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fxq.backends.kernel import Kernel
from fxq.backends.kernel_table import KernelRow, Operands, Parts
from fxq.backends.layer_kernel import LayerKernel
from fxq.backends.layer_spec import LayerSpec, is_depthwise
from fxq.errors import BackendError
from fxq.graph.info import info
from fxq.graph.unit import OpCall
from fxq.quant.qparams import QParams

Change = Callable[[LayerSpec], LayerSpec]


def layer_row(kernel: type[LayerKernel], change: Change = lambda layer: layer) -> KernelRow:
    """The row of a kernel of layers.

    Args:
        kernel: the kernel.
        change: what the layer becomes before the kernel gets it.
    """

    def refuses(parts: Parts, node: fx.Node) -> str | None:
        return kernel.refuses(change(_planned(parts)))

    def make(parts: Parts, operands: Operands) -> Kernel:
        return kernel(change(layer_of(parts, operands)))

    adds = "residual" in kernel.options
    return KernelRow(make, refuses, kernel.posts, adds, kernel.twice, kernel.emits_float)


def layer_of(parts: Parts, operands: Operands) -> LayerSpec:
    """The layer that a unit runs. Raises `BackendError` when its weight is not in integers."""
    if operands.weight is None:
        raise BackendError("its weight is not in integers")
    weight, (x, *rest) = operands.weight, operands.grids
    return LayerSpec(
        weight.values, weight.qparams, operands.bias, x, operands.out, **parts.first.options, post=parts.post,
        residual=rest[0] if rest else None, slope=operands.slope,
    )  # fmt: skip


_GRID = QParams.per_tensor(1.0, 0)
_WEIGHT_GRID = QParams.per_tensor(1.0, 0, -127, 127, torch.int8)


def _planned(parts: Parts) -> LayerSpec:
    """The layer as far as it is known before calibration, with grids and values that any kernel takes."""
    weight = torch.empty(_weight_shape(parts.first) or (0, 0), dtype=torch.int8, device="meta")
    slope = torch.zeros(1, device="cpu") if parts.slope is not None else None
    return LayerSpec(
        weight, _WEIGHT_GRID, None, _GRID, _GRID, **parts.first.options, post=parts.post,
        residual=None if parts.residual is None else _GRID, slope=slope,
    )  # fmt: skip


def _weight_shape(call: OpCall) -> tuple[int, ...] | None:
    weight = call.tensors.get("weight")
    return info(weight).shape if isinstance(weight, fx.Node) else None


def is_depthwise_call(call: OpCall) -> bool:
    """Whether an op is a convolution, perhaps a transposed one, of a channel each."""
    shape = _weight_shape(call)
    return shape is not None and is_depthwise(shape, call.options.get("groups", 1))
