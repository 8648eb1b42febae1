"""Ranking of the layers of a model by the error that quantizing each one adds to the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, ClassVar

from fxq.display.queryable import Rows, decibels, layer_text
from fxq.display.tables import Column, Part, text
from fxq.ledger.output_check import rank
from fxq.recipe.recipe import Recipe
from fxq.tuning.trials import Trials
from fxq.tuning.tunable_layer import TunableLayer


@dataclass(frozen=True)
class LayerSensitivity:
    """Output error that one quantized layer adds, and its cost in float.

    Attributes:
        name: name of the layer's op in the ledger. path: its module path. op: its kind, with the ops fused after it.
        sqnr: dB of the model's output against the float model's when only this layer runs on integers.
        share: its share, 0 to 1, of the sum of the noise of all layers.
        macs: multiply-accumulates for the example batch.
        extra_us: measured microseconds that it takes more in float than on integers, with conversions; None if nothing
            was measured. Negative if float is faster.
        line: line of a recipe that sets it to float, as Python.
    """

    name: str
    path: str
    op: str
    sqnr: float
    share: float
    macs: int
    extra_us: float | None
    line: str


@dataclass(frozen=True, repr=False)
class Sensitivity(Rows[LayerSensitivity]):
    """Result of `fxq.sensitivity`: one row per layer that runs on integers, the worst first. `print` shows a table.

    Attributes:
        entries: the rows.
        output_sqnr: dB of the output when all layers run on integers.
        batches: number of batches of the data.
    """

    entries: tuple[LayerSensitivity, ...]
    output_sqnr: float
    batches: int
    _name: ClassVar[str] = "sensitivity"
    _key: ClassVar[str] = "layers"

    def tables(self) -> dict[str, Rows[Any]]:
        """Return the tables that a report shows: `qmodel.report(path, tuning=...)`."""
        return {"sensitivity": self}

    def _facts(self) -> dict[str, Any]:
        return {"output_sqnr": self.output_sqnr, "batches": self.batches}

    def _short(self) -> str:
        worst = min(self.entries, key=lambda e: rank(e.sqnr), default=None)
        source = f"; most of the error is from {layer_text(worst.name, worst.path)}" if worst is not None else ""
        layers = f"{len(self)} layer{'' if len(self) == 1 else 's'} on integers"
        return f"{layers}, the output at {decibels(self.output_sqnr)} dB with all of them{source}"

    def _parts(self) -> list[Part]:
        return [self._table(_COLUMNS), text(self._short())]


_COLUMNS: dict[Column, Callable[[LayerSensitivity], str]] = {
    Column("layer", give="start"): lambda e: layer_text(e.name, e.path),
    Column("op"): lambda e: e.op,
    Column("alone dB", "right"): lambda e: decibels(e.sqnr),
    Column("of the noise", "right"): lambda e: f"{e.share:.1%}",
    Column("MACs", "right", drop=1): lambda e: f"{e.macs:,}" if e.macs else "",
    Column("float costs µs", "right", optional=True): lambda e: "" if e.extra_us is None else f"{e.extra_us:+.0f}",
}


def with_one_quantized(layer: TunableLayer, layers: Sequence[TunableLayer], recipe: Recipe) -> Recipe:
    """Return a recipe with all layers except `layer` in float."""
    for float_layer in layers:
        if float_layer is not layer:
            recipe = float_layer.in_float(recipe)
    return recipe


def ranked(
    trials: Trials, executor: Executor | None, advance: Callable[[], None]
) -> tuple[Sensitivity, list[TunableLayer]]:
    """Rank the layers of a calibrated model by the error that quantizing each one adds.

    Each layer is quantized with all others in float, so that its noise is not hidden by theirs. The noise of
    independent roundings adds up, so this is also the best order in which to set layers to float.

    Args:
        trials: the calibrated model, without a metric.
        executor: executor that evaluates candidates; None: this process.
        advance: called after each candidate: one for all layers quantized, and one per layer.

    Returns:
        The table, and the layers in execution order.
    """
    layers = trials.layers(trials.recipe, trials.ledger())
    recipes = [trials.recipe, *(with_one_quantized(layer, layers, trials.recipe) for layer in layers)]
    together, *sqnrs = trials.scores(recipes, executor, advance)
    noises = [math.inf if math.isnan(sqnr) else 10 ** (-sqnr / 10) for sqnr in sqnrs]
    total = sum(noises)
    shares = [0.0 if not total else noise / total if total < math.inf else float(noise == math.inf) for noise in noises]
    rows = [
        LayerSensitivity(e.name, e.path, e.op, sqnr, share, e.macs, e.extra_us, e.line)
        for e, sqnr, share in zip(layers, sqnrs, shares, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda i: rank(rows[i].sqnr))
    table = Sensitivity(tuple(rows[i] for i in order), together, len(trials.batches))
    return table, layers
