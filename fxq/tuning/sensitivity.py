"""Which layers of a model its output suffers from when they run on integers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, ClassVar

from fxq.display.queryable import Rows, decibels, layer_text
from fxq.display.tables import Column, Part, text
from fxq.ledger.output_check import rank
from fxq.recipe.recipe import Recipe
from fxq.tuning.trials import Trials
from fxq.tuning.tunable_layer import TunableLayer, layers_of
from fxq.workflow.steps import converted


@dataclass(frozen=True)
class LayerSensitivity:
    """What one layer on integers costs the output, and what it would cost in float.

    Attributes:
        name: the op that the ledger calls it by. path: its module path. op: what it is, with what is fused behind it.
        sqnr: dB of the model's output against the float model's when this layer alone runs on integers.
        share: of the noise in the output that all layers make one by one, 0 to 1.
        macs: multiply-accumulates, for the batch that shapes were found with.
        extra_us: measured microseconds that it takes more in float, conversions counted; None where nothing was
            measured. Below zero where float is faster.
        line: the line of a recipe that puts it into float, as Python.
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
    """What `fxq.sensitivity` found: one row per layer that runs on integers, the worst first. `print` shows a table.

    Attributes:
        entries: the rows.
        output_sqnr: dB of the output when all of them run on integers.
        batches: number of batches that they were judged on.
    """

    entries: tuple[LayerSensitivity, ...]
    output_sqnr: float
    batches: int
    _name: ClassVar[str] = "sensitivity"
    _key: ClassVar[str] = "layers"

    def tables(self) -> dict[str, Rows[Any]]:
        """The tables that a report shows: `qmodel.report(path, tuning=...)`."""
        return {"sensitivity": self}

    def _facts(self) -> dict[str, Any]:
        return {"output_sqnr": self.output_sqnr, "batches": self.batches}

    def _short(self) -> str:
        worst = min(self.entries, key=lambda e: rank(e.sqnr), default=None)
        most = f"; most of the error is from {layer_text(worst.name, worst.path)}" if worst is not None else ""
        layers = f"{len(self)} layer{'' if len(self) == 1 else 's'} on integers"
        return f"{layers}, the output at {decibels(self.output_sqnr)} dB with all of them{most}"

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


def alone(layer: TunableLayer, layers: Sequence[TunableLayer], recipe: Recipe) -> Recipe:
    """A recipe with all layers but one in float."""
    for other in layers:
        if other is not layer:
            recipe = other.in_float(recipe)
    return recipe


def ranked(
    trials: Trials, executor: Executor | None, advance: Callable[[], None]
) -> tuple[Sensitivity, list[TunableLayer]]:
    """The layers of a calibrated model, the one that costs its output most first.

    Each layer is tried with all others in float: the noise of one layer is then not lost in that of the others, as it
    would be were it alone in float. The noise of independent roundings adds up, so that the order is also that in
    which layers are best put into float.

    Args:
        trials: the calibrated model, without a metric.
        executor: where candidates are judged; None: here.
        advance: is called for every candidate, of which there are as many as layers, and one.

    Returns:
        The table, and the layers in execution order.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong with this model is what is being found out
        ledger = converted(trials.observed, trials.recipe).ledger
    layers = layers_of(trials.candidate(trials.recipe), ledger)
    recipes = [trials.recipe, *(alone(layer, layers, trials.recipe) for layer in layers)]
    together, *found = trials.scores(recipes, executor, advance)
    noises = [math.inf if math.isnan(sqnr) else 10 ** (-sqnr / 10) for sqnr in found]
    total = sum(noises)
    shares = [0.0 if not total else noise / total if total < math.inf else float(noise == math.inf) for noise in noises]
    rows = [
        LayerSensitivity(e.name, e.path, e.op, sqnr, share, e.macs, e.extra_us, e.line)
        for e, sqnr, share in zip(layers, found, shares, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda i: rank(rows[i].sqnr))
    table = Sensitivity(tuple(rows[i] for i in order), together, len(trials.batches))
    return table, layers
