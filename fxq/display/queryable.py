"""`Rows`, base class of tables that can be filtered, sorted, and written as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin

from rich.text import Text

from fxq.common.files import as_path, write_file
from fxq.common.globs import path_matches, text_matches
from fxq.display.printed import Printed
from fxq.display.tables import Column, Table, text
from fxq.errors import InputError, unknown

Row = TypeVar("Row")
Same = TypeVar("Same", bound="Rows[Any]")


class Rows(Printed, Sequence[Row]):
    """Base class of tables: `class Ledger(Rows[Entry])` is a frozen dataclass whose rows are dataclasses `Entry`.

    Attributes:
        entries: the rows, in order.
    """

    entries: tuple[Row, ...]
    _name: ClassVar[str]
    """Name of the table in errors."""
    _key: ClassVar[str]
    """Key of the rows in JSON."""
    _choices: ClassVar[Mapping[str, Sequence[str]]] = {}
    """All values of a field, for fields with a fixed set of values."""

    @property
    def _row(self) -> type:
        """Type of the rows, also of an empty table: `Row` in `class Table(Rows[Row])`."""
        (row,) = next(get_args(base) for base in type(self).__orig_bases__ if get_origin(base) is Rows)  # type: ignore[attr-defined]
        return cast("type", row)

    def _facts(self) -> dict[str, Any]:
        """Return the facts about the whole table that JSON holds besides the rows."""
        return {}

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields of a row."""
        return tuple(f.name for f in fields(self._row))

    def where(self: Same, condition: Callable[[Any], bool] | None = None, **values: Any) -> Same:
        """Return a table of the entries that satisfy `condition` and whose fields have these values.

        Args:
            condition: a function of an entry, or None.
            **values: for each field, a value (text may be a glob), or a list, tuple or set of values:
                `where(op=("conv2d", "linear"), path="head.*")`. In a path, `*` stops at a dot and `**` does not.

        Raises:
            InputError: an unknown field, or a value that the field cannot have (the message has the nearest names), or
                a `condition` that is not a function.
        """
        if condition is not None and not callable(condition):
            raise InputError(self._bad_condition(condition))
        self._check_fields(values)
        for field, wanted in values.items():
            self._check_value(field, wanted)
        return self._with(
            e
            for e in self.entries
            if (condition is None or condition(e)) and all(_is(getattr(e, k), v, k) for k, v in values.items())
        )

    def sort(self: Same, key: str = "sqnr", *, reverse: bool = False) -> Same:
        """Return a table sorted by a field, with entries without a value last.

        Args:
            key: name of the field.
            reverse: False: smallest value first; True: largest first.

        Raises:
            InputError: an unknown field; the message has the nearest names.
        """
        self._check_fields([key])
        with_value = [e for e in self.entries if not _missing(getattr(e, key))]
        with_value.sort(key=lambda e: getattr(e, key), reverse=reverse)
        return self._with((*with_value, *(e for e in self.entries if _missing(getattr(e, key)))))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one dict per entry, with its fields as keys."""
        return [asdict(e) for e in self.entries]  # type: ignore[call-overload]

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the table as JSON: an object with facts about the table, and the list of its entries.

        Infinity and NaN, which JSON does not have, become the strings "inf", "-inf" and "nan".

        Args:
            path: file to write it to as well, or None. Missing folders are created.

        Raises:
            InputError: `path` is not a path.
            RenderError: the file cannot be written.
        """
        rows = [{k: _plain(v) for k, v in row.items()} for row in self.to_dicts()]
        facts = {k: _plain(v) for k, v in self._facts().items()}
        return _written(json.dumps({**facts, self._key: rows}, indent=1, allow_nan=False) + "\n", path)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the table as CSV with a header, with empty cells for None. `path`: as for `to_json`."""
        stream = io.StringIO()
        writer = csv.DictWriter(stream, self.fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.to_dicts())
        return _written(stream.getvalue(), path)

    def _with(self: Same, entries: Iterable[Any]) -> Same:
        """Return this table with other entries."""
        return replace(self, entries=tuple(entries))  # type: ignore[type-var]

    def _bad_condition(self, condition: Any) -> str:
        field, choices = next((field, choices) for field, choices in self._choices.items() if field in self.fields)
        value = condition if condition in choices else choices[0]
        return (
            f"{self._name}.where takes a function of an entry, or fields by name, not {condition!r}: "
            f'{self._name}.where({field}="{value}"), {self._name}.where(lambda entry: entry.op == "linear").'
        )

    def _table(self, values: Mapping[Column, Callable[[Row], str]], look: Callable[[Row], str] = lambda e: "") -> Table:
        """Return the rows as text, each in the look that `look` returns for its entry."""

        def cell(column: Column, entry: Row) -> Text:
            value = values[column](entry)
            return text(value, look(entry) or (value if column.coloured else ""), breaks=column.give == "fold")

        columns = [c for c, value in values.items() if not c.optional or any(map(value, self.entries))]
        return Table(columns, [[cell(c, e) for c in columns] for e in self.entries])

    def _check_fields(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self.fields:
                raise InputError(unknown(f"field of the {self._name}", name, self.fields))

    def _check_value(self, field: str, wanted: Any) -> None:
        """Raise for a value that no entry can have, else `assert not ledger.where(precision="flaot")` always holds."""
        choices = self._choices.get(field)
        for value in wanted if isinstance(wanted, (list, tuple, set, frozenset)) else (wanted,):
            if choices is not None and not any(_is(choice, value, field) for choice in choices):
                raise InputError(unknown(field.partition("_")[0], value, choices))


_MAX_PATH_LENGTH = 40


def layer_text(name: str, path: str) -> str:
    """Return the text for a layer in a table: its module path, without the beginning if it is long, or its name."""
    path = path or name
    return path if len(path) <= _MAX_PATH_LENGTH else f"…{path[1 - _MAX_PATH_LENGTH :]}"


def decibels(value: float | None) -> str:
    """Return an SQNR in dB as text; empty for None, "exact" for infinity."""
    return "" if value is None else "exact" if value == math.inf else f"{value:.1f}"


def _is(value: Any, wanted: Any, field: str) -> bool:
    if isinstance(wanted, (list, tuple, set, frozenset)):
        return any(_is(value, w, field) for w in wanted)
    matches = path_matches if field == "path" else text_matches
    return value == wanted or (isinstance(value, str) and isinstance(wanted, str) and matches(value, wanted))


def _missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        write_file(as_path(path), text.encode())
    return text
