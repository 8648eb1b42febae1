"""The tensorrt backend: units and grids as TensorRT takes them, for models that are exported to it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import fx

from fxq.backends.base import Support
from fxq.backends.reference import Reference
from fxq.graph.query import constant
from fxq.graph.unit import Calls
from fxq.ops import OPS
from fxq.quant.spec import QuantConfig

_OPS = frozenset(
    {
        *OPS.family("conv"), *OPS.family("conv_transpose"), "linear", "matmul", "add", "mean",
        *OPS.family("avg_pool"), *OPS.family("adaptive_avg_pool"),
    }
)  # fmt: skip
"""Ops that TensorRT runs on integers, besides those that only move values."""


class Tensorrt(Reference):
    """Backend of models for TensorRT: int8 activations and weights, all symmetric.

    Here the quantized model runs as in `reference`: as float ops between conversions, exact, slower than float. On a
    GPU, TensorRT runs the file that `qmodel.export("m.onnx", target="tensorrt")` writes.

    A layer and a sum after it are separate units, so that both inputs of the sum are quantized, if its result is read
    as integers. Activation functions after a layer are in its unit. Layers with dynamic ranges, recurrent layers and
    embeddings stay in float; so do weight-only layers, except linear ones with symmetric 4-bit weights in blocks of 64
    or 128.

    Source: NVIDIA, TensorRT documentation, "Working with Quantized Types".
    """

    name: ClassVar[str] = "tensorrt"
    notes_specs: ClassVar[bool] = False

    def fuses(self, calls: Calls) -> bool:
        """Whether the ops after the first are activation functions: they have one input, and no weight."""
        return all(len(call.op.traits.inputs) == 1 and call.op.traits.weight is None for call in calls[1:])

    def config(self, gm: fx.GraphModule, config: QuantConfig, calls: Calls) -> QuantConfig:
        """Return the config with symmetric signed activations and weights."""
        activation, weight = (
            spec and replace(spec, signed=True, symmetric=True) for spec in (config.activation, config.weight)
        )
        return config if config.activation is None else replace(config, activation=activation, weight=weight)

    def supports(self, gm: fx.GraphModule, node: fx.Node, calls: Calls, config: QuantConfig) -> Support:
        weight = constant(gm, calls[0].tensors.get("weight"))
        reason = _refusal(calls, config, weight.shape[-1] if weight is not None else 0)
        return Support(0, reason) if reason else Support(len(calls))


def _refusal(calls: Calls, config: QuantConfig, columns: int) -> str:
    """Reason why TensorRT computes a unit in float; empty if it runs on integers.

    Args:
        calls: ops of the unit.
        config: its specs.
        columns: number of values in a row of its weight.
    """
    op, activation, weight = calls[0].op, config.activation, config.weight
    if activation is None:
        fits = weight is not None and weight.bits == 4 and weight.symmetric and fits_blocks(weight.block, columns)
        if op.name == "linear" and fits:
            return ""
        return "TensorRT takes weights alone only as symmetric int4, in several blocks of 64 or 128 per row"
    if op.name not in _OPS and op.traits.kind != "moves":
        return f"TensorRT computes {op.name} in float"
    if activation.range == "dynamic":
        return "TensorRT takes no dynamic ranges"
    if activation.bits != 8:
        return f"TensorRT takes activations with 8 bits, not {activation.bits}"
    if weight is not None and op.traits.weight and (weight.block is not None or weight.bits <= 4):
        return "TensorRT takes no weights per block or of 4 bits with integer activations"
    return ""


def fits_blocks(block: int | None, columns: int) -> bool:
    """Whether TensorRT takes 4-bit weights with this block size and this number of values in a row."""
    return block in (64, 128) and columns % block == 0 and columns > block
