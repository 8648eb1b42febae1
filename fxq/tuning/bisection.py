"""The first layer of a quantized model whose own error is to blame for that of the output."""

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
from fxq.graph.program import IsolatedGraph
from fxq.ledger.comparison import Baseline
from fxq.ledger.layer_error import same_values
from fxq.ledger.ledger import rows_by_node
from fxq.ledger.output_check import add_output, rank
from fxq.ledger.quantized import Quantized
from fxq.paired.side_by_side import corrected

HALF = 3.0
"""dB: with half of the noise gone, the output is so much better."""


@dataclass(frozen=True)
class BisectionStep:
    """The output when all layers up to one make no error.

    Attributes:
        name: the last of them, as the ledger calls it. path: its module path. op: what it is.
        precision: what it runs as.
        sqnr: dB of the output against the float model's, when it and all layers before it are exact.
        position: how many layers are exact.
    """

    name: str
    path: str
    op: str
    precision: str
    sqnr: float
    position: int


@dataclass(frozen=True, repr=False)
class Bisection(Rows[BisectionStep]):
    """What `fxq.bisect` found: the probes, in the order of the layers. `print` shows a table.

    Attributes:
        entries: one row for each layer up to which all were made exact.
        layer: the first layer up to which all have to be exact for half of the noise to go; None where the output has
            no error.
        before: dB of the output when all layers in front of it are exact, and it is not.
        after: dB when it is exact as well: what it loses alone is the difference.
        output_sqnr: dB of the output as it is.
        mend: the line of a recipe that takes its noise away, as Python; empty where there is none.
    """

    entries: tuple[BisectionStep, ...]
    layer: BisectionStep | None
    before: float
    after: float
    output_sqnr: float
    mend: str = ""
    _name: ClassVar[str] = "bisection"
    _key: ClassVar[str] = "probes"

    def _facts(self) -> dict[str, Any]:
        name = self.layer.name if self.layer is not None else None
        known = ("before", "after", "output_sqnr", "mend")
        return {"layer": name, **{key: getattr(self, key) for key in known}}

    def _short(self) -> str:
        if self.layer is None:
            return "the output has no error"
        layer = layer_text(self.layer.name, self.layer.path)
        return (
            f"{layer} ({self.layer.op}): the output is at {decibels(self.before)} dB when all before it is exact, "
            f"and at {decibels(self.after)} dB when it is exact, too; at {decibels(self.output_sqnr)} dB as it is"
        )

    def _parts(self) -> list[Part]:
        mend = [text(self.mend)] if self.mend else []
        return [self._table(_COLUMNS), text(self._short()), *mend]


_COLUMNS: dict[Column, Callable[[BisectionStep], str]] = {
    Column("exact up to", give="start"): lambda e: layer_text(e.name, e.path),
    Column("op"): lambda e: e.op,
    Column("runs as", coloured=True): lambda e: e.precision,
    Column("output dB", "right"): lambda e: decibels(e.sqnr),
}


def blamed(
    reference: Baseline, model: Quantized, batches: Sequence[Batch], advance: Callable[[], None] = lambda: None
) -> Bisection:
    """Find the layer by halving: which layers have to be exact for half of the output's noise to go.

    Args:
        reference: the float model.
        model: the quantized model.
        batches: the data; both models run on all of it for every probe, of which there are about log2 of the layers.
        advance: is called for every probe.

    Raises:
        InputError: the models return nothing that can be compared.
    """
    rows = rows_by_node(model.ledger)
    pairs = {**same_values(model, rows, reference.nodes), model.graph.output_node(): reference.output}
    layers = [node for node in model.graph.nodes if node in pairs and node.op != "output"]
    known: dict[int, float] = {}

    def probe(count: int) -> float:
        if count not in known:
            known[count] = _output(reference.program, IsolatedGraph(model, model.graph), pairs, batches, layers[:count])
            advance()
        return known[count]

    whole = probe(0)
    low, high = 0, len(layers)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rank(probe(middle)) >= rank(whole) + HALF else (middle, high)
    if whole == float("inf") or not layers:
        return Bisection((), None, whole, whole, whole)
    before, after = probe(high - 1), probe(high)
    probes = {i: _probe(rows[layers[i - 1].name].row, known[i], i) for i in sorted(known) if i}
    return Bisection(tuple(probes.values()), probes[high], before, after, whole, rows[layers[high - 1].name].row.mend)


def _probe(row: Any, sqnr: float, position: int) -> BisectionStep:
    return BisectionStep(row.name, row.path, row.op, row.precision, sqnr, position)


def _output(
    reference: IsolatedGraph,
    compared: IsolatedGraph,
    pairs: dict[fx.Node, fx.Node],
    batches: Sequence[Batch],
    exact: Sequence[fx.Node],
) -> float:
    """dB of the output over all data; of several outputs, that of the worst."""
    found: dict[int, Agreement] = {}
    with torch.no_grad(), without_autocast(), seeded():
        for i, batch in enumerate(batches):
            with naming_batch(i, batch):
                value = corrected(reference, compared, pairs, batch, exact)
            for place, (want, got) in enumerate(zip(value.want, value.got, strict=True) if value is not None else ()):
                add_output(found, place, want, got)
    if not found:
        raise InputError("the models return nothing that could be compared: no float tensor.")
    return min((output.sqnr for output in found.values()), key=rank)
