"""What decided between integers and float: the price of every op that could run either way, and where it is from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fxq.ledger.ledger import Entry
from fxq.text.queryable import Rows
from fxq.text.tables import Column, Part, Table, row, text


@dataclass(frozen=True)
class PricedDecision:
    """An op or unit that could run either way.

    Attributes:
        name: its first op's name in the traced graph.
        path: the module path of that.
        op: what that is.
        runs: "int8", "moves" (moves integers), or "float".
        by: "measured": its seconds were measured on this machine; "table": they are estimated from its sizes, by the
            price table of this kind of CPU, which the measurement does not clearly contradict.
        float_us, int8_us: microseconds in float and on integers, on one thread.
        conversions_us: microseconds of conversions with it on integers, less those with it in float; None where nothing
            reads its integers.
        why: why it runs in float; else empty.
    """

    name: str
    path: str
    op: str
    runs: str
    by: str
    float_us: float
    int8_us: float
    conversions_us: float | None = None
    why: str = ""


@dataclass(frozen=True, repr=False)
class Decisions(Rows[PricedDecision]):
    """What decided of every op that could run either way: `print` it, filter it with `where`, sort it by a field.

    Attributes:
        entries: one for each such op or unit, in the order of the graph.
    """

    entries: tuple[PricedDecision, ...]
    _name: ClassVar[str] = "decisions"
    _key: ClassVar[str] = "decisions"

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Decisions:
        """The rows of a ledger that have both prices."""
        return cls(
            tuple(
                PricedDecision(
                    e.name, e.path, e.op, e.fate, e.priced_by, e.float_us, e.int8_us, e.conversions_us,
                    e.reason if e.fate == "float" else "",
                )
                for e in entries
                if e.float_us is not None and e.int8_us is not None and e.fate != "weight-only"
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
