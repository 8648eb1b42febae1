"""Text for people as data: lines and tables, whose cells say what they are.

`plain` makes text of it, the same everywhere; `fxq/text/terminal.py` colours it and fits it to a terminal's width, and
`fxq/text/notebook.py` makes HTML of it. Nothing is coloured, cropped or escaped before that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tabulate import tabulate

from fxq.text.colours import CHANGES, LOOKS, Look, clean

BADGES: dict[str, Look] = {**LOOKS, **{str(kind): look for kind, look in CHANGES.items()}}
"""The looks that are a word on a coloured ground, as in the pictures: readable on light and on dark."""

_BIDI = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]+")  # they take no place, or turn a line around


@dataclass(frozen=True)
class Cell:
    """A piece of text.

    Attributes:
        text: what it says; with line breaks only in a column that folds.
        look: a name of `BADGES`, or "quiet" (less important) or "strong".
        bar: for a column of bars: the length of each piece, 0 to 1 in all, and its look.
    """

    text: str = ""
    look: str = ""
    bar: tuple[tuple[float, str], ...] = ()

    @property
    def badge(self) -> Look | None:
        """Its look, where that is a coloured ground."""
        return BADGES.get(self.look)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        header: what stands on top.
        align: of the cells and the header.
        look: name of the badge that stands on top instead, where there are colours.
        give: how it gives way in a narrow terminal: not at all, cropped at its "start" or "end", or "fold"ed. A folded
            cell's own line breaks are those of plain text.
        least: characters that it keeps when it gives way.
        drop: a terminal that is too narrow leaves out the columns with the highest number first, those of one number
            together; 0: never.
        extra: whether it helps the eye only, or repeats, and is not part of plain text.
        bars: characters of its bars.
    """

    header: str = ""
    align: Literal["left", "right"] = "left"
    look: str = ""
    give: Literal["", "start", "end", "fold"] = ""
    least: int = 12
    drop: int = 0
    extra: bool = False
    bars: int = 0


@dataclass(frozen=True)
class Table:
    """Columns, and rows of as many cells. Without any header it is a list."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def headed(self) -> bool:
        """Whether a column has a header."""
        return any(column.header for column in self.columns)


Part = Table | tuple[Cell, ...]
"""A table, or the cells of a line."""


def cells(*values: str | Cell) -> tuple[Cell, ...]:
    """Texts and cells as cells: a line, or a row."""
    return tuple(value if isinstance(value, Cell) else Cell(value) for value in values)


def visible(text: str) -> str:
    """`text` without what a terminal would obey and not show: names in a model are data."""
    return _BIDI.sub(" ", clean(text))


def lines_of(cell: Cell) -> Iterator[str]:
    """The lines of a cell, visible."""
    return map(visible, cell.text.split("\n"))


def plain(parts: Sequence[Part]) -> str:
    """The parts as text: complete, without colours, independent of any terminal."""
    return "\n".join(_table(part) if isinstance(part, Table) else _line(part) for part in parts)


def _line(line: tuple[Cell, ...]) -> str:
    return "".join(visible(cell.text) for cell in line)


def _table(table: Table) -> str:
    shown = [(i, column) for i, column in enumerate(table.columns) if not column.extra]
    text: str = tabulate(
        [
            ["\n".join(lines_of(row[i])) if c.give == "fold" else visible(row[i].text) for i, c in shown]
            for row in table.rows
        ],
        headers=[column.header for _, column in shown] if table.headed else (),
        tablefmt="simple" if table.headed else "plain",
        colalign=[column.align for _, column in shown] if table.rows else None,
        disable_numparse=True,
    )
    return text
