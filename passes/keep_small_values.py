"""keep-small-values: layers whose grids would make zeros of most of what they read stay in float."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.common.data import Batch
from fxq.common.isolation import seeded
from fxq.common.metrics import tensors
from fxq.graph.info import Decision, Plan, info
from fxq.graph.query import unobserved
from fxq.graph.run import value_of
from fxq.graph.unit import calls_of, inputs_of, integer_sources, wanted_forms
from fxq.pipeline.context import Context
from fxq.pipeline.float_values import CachedFloatForm, LayerValues
from fxq.pipeline.samples import on_samples
from fxq.quant.dynamic_grid import DynamicGrid
from fxq.quant.qparams import QParams
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter

Grid = QParams | DynamicGrid

FEW = 8
"""Samples that are looked at, if so many are recorded: shares of values hardly differ from sample to sample."""
COARSE = 6
"""Bits below which a grid makes zeros of many values of any kind: who asks for that gets it."""


@dataclass(frozen=True)
class KeepSmallValues(Pass):
    """Leave a layer in float where most of the values that it reads would become zero on their grid, and it needs them.

    Before: edges with grids, and a layer that reads values of which most are smaller than half a step
    After: the same graph, where the plans of that layer, and of the functions between it and those before, say float
    Keeps: the graph.

    Powers, for one, differ by more than 8 bits can tell apart: on any scale, they are a few peaks among zeros. The
    graph runs in float on a few recorded samples, or where none are recorded on the example, and values are counted
    that their grid rounds to zero. Exact zeros, as behind a relu, are not: they stay what they are. A layer that would
    lose too many is run again without them. Where its result is hardly another one, they were no more than what a gate
    lets through when it is closed.

    Attributes:
        most: the share of what a layer reads that may become zero. Of normally distributed values it is about a
            hundredth, of what GELU or SiLU leave of them rarely more than a quarter.
        least: dB. SQNR that a layer's result has to keep without these values in half of its rows, the vectors of its
            channels: 20 dB is an error of a tenth, several times that of ordinary rounding to 8 bits.
    """

    most: float = 0.5
    least: float = 20.0

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"most": (0.0, 1.0), "least": (-math.inf, math.inf)}
    name: ClassVar[str] = "keep-small-values"
    needs: ClassVar[Stage] = Stage.OBSERVED
    gives: ClassVar[Stage] = Stage.OBSERVED

    def run(self, rewriter: Rewriter) -> None:
        """Find out what layers would lose, and write the plans of those that would lose too much."""
        for node, loss in self._losses(rewriter).items():
            if loss.share > self.most and loss.sqnr < self.least:
                why = (
                    f"in {loss.bits} bits, {100 * loss.share:.0f} % of what it reads would become zero (zeros not "
                    f"counted), and leave its result at {loss.sqnr:.1f} dB"
                )
                between = integer_sources(rewriter.gm, node, lambda value: _is_light(rewriter.gm, value))
                rewriter.describe(node, plan=self._float(why))
                for light in between:
                    why = f"%{node.name} reads of it what would mostly become zero in {loss.bits} bits"
                    rewriter.describe(light, plan=self._float(why))

    def _losses(self, rewriter: Rewriter) -> dict[fx.Node, _Loss]:
        """What each layer would lose on the samples; on the example where it does not run on samples."""
        context: Context = rewriter.context

        def run(batches: Sequence[Batch]) -> dict[fx.Node, _Loss]:
            all_losses = {node: _Loss.of(rewriter.gm, node) for node in rewriter.nodes()}
            losses = {node: loss for node, loss in all_losses.items() if loss.grids}
            floats = context.floats.of(rewriter.gm, context) if losses else LayerValues()
            for batch in batches if losses else ():
                with torch.no_grad(), seeded():
                    _Trial(rewriter.gm, batch, floats, losses, self.most).run()
            return losses

        return on_samples(context, FEW, run)

    def _float(self, why: str) -> Plan:
        fix = f'recipe.without_pass("{self.name}")'
        return Plan(Decision("float", "off the grid", why, fix, self.name), exact=True)


def _is_light(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node that runs on integers has no layer in it."""
    plan, calls = info(node).plan, calls_of(gm, node)
    light = bool(calls) and all(call.op.traits.weight is None for call in calls)
    return light and plan is not None and not plan.in_float


