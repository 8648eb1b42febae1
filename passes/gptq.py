"""gptq: round weights one input at a time, and compensate the error in the inputs that follow. Optional."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fxq.paired.integer_layers import IntegerLayer, OutputError, WeightRows
from fxq.paired.reconstruction import Reconstruction
from fxq.pipeline.context import Context
from fxq.quant.least_error import QUICK_ZOOMS, least_range
from fxq.quant.qparams import choose_qparams, scale_dtype
from fxq.quant.spec import QuantConfig, TensorSpec
from fxq.recipe.pass_base import Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Gptq(Reconstruction):
    """Round the weight of each layer one input at a time; the float weights of the later inputs compensate the error.

    Before: linear(x, dequantize(w_int4))    After: linear(x, dequantize(w_int4')), with less error in the output
    Keeps: the number of scales. A channel keeps its integers and scales if its error does not become smaller. With
    `scales`, scales per channel are fitted again, and scales of blocks are chosen when the first input of the block is
    rounded, if that gives less error.

    The error is that of the layer's output on the recorded samples; its Hessian is the Gram matrix of the inputs.
    `Recipe.weight_only` has it for weights of 4 bits or fewer, if there is data. To set its options, or in another
    recipe, insert it after insert-qdq: `recipe.insert_pass(fxq.passes.Gptq(), after="smooth")`. Needs data.
    Source: Frantar et al. 2022 (arXiv 2210.17323), algorithm 1. Inputs are from the partly quantized graph, outputs
    from the float graph: Li et al. 2025 (arXiv 2504.02692). Order by blocks: Gafni et al. 2025 (arXiv 2505.14638).

    Args:
        samples: number of recorded samples to use.
        trust: how strongly the fit stays close to the float weight if there are few patches, see `Reconstruction`.
        scales: whether to choose new scales for channels and blocks, too.
        damping: number that is added to the diagonal of the Hessian, relative to its mean. More damping trusts the data
            less.
        max_bits: maximum number of bits of the weights that are rounded again; weights with more bits stay as they are.
        needs_data: whether missing data is an error. If not, the pass changes nothing without data.
        ordered: whether to round the inputs with the largest values first, while most others can still compensate.
        trials: whether to try other values of `trust` for each layer, and keep the one whose output error is least on
            patches that it is not fitted to.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
        >>> recipe = fxq.Recipe.weight_only(bits=4)
        >>> qmodel = fxq.quantize(model, recipe, data=[torch.rand(16, 64) for _ in range(4)])
        >>> [entry.rule for entry in qmodel.history["gptq"].edits]
        ['gptq', 'gptq']
    """

    damping: float = 0.01
    ordered: bool = True
    trials: bool = False
    max_bits: int = 8
    needs_data: bool = True

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        **Reconstruction.bounds,
        "damping": (0.0, math.inf),
        "max_bits": (2, 8),
    }
    name: ClassVar[str] = "gptq"
    needs: ClassVar[Stage] = Stage.QDQ
    gives: ClassVar[Stage] = Stage.QDQ

    @property
    def replaceable(self) -> bool:
        return not self.needs_data

    def applies(self, configs: Collection[QuantConfig]) -> bool:
        weights = [config.weight for config in configs if config.weight is not None]
        return any(weight.format == "integer" and weight.bits <= self.max_bits for weight in weights)

    def run(self, rewriter: Rewriter[Context]) -> None:
        if self.needs_data or rewriter.context.samples:
            super().run(rewriter)

    def takes(self, layer: IntegerLayer) -> bool:
        return layer.grid.bits <= self.max_bits

    def trust_in(self, layer: WeightRows, fit: OutputError, held_out: OutputError) -> float:
        """Try several values on some of the rows, and choose the one with the least error on held-out patches."""
        if not self.trials or not held_out.count:
            return self.trust
        count = layer.weight.shape[1]
        rows = torch.arange(0, count, max(count // _TRIAL_ROWS, 1), device=layer.weight.device)
        part, judge = layer.some_rows(rows), held_out.some_rows(rows)
        errors = {}
        for factor in _TRUST_FACTORS:
            error = fit.some_rows(rows)
            error.trust(part.weight, factor * self.trust)
            grid, integers = self._rounded(part, error, None)
            errors[factor * self.trust] = float(judge(grid.real(integers)).sum())
        return min(errors, key=errors.__getitem__)

    def choose(self, layer: WeightRows, error: OutputError) -> tuple[WeightRows, Tensor]:
        """Grid and integers of a weight, (groups, outputs, inputs), rounded column by column.

        Scales of blocks stay, or are chosen again in the order of rounding: whichever gives a row less error.
        """
        grid, integers = self._rounded(layer, error, None)
        if layer.block is None or not self.scales:
            return grid, integers
        followed, others = self._rounded(layer, error, layer.block)
        better = (error(followed.real(others)) < error(grid.real(integers)))[:, :, None]
        scale, zero_point, integers = (
            torch.where(better, a, b)
            for a, b in zip(
                (followed.scale, followed.zero_point, others), (grid.scale, grid.zero_point, integers), strict=True
            )
        )
        return replace(layer, scale=scale, zero_point=zero_point), integers

    def _rounded(self, layer: WeightRows, error: OutputError, size: int | None) -> tuple[WeightRows, Tensor]:
        """Grid and integers of a weight, rounded column by column.

        Args:
            layer: weight and grid.
            error: error of the output.
            size: number of columns of a block whose scales are chosen when its first column is reached, for the float
                weights at that time; the block's columns then stay together. None: the grid stays.
        """
        gram, count = error.gram, layer.weight.shape[2]
        usual = gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        damped = gram + torch.where(usual > 0, self.damping * usual, 1.0) * torch.eye(count, device=gram.device)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        real = layer.weight + (error.cross.mT - layer.weight @ gram) @ inverse  # the float weight of least error
        order = self._order(damped.diagonal(dim1=1, dim2=2).sum(0), size)
        ahead = torch.linalg.cholesky(inverse[:, order][:, :, order], upper=True)
        del damped, inverse
        # columns are rows here, which are contiguous: (groups, inputs, outputs)
        remaining = real[:, :, order].mT.contiguous()
        scale, zero_point = (values[:, :, order].mT.contiguous() for values in (layer.scale, layer.zero_point))
        chosen, errors = torch.empty_like(remaining), torch.empty_like(remaining)
        spec = _spec_of(layer)
        starts = _starts(order, size)
        for start, stop in zip(starts, [*starts[1:], count], strict=True):
            if size is not None:
                weights = ahead.diagonal(dim1=1, dim2=2)[:, None, start:stop] ** -2
                chosen_grid = _grid(remaining[:, start:stop].mT, weights, spec)
                scale[:, start:stop], zero_point[:, start:stop] = (values[:, None] for values in chosen_grid)
            for i in range(start, stop):
                w, s, z = remaining[:, i], scale[:, i], zero_point[:, i]
                q = ((w / s).round_() + z).clamp_(layer.qmin, layer.qmax)
                e = (w - (q - z) * s) / ahead[:, None, i, i]
                remaining[:, i:stop] -= ahead[:, i, i:stop, None] * e[:, None]
                chosen[:, i], errors[:, i] = q, e
            remaining[:, stop:] -= ahead[:, start:stop, stop:].mT @ errors[:, start:stop]
        back = order.argsort()
        scale, zero_point, chosen = (values.mT[:, :, back] for values in (scale, zero_point, chosen))
        return replace(layer, scale=scale, zero_point=zero_point), chosen

    def _order(self, importance: Tensor, size: int | None) -> Tensor:
        """Order of the columns, by their importance, (K,). Blocks of `size` columns stay together."""
        if not self.ordered:
            return torch.arange(len(importance), device=importance.device)
        if size is None:
            return importance.argsort(descending=True, stable=True)
        blocks = [block + size * i for i, block in enumerate(_descending(importance.split(size)))]
        totals = torch.stack([part.sum() for part in importance.split(size)])
        return torch.cat([blocks[i] for i in totals.argsort(descending=True, stable=True).tolist()])


def _descending(parts: Sequence[Tensor]) -> list[Tensor]:
    return [part.argsort(descending=True, stable=True) for part in parts]


def _starts(order: Tensor, size: int | None) -> list[int]:
    """Places in an order where a block begins, or without blocks, every `_GROUP` columns."""
    if size is None:
        return list(range(0, len(order), _GROUP))
    blocks = order // size
    return [0, *((blocks[1:] != blocks[:-1]).nonzero().flatten() + 1).tolist()]


def _spec_of(layer: WeightRows) -> TensorSpec:
    """Spec of the grid of a layer."""
    bits = (layer.qmax - layer.qmin).bit_length()
    return TensorSpec(bits=bits, signed=layer.qmin < 0, symmetric=layer.is_symmetric)


def _grid(values: Tensor, weights: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Scale and zero point, (G, R), of least weighted error for values (G, R, n) with weights (G, 1, n)."""
    ends = least_range(values, values.amin(2), values.amax(2), spec, 2.0, weights.expand_as(values), QUICK_ZOOMS)
    grid = choose_qparams(*ends, spec)
    return grid.scale.to(scale_dtype(grid.scale)).float(), grid.zero_point.float()


_GROUP = 128
"""Number of columns after which the errors are propagated to all later columns, if there are no blocks."""
_TRUST_FACTORS = 1 / 4, 1.0, 4.0
"""Factors of `trust` that are tried. No smaller ones, since earlier layers were fitted to the held-out patches, too."""
_TRIAL_ROWS = 128
"""Number of rows of a weight on which the factors are tried; up to twice as many, since rows are evenly spaced."""
