"""Comparison of two models, layer by layer, on any amount of data."""

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
from fxq.graph.precision import ENTRY_PRECISIONS, EntryPrecision
from fxq.graph.program import IsolatedGraph
from fxq.ledger.layer_error import same_values
from fxq.ledger.ledger import NodeRow, rows_by_node
from fxq.ledger.output_check import add_output, rank
from fxq.ledger.quantized import Quantized
from fxq.paired.side_by_side import side_by_side
from fxq.paired.used_rows import AT_ONCE, used_rows


@dataclass(frozen=True)
class LayerRow:
    """Errors of one layer of a quantized model against the float model. Names are those of the ledger.

    Rows of a value that no output of the float model depends on, such as those of padding tokens, are not counted.

    Attributes:
        name: name of the op whose values are compared. path: its module path. op: its kind.
        precision: `int8`, `weight-only`, `moves` or `float`.
        sqnr: dB of its output against the float model's, with the errors of all layers before it; infinite when equal.
        own_sqnr: dB of its output when it runs on the float model's values of its inputs.
        cosine: cosine of the angle between the two outputs, as vectors.
        max_error: largest absolute difference, in units of the value.
    """

    name: str
    path: str
    op: str
    precision: EntryPrecision
    sqnr: float
    own_sqnr: float
    cosine: float
    max_error: float


@dataclass(frozen=True)
class PairRow:
    """Difference of one layer between two quantized models. Names are those of the ledgers.

    Attributes:
        name: name of the op whose values are compared. path: its module path. op: its kind.
        precision_a, precision_b: precision in each model: `int8`, `weight-only`, `moves` or `float`.
        sqnr: dB of b's output against a's, with padding tokens; infinite when equal.
        sqnr_a, sqnr_b: dB of each output against the float model's, from its ledger; None if that has none.
        cosine: cosine of the angle between the two outputs, as vectors.
        max_error: largest absolute difference, in units of the value.
    """

    name: str
    path: str
    op: str
    precision_a: EntryPrecision
    precision_b: EntryPrecision
    sqnr: float
    sqnr_a: float | None
    sqnr_b: float | None
    cosine: float
    max_error: float


