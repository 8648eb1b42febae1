"""The ledger: what became of every op of the model, and why. `fxq/fates.py` makes it."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fxq.errors import InputError, unknown
from fxq.printed import Printed
from fxq.table import Cell, Column, Part, Table, cells


@dataclass(frozen=True)
class Entry:
    """One op of the model.

    Attributes:
        name: its node in the canonical graph; two calls of one module have two names.
        path: its module path: of the module itself, or of the one whose forward calls the function.
        op: what it is.
        fate: `int8`, `moves` (moves integers), `float`, or `folded` (into another op's weights, or without an effect).
        into: the node of the final graph that stands for it; the same one for the ops of a unit, and empty when it is
            gone.
        reason: why it is float, or where it went.
        fix: the line of a recipe that would decide otherwise, as Python; empty where none can.
        source: `file:line` of the model.
        macs: multiply-accumulates for the batch that shapes were found with, see `fxq.macs.macs_of`.
        sqnr: dB of its output against the float model's on a recorded calibration batch, all that happens before it
            included; infinite when they are equal. None where the value does not exist: inside a unit (the row of the
            op that ends it has it), or no float tensor.
        own_sqnr: the same for what the op does wrong alone: it runs on the float model's values of its inputs, on the
            grids that it reads.
        float_us, int8_us: measured microseconds of the op in float and on integers; for a unit, in the row of its first
            op. None where nothing was measured.
    """

    name: str
    path: str
    op: str
    fate: str
    into: str = ""
    reason: str = ""
    fix: str = ""
    source: str = ""
    macs: int = 0
    sqnr: float | None = None
    own_sqnr: float | None = None
    float_us: float | None = None
    int8_us: float | None = None


@dataclass(frozen=True)
class Speaker:
    """The row that speaks for a node of the final graph.

    Attributes:
        row: the last of the ops that the node runs.
        value: the op whose value the node makes: the same, or one behind it that went into its weights.
    """

    row: Entry
    value: Entry


def speaking(entries: Iterable[Entry]) -> dict[str, Speaker]:
    """The rows that speak for the nodes of the final graph, by the node's name, in the order of the rows."""
    found: dict[str, Speaker] = {}
    for entry in entries:
        known = found.pop(entry.into, None)
        if entry.fate != "folded":
            found[entry.into] = Speaker(entry, entry)
        elif known is not None:
            found[entry.into] = Speaker(known.row, entry)
    return found


FIELDS = tuple(f.name for f in fields(Entry))
FATES = ("int8", "moves", "float", "folded")


@dataclass(frozen=True, repr=False)
class Ledger(Printed, Sequence[Entry]):
    """One entry per op of the model, in execution order. `print` shows a table.

    Example:
        >>> ledger = Ledger((Entry("a", "a", "conv2d", "int8", macs=90), Entry("b", "b", "linear", "float", macs=10)))
        >>> ledger.coverage, ledger.count("int8"), [e.name for e in ledger.where(fate="float")]
        (0.9, 1, ['b'])
    """

    entries: tuple[Entry, ...]

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    @property
    def coverage(self) -> float:
        """Share of the multiply-accumulates that run on integers, 0 to 1; 0 when there are none.

        Counted are convolutions, linear layers, matrix products, attention, and modules that are kept as they are with
        weights inside, see `fxq.macs.macs_of`.
        """
        total = sum(e.macs for e in self.entries)
        return sum(e.macs for e in self.entries if e.fate == "int8") / total if total else 0.0

    def where(self, condition: Callable[[Entry], bool] | None = None, **values: Any) -> Ledger:
        """The entries for which `condition` is true and whose fields have these values.

        Args:
            condition: a function of an entry.
            **values: for each field, a value (text may be a glob), or a list, tuple or set of values.

        Raises:
            InputError: unknown field or fate, and the nearest names are given; `condition` is no function.

        Example:
            >>> Ledger((Entry("a", "head.a", "conv2d", "int8"),)).where(fate="int8", path="head.*").count("int8")
            1
        """
        if condition is not None and not callable(condition):
            raise InputError(
                f"ledger.where takes a function of an entry, or fields by name, not {condition!r}: "
                'ledger.where(fate="float"), ledger.where(lambda entry: entry.macs > 1000).'
            )
        _check(values)
        _check_fates(values.get("fate", ()))
        return Ledger(
            tuple(
                e
                for e in self.entries
                if (condition is None or condition(e)) and all(_is(getattr(e, k), v) for k, v in values.items())
            )
        )

    def sort(self, key: str = "sqnr", *, reverse: bool = False) -> Ledger:
        """The entries by a field, smallest first (`reverse`: largest first); those without a value come last.

        Raises:
            InputError: unknown field; the nearest names are given.
        """
        _check([key])
        known = [e for e in self.entries if not _missing(getattr(e, key))]
        known.sort(key=lambda e: getattr(e, key), reverse=reverse)
        return Ledger((*known, *(e for e in self.entries if _missing(getattr(e, key)))))

    def count(self, value: Any) -> int:
        """Number of entries of that fate. Raises `InputError` where there is no such fate."""
        _check_fates(value)
        return sum(e.fate == value for e in self.entries)

    def main_reason(self) -> str:
        """The most frequent reason for float, with its share."""
        reasons = Counter(e.reason for e in self.entries if e.fate == "float")
        if not reasons:
            return "the model has no op that could"
        reason, count = reasons.most_common(1)[0]
        return f"{count} of {len(self)} ops stay in float because: {reason}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dict per entry, keys as the fields of `Entry`."""
        return [asdict(e) for e in self.entries]

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The ledger as JSON: `coverage`, and `ops`, a list of objects; also written to `path` if one is given.

        JSON has no infinity and no NaN: an SQNR that is none stands as the string "inf", "-inf" or "nan".
        """
        rows = [{k: _plain(v) for k, v in row.items()} for row in self.to_dicts()]
        text = json.dumps({"coverage": self.coverage, "ops": rows}, indent=1, allow_nan=False) + "\n"
        return _written(text, path)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The ledger as CSV with a header; what is None is empty. Also written to `path` if one is given."""
        stream = io.StringIO()
        writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.to_dicts())
        return _written(stream.getvalue(), path)

    def _short(self) -> str:
        weighed = f"; {self.coverage:.1%} of the multiply-accumulates in int8" if any(e.macs for e in self) else ""
        return ", ".join(f"{self.count(f)} {f}" for f in FATES) + weighed

    def _parts(self) -> list[Part]:
        fixes = Counter(e.fix for e in self.entries if e.fate == "float" and e.fix)
        notes = {fix: f"[{i}]" for i, fix in enumerate((fix for fix, count in fixes.items() if count > 1), 1)}
        texts = {**_COLUMNS, _WHY: lambda e: _why(e, notes)}
        columns = [c for c, text in texts.items() if c in _ALWAYS or any(text(e) for e in self.entries)]
        rows = tuple(tuple(Cell(texts[c](e), _look(c, e)) for c in columns) for e in self.entries)
        ways = [cells(Cell(note, "strong"), f" {fix}") for fix, note in notes.items()]
        return [Table(tuple(columns), rows), cells(self._short()), *ways]


