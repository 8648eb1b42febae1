"""Table of the backends that `backend="fastest"` tried (`fxq/workflow/fastest.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fxq.display.queryable import Rows
from fxq.display.tables import Column, Part, Table, row, text


@dataclass(frozen=True)
class Attempt:
    """Result of one backend for a model.

    Attributes:
        backend: name of the backend.
        us: microseconds of a call on the example, the minimum over several calls; None if it was not timed.
        int8: number of ops that run on integers.
        sqnr: dB of the output against the float model's, see `Ledger.output_sqnr`.
        chosen: whether this backend was chosen.
        why: reason why the backend was not tried or failed; otherwise empty.
    """

    backend: str
    us: float | None = None
    int8: int = 0
    sqnr: float | None = None
    chosen: bool = False
    why: str = ""


@dataclass(frozen=True, repr=False)
class Attempts(Rows[Attempt]):
    """Table of the backends that were tried: `print` it, filter it with `where`, sort it by a field.

    Attributes:
        entries: one row per backend.
        threads: number of threads that calls were timed with.
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
        caption = f"one call on the example, {self.threads} {'thread' if self.threads == 1 else 'threads'}"
        return [Table(columns, rows), text(caption)]


def _cells(e: Attempt) -> tuple[str, ...]:
    ms, count = ("", "") if e.us is None else (f"{e.us / 1e3:.2f}", str(e.int8))
    return e.backend, ms, count, "" if e.sqnr is None else f"{e.sqnr:.1f}", "chosen" if e.chosen else "", e.why
