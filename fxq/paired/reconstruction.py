"""Choice of integer weights layer by layer, so that the output of each layer is close to its float output."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxq.common.ranks import Ranks
from fxq.graph.query import read_attribute
from fxq.paired.integer_layers import IntegerLayer
from fxq.paired.layer_fit import LayerFit, LayerInputs, note
from fxq.paired.output_error import OutputError, WeightRows
from fxq.paired.paired_run import PairedRun
from fxq.pipeline.context import Context
from fxq.rewriting.rewriter import Rewriter


@dataclass(frozen=True)
class Reconstruction(LayerFit):
    """Base of the passes that choose the integers of weights by the error of each layer's output on recorded samples.

    It visits the layers as `LayerFit` does. A subclass implements `choose`, which returns the integers. A channel keeps
    its old integers if the new ones are not better. An embedding that shares the weight gets the integers, too, so that
    it is stored once. If correct-bias removes the mean error of a layer later, it does not count here, and the
    following layers run without it.

    If several processes work together (`Context.ranks`), each chooses the integers of its share of a weight's rows.

    Weights with per-channel scales also get new scales: before `choose` those of least error with rounding to nearest,
    afterwards those that fit the chosen integers best. `choose` itself may change scales and zero points of blocks.

    Args:
        samples: number of recorded samples to use.
        trust: weight of the float weight in the fit, as a number of patches for each input of the weight. It prevents
            that few patches determine integers that are wrong for other data.
        scales: whether to fit per-channel scales as well.
    """

    scales: bool = True

    @abstractmethod
    def choose(self, layer: WeightRows, error: OutputError) -> tuple[WeightRows, Tensor]:
        """Choose the integers of a layer's weight: whole numbers in float32, (G, R, K), with their grid."""

    def trust_in(self, layer: WeightRows, fit: OutputError, held_out: OutputError) -> float:
        """Choose the weight of the float weight in the fit of a layer.

        Args:
            layer: weight and grid.
            fit: error on the first part of each batch.
            held_out: error on the rest; there are none unless the pass `holds_out`.
        """
        return self.trust

    def fit(self, rewriter: Rewriter[Context], layer: IntegerLayer, runs: PairedRun, inputs: LayerInputs) -> None:
        """Choose the integers of a layer and write them, if any channel has less error."""
        grid, form, ranks = layer.on_rows(), layer.form, rewriter.context.ranks
        is_corrected = inputs.fit.count + inputs.held_out.count >= _least_values(rewriter.context)
        bias = layer.bias if is_corrected else None
        fit, held_out = (
            OutputError(part, grid.weight, centred=bias is not None) for part in (inputs.fit, inputs.held_out)
        )
        if not inputs.fit.is_finite or not inputs.held_out.is_finite:
            for node in layer.weight.users:
                note(rewriter, node, f"{self.name} leaves its integers: its inputs are too large, or not finite")
            return
        trusted = inputs.trusting(self.trust_in(grid, fit, held_out))
        old, rows = form.rows(layer.integers(rewriter.gm)), ranks.slice_of(grid.weight.shape[1])
        error = OutputError(trusted, grid.weight[:, rows], fit.centred, rows)
        own = self._better(grid.some_rows(rows), old[:, rows], error, self.scales and layer.has_channel_scales)
        new_grid, new = gathered(ranks, grid, *own, f"{self}: weight of {layer.label}")
        if bias is not None:
            shift = OutputError(trusted, grid.weight).shift(new_grid.real(new)).flatten()
            runs.compared.put(bias, read_attribute(rewriter.gm, str(bias.target)) + shift)
        changed = {
            name: layer.per_scale(form.weight(getattr(new_grid, name)))
            for name in ("scale", "zero_point")
            if not torch.equal(getattr(new_grid, name), getattr(grid, name))
        }
        if changed or not torch.equal(new, old):
            with rewriter.attributed(self.name.replace("-", "_"), type(self)):
                layer.put(rewriter, form.weight(new), changed)
            runs.compared.put(layer.weight, form.weight(new_grid.real(new)))

    def _better(
        self, grid: WeightRows, old: Tensor, error: OutputError, fits_scales: bool
    ) -> tuple[WeightRows, Tensor]:
        """Grid and integers of some rows, chosen anew where that lowers the error, else as before.

        Args:
            grid: weight and grid of the rows.
            old: integers of the rows before, (G, R, K).
            error: error of their outputs.
            fits_scales: whether to fit per-channel scales.
        """
        if not old.numel():
            return grid, old
        new_grid, new = self.choose(grid.rescaled(error) if fits_scales else grid, error)
        new_grid = new_grid.fitted(new, error) if fits_scales else new_grid
        better = (error(new_grid.real(new), grid.real(old)) < 0)[:, :, None]
        scale, zero_point = (
            torch.where(better, a, b) for a, b in ((new_grid.scale, grid.scale), (new_grid.zero_point, grid.zero_point))
        )
        return replace(grid, scale=scale, zero_point=zero_point), torch.where(better, new, old)


def gathered(
    ranks: Ranks, grid: WeightRows, own: WeightRows, integers: Tensor, about: str
) -> tuple[WeightRows, Tensor]:
    """Grid and integers of a weight, of which each process has chosen some rows, see `Ranks.slice_of`.

    Args:
        ranks: the processes.
        grid: weight and grid of all rows before.
        own: grid of the rows of this process.
        integers: integers of these rows, (G, R, K).
        about: description of the weight, equal in all processes.
    """
    if ranks.size == 1:
        return own, integers
    step = grid.block or (grid.weight.shape[2] if _is_by_row(grid) else 1)

    def chosen() -> list[Tensor]:
        return [(integers - grid.qmin).to(torch.uint8), own.scale[:, :, ::step], own.zero_point[:, :, ::step]]

    parts = zip(*ranks.exchanged(chosen, str(integers.device), about), strict=True)
    whole, scale, zero_point = (torch.cat(of_rank, 1) for of_rank in parts)
    scale, zero_point = (t.repeat_interleave(step, 2)[:, :, : whole.shape[2]] for t in (scale, zero_point))
    return replace(grid, scale=scale, zero_point=zero_point), whole.float() + grid.qmin


def _is_by_row(grid: WeightRows) -> bool:
    """Whether all values of a row have one scale and one zero point."""
    return all(torch.equal(t, t[:, :, :1].expand_as(t)) for t in (grid.scale, grid.zero_point))


def _least_values(context: Context) -> float:
    """Number of values per channel from which correct-bias corrects a layer; infinite without that pass."""
    steps = {step.name: step for step in context.recipe.pipeline}
    least: float = steps["correct-bias"].options.get("least", 0) if "correct-bias" in steps else math.inf
    return least
