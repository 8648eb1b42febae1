"""keep-small-values: keep layers in float whose grids would round most of their inputs to zero."""

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
from fxq.graph.query import submodule, unobserved
from fxq.graph.run import value_of
from fxq.graph.unit import calls_of, inputs_of, integer_sources, wanted_forms
from fxq.pipeline.context import Context
from fxq.pipeline.float_values import CachedFloatForm, LayerValues
from fxq.pipeline.samples import on_samples
from fxq.quant.dynamic_grid import DynamicGrid, Grid
from fxq.quant.histogram import zeros_in
from fxq.quant.observer_base import Observer
from fxq.recipe.pass_base import Pass, Stage
from fxq.rewriting.rewriter import Rewriter

MIN_CHECKED_BITS = 6
"""Bits below which a grid is not checked: it rounds many values to zero in any model, and the recipe asks for it."""
FEW_SAMPLES = 2
"""Maximum number of samples that a large model runs on."""


@dataclass(frozen=True)
class KeepSmallValues(Pass):
    """Keep a layer in float if most of its input would be rounded to zero, and if this would change its result.

    Before: edges with grids, and a layer whose input values are mostly smaller than half a step of the grid
    After: the same graph, with float plans for that layer and for the functions between it and the layers before
    Keeps: the graph.

    Squares and other powers are an example: their values span more orders of magnitude than 8 bits can represent, so
    that a few peaks remain among zeros. The pass counts the values that their grid rounds to zero. Exact zeros, as
    after a relu, do not count. Where histograms of all calibration data show that a layer loses few values,
    nothing is run. For other layers, also those whose observers have no histogram, the graph runs in float on a few
    recorded samples, or on the example if there are none.
    If a layer would lose too many values, it is run again without them. It stays on integers if its result hardly
    changes: the lost values are then as unimportant as the output of a closed gate.

    Args:
        most: share of the input that may be rounded to zero, 0 to 1. With normally distributed values it is about 0.01,
            with outputs of GELU or SiLU rarely more than 0.25.
        least: minimum SQNR of the layer's result without these values, in dB, as the median over its rows (vectors of
            channels). 20 dB is an error of a tenth, several times that of ordinary rounding to 8 bits.
        samples: about how many samples to run, at most `FEW_SAMPLES` of a large model: the share of small
            values hardly differs from sample to sample.
    """

    most: float = 0.5
    least: float = 20.0
    samples: int = 8

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {
        "most": (0.0, 1.0),
        "least": (-math.inf, math.inf),
        "samples": (1, math.inf),
    }
    name: ClassVar[str] = "keep-small-values"
    needs: ClassVar[Stage] = Stage.OBSERVED
    gives: ClassVar[Stage] = Stage.OBSERVED

    def run(self, rewriter: Rewriter[Context]) -> None:
        """Measure the losses of all layers, and write float plans for those that lose too much."""
        for node, loss in self._losses(rewriter).items():
            if loss.share > self.most and loss.sqnr < self.least:
                why = (
                    f"in {loss.bits} bits, {100 * loss.share:.0f} % of its nonzero inputs would become zero, which "
                    f"leaves its result at {loss.sqnr:.1f} dB"
                )
                between = integer_sources(rewriter.gm, node, lambda value: _is_light(rewriter.gm, value))
                rewriter.describe(node, plan=self._float(why))
                for light in between:
                    why = f"%{node.name} reads values of it that would mostly become zero in {loss.bits} bits"
                    rewriter.describe(light, plan=self._float(why))

    def _losses(self, rewriter: Rewriter[Context]) -> dict[fx.Node, _Loss]:
        """Loss of each layer on recorded samples, or on the example if the graph does not run on these."""
        context = rewriter.context

        def run(batches: Sequence[Batch]) -> dict[fx.Node, _Loss]:
            all_losses = {node: _Loss.of(rewriter.gm, node) for node in rewriter.nodes()}
            losses = {node: loss for node, loss in all_losses.items() if self._may_lose(rewriter.gm, loss)}
            floats = context.floats.of(rewriter.gm, context) if losses else LayerValues()
            for batch in batches if losses else ():
                with torch.no_grad(), seeded():
                    _Trial(rewriter.gm, batch, floats, losses, self.most).run()
            return losses

        return on_samples(context, min(self.samples, FEW_SAMPLES) if context.is_large else self.samples, run)

    def _may_lose(self, gm: fx.GraphModule, loss: _Loss) -> bool:
        """Whether more than `most` of a layer's inputs may become zero, by their observers."""
        shares = (_share_rounded_to_zero(gm, read, grid) for read, grid in loss.grids.items())
        return any(share is None or share > self.most for share in shares)

    def _float(self, why: str) -> Plan:
        fix = f'recipe.without_pass("{self.name}")'
        return Plan(Decision("float", "off the grid", why, fix, self.name), exact=True)