@dataclass(frozen=True, repr=False)
class Comparison(Rows[Any]):
    """Result of `fxq.compare`: one row per layer, in execution order. `print` shows a table.

    Attributes:
        entries: rows: `LayerRow` against a float model, `PairRow` for two quantized models.
        output_sqnr: dB of the second model's output against the first's, the minimum over its outputs. None if no
            output is a float tensor.
        batches: number of batches.
        models: the quantized models that were compared, one or two.
        metric: metric of the first and of the second model; None if there is none.
    """

    entries: tuple[Any, ...]
    output_sqnr: float | None
    batches: int
    models: tuple[Quantized, ...] = field(compare=False)
    _write: Callable[[Comparison, Any], Path] = field(compare=False)
    metric: tuple[float, float] | None = None
    _name: ClassVar[str] = "comparison"
    _key: ClassVar[str] = "layers"
    _choices: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(
        ("precision", "precision_a", "precision_b"), ENTRY_PRECISIONS
    )

    @property
    def _row(self) -> type:
        return LayerRow if len(self.models) == 1 else PairRow

    @property
    def worst(self) -> Any:
        """Row with the lowest SQNR; None if there are no rows."""
        return min(self.entries, key=lambda row: -math.inf if math.isnan(row.sqnr) else row.sqnr, default=None)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a report page, one HTML file that needs no other files.

        Two quantized models are shown side by side: SQNR and precision of every layer, recipes and graphs. For one
        model and its float model, it is the report of the model with these numbers (see `QuantizedModel.report`).

        Args:
            path: the file. Missing folders are created.

        Returns:
            The path.

        Raises:
            InputError: `path` is not a path.
            RenderError: the file cannot be written.
        """
        return self._write(self, path)

    def _facts(self) -> dict[str, Any]:
        metric = {} if self.metric is None else {"metric": list(self.metric)}
        return {"output_sqnr": self.output_sqnr, **metric, "batches": self.batches}

    def _short(self) -> str:
        output = "" if self.output_sqnr is None else f"the output agrees to {_words(self.output_sqnr)}; "
        if self.metric is not None:
            output += f"metric {self.metric[1]:.4g} instead of {self.metric[0]:.4g}; "
        worst = self.worst
        if worst is None:
            lowest = "no layers"
        elif worst.sqnr == math.inf:
            lowest = "every layer to the last bit"
        else:
            lowest = f"least {layer_text(worst.name, worst.path)}, {_words(worst.sqnr)}"
        return f"{output}{lowest}; {self.batches} batch{'es' if self.batches != 1 else ''}"

    def _parts(self) -> list[Part]:
        columns = {**_LAYER_COLUMNS, **(_FLOAT_COLUMNS if len(self.models) == 1 else _PAIR_COLUMNS), **_ERROR_COLUMNS}
        return [self._table(columns), text(self._short())]


def _words(value: float) -> str:
    return "the last bit" if value == math.inf else f"{value:.1f} dB"


_LAYER_COLUMNS: dict[Column, Callable[[Any], str]] = {
    Column("layer", give="start"): lambda row: layer_text(row.name, row.path),
    Column("op"): lambda row: row.op,
}
_FLOAT_COLUMNS: dict[Column, Callable[[Any], str]] = {
    Column("runs as", coloured=True): lambda row: row.precision,
    Column("SQNR dB", "right"): lambda row: decibels(row.sqnr),
    Column("own dB", "right"): lambda row: decibels(row.own_sqnr),
}
_PAIR_COLUMNS: dict[Column, Callable[[Any], str]] = {
    Column("a runs as", coloured=True): lambda row: row.precision_a,
    Column("b runs as", coloured=True): lambda row: row.precision_b,
    Column("b to a", "right"): lambda row: decibels(row.sqnr),
    Column("a to float", "right", drop=1): lambda row: decibels(row.sqnr_a),
    Column("b to float", "right", drop=1): lambda row: decibels(row.sqnr_b),
}
_ERROR_COLUMNS: dict[Column, Callable[[Any], str]] = {
    Column("cosine", "right"): lambda row: f"{row.cosine:.5f}",
    Column("max error", "right"): lambda row: f"{row.max_error:.3g}",
}


@dataclass(frozen=True)
class Baseline:
    """Reference that a quantized model is compared with.

    Attributes:
        program: the float model's canonical graph, or the graph of another quantized model.
        nodes: its nodes, by the name of the op whose value they compute.
        model: the other quantized model; None for a float model.
        divisible: whether running some samples of a batch gives the same values as running the whole batch.
        is_large: whether all values for a batch take too much memory to be kept at once.
    """

    program: IsolatedGraph
    nodes: Mapping[str, fx.Node]
    model: Quantized | None = None
    divisible: bool = False
    is_large: bool = False

    @property
    def output(self) -> fx.Node:
        """Output node of the graph."""
        return self.program.graph.output_node()


def quantized_reference(a: Quantized, b: Quantized) -> Baseline:
    """Return `a` as the baseline of `b`. Raises `InputError` if they have no layer in common."""
    nodes = {n.name: n for n in a.graph.nodes}
    rows_a = {s.value.name: (s.value, nodes[into]) for into, s in rows_by_node(a.ledger).items() if into in nodes}
    rows_b = {e.name: (e.path, e.op) for e in b.ledger}  # source lines may differ
    shared = {name: node for name, (e, node) in rows_a.items() if rows_b.get(name) == (e.path, e.op)}
    scaled = {*a.record.scaled, *b.record.scaled}
    if not shared and (rows_a or rows_by_node(b.ledger)):
        raise InputError("a and b are not made from the same model: they have no layer in common.")
    return Baseline(IsolatedGraph(a, a.graph), {n: node for n, node in shared.items() if n not in scaled}, a)


def compare_with(
    reference: Baseline,
    b: Quantized,
    batches: Iterable[Batch],
    advance: Callable[[], None],
    write: Callable[[Comparison, Any], Path],
) -> Comparison:
    """Compare a quantized model with a reference. Values are not kept between batches.

    Args:
        reference: the baseline.
        b: the quantized model.
        batches: the data.
        advance: called after each batch.
        write: function that writes the report page of a comparison to a file.

    Raises:
        InputError: the models do not run on a batch, or do not compute the same values.
    """
    running = RunningComparison(reference, b)
    with torch.no_grad(), without_autocast(), seeded():
        for i, batch in enumerate(batches):
            with naming_batch(i, batch):
                running.add(batch)
            advance()
    return running.result(write)


class RunningComparison:
    """Comparison of a quantized model with a reference, to which batches are added one by one.

    Args:
        reference: the baseline.
        b: the quantized model.
    """

    def __init__(self, reference: Baseline, b: Quantized) -> None:
        self.reference, self.b = reference, b
        self._rows = rows_by_node(b.ledger)
        self._pairs = {**same_values(b, self._rows, reference.nodes), b.graph.output_node(): reference.output}
        self._sums, self._compared = _Sums(), IsolatedGraph(b, b.graph)

    def add(self, batch: Batch) -> None:
        """Run both on a batch.

        Raises:
            InputError: the models do not run on it, or do not compute the same values.
        """
        self._sums.add(self.reference, self._compared, self._pairs, batch)
        _check_shapes(self._pairs, self._rows, self._sums)

    def result(self, write: Callable[[Comparison, Any], Path]) -> Comparison:
        """Return the comparison of all batches; `write` writes its report page to a file."""
        reference, sums = self.reference, self._sums
        reference_rows = rows_by_node(reference.model.ledger) if reference.model is not None else {}
        layer_rows = [
            _row(self._rows[node.name], reference_rows.get(self._pairs[node].name), *sums.by_node[node])
            for node in sums.by_node
        ]
        order = {entry.name: i for i, entry in enumerate(self.b.ledger)}
        layer_rows.sort(key=lambda row: order[row.name])
        output = min((result.sqnr for result in sums.outputs.values()), key=rank, default=None)
        models = (self.b,) if reference.model is None else (reference.model, self.b)
        return Comparison(tuple(layer_rows), output, sums.batches, models, write)


@dataclass
class _Sums:
    """Sums over batches from which a comparison is computed.

    Attributes:
        batches: number of batches.
        by_node: for each node, agreement of its value and, against a float model, of its value on float inputs.
        outputs: agreement of each output tensor, by its position.
    """

    batches: int = 0
    by_node: dict[fx.Node, tuple[Agreement, Agreement]] = field(default_factory=dict)
    outputs: dict[int, Agreement] = field(default_factory=dict)

    def add(self, reference: Baseline, compared: IsolatedGraph, pairs: Mapping[fx.Node, fx.Node], batch: Batch) -> None:
        """Add the values of one batch."""
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
            total, own = self.by_node.setdefault(value.node, (Agreement(), Agreement()))
            for want, got in zip(value.want, value.got, strict=True):
                total.add(want, got)
            for want, got in zip(value.want, value.own, strict=True) if value.own is not None else ():
                own.add(want, got)


def _check_shapes(pairs: Mapping[fx.Node, fx.Node], node_rows: Mapping[str, NodeRow], sums: _Sums) -> None:
    """Raise `InputError` if two values that were comparable when the model was quantized have different shapes now."""
    for node, real in pairs.items():
        node_row = node_rows.get(node.name)
        if node_row is not None and node_row.row.sqnr is not None and node not in sums.by_node:
            shape_a, shape_b = info(real).shape, info(node).shape
            raise InputError(
                f"a and b compute different values: at {node_row.row.path or node_row.row.name!r}, the shape is "
                f"{shape_a} in a and {shape_b} in b. Pass the model that b was made from."
            )


def _row(node_row: NodeRow, row_a: NodeRow | None, total: Agreement, own: Agreement) -> LayerRow | PairRow:
    row = node_row.row
    names, distance = (row.name, row.path, row.op), (total.cosine, total.max_error)
    if row_a is None:
        return LayerRow(*names, row.precision, total.sqnr, own.sqnr, *distance)
    return PairRow(*names, row_a.row.precision, row.precision, total.sqnr, row_a.row.sqnr, row.sqnr, *distance)
