"""Integer layers beside their float form: rows of a weight, and the error of their output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxq.graph.analysis.layer_matrix import LayerMatrix
from fxq.graph.info import info
from fxq.graph.query import constant, is_op, options_of
from fxq.quant.packing import pack, unpack
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
    def reads_tokens(self) -> bool:
        """Whether it reads sequences of tokens, where a few tokens may be much larger than the others."""
        return self.real.dim() == 2 and len(info(self.x).shape or ()) > 2

    @property
    def reads_rounded_tokens(self) -> bool:
        """Whether it is a linear layer that reads quantized tokens."""
        return self.reads_tokens and self.form.call.op.name == "linear" and is_op(self.x, "dequantize")

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
            return values.flatten(1)[:, 0].clone()
        values = values.index_select(axis, torch.arange(0, values.shape[axis], block, device=values.device))
        for other_axis, count in enumerate(self.grid.scale.shape):
            values = values if count > 1 else values.narrow(other_axis, 0, 1)
        return values.clone()

    def integers(self, gm: fx.GraphModule) -> Tensor:
        """Current integers, float32, of the shape of the weight."""
        stored = constant(gm, self.weight.args[0])
        assert stored is not None  # `Reconstruction._layer` checks it
        packed = options_of(self.weight)["packed"]
        return (stored if packed is None else unpack(stored, packed, self.grid.qmin < 0)).float()

    def put(self, rewriter: Rewriter, integers: Tensor, changed: Mapping[str, Tensor]) -> None:
        """Write new integers, of the shape of the weight, and, where they change, "scale" and "zero_point"."""
        stored = integers.to(self.grid.dtype)
        stored = stored if options_of(self.weight)["packed"] is None else pack(stored)
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


@dataclass(frozen=True)
class WeightRows:
    """Weight as rows, (G, R, K) as in `LayerMatrix.rows`, with the grid of each value.

    Attributes:
        weight: float weight, (G, R, K).
        scale: scale of each value, (G, R, K).
        zero_point: zero point of each value, (G, R, K).
        qmin: smallest integer.
        qmax: largest integer.
        block: number of neighbouring values of a row that share a scale; None: scales are per channel or tensor.
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int
    block: int | None = None

    @property
    def is_symmetric(self) -> bool:
        """Whether all zero points are in the middle of the integers."""
        return bool((self.zero_point == (self.qmin + self.qmax + 1) // 2).all())

    def some_rows(self, rows: Tensor) -> WeightRows:
        """Only some rows, by index."""
        parts = {name: getattr(self, name)[:, rows] for name in ("weight", "scale", "zero_point")}
        return replace(self, **parts)

    def real(self, integers: Tensor) -> Tensor:
        """Weight that integers represent, (G, R, K)."""
        return (integers - self.zero_point) * self.scale

    def steps(self) -> Tensor:
        """Float weight in integer steps, (G, R, K), neither rounded nor clamped."""
        return self.weight / self.scale + self.zero_point

    def nearest(self) -> Tensor:
        """Nearest integers of the float weight, (G, R, K)."""
        return self.steps().round_().clamp_(self.qmin, self.qmax)

    def rescaled(self, error: OutputError) -> WeightRows:
        """Grid with the scale of each row, among smaller and larger ones, that has the least error with rounding."""
        factors = torch.logspace(*_SCALE_OCTAVES, _SCALE_COUNT, base=2, device=self.scale.device)
        grids = [replace(self, scale=self.scale * factor) for factor in factors]
        best = torch.stack([error(grid.real(grid.nearest())) for grid in grids]).argmin(0)
        return replace(self, scale=self.scale * factors[best][:, :, None])

    def fitted(self, integers: Tensor, error: OutputError) -> WeightRows:
        """Grid with scales of least error for these integers. A row keeps its scale if the new one is far from it."""
        weight = self.real(integers)
        power = ((weight @ error.gram) * weight).sum(2)
        factor = (weight * error.cross.mT).sum(2) / power.clamp(min=_MIN_POWER)
        factor = torch.where((factor - 1).abs() < _MAX_SCALE_CHANGE, factor, 1.0)
        return replace(self, scale=self.scale * factor[:, :, None])


_SCALE_OCTAVES = -1.2, 0.2
"""Smallest and largest factor of a scale that is tried, as powers of 2."""
_SCALE_COUNT = 29
"""Number of factors that are tried."""
_MAX_SCALE_CHANGE = 0.3
"""Largest |factor - 1| of a scale. Larger ones follow noise."""
_MIN_POWER = 1e-30


class OutputError:
    """Squared error of a layer's output as a function of its weight, from sums over all patches.

    Attributes:
        count: number of patches.
        centred: whether the mean error of each channel is left out, since the bias corrects it.
    """

    def __init__(self, centred: bool = False) -> None:
        self.count, self.centred = 0, centred
        self._sums: tuple[Tensor, ...] = ()

    def add(self, x: Tensor, wanted: Tensor, counts: Tensor | None = None) -> None:
        """Add patches.

        Args:
            x: patches, float32, (G, n, K).
            wanted: wanted outputs, float32, (G, n, R).
            counts: weights of the patches, (n,), on average 1; None: all equal.
        """
        self.count += x.shape[1]
        by = torch.ones(x.shape[1], 1, device=x.device) if counts is None else counts[:, None]
        weighted_x, weighted_wanted = x * by, wanted * by
        products = weighted_x.mT @ x, weighted_x.mT @ wanted
        sums = *products, weighted_x.sum(1), weighted_wanted.sum(1), (weighted_wanted * wanted).sum(1)
        self._sums = tuple(a.add_(b) for a, b in zip(self._sums, sums, strict=True)) if self._sums else sums

    def merged(self, other: OutputError) -> OutputError:
        """Error on the patches of both. May share memory with this one."""
        both = OutputError(self.centred)
        both.count = self.count + other.count
        parts = [error._sums for error in (self, other) if error.count]
        both._sums = tuple(map(torch.add, *parts)) if len(parts) == 2 else parts[0] if parts else self._sums
        return both

    def some_rows(self, rows: Tensor) -> OutputError:
        """Error of some output channels, by index; a copy."""
        gram, cross, x, wanted, power = self._sums
        part = OutputError(self.centred)
        part.count = self.count
        part._sums = gram.clone(), cross[:, :, rows], x, wanted[:, rows], power[:, rows]
        return part

    def trust(self, weight: Tensor, patches: float) -> None:
        """Add artificial patches for which the float weight is right: independent inputs of average size.

        Args:
            weight: float weight, (G, R, K).
            patches: number of patches for each input of the weight.
        """
        gram, cross, _, _, power = self._sums
        size = patches * weight.shape[2] * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] / max(self.count, 1)
        gram += size * torch.eye(weight.shape[2], device=gram.device)
        cross += size * weight.mT
        power += size[:, :, 0] * weight.square().sum(2)

    def shift(self, weight: Tensor) -> Tensor:
        """Mean of the wanted minus the actual output by channel, (G, R), with a weight (G, R, K)."""
        _, _, x, wanted, _ = self._means()
        return wanted - (weight @ x[:, :, None])[:, :, 0]

    @property
    def gram(self) -> Tensor:
        """Mean product of each two inputs, (G, K, K); their covariance if `centred`."""
        gram, _, x, _, _ = self._means()
        return gram - x[:, :, None] * x[:, None] if self.centred else gram

    @property
    def cross(self) -> Tensor:
        """Mean product of each input and each wanted output, (G, K, R); their covariance if `centred`."""
        _, cross, x, wanted, _ = self._means()
        return cross - x[:, :, None] * wanted[:, None] if self.centred else cross

    def __call__(self, weight: Tensor) -> Tensor:
        """Mean squared error by channel, (G, R), with a weight (G, R, K)."""
        _, _, _, wanted, power = self._means()
        wanted_power = power - wanted.square() if self.centred else power
        return (weight * (weight @ self.gram - 2 * self.cross.mT)).sum(2) + wanted_power

    def _means(self) -> tuple[Tensor, ...]:
        return tuple(total / max(self.count, 1) for total in self._sums)
