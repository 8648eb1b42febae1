"""gptq: round weights one input at a time, and compensate the error in the inputs that follow. Optional."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fxq.paired.cholesky import cholesky_factor
from fxq.paired.column_rounding import block_grid, round_block
from fxq.paired.integer_layers import IntegerLayer
from fxq.paired.output_error import OutputError, WeightRows
from fxq.paired.reconstruction import Reconstruction
from fxq.pipeline.context import Context
from fxq.quant.spec import QuantConfig, TensorSpec
from fxq.recipe.pass_base import Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Gptq(Reconstruction):
    """Round the weight of each layer one input at a time; the float weights of the later inputs compensate the error.

    Before: linear(x, dequantize(w_int4))    After: linear(x, dequantize(w_int4')), with less error in the output
    Keeps: the number of scales. A channel keeps its integers and scales if its error does not become smaller. With
    `scales`, scales per channel are fitted again, and scales of blocks are chosen when the first input of the block is
    rounded; the inputs of a block are then rounded together.

    The error is that of the layer's output on the recorded samples; its Hessian is the Gram matrix of the inputs.
    `Recipe.weight_only` has it for weights of 4 bits or fewer, if there is data. To set its options, or in another
    recipe, insert it after insert-qdq: `recipe.insert_pass(fxq.passes.Gptq(), after="smooth")`. Needs data.
    Source: Frantar et al. 2022 (arXiv 2210.17323), algorithm 1. The errors are those of a nearest-plane search, which
    needs no inverse of the Hessian: Chen et al. 2025 (arXiv 2507.18553). Inputs are from the partly quantized graph,
    outputs from the float graph: Li et al. 2025 (arXiv 2504.02692). Order by blocks: Gafni et al. 2025
    (arXiv 2505.14638).

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

    trust: float = 0.5
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

    @property
    def holds_out(self) -> bool:
        return self.trials

    def applies(self, configs: Collection[QuantConfig]) -> bool:
        weights = [config.weight for config in configs if config.weight is not None]
        return any(weight.format == "integer" and weight.bits <= self.max_bits for weight in weights)

    def scratch_bytes(self, rows: tuple[int, int, int]) -> int:
        groups, outputs, inputs = rows
        return 4 * groups * inputs * (_SQUARES * inputs + _COPIES * outputs)

    def run(self, rewriter: Rewriter[Context]) -> None:
        if self.needs_data or rewriter.context.samples:
            super().run(rewriter)

    def takes(self, layer: IntegerLayer) -> bool:
        return layer.grid.bits <= self.max_bits

    def trust_in(self, layer: WeightRows, fit: OutputError, held_out: OutputError) -> float:
        """Try several values on some of the rows, and choose the one with the least error on held-out patches."""
        if not self.trials or not held_out.inputs.count:
            return self.trust
        count = layer.weight.shape[1]
        rows = torch.arange(0, count, max(count // _TRIAL_ROWS, 1), device=layer.weight.device)
        part = layer.some_rows(rows)
        judge = OutputError(held_out.inputs, part.weight, held_out.centred)
        errors = {}
        for factor in _TRUST_FACTORS:
            error = OutputError(fit.inputs.trusting(factor * self.trust), part.weight, fit.centred)
            grid, integers = self._rounded(part, error, None)
            errors[factor * self.trust] = float(judge(grid.real(integers)).sum())
        return min(errors, key=errors.__getitem__)

    def choose(self, layer: WeightRows, error: OutputError) -> tuple[WeightRows, Tensor]:
        """Grid and integers of a weight, (groups, outputs, inputs), rounded column by column.

        Scales of blocks are chosen in the order of rounding, if they may change.
        """
        return self._rounded(layer, error, layer.block if self.scales else None)

    def _rounded(self, layer: WeightRows, error: OutputError, size: int | None) -> tuple[WeightRows, Tensor]:
        """Grid and integers of a weight, rounded column by column.

        Args:
            layer: weight and grid.
            error: error of the output.
            size: number of columns of a block whose scales are chosen when its first column is reached, for the float
                weights at that time; the block's columns then stay together. None: the grid stays.
        """
        factors = self._factors(error, size)
        order, ahead = factors.order, factors.ahead
        # columns are rows here, which are contiguous: (groups, inputs, outputs)
        target = layer.weight.mT.contiguous()[:, order]
        wanted = target - factors.shift(error.slope)  # before later columns compensate what was rounded
        starts = _starts(order, size)
        columns = order if size is None else order[starts]  # one for each scale of a row
        scale, zero_point = (values[:, :, columns].mT.contiguous() for values in (layer.scale, layer.zero_point))
        steps, errors, spec = torch.empty_like(target), torch.empty_like(target), _spec_of(layer)
        for i, (start, stop) in enumerate(zip(starts, [*starts[1:], len(order)], strict=True)):
            block = slice(start, stop)
            read = block if size is None else slice(i, i + 1)
            real = torch.baddbmm(wanted[:, block], ahead[:, block, :start], errors[:, :start])
            if size is not None:
                scale[:, i], zero_point[:, i] = block_grid(real, factors.importance[:, block], spec)
            step, zero = (values[:, read].expand_as(real) for values in (scale, zero_point))
            steps[:, block], errors[:, block] = round_block(
                target[:, block], real, step, layer.qmin - zero, layer.qmax - zero, ahead[:, block, block]
            )
        if size is not None:
            by_place = columns.argsort()
            scale, zero_point = (
                values[:, by_place].mT[:, :, :, None].expand(-1, -1, -1, size).flatten(2)[:, :, : len(order)]
                for values in (scale, zero_point)
            )
            layer = replace(layer, scale=scale, zero_point=zero_point)
        return layer, steps[:, order.argsort()].mT.contiguous().add_(layer.zero_point)

    def _factors(self, error: OutputError, size: int | None) -> _Factors:
        """Factors of the damped Hessian, with the columns in order; computed once for layers with the same inputs."""
        key = self, size, error.centred
        if key not in error.inputs.derived:
            diagonal = error.gram.diagonal(dim1=1, dim2=2)
            usual = diagonal.mean(1, keepdim=True)
            added = torch.where(usual > 0, self.damping * usual, 1.0)
            order = self._order((diagonal + added).sum(0), size)
            error.inputs.derived[key] = _Factors.of(error.gram, added, order)
        factors: _Factors = error.inputs.derived[key]
        return factors

    def _order(self, importance: Tensor, size: int | None) -> Tensor:
        """Order of the columns, by their importance, (K,). Blocks of `size` columns stay together."""
        if not self.ordered:
            return torch.arange(len(importance), device=importance.device)
        if size is None:
            return importance.argsort(descending=True, stable=True)
        blocks = [block + size * i for i, block in enumerate(_descending(importance.split(size)))]
        totals = torch.stack([part.sum() for part in importance.split(size)])
        return torch.cat([blocks[i] for i in totals.argsort(descending=True, stable=True).tolist()])


@dataclass(frozen=True)
class _Factors:
    """Factors of a Hessian, for columns in an order.

    Attributes:
        order: order of the columns, (K,).
        lower: Cholesky factor of the Hessian with the columns in reverse order, (G, K, K).
        ahead: how much a column (second axis) compensates the error of an earlier one, in order, (G, K, K).
        importance: error of the output for an error of 1 in a column that all later ones compensate, in order, (G, K).
    """

    order: Tensor
    lower: Tensor
    ahead: Tensor
    importance: Tensor

    @classmethod
    def of(cls, gram: Tensor, added: Tensor, order: Tensor) -> _Factors:
        """Factors of the Hessian, for columns in an order, (K,).

        Args:
            gram: mean product of each two inputs, (G, K, K).
            added: number that is added to its diagonal, (G, 1).
            order: the order, (K,).
        """
        last = order.flip(0)
        hessian = gram[:, last[:, None], last]
        hessian.diagonal(dim1=1, dim2=2).add_(added)
        lower = cholesky_factor(hessian)
        # The error is |U e|^2 with U = lower.mT, e in reverse order: a column meets the errors of earlier ones only.
        diagonal = lower.diagonal(dim1=1, dim2=2).flip(1)
        return cls(order, lower, lower.mT.flip(1, 2).div_(diagonal[:, :, None]), diagonal**2)

    def shift(self, slope: Tensor) -> Tensor:
        """Amount that an error with a slope, (G, R, K), subtracts from the columns in order, (G, K, R).

        The error with a change D of the weight, D H D' + 2 D slope', is |U D' + inverse(U') slope'|^2 and a constant.
        """
        rows = slope[:, :, self.order.flip(0)]
        solved = torch.linalg.solve_triangular(self.lower.mT, rows, upper=True, left=False).flip(2)
        return (solved / self.importance.sqrt()[:, None]).mT


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


_SQUARES = 7
"""Matrices of inputs by inputs in memory: products and their errors, as sums, damped and as means, and factors."""
_COPIES = 14
"""Tensors of the shape of a weight in memory: the weight, scales and zero points of each value, integers, errors."""
_GROUP = 128
"""Number of columns of a block, if the weight has no blocks."""
_TRUST_FACTORS = 1 / 4, 1.0, 4.0
"""Factors of `trust` that are tried. No smaller ones, since earlier layers were fitted to the held-out patches, too."""
_TRIAL_ROWS = 128
"""Number of rows of a weight on which the factors are tried; up to twice as many, since rows are evenly spaced."""
