"""Binary search for the layer of a quantized model that causes most of the output error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxq.common.data import Batch, naming_batch
from fxq.common.isolation import seeded, without_autocast
from fxq.common.metrics import Agreement
from fxq.display.queryable import Rows, decibels, layer_text
from fxq.display.tables import Column, Part, text
from fxq.errors import InputError
from fxq.graph.precision import EntryPrecision
from fxq.graph.program import IsolatedGraph
from fxq.ledger.comparison import Baseline
from fxq.ledger.layer_error import same_values
from fxq.ledger.ledger import rows_by_node
from fxq.ledger.output_check import add_output, rank
from fxq.ledger.quantized import Quantized
from fxq.paired.side_by_side import corrected

HALF_NOISE_DB = 3.0
"""Increase of the SQNR, in dB, when half of the noise is removed."""


@dataclass(frozen=True)
class BisectionStep:
    """Step of the search: the output when a layer and all layers before it are exact.

    Attributes:
        name: name of the layer in the ledger. path: its module path. op: its kind.
        precision: its precision.
        sqnr: dB of the output against the float model's when these layers are exact.
        position: number of exact layers.
    """

    name: str
    path: str
    op: str
    precision: EntryPrecision
    sqnr: float
    position: int


@dataclass(frozen=True, repr=False)
class Bisection(Rows[BisectionStep]):
    """Result of `fxq.bisect`: the steps of the search, in the order of the layers. `print` shows a table.

    Attributes:
        entries: one row per step.
        layer: the first layer for which half of the output's noise is gone when it and all layers before it are exact;
            None if the output has no error.
        before: dB of the output when all layers before it are exact.
        after: dB of the output when it is exact, too. The difference is the loss by this layer alone.
        output_sqnr: dB of the output when no layer is exact.
        remedy: line of a recipe that removes the layer's noise, as Python; empty if there is none.
    """

    entries: tuple[BisectionStep, ...]
    layer: BisectionStep | None
    before: float
    after: float
    output_sqnr: float
    remedy: str = ""
    _name: ClassVar[str] = "bisection"
    _key: ClassVar[str] = "probes"

    def _facts(self) -> dict[str, Any]:
        name = self.layer.name if self.layer is not None else None
        keys = ("before", "after", "output_sqnr", "remedy")
        return {"layer": name, **{key: getattr(self, key) for key in keys}}

    def _short(self) -> str:
        if self.layer is None:
            return "the output has no error"
        layer = layer_text(self.layer.name, self.layer.path)
        return (
            f"{layer} ({self.layer.op}): the output is at {decibels(self.before)} dB when all before it is exact, "
            f"and at {decibels(self.after)} dB when it is exact, too; at {decibels(self.output_sqnr)} dB as it is"
        )

    def _parts(self) -> list[Part]:
        remedy = [text(self.remedy)] if self.remedy else []
        return [self._table(_COLUMNS), text(self._short()), *remedy]


_COLUMNS: dict[Column, Callable[[BisectionStep], str]] = {
    Column("exact up to", give="start"): lambda e: layer_text(e.name, e.path),
    Column("op"): lambda e: e.op,
    Column("runs as", coloured=True): lambda e: e.precision,
    Column("output dB", "right"): lambda e: decibels(e.sqnr),
}


def blamed(
    reference: Baseline, model: Quantized, batches: Sequence[Batch], advance: Callable[[], None] = lambda: None
) -> Bisection:
    """Find the first layer for which half of the output's noise is gone when all layers up to it are exact.

    Args:
        reference: the float model.
        model: the quantized model.
        batches: the data. Both models run on all of it in each of about log2(number of layers) steps.
        advance: called after each step.

    Raises:
        InputError: the models return no float tensors to compare.
    """
    rows = rows_by_node(model.ledger)
    pairs = {**same_values(model, rows, reference.nodes), model.graph.output_node(): reference.output}
    layers = [node for node in model.graph.nodes if node in pairs and node.op != "output"]
    sqnrs: dict[int, float] = {}

    def probe(count: int) -> float:
        if count not in sqnrs:
            sqnrs[count] = _output(reference.program, IsolatedGraph(model, model.graph), pairs, batches, layers[:count])
            advance()
        return sqnrs[count]

    whole = probe(0)
    low, high = 0, len(layers)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rank(probe(middle)) >= rank(whole) + HALF_NOISE_DB else (middle, high)
    if whole == float("inf") or not layers:
        return Bisection((), None, whole, whole, whole)
    before, after = probe(high - 1), probe(high)
    probes = {i: _probe(rows[layers[i - 1].name].row, sqnrs[i], i) for i in sorted(sqnrs) if i}
    return Bisection(tuple(probes.values()), probes[high], before, after, whole, rows[layers[high - 1].name].row.remedy)


def _probe(row: Any, sqnr: float, position: int) -> BisectionStep:
    return BisectionStep(row.name, row.path, row.op, row.precision, sqnr, position)


def _output(
    reference: IsolatedGraph,
    compared: IsolatedGraph,
    pairs: dict[fx.Node, fx.Node],
    batches: Sequence[Batch],
    exact: Sequence[fx.Node],
) -> float:
    """Return dB of the output over all data when some layers are exact, the minimum over outputs."""
    outputs: dict[int, Agreement] = {}
    with torch.no_grad(), without_autocast(), seeded():
        for i, batch in enumerate(batches):
            with naming_batch(i, batch):
                value = corrected(reference, compared, pairs, batch, exact)
            for place, (want, got) in enumerate(zip(value.want, value.got, strict=True) if value is not None else ()):
                add_output(outputs, place, want, got)
    if not outputs:
        raise InputError("the models cannot be compared: they return no float tensor.")
    return min((output.sqnr for output in outputs.values()), key=rank)
