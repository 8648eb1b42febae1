"""Layers with integer weights, whose integers passes choose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxq.graph.analysis.layer_matrix import LayerMatrix
from fxq.graph.info import info
from fxq.graph.query import constant, is_op
from fxq.graph.region import packing_of
from fxq.paired.output_error import WeightRows
from fxq.quant.qparams import QParams, spread
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class IntegerLayer:
    """Layer whose weight is in integers.

    Attributes:
        form: the layer as a product of matrices.
        x: node of its input; for the state of a recurrent op, that op.
        weight: node that dequantizes its weight.
        real: float weight.
        grid: grid of the integers.
        bias: node of its bias if correct-bias will fit it, else None.
        reads_state: whether it reads the hidden state of `x` in each step.
        tables: nodes that dequantize the same integers for embeddings.
    """

    form: LayerMatrix
    x: fx.Node
    weight: fx.Node
    real: Tensor
    grid: QParams
    bias: fx.Node | None
    reads_state: bool = False
    tables: tuple[fx.Node, ...] = ()

    @property
    def label(self) -> str:
        """Node, size and grid of its weight in words, which are equal on all processes that quantize one model."""
        size, grid = " x ".join(map(str, self.real.shape)), self.grid
        return f"%{self.weight.name} ({size}, {grid.qmin}..{grid.qmax}, axis {grid.axis}, block {grid.block})"

    @property
    def is_linear(self) -> bool:
        """Whether it is a linear layer, which reads each of its inputs once."""
        return self.form.call.op.name == "linear"

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads sequences of tokens, where a few tokens may be much larger than the others."""
        return self.real.dim() == 2 and len(info(self.x).shape or ()) > 2

    @property
    def reads_rounded_tokens(self) -> bool:
        """Whether it is a linear layer that reads quantized tokens."""
        return self.reads_tokens and self.is_linear and is_op(self.x, "dequantize")

    @property
    def has_channel_scales(self) -> bool:
        """Whether the weight has a symmetric per-channel grid."""
        per_channel = self.grid.axis == 0 and self.grid.block is None and not self.form.is_transposed
        return per_channel and not self.grid.zero_point.any()

    def on_rows(self) -> WeightRows:
        """Weight and grid as rows."""

        def rows(values: Tensor) -> Tensor:
            shaped = spread(values.to(self.real.device), self.real, self.grid.axis, self.grid.block)
            return self.form.rows(shaped.expand_as(self.real).float())

        scale, zero_point = rows(self.grid.scale), rows(self.grid.zero_point)
        block = self.grid.block if self.grid.axis == 1 and not self.form.is_transposed else None
        block = block * math.prod(self.real.shape[2:]) if block is not None else None
        return WeightRows(self.form.rows(self.real.float()), scale, zero_point, self.grid.qmin, self.grid.qmax, block)

    def per_scale(self, values: Tensor) -> Tensor:
        """Values of the shape of the weight, which agree where a scale is shared, in the shape of the scales."""
        axis, block = self.grid.axis, self.grid.block
        if axis is None or block is None:
            return values.flatten(1)[:, 0].clone(memory_format=torch.contiguous_format)
        values = values.index_select(axis, torch.arange(0, values.shape[axis], block, device=values.device))
        for other_axis, count in enumerate(self.grid.scale.shape):
            values = values if count > 1 else values.narrow(other_axis, 0, 1)
        return values.clone()

    def integers(self, gm: fx.GraphModule) -> Tensor:
        """Current integers, float32, of the shape of the weight."""
        stored = constant(gm, self.weight.args[0])
        assert stored is not None  # `LayerFit._layer` checks it
        packing = packing_of(self.weight)
        return (stored if packing is None else packing.unpack(stored)).float()

    def put(self, rewriter: Rewriter, integers: Tensor, changed: Mapping[str, Tensor]) -> None:
        """Write new integers, of the shape of the weight, and, where they change, "scale" and "zero_point"."""
        stored, packing = integers.to(self.grid.dtype), packing_of(self.weight)
        stored = stored if packing is None else packing.pack(stored)
        for weight in (self.weight, *self.tables):
            old: Any = weight.args[0]
            name = str(old.target).removeprefix("fxq_data.")
            chosen = rewriter.constant(stored, f"{name}_chosen", before=weight, like=old)
            replaced: list[Any] = [old, *(weight.kwargs[key] for key in changed)]
            rewriter.update(weight, args=(chosen, *weight.args[1:]))
            for key, values in changed.items():
                half = values.half()
                in_half = self.grid.block is not None and torch.equal(half.float(), values)
                kept = values.to(self.grid.dtype) if key != "scale" else half if in_half else values
                constant_node = rewriter.constant(kept, f"{name}_{key}_chosen", before=weight)
                rewriter.update(weight, kwargs={**weight.kwargs, key: constant_node})
            for node in replaced:
                if isinstance(node, fx.Node) and not node.users:
                    rewriter.erase(node)
