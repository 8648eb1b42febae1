"""Lines and tables for people, made once of rich's texts.

`plain` writes them, `fxq/display/terminal.py` prints them in colours and fits them to a terminal, and
`fxq/display/notebook.py` makes HTML of them.
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
"""The looks that are text on a coloured ground, as in the pictures: readable on light and on dark."""

STYLES = {name: Style(color=look.ink, bgcolor=look.colour) for name, look in GROUNDS.items()}
STYLES |= {"quiet": Style(dim=True), "strong": Style(bold=True)}

_EIGHTHS = " ▏▎▍▌▋▊▉"
_BIDI = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]+")  # they take no place, or turn a line around


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        header: its title.
        align: of the cells and the header.
        look: the look whose tag is the title instead, where there are colours.
        give: what a narrow terminal does with long cells: they are cropped at their "start" or "end", or "fold"ed. A
            folded cell's own line breaks are those of plain text.
        drop: a terminal that is too narrow leaves out the columns with the highest number first, those of one number
            together; 0: never.
        extra: whether it helps the eye only, or repeats, and is not part of plain text.
        coloured: whether each of its cells is the name of a look, and shown in that.
        optional: whether it is left out where all of its cells are empty.
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
        """The header where there are colours."""
        title = text(GROUNDS[self.look].tag if self.look else self.header, self.look)
        title.justify = "left" if self.look else None
        return title


@dataclass(frozen=True)
class Table:
    """Columns, and rows of as many cells. Without any header it is a list."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Text]]

    @property
    def headed(self) -> bool:
        """Whether a column has a header."""
        return any(column.header for column in self.columns)


Part = Table | Text
"""A table or a line."""


def visible(value: str) -> str:
    """`value` without what a terminal would obey and not show: names in a model are data."""
    return _BIDI.sub(" ", clean(value))


def text(value: str, look: str = "", breaks: bool = False) -> Text:
    """A cell, or a piece of a line.

    Args:
        value: what it says.
        look: a name of `STYLES`.
        breaks: whether its line breaks count; else they become spaces.
    """
    shown = "\n".join(map(visible, value.split("\n"))) if breaks else visible(value)
    return Text(shown, STYLES.get(look, ""), no_wrap=True, overflow="ellipsis")


def row(*values: str | Text) -> list[Text]:
    """Texts as the cells of a row."""
    return [value if isinstance(value, Text) else text(value) for value in values]


def line(*values: str | Text) -> Text:
    """Texts as one."""
    return Text.assemble(*row(*values))


def duration(us: float) -> str:
    """Microseconds with a unit that suits them, and three digits."""
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} µs"


def bar(size: int, *pieces: tuple[float, str]) -> Text:
    """A bar of blocks.

    Args:
        size: characters of a whole bar.
        pieces: the length of each piece, 0 to 1 in all, and its look. One alone ends on an eighth of a character.
    """
    drawn, reached, end = text(""), 0, 0.0
    for share, look in pieces:
        end += share * size
        whole = round(end) if len(pieces) > 1 else int(end)
        rest = "" if len(pieces) > 1 else _EIGHTHS[int(8 * (end - whole))].strip()
        drawn.append("█" * (whole - reached) + rest, Style(color=GROUNDS[look].colour))
        reached = whole
    return drawn


def plain(parts: Sequence[Part]) -> str:
    """The parts as text: complete, without colours, independent of any terminal."""
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