def _share_rounded_to_zero(gm: fx.GraphModule, read: fx.Node, grid: Grid) -> float | None:
    """Upper limit of the share of a value's nonzero elements that a grid rounds to zero, by observers.

    None: they do not tell. A value without an observer is a view or a concatenation of values that have one.
    """
    if isinstance(grid, DynamicGrid):
        return None
    largest, seen, todo = 0.0, {read}, [read]
    while todo:
        value = todo.pop()
        observer = submodule(gm, value)
        share = observer.share_up_to(grid.s / 2) if isinstance(observer, Observer) and observer.seen else None
        if share is not None:
            largest = max(largest, share)
            continue
        if not isinstance(observer, Observer) and not _has_all_elements(gm, value):
            return None
        todo += [part for part in value.all_input_nodes if part not in seen]
        seen.update(todo)
    return largest


def _has_all_elements(gm: fx.GraphModule, value: fx.Node) -> bool:
    """Whether a value has all elements of the values that its node reads, and no others."""
    ops = [call.op for call in calls_of(gm, value)]
    return bool(ops) and all(op.name in ("cat", "stack") or (op.traits.view and not op.traits.selects) for op in ops)


def _is_light(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node runs on integers and has no op with weights."""
    plan, calls = info(node).plan, calls_of(gm, node)
    light = bool(calls) and all(call.op.traits.weight is None for call in calls)
    return light and plan is not None and not plan.in_float


@dataclass
class _Loss:
    """Loss of a layer by input values that its grids round to zero.

    Attributes:
        grids: grid of each input, by the node that the layer reads.
        channels: axis of the channels in its result, counted from the end.
        seen: number of input values that are not zero.
        lost: number of these that a grid rounds to zero.
        rows: SQNR of the rows of its result without the lost values, in dB, float64, 1-d; of batches that lose many.
    """

    grids: dict[fx.Node, Grid] = field(default_factory=dict)
    channels: int | None = None
    seen: int = 0
    lost: int = 0
    rows: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, gm: fx.GraphModule, node: fx.Node) -> _Loss:
        """Empty loss of a node, with the grids that its ops with weights read. It has no grids if there are none."""
        loss, calls, wanted = cls(), calls_of(gm, node), wanted_forms(gm, node)
        for read in inputs_of(calls):
            traits, value = calls[read.call].op.traits, unobserved(gm, read.node)
            if read.role == "activation" and traits.weight is not None and value in wanted:
                edges = (edge for edge in info(value).edges if edge.form == wanted[value])
                grid = next((edge.qparams for edge in edges if edge.spec.bits >= MIN_CHECKED_BITS), None)
                if grid is not None:
                    loss.grids[read.node], loss.channels = grid, traits.channels
        return loss

    @property
    def share(self) -> float:
        """Share of the nonzero input values that become zero."""
        return self.lost / max(self.seen, 1)

    @property
    def sqnr(self) -> float:
        """Median SQNR of the rows, in dB; infinity if nothing was measured."""
        return float(torch.cat(self.rows).median()) if self.rows else torch.inf

    @property
    def bits(self) -> int:
        """Largest number of bits of the grids."""
        return max((grid.qmax - grid.qmin).bit_length() for grid in self.grids.values())


class _Trial(CachedFloatForm):
    """Run of the graph in float that also computes its layers without the values that their grids round to zero."""

    def __init__(
        self, gm: fx.GraphModule, batch: Batch, floats: LayerValues, losses: Mapping[fx.Node, _Loss], most: float
    ) -> None:
        super().__init__(gm, batch, floats, {read for node in losses for read in node.all_input_nodes})
        self._losses, self._most = losses, most

    def step(self, node: fx.Node) -> Any:
        """Run the next node if it is needed, and update the loss if it is a layer."""
        if node in self._losses:
            self._count(node, self._losses[node])
        return super().step(node)

    def _count(self, node: fx.Node, loss: _Loss) -> None:
        """Count the input values of a layer that become zero; if they are many, measure the error of its result."""
        seen, lost, masks = 0, 0, dict[fx.Node, Tensor]()
        for read, grid in loss.grids.items():
            x = self.values[read]
            step = grid.scale_of(x) if isinstance(grid, DynamicGrid) else grid.s
            masks[read] = x.abs() > 0.5 * step
            nonzero = x.numel() - zeros_in(x)
            seen, lost = seen + nonzero, lost + nonzero - (x.numel() - zeros_in(masks[read]))
        loss.seen, loss.lost = loss.seen + seen, loss.lost + lost
        if lost > self._most * seen:
            rounded = {**self.values, **{read: self.values[read] * mask for read, mask in masks.items()}}
            wants, gots = (tensors(value_of(self.gm, node, values)) for values in (self.values, rounded))
            loss.rows += [_sqnr_of_rows(*pair, loss.channels) for pair in zip(wants, gots, strict=True)]


def _sqnr_of_rows(value: Tensor, other: Tensor, channels: int | None) -> Tensor:
    """SQNR of each vector of channels of a tensor, in dB, float64, 1-d; infinity if nothing differs."""
    axes = channels if channels is not None and value.dim() >= -channels else tuple(range(value.dim()))
    noise = (value - other).double().square().sum(axes)
    signal = value.double().square().sum(axes)
    return torch.where(noise > 0, 10 * torch.log10(signal / noise), torch.inf).flatten()
