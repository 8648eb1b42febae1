"""The integers of every layer: weights, scales, zero points and int32 biases, read off the graph and its kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from fxq.backends.kernel import Kernel
from fxq.graph.info import info
from fxq.graph.query import constant, submodule
from fxq.graph.region import integer_input, integer_weight, out_grids, read_region
from fxq.graph.unit import Inner, OpCall
from fxq.quant.qparams import QParams


@dataclass(frozen=True)
class LayerQParams:
    """The integers of one layer, on the CPU. The real value of an integer q is (q - zero_point) * scale.

    A layer inside a unit (of squeeze-and-excitation) reads and makes floats: only its weight is in integers.

    Attributes:
        weight: int8, the layer's own weight shape.
        weight_scale: float32, (C,) per channel or () per tensor.
        weight_zero_point: int32, same shape; 0 for symmetric weights.
        axis: the output-channel axis of the weight, or None per tensor.
        bias: int32, (C,), or None: round(bias / bias_scale), zero point 0. float32 where it reads floats.
        bias_scale: float32, (C,) or (): input_scale * weight_scale; None where it reads floats.
        input_scale, input_zero_point: of the activation that it reads; None where it reads floats.
        output_scale, output_zero_point: of what it makes, fused ops included; None when it emits float. Of a unit of
            several outputs, of the first.
        node: the node of the graph that runs it, as the ledger's `into` names it.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor
    axis: int | None
    bias: Tensor | None
    bias_scale: Tensor | None
    input_scale: float | None
    input_zero_point: int | None
    output_scale: float | None
    output_zero_point: int | None
    node: str


def layers_of(gm: fx.GraphModule) -> dict[str, LayerQParams]:
    """The integers of every layer of a qdq or lowered graph that runs on integers, by module path.

    A functional call outside any module goes by its node's name; a layer called again gets `@2`, `@3`, ... appended.
    """
    layers: dict[str, LayerQParams] = {}
    calls: defaultdict[str, int] = defaultdict(lambda: 1)
    for node in gm.graph.nodes:
        kernel = submodule(gm, node)
        if isinstance(kernel, Kernel) and kernel.form is not None:
            form = kernel.form.module(kernel)
            found = [pair for inside in form.graph.nodes for pair in _layers(form, inside)]
        else:
            found = list(_layers(gm, node))
        for path, layer in found:
            key = path
            while key in layers:
                calls[path] += 1
                key = f"{path}@{calls[path]}"
            layers[key] = replace(layer, node=node.name)
    return layers


def _layers(gm: fx.GraphModule, node: fx.Node) -> Iterator[tuple[str, LayerQParams]]:
    """The layers that a node runs, each with its module path: the one that a unit begins with, or those inside."""
    region, about = read_region(gm, node), info(node)
    if region is None:
        return
    for i, call in enumerate(region.calls):
        found = _layer(gm, node, call, out_grids(gm, region)[0] if i == 0 else None)
        if found is not None:
            inside = about.paths[i] if i and about.paths else about.path
            yield inside or about.path or node.name, found


def _layer(gm: fx.GraphModule, node: fx.Node, call: OpCall, out: QParams | None) -> LayerQParams | None:
    quant = call.op.quant
    weight = integer_weight(gm, call.tensors.get(quant.weight)) if quant.weight is not None else None
    if weight is None:
        return None
    read = call.tensors.get(quant.inputs[0])
    source = integer_input(gm, read)
    if source is None and not isinstance(read, Inner):
        return None
    bias = constant(gm, call.tensors.get(quant.bias or ""))
    bias_scale = None if source is None else weight.qparams.scale.cpu() * source[1].s
    if bias is not None and bias_scale is not None:
        if bias_scale.dim():  # a transposed convolution's groups share the scales of their channels
            bias_scale = bias_scale.repeat(bias.numel() // bias_scale.numel())
        bias = int32_bias(bias, bias_scale)
    return LayerQParams(
        weight=weight.values.cpu(),
        weight_scale=weight.qparams.scale.cpu(),
        weight_zero_point=weight.qparams.zero_point.cpu(),
        axis=weight.qparams.axis,
        bias=bias.cpu() if bias is not None else None,
        bias_scale=bias_scale,
        input_scale=source[1].s if source is not None else None,
        input_zero_point=source[1].z if source is not None else None,
        output_scale=out.s if out is not None else None,
        output_zero_point=out.z if out is not None else None,
        node=node.name,
    )


def int32_bias(bias: Tensor, scale: Tensor) -> Tensor:
    """round(bias / scale) as int32; the scale is input_scale * weight_scale, the zero point 0.

    Args:
        bias: float32, (C,).
        scale: float32, (C,) or ().

    Source: Jacob et al. 2018, section 2.4.
    """
    limit = 2**31 - 1
    return torch.round(bias.detach().cpu().double() / scale.cpu().double()).clamp(-limit - 1, limit).to(torch.int32)