def _look(column: Column, entry: Entry) -> str:
    """The fate is a badge; what is gone from the graph stands back."""
    return "quiet" if entry.fate == "folded" else entry.fate if column is _FATE else ""


def _layer(entry: Entry) -> str:
    """The module path, its beginning left out where it is long."""
    path = entry.path or entry.name
    return path if len(path) <= _LONGEST else f"…{path[1 - _LONGEST :]}"


_LONGEST = 40


def _why(entry: Entry, notes: Mapping[str, str]) -> str:
    """Reason and way out of a float op: a note where several ops share it, else the line in one piece.

    For int8 ops the line stands only in `fix`.
    """
    fix = notes.get(entry.fix, f"[{entry.fix}]") if entry.fate == "float" and entry.fix else ""
    apart = " " if len(entry.reason) + len(fix) < _WIDE else "\n"
    return textwrap.fill(entry.reason, _WIDE) + (apart + fix if fix else "")


_WIDE = 78


def _decibels(value: float | None) -> str:
    return "" if value is None else "exact" if value == math.inf else f"{value:.1f}"


def _count(value: int) -> str:
    """A number with three digits and a letter: 118M."""
    if value == 0:
        return ""
    power = min((len(str(value)) - 1) // 3, 4)
    return f"{value / 1000**power:.3g}{'kMGT'[power - 1] if power else ''}"


def _time(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


_FATE = Column("runs as")
_WHY = Column("why", give="fold", least=30)
_COLUMNS: dict[Column, Callable[[Entry], str]] = {
    Column("layer", give="start", least=20): _layer,
    Column("op", give="end", least=16): lambda e: e.op,
    _FATE: lambda e: e.fate,
    Column("SQNR dB", "right"): lambda e: _decibels(e.sqnr),
    Column("own dB", "right"): lambda e: _decibels(e.own_sqnr),
    Column("MACs", "right", drop=2): lambda e: _count(e.macs),
    Column("float µs", "right", drop=1): lambda e: _time(e.float_us),
    Column("int8 µs", "right", drop=1): lambda e: _time(e.int8_us),
}
_ALWAYS = tuple(_COLUMNS)[:3]
"""The columns that are there even when they are empty."""


def _check(names: Collection[str]) -> None:
    for name in names:
        if name not in FIELDS:
            raise InputError(unknown("field of the ledger", name, FIELDS))


def _check_fates(wanted: Any) -> None:
    """Raise on a fate that no entry can have: `assert not ledger.where(fate="flaot")` would always hold."""
    for fate in wanted if isinstance(wanted, (list, tuple, set, frozenset)) else (wanted,):
        if not any(_is(known, fate) for known in FATES):
            raise InputError(unknown("fate", fate, FATES))


def _is(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, (list, tuple, set, frozenset)):
        return any(_is(value, w) for w in wanted)
    return value == wanted or (isinstance(value, str) and isinstance(wanted, str) and fnmatchcase(value, wanted))


def _missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
