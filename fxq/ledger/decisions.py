"""Prices that decided between int8 and float, for every op that could run either way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fxq.display.queryable import Rows
from fxq.display.tables import Column, Part, Table, row, text
from fxq.graph.precision import EntryPrecision
from fxq.ledger.ledger import Entry


@dataclass(frozen=True)
class PricedDecision:
    """Prices of an op or unit that could run either way, and the choice.

    Attributes:
        name: name of its first op in the traced graph.
        path: module path of its first op.
        op: kind of its first op, such as "conv2d".
        runs: "int8", "moves" (moves integers), or "float".
        by: "measured": timed on this machine; "table": estimated from its sizes by the price table of this kind of CPU.
        float_us, int8_us: microseconds in float and as int8, on one thread.
        conversions_us: microseconds of conversions if it runs as int8, minus those if it runs in float; None if nothing
            reads its integers.
        why: reason to run in float; empty otherwise.
    """

    name: str
    path: str
    op: str
    runs: EntryPrecision
    by: str
    float_us: float
    int8_us: float
    conversions_us: float | None = None
    why: str = ""


@dataclass(frozen=True, repr=False)
class Decisions(Rows[PricedDecision]):
    """Table of the ops that could run either way: `print` it, filter it with `where`, sort it by a field.

    Attributes:
        entries: ops and units in graph order.
    """

    entries: tuple[PricedDecision, ...]
    _name: ClassVar[str] = "decisions"
    _key: ClassVar[str] = "decisions"

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Decisions:
        """Rows of a ledger that have both prices."""
        return cls(
            tuple(
                PricedDecision(
                    e.name, e.path, e.op, e.precision, e.priced_by, e.float_us, e.int8_us, e.conversions_us,
                    e.reason if e.precision == "float" else "",
                )
                for e in entries
                if e.float_us is not None and e.int8_us is not None and e.precision != "weight-only"
            )
        )  # fmt: skip

    def _facts(self) -> dict[str, Any]:
        return dict(Counter(entry.by for entry in self.entries))

    def _short(self) -> str:
        count = Counter(entry.by for entry in self.entries)
        return f"{len(self)} ops, {count['measured']} by measured prices, {count['table']} by the price table"

    def _parts(self) -> Sequence[Part]:
        columns = (
            *(Column(name) for name in ("layer", "op", "runs as", "priced by")),
            *(Column(name, "right") for name in ("float µs", "int8 µs", "conversions µs")),
            Column("why", give="fold", optional=True),
        )
        return [Table(columns, [row(*_cells(entry)) for entry in self.entries]), text(self._short())]


def _cells(e: PricedDecision) -> tuple[str, ...]:
    around = "" if e.conversions_us is None else f"{e.conversions_us:.1f}"
    return e.path or e.name, e.op, e.runs, e.by, f"{e.float_us:.1f}", f"{e.int8_us:.1f}", around, e.why
