"""Lines and tables of rich's texts, and their plain form.

`fxq/display/terminal.py` prints them in colours and fits them to a terminal; `fxq/display/notebook.py` makes HTML.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.style import Style
from rich.text import Text
from tabulate import tabulate

from fxq.display.colours import CHANGES, LOOKS, Look, clean

GROUNDS: dict[str, Look] = {**LOOKS, **{str(kind): look for kind, look in CHANGES.items()}}
"""Looks of text on a coloured background, as in the pictures; readable on light and on dark terminals."""

STYLES = {name: Style(color=look.ink, bgcolor=look.colour) for name, look in GROUNDS.items()}
STYLES |= {"quiet": Style(dim=True), "strong": Style(bold=True)}

_EIGHTHS = " ▏▎▍▌▋▊▉"
_BIDI = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]+")  # invisible, or they reverse a line


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        header: title.
        align: alignment of the cells and the header.
        look: name of a look whose tag replaces the title when there are colours; empty: none.
        give: treatment of long cells in a narrow terminal: cropped at their "start" or "end", or "fold"ed. Line breaks
            in a folded cell are kept in plain text only.
        drop: rank in which a narrow terminal leaves out columns, highest first, equal ranks together; 0: never.
        extra: whether plain text leaves it out, since it is decoration or repeats another column.
        coloured: whether its cells are names of looks, to be shown in that look.
        optional: whether it is left out if all its cells are empty.
    """

    header: str = ""
    align: Literal["left", "right"] = "left"
    look: str = ""
    give: Literal["start", "end", "fold"] = "end"
    drop: int = 0
    extra: bool = False
    coloured: bool = False
    optional: bool = False

    @property
    def title(self) -> Text:
        """Header in a table with colours."""
        title = text(GROUNDS[self.look].tag if self.look else self.header, self.look)
        title.justify = "left" if self.look else None
        return title


@dataclass(frozen=True)
class Table:
    """Columns, and rows with one cell per column. Without headers it shows as a list."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Text]]

    @property
    def headed(self) -> bool:
        """Whether any column has a header."""
        return any(column.header for column in self.columns)


Part = Table | Text
"""A table or a line."""


def visible(value: str) -> str:
    """Return `value` without control and invisible characters, which names in a model may have."""
    return _BIDI.sub(" ", clean(value))


def text(value: str, look: str = "", breaks: bool = False) -> Text:
    """Return the text of a cell, or of a part of a line.

    Args:
        value: the characters.
        look: a name of `STYLES`, or empty.
        breaks: whether to keep line breaks; else they become spaces.
    """
    shown = "\n".join(map(visible, value.split("\n"))) if breaks else visible(value)
    return Text(shown, STYLES.get(look, ""), no_wrap=True, overflow="ellipsis")


def row(*values: str | Text) -> list[Text]:
    """Return the values as the cells of a row."""
    return [value if isinstance(value, Text) else text(value) for value in values]


def line(*values: str | Text) -> Text:
    """Return the values as one line."""
    return Text.assemble(*row(*values))


def duration(us: float) -> str:
    """Return a duration in microseconds as text with three digits, in µs or ms."""
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} µs"


def bar(size: int, *pieces: tuple[float, str]) -> Text:
    """Return a bar of block characters.

    Args:
        size: characters of a full bar.
        pieces: (share, look) of each piece; the shares sum up to at most 1. A single piece ends on an eighth of a
            character.
    """
    drawn, reached, end = text(""), 0, 0.0
    for share, look in pieces:
        end += share * size
        characters = round(end) if len(pieces) > 1 else int(end)
        rest = "" if len(pieces) > 1 else _EIGHTHS[int(8 * (end - characters))].strip()
        drawn.append("█" * (characters - reached) + rest, Style(color=GROUNDS[look].colour))
        reached = characters
    return drawn


def plain(parts: Sequence[Part]) -> str:
    """Return the parts as text: complete, without colours, independent of the terminal."""
    return "\n".join(_table(part) if isinstance(part, Table) else part.plain for part in parts)


def _table(table: Table) -> str:
    shown = [(i, column) for i, column in enumerate(table.columns) if not column.extra]
    written: str = tabulate(
        [[cells[i].plain for i, _ in shown] for cells in table.rows],
        headers=[column.header for _, column in shown] if table.headed else (),
        tablefmt="simple" if table.headed else "plain",
        colalign=[column.align for _, column in shown] if table.rows else None,
        disable_numparse=True,
    )
    return written
