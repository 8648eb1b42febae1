"""Tables and lines in a terminal: in the palette's colours, and no wider than it is. rich does both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style
from rich.table import Table as Grid
from rich.text import Text

from fxq.display.tables import Part, Table, plain

_GAP = 2  # characters between columns
_LEAST = 20  # characters that a column keeps before others are left out for it
_ENDLESS = 100_000  # characters of a line that is never folded


def shown(parts: Callable[[], Sequence[Part]], brief: Callable[[], Sequence[Part]]) -> str:
    """What `print` is to show on stdout: all of `parts`, plain; in a terminal, `brief`, coloured and fitted.

    Characters that stdout's encoding does not have become question marks; `to_text` has them all.

    NO_COLOR, FORCE_COLOR and TERM=dumb mean what they mean to rich: without colours a table still fits the terminal,
    and where colours are forced into a file, nothing is left out.
    """
    if sys.stdout is None:
        return plain(parts())
    console = Console(force_jupyter=False)
    if not console.is_terminal or console.is_dumb_terminal or console.legacy_windows or console.options.ascii_only:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # print would fail at what a pipe of cp1252 has not
        return plain(parts()).encode(encoding, "replace").decode(encoding)
    if not getattr(sys.stdout, "isatty", bool)():
        return coloured(parts(), console, _ENDLESS)
    return coloured(brief(), console, console.width)


def coloured(parts: Sequence[Part], console: Console, width: int) -> str:
    """The parts with the console's colours, tables at most `width` characters wide."""
    console.width = width
    with console.capture() as capture:
        for part in parts:
            if isinstance(part, Table):
                console.print(_grid(part, width))
            else:
                console.print(part, soft_wrap=True)
    return "\n".join(line.rstrip(" ") for line in capture.get().rstrip("\n").split("\n"))


def _grid(table: Table, width: int) -> Grid:
    """The table as rich's, which makes the widest columns narrower where there is no place for all."""
    rule = table.headed  # the box with a rule has a character between columns
    grid = Grid(
        box=box.SIMPLE_HEAD if rule else None,
        show_header=rule,
        show_edge=False,
        pad_edge=False,
        padding=(0, _GAP - rule, 0, 0),
        header_style="bold",
    )
    titles = [_cell(column.title) for column in table.columns]
    cells = [[_cell(row[i], column.give) for row in table.rows] for i, column in enumerate(table.columns)]
    sizes = [max(text.cell_len for text in (titles[i], *cells[i])) for i in range(len(titles))]
    kept = [i for i, size in enumerate(sizes) if size]
    for number in sorted({column.drop for column in table.columns} - {0}, reverse=True):
        if sum(min(sizes[i], _LEAST) + _GAP for i in kept) - _GAP > width:
            kept = [i for i in kept if table.columns[i].drop != number]
    for i in kept:
        grid.add_column(titles[i], justify=table.columns[i].align)
    for shown_cells in zip(*(cells[i] for i in kept), strict=True):
        grid.add_row(*shown_cells)
    return grid


def _cell(cell: Text, give: str = "end") -> Text:
    """The cell, cropped or folded as its column says; with a space on either side where its ground is coloured."""
    if give == "fold":
        return Text(cell.plain.replace("\n", " "), cell.style, overflow="fold")
    cell = _End(cell.plain, cell.style) if give == "start" else cell.copy()
    if isinstance(cell.style, Style) and cell.style.bgcolor:
        cell.pad(1)
    return cell


class _End(Text):
    """Text that loses its beginning in a narrow column."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        words, width = self.plain, options.max_width
        if cell_len(words) > width:
            words = "…" + next(words[i:] for i in range(len(words) + 1) if cell_len(words[i:]) < width)
        return Text(words, self.style, no_wrap=True, overflow="crop").__rich_console__(console, options)
