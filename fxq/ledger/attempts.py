"""What each backend did with a model for which all were tried (`fxq/workflow/fastest.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fxq.display.queryable import Rows
from fxq.display.tables import Column, Part, Table, row, text


@dataclass(frozen=True)
class Attempt:
    """What became of a model with one backend.

    Attributes:
        backend: its name.
        us: microseconds of a call on the example, the shortest of some; None: it was not timed.
        int8: how many ops run on integers.
        sqnr: how far the output is from the float model's, see `Ledger.output_sqnr`.
        chosen: whether this one was taken.
        why: why it was not tried, or cannot be taken; else empty.
    """

    backend: str
    us: float | None = None
    int8: int = 0
    sqnr: float | None = None
    chosen: bool = False
    why: str = ""


@dataclass(frozen=True, repr=False)
class Attempts(Rows[Attempt]):
    """What each backend did: `print` it, filter it with `where`, sort it by a field.

    Attributes:
        entries: one for each backend.
        threads: with how many threads the calls were timed.
    """

    entries: tuple[Attempt, ...]
    threads: int = 1
    _name: ClassVar[str] = "attempts"
    _key: ClassVar[str] = "attempts"

    def _facts(self) -> dict[str, Any]:
        return {"threads": self.threads}

    def _short(self) -> str:
        best = next((e for e in self.entries if e.chosen), None)
        return f"{len(self)} backends" + (f", {best.backend} was the quickest" if best is not None else "")

    def _parts(self) -> Sequence[Part]:
        columns = (
            Column("backend"),
            *(Column(name, "right") for name in ("ms", "int8 ops", "SQNR dB")),
            *(Column(""), Column("why not", give="fold", optional=True)),
        )
        rows = [row(*_cells(entry)) for entry in self.entries]
        about = f"one call on the example, {self.threads} {'thread' if self.threads == 1 else 'threads'}"
        return [Table(columns, rows), text(about)]


def _cells(e: Attempt) -> tuple[str, ...]:
    ms, count = ("", "") if e.us is None else (f"{e.us / 1e3:.2f}", str(e.int8))
    return e.backend, ms, count, "" if e.sqnr is None else f"{e.sqnr:.1f}", "chosen" if e.chosen else "", e.why
