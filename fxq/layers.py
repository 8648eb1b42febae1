"""The integers of every layer: weights, scales, zero points and int32 biases, read off the qdq graph."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxq.graph import constant, info
from fxq.region import integer_input, integer_weight, read_region


@dataclass(frozen=True)
class LayerQParams:
    """The integers of one layer, on the CPU. The real value of an integer q is (q - zero_point) * scale.

    Attributes:
        weight: int8, the layer's own weight shape.
        weight_scale: float32, (C,) per channel or () per tensor.
        weight_zero_point: int32, same shape; 0 for symmetric weights.
        axis: the output-channel axis of the weight, or None per tensor.
        bias: int32, (C,), or None: round(bias / bias_scale), zero point 0.
        bias_scale: float32, (C,) or (): input_scale * weight_scale.
        input_scale, input_zero_point: of the activation that it reads.
        output_scale, output_zero_point: of what it makes, fused ops included; None when it emits float.
        node: the node of the graph that runs it, as the ledger's `into` names it.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor
    axis: int | None
    bias: Tensor | None
    bias_scale: Tensor
    input_scale: float
    input_zero_point: int
    output_scale: float | None
    output_zero_point: int | None
    node: str


def layers_of(gm: fx.GraphModule) -> dict[str, LayerQParams]:
    """The integers of every layer of a qdq graph that runs on integers, by module path.

    A functional call outside any module goes by its node's name; a layer called again gets `@2`, `@3`, ... appended.
    """
    layers: dict[str, LayerQParams] = {}
    calls: defaultdict[str, int] = defaultdict(lambda: 1)
    for node in gm.graph.nodes:
        plan = info(node).plan
        if plan is None or plan.fate != "int8":
            continue
        found = _layer(gm, node)
        if found is None:
            continue
        base = key = info(node).path or node.name
        while key in layers:
            calls[base] += 1
            key = f"{base}@{calls[base]}"
        layers[key] = found
    return layers


def _layer(gm: fx.GraphModule, node: fx.Node) -> LayerQParams | None:
    region = read_region(gm, node)
    if region is None:
        return None
    call = region.calls[0]
    quant = call.op.quant
    if quant.weight is None:
        return None
    weight = integer_weight(gm, call.tensors.get(quant.weight))
    source = integer_input(call.tensors.get(quant.inputs[0]))
    if weight is None or source is None:
        return None
    x, out = source[1], region.out_qparams
    bias = constant(gm, call.tensors.get(quant.bias or ""))
    bias_scale = weight.qparams.scale.cpu() * x.s
    if bias is not None and bias_scale.dim():  # a transposed convolution's groups share the scales of their channels
        bias_scale = bias_scale.repeat(bias.numel() // bias_scale.numel())
    return LayerQParams(
        weight=weight.values.cpu(),
        weight_scale=weight.qparams.scale.cpu(),
        weight_zero_point=weight.qparams.zero_point.cpu(),
        axis=weight.qparams.axis,
        bias=int32_bias(bias, bias_scale) if bias is not None else None,
        bias_scale=bias_scale,
        input_scale=x.s,
        input_zero_point=x.z,
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