@dataclass
class _Loss:
    """What a layer loses by what its grids make zero.

    Attributes:
        grids: those of the values that it reads, by the node that it reads each from.
        channels: the axis of the channels in its result, counted from the end.
        seen: how many values were not zero.
        lost: how many of these a grid makes zero.
        rows: dB, float64: SQNR of the rows of its result without these values, where they were too many.
    """

    grids: dict[fx.Node, Grid] = field(default_factory=dict)
    channels: int | None = None
    seen: int = 0
    lost: int = 0
    rows: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, gm: fx.GraphModule, node: fx.Node) -> _Loss:
        """Nothing yet, of the values that ops with weights read; without grids where the node has none."""
        made, calls, wishes = cls(), calls_of(gm, node), wanted_forms(gm, node)
        for read in inputs_of(calls):
            quant, value = calls[read.call].op.traits, unobserved(gm, read.node)
            if read.role == "activation" and quant.weight is not None and value in wishes:
                edges = (edge for edge in info(value).edges if (edge.spec, edge.axis) == wishes[value])
                grid = next((edge.qparams for edge in edges if edge.spec.bits >= COARSE), None)
                if grid is not None:
                    made.grids[read.node], made.channels = grid, quant.channels
        return made

    @property
    def share(self) -> float:
        """How much of what is not zero becomes zero."""
        return self.lost / max(self.seen, 1)

    @property
    def sqnr(self) -> float:
        """dB that half of the rows have left, or less."""
        return float(torch.cat(self.rows).median()) if self.rows else torch.inf

    @property
    def bits(self) -> int:
        """Of the grids."""
        return max((grid.qmax - grid.qmin).bit_length() for grid in self.grids.values())


class _Trial(CachedFloatForm):
    """Runs the graph on a batch in float, and its layers once more without the values that their grids make zero."""

    def __init__(
        self, gm: fx.GraphModule, batch: Batch, floats: LayerValues, losses: Mapping[fx.Node, _Loss], most: float
    ) -> None:
        super().__init__(gm, batch, floats, {read for node in losses for read in node.all_input_nodes})
        self._losses, self._most = losses, most

    def step(self, node: fx.Node) -> Any:
        """Run the next node if it is needed, and count the losses of its layer."""
        if node in self._losses:
            self._count(node, self._losses[node])
        return super().step(node)

    def _count(self, node: fx.Node, loss: _Loss) -> None:
        """Measure the error of a layer that quantization of its inputs causes."""
        seen, lost, left = 0, 0, dict(self.values)
        for read, grid in loss.grids.items():
            x = self.values[read]
            step = grid.scale_of(x) if isinstance(grid, DynamicGrid) else grid.s
            kept = x.abs() > 0.5 * step
            nonzero = int(x.count_nonzero())
            seen, lost = seen + nonzero, lost + nonzero - int(kept.count_nonzero())
            left[read] = x * kept
        loss.seen, loss.lost = loss.seen + seen, loss.lost + lost
        if lost > self._most * seen:
            wants, gots = (tensors(value_of(self.gm, node, values)) for values in (self.values, left))
            loss.rows += [_sqnr_of_rows(*pair, loss.channels) for pair in zip(wants, gots, strict=True)]


def _sqnr_of_rows(value: Tensor, other: Tensor, channels: int | None) -> Tensor:
    """SQNR in dB of each vector of channels of a tensor, float64, 1-d: infinity where nothing differs."""
    axes = channels if channels is not None and value.dim() >= -channels else tuple(range(value.dim()))
    noise = (value - other).double().square().sum(axes)
    signal = value.double().square().sum(axes)
    return torch.where(noise > 0, 10 * torch.log10(signal / noise), torch.inf).flatten()
