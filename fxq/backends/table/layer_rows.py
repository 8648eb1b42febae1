"""Rows of layers in a kernel table: they turn an op with a weight into a `LayerSpec`, and make the layer's kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from fxq.backends.kernel import Kernel
from fxq.backends.table.dynamic_layer import DynamicLayer
from fxq.backends.table.dynamic_linear import DynamicLinear
from fxq.backends.table.kernel_table import CLAMPS, KernelRequest, KernelRow
from fxq.backends.table.layer_kernel import LayerKernel
from fxq.backends.table.layer_spec import LayerSpec, is_depthwise
from fxq.errors import BackendError
from fxq.graph.info import info
from fxq.graph.region import Weight
from fxq.graph.unit import OpCall

Change = Callable[[LayerSpec], LayerSpec]


def layer_row(kernel: type[LayerKernel], change: Change = lambda layer: layer) -> KernelRow:
    """Return the row of a layer kernel. `change` is applied to every layer before its kernel is made."""
    dynamic = KernelRow(
        lambda request: DynamicLayer.of(kernel, change(layer_of(request.with_unit_scales))),
        lambda request: DynamicLayer.refuses(kernel, change(layer_of(request))),
        (*CLAMPS, "gelu"),
        emits_integers=False,
    )
    return KernelRow(
        lambda request: kernel(change(layer_of(request))),
        lambda request: kernel.refuses(change(layer_of(request))),
        kernel.posts,
        "residual" in kernel.options,
        kernel.slow_posts,
        kernel.emits_float,
        dynamic=dynamic if kernel.emits_float else None,
    )


def linear_row(kernel: type[LayerKernel]) -> KernelRow:
    """Return the row of a kernel of linear layers, with further weights for inputs with dynamic ranges."""
    row = layer_row(kernel)
    dynamic = row.dynamic
    if dynamic is None or dynamic.make is None:
        return row
    of_bytes = dynamic.make

    def make(request: KernelRequest) -> Kernel:
        weight = request.captures["weight"]
        is_special = isinstance(weight, Weight) and DynamicLinear.suits(weight)
        return DynamicLinear.of_request(request) if is_special else of_bytes(request)

    return replace(row, dynamic=replace(dynamic, make=make, any_weight=True))


def layer_of(request: KernelRequest) -> LayerSpec:
    """Return the layer of a request. Raises `BackendError` if its weight is not int8."""
    weight, bias, residual, slope = map(request.captures.get, ("weight", "bias", "residual", "slope"))
    if not isinstance(weight, Weight):
        raise BackendError("its weight is not in integers")
    return LayerSpec(
        weight.values, weight.qparams, bias, request.grids[0], request.out, **request.options, post=request.post,
        residual=residual, slope=slope,
    )  # fmt: skip


def _weight_shape(call: OpCall) -> tuple[int, ...] | None:
    weight = call.tensors.get("weight")
    return info(weight).shape if isinstance(weight, fx.Node) else None


def is_depthwise_call(call: OpCall) -> bool:
    """Whether an op is a depthwise convolution, possibly a transposed one."""
    shape = _weight_shape(call)
    return shape is not None and is_depthwise(shape, call.options.get("groups", 1))
