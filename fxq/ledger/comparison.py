"""How far two models are apart, layer by layer, on any amount of data."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxq.common.data import Batch, naming_batch, samples_in
from fxq.common.isolation import seeded, without_autocast
from fxq.common.metrics import Agreement
from fxq.display.queryable import Rows, decibels, layer_text
from fxq.display.tables import Column, Part, text
from fxq.errors import InputError
from fxq.graph.info import info
from fxq.graph.program import IsolatedGraph
from fxq.ledger.layer_error import same_values
from fxq.ledger.ledger import PRECISIONS, NodeRow, rows_by_node
from fxq.ledger.output_check import add_output, rank
from fxq.ledger.quantized import Quantized
from fxq.paired.side_by_side import side_by_side
from fxq.paired.used_rows import AT_ONCE, used_rows


@dataclass(frozen=True)
class LayerRow:
    """One layer of a quantized model beside the float model's. Names are those of the ledger.

    Attributes:
        name: the op that pairs the layer. path: its module path. op: what it is.
        precision: what it runs as: `int8`, `moves` or `float`.
        sqnr: dB of its output against the float model's, all that happens before it included; infinite when equal.
            Rows that no output of the float model depends on, as those of tokens that pad a text, do not count, here
            and below; so it is in the ledger.
        own_sqnr: the same where it runs on the float model's values of its inputs.
        cosine: of the angle between the two outputs, taken as vectors.
        max_error: the largest absolute difference, in units of the value.
    """

    name: str
    path: str
    op: str
    precision: str
    sqnr: float
    own_sqnr: float
    cosine: float
    max_error: float


@dataclass(frozen=True)
class PairRow:
    """One layer of two quantized models. Names are those of the ledgers.

    Attributes:
        name: the op that pairs the layer. path: its module path. op: what it is.
        fate_a, fate_b: what it runs as in each: `int8`, `moves` or `float`.
        sqnr: dB of b's output against a's, all tokens included; infinite when they are equal.
        sqnr_a, sqnr_b: dB of each against the float model, from its ledger; None where that has none.
        cosine: of the angle between the two outputs, taken as vectors.
        max_error: the largest absolute difference, in units of the value.
    """

    name: str
    path: str
    op: str
    fate_a: str
    fate_b: str
    sqnr: float
    sqnr_a: float | None
    sqnr_b: float | None
    cosine: float
    max_error: float


@dataclass(frozen=True, repr=False)
class Comparison(Rows[Any]):
    """What `fxq.compare` found: one row per layer, in execution order. `print` shows a table.

    Attributes:
        entries: the rows: `LayerRow` against a float model, `PairRow` for two quantized ones.
        output_sqnr: dB of what the second model returns against the first; of several outputs, the worst one's. None
            when there is no float tensor.
        batches: number of batches.
        models: the quantized models: the one, or the two.
    """

    entries: tuple[Any, ...]
    output_sqnr: float | None
    batches: int
    models: tuple[Quantized, ...] = field(compare=False)
    _write: Callable[[Comparison, Any], Path] = field(compare=False)
    _name: ClassVar[str] = "comparison"
    _key: ClassVar[str] = "layers"
    _choices: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(("precision", "fate_a", "fate_b"), PRECISIONS)

    @property
    def _row(self) -> type:
        return LayerRow if len(self.models) == 1 else PairRow

    @property
    def worst(self) -> Any:
        """The row with the lowest SQNR; None where there are no rows."""
        return min(self.entries, key=lambda row: -math.inf if math.isnan(row.sqnr) else row.sqnr, default=None)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a page that shows it: one HTML file that needs no other.

        Two quantized models stand side by side: SQNR of every layer, what runs as what in each, recipes and graphs. For
        one and its float model it is the report of the model, with these numbers (see `QuantizedModel.report`).

        Args:
            path: the file; folders that are missing are made.

        Returns:
            The path.

        Raises:
            InputError: `path` is no path.
            RenderError: the file cannot be written.
        """
        return self._write(self, path)

    def _facts(self) -> dict[str, Any]:
        return {"output_sqnr": self.output_sqnr, "batches": self.batches}

    def _short(self) -> str:
        output = "" if self.output_sqnr is None else f"the output agrees to {_words(self.output_sqnr)}; "
        worst = self.worst
        if worst is None:
            least = "no layers"
        elif worst.sqnr == math.inf:
            least = "every layer to the last bit"
        else:
            least = f"least {layer_text(worst.name, worst.path)}, {_words(worst.sqnr)}"
        return f"{output}{least}; {self.batches} batch{'es' if self.batches != 1 else ''}"

    def _parts(self) -> list[Part]:
        columns = {**_LAYER, **(_FLOAT if len(self.models) == 1 else _PAIR), **_DISTANCE}
        return [self._table(columns), text(self._short())]


def _words(value: float) -> str:
    return "the last bit" if value == math.inf else f"{value:.1f} dB"


_LAYER: dict[Column, Callable[[Any], str]] = {
    Column("layer", give="start"): lambda row: layer_text(row.name, row.path),
    Column("op"): lambda row: row.op,
}
_FLOAT: dict[Column, Callable[[Any], str]] = {
    Column("runs as", coloured=True): lambda row: row.precision,
    Column("SQNR dB", "right"): lambda row: decibels(row.sqnr),
    Column("own dB", "right"): lambda row: decibels(row.own_sqnr),
}
_PAIR: dict[Column, Callable[[Any], str]] = {
    Column("a runs as", coloured=True): lambda row: row.fate_a,
    Column("b runs as", coloured=True): lambda row: row.fate_b,
    Column("b to a", "right"): lambda row: decibels(row.sqnr),
    Column("a to float", "right", drop=1): lambda row: decibels(row.sqnr_a),
    Column("b to float", "right", drop=1): lambda row: decibels(row.sqnr_b),
}
_DISTANCE: dict[Column, Callable[[Any], str]] = {
    Column("cosine", "right"): lambda row: f"{row.cosine:.5f}",
    Column("max error", "right"): lambda row: f"{row.max_error:.3g}",
}


