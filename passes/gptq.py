"""gptq: round weights one input at a time, and compensate the error in the inputs that follow. Optional."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxq.paired.reconstruction import IntegerLayer, OutputError, Reconstruction, WeightRows
from fxq.pipeline.context import Context
from fxq.recipe.pass_base import Stage
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Gptq(Reconstruction):
    """Round the weight of each layer one input at a time; the float weights of the later inputs compensate the error.

    Before: linear(x, dequantize(w_int4))    After: linear(x, dequantize(w_int4')), with less error in the output
    Keeps: the grids of the weights, except for per-channel scales, which may be fitted again (`scales`). A channel
    keeps its integers if its error does not become smaller.

    The error is that of the layer's output on the recorded samples; its Hessian is the Gram matrix of the inputs.
    `Recipe.weight_only` has it for weights of 4 bits or fewer, if there is data. To set its options, or in another
    recipe, insert it after insert-qdq: `recipe.insert_pass(fxq.passes.Gptq(), after="smooth")`. Needs data.
    Source: Frantar et al. 2022 (arXiv 2210.17323), algorithm 1. Inputs are from the partly quantized graph, outputs
    from the float graph: Li et al. 2025 (arXiv 2504.02692).

    Args:
        samples: number of recorded samples to use.
        trust: weight of the float weight in the fit where there are few patches, see `Reconstruction`.
        scales: whether to fit per-channel scales as well.
        damping: what is added to the diagonal of the Hessian, relative to its mean. More damping trusts the data less.
        max_bits: maximum number of bits of the weights that are chosen; others stay as they are.
        needs_data: whether missing data is an error; else nothing changes without data.
        ordered: whether to round the inputs with the largest values first, while most others can still compensate.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
        >>> recipe = fxq.Recipe.weight_only(bits=4)
        >>> qmodel = fxq.quantize(model, recipe, data=[torch.rand(16, 64) for _ in range(4)])
        >>> [entry.rule for entry in qmodel.history["gptq"].edits]
        ['gptq', 'gptq']
    """

    damping: float = 0.01
    ordered: bool = True
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

    def run(self, rewriter: Rewriter[Context]) -> None:
        if self.needs_data or rewriter.context.samples:
            super().run(rewriter)

    def takes(self, layer: IntegerLayer) -> bool:
        return layer.grid.bits <= self.max_bits

    def choose(self, layer: WeightRows, error: OutputError) -> Tensor:
        """Integers of a weight, (groups, outputs, inputs), rounded column by column."""
        gram, count = error.gram, layer.weight.shape[2]
        usual = gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        gram = gram + torch.where(usual > 0, self.damping * usual, 1.0) * torch.eye(count, device=gram.device)
        order = gram.diagonal(dim1=1, dim2=2).sum(0).argsort(descending=True, stable=True)
        order = order if self.ordered else torch.arange(count, device=gram.device)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
        real = layer.weight + (error.cross.mT - layer.weight @ error.gram) @ inverse  # the float weight of least error
        ahead = torch.linalg.cholesky(inverse[:, order][:, :, order], upper=True)
        remaining = real[:, :, order].clone()
        scale, zero_point = layer.scale[:, :, order], layer.zero_point[:, :, order]
        chosen = torch.empty_like(remaining)
        for start in range(0, count, _GROUP):
            stop = min(start + _GROUP, count)
            errors = torch.empty_like(remaining[:, :, start:stop])
            for i in range(start, stop):
                w, s, z = remaining[:, :, i], scale[:, :, i], zero_point[:, :, i]
                q = ((w / s).round_() + z).clamp_(layer.qmin, layer.qmax)
                e = (w - (q - z) * s) / ahead[:, None, i, i]
                remaining[:, :, i:stop] -= e[:, :, None] * ahead[:, None, i, i:stop]
                chosen[:, :, i], errors[:, :, i - start] = q, e
            remaining[:, :, stop:] -= errors @ ahead[:, start:stop, stop:]
        return chosen[:, :, order.argsort()]


_GROUP = 128
"""Number of columns after which the errors are propagated to all later columns."""