@dataclass(frozen=True)
class Baseline:
    """What a quantized model is compared with.

    Attributes:
        program: the float model's canonical graph, or the graph of another quantized model.
        nodes: its nodes, by the op whose value they make.
        model: the other quantized model, if it is one.
        divisible: whether the graph computes for some samples of a batch what it computes for them among all.
        is_large: whether it holds so much for a batch that all of its values are not to be kept at once.
    """

    program: IsolatedGraph
    nodes: Mapping[str, fx.Node]
    model: Quantized | None = None
    divisible: bool = False
    is_large: bool = False

    @property
    def output(self) -> fx.Node:
        """The node that returns."""
        return self.program.graph.output_node()


def quantized_reference(a: Quantized, b: Quantized) -> Baseline:
    """`a` as a reference for `b`. Raises `InputError` when they have no layer in common."""
    nodes = {n.name: n for n in a.graph.nodes}
    rows_a = {s.value.name: (s.value, nodes[into]) for into, s in rows_by_node(a.ledger).items() if into in nodes}
    rows_b = {e.name: (e.path, e.op) for e in b.ledger}  # not the line: files move
    same = {name: node for name, (e, node) in rows_a.items() if rows_b.get(name) == (e.path, e.op)}
    if not same and (rows_a or rows_by_node(b.ledger)):
        raise InputError("a and b are not made from the same model: no layer of one is a layer of the other.")
    return Baseline(IsolatedGraph(a, a.graph), same, a)


def compare_with(
    reference: Baseline,
    b: Quantized,
    batches: Iterable[Batch],
    advance: Callable[[], None],
    write: Callable[[Comparison, Any], Path],
) -> Comparison:
    """Compare a quantized model with a reference; no value is kept from one batch to the next.

    `advance` is called behind every batch; `write` writes the page of what was found to a file.

    Raises:
        InputError: the models do not run on a batch, or do not compute the same values.
    """
    rows = rows_by_node(b.ledger)
    pairs = {**same_values(b, rows, reference.nodes), b.graph.output_node(): reference.output}
    sums, compared = _Sums(), IsolatedGraph(b, b.graph)
    with torch.no_grad(), without_autocast(), seeded():
        for i, batch in enumerate(batches):
            with naming_batch(i, batch):
                sums.add(reference, compared, pairs, batch)
                _check_shapes(pairs, rows, sums)
            advance()
    others = rows_by_node(reference.model.ledger) if reference.model is not None else {}
    found = [_row(rows[node.name], others.get(pairs[node].name), *sums.by_node[node]) for node in sums.by_node]
    order = {entry.name: i for i, entry in enumerate(b.ledger)}
    found.sort(key=lambda row: order[row.name])
    output = min((result.sqnr for result in sums.outputs.values()), key=rank, default=None)
    models = (b,) if reference.model is None else (reference.model, b)
    return Comparison(tuple(found), output, sums.batches, models, write)


@dataclass
class _Sums:
    """What is kept of the batches: for each node how far it is off, and how far alone, against a float model.

    Of what the model returns, each tensor counts for itself.
    """

    batches: int = 0
    by_node: dict[fx.Node, tuple[Agreement, Agreement]] = field(default_factory=dict)
    outputs: dict[int, Agreement] = field(default_factory=dict)

    def add(self, reference: Baseline, compared: IsolatedGraph, pairs: Mapping[fx.Node, fx.Node], batch: Batch) -> None:
        """Take in one batch."""
        self.batches += 1
        real, used = reference.model is None, dict[fx.Node, Tensor]()
        cut = reference.divisible and samples_in(batch) is not None
        if real and (cut or not reference.is_large):
            used = used_rows(reference.program, batch, set(pairs.values()), AT_ONCE if cut else None)
        for value in side_by_side(reference.program, compared, pairs, batch, own=real, used=used):
            if value.node.op == "output":
                for i, (want, got) in enumerate(zip(value.want, value.got, strict=True)):
                    add_output(self.outputs, i, want, got)
                continue
            found, alone = self.by_node.setdefault(value.node, (Agreement(), Agreement()))
            for want, got in zip(value.want, value.got, strict=True):
                found.add(want, got)
            for want, got in zip(value.want, value.own, strict=True) if value.own is not None else ():
                alone.add(want, got)


def _check_shapes(pairs: Mapping[fx.Node, fx.Node], node_rows: Mapping[str, NodeRow], sums: _Sums) -> None:
    """Raise where two values could be compared when the model was quantized, and cannot now."""
    for node, real in pairs.items():
        node_row = node_rows.get(node.name)
        if node_row is not None and node_row.row.sqnr is not None and node not in sums.by_node:
            mine, other = info(node).shape, info(real).shape
            raise InputError(
                f"a and b do not compute the same: at {node_row.row.path or node_row.row.name!r} a gives {other}, b "
                f"{mine}. Give the model that b was made from."
            )


def _row(node_row: NodeRow, other: NodeRow | None, found: Agreement, alone: Agreement) -> LayerRow | PairRow:
    row = node_row.row
    names, distance = (row.name, row.path, row.op), (found.cosine, found.max_error)
    if other is None:
        return LayerRow(*names, row.precision, found.sqnr, alone.sqnr, *distance)
    return PairRow(*names, other.row.precision, row.precision, found.sqnr, other.row.sqnr, row.sqnr, *distance)
