"""Tables and lines in a terminal, in colours and fitted to its width, by rich."""

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
_MIN_COLUMN_WIDTH = 20  # characters that a column keeps, before other columns are left out
_UNLIMITED_WIDTH = 100_000  # characters of a line that is never folded


def shown(parts: Callable[[], Sequence[Part]], brief: Callable[[], Sequence[Part]]) -> str:
    """Return the text to print on stdout: `brief` in a terminal, coloured and fitted; else `parts` as plain text.

    Characters that the encoding of stdout does not have become question marks.

    NO_COLOR, FORCE_COLOR and TERM=dumb work as in rich: a table without colours still fits the terminal, and a file
    with forced colours is complete.

    Args:
        parts: returns the complete content.
        brief: returns the content for a terminal.
    """
    if sys.stdout is None:
        return plain(parts())
    console = Console(force_jupyter=False)
    if not console.is_terminal or console.is_dumb_terminal or console.legacy_windows or console.options.ascii_only:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # print raises for characters that cp1252 lacks
        return plain(parts()).encode(encoding, "replace").decode(encoding)
    if not getattr(sys.stdout, "isatty", bool)():
        return coloured(parts(), console, _UNLIMITED_WIDTH)
    return coloured(brief(), console, console.width)


def coloured(parts: Sequence[Part], console: Console, width: int) -> str:
    """Return the parts with the console's colours, and tables of at most `width` characters."""
    console.width = width
    with console.capture() as capture:
        for part in parts:
            if isinstance(part, Table):
                console.print(_grid(part, width))
            else:
                console.print(part, soft_wrap=True)
    return "\n".join(line.rstrip(" ") for line in capture.get().rstrip("\n").split("\n"))


def _grid(table: Table, width: int) -> Grid:
    """Return the table as a table of rich, which shrinks the widest columns to fit the width."""
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
    visible = [i for i, size in enumerate(sizes) if size]
    for rank in sorted({column.drop for column in table.columns} - {0}, reverse=True):
        if sum(min(sizes[i], _MIN_COLUMN_WIDTH) + _GAP for i in visible) - _GAP > width:
            visible = [i for i in visible if table.columns[i].drop != rank]
    for i in visible:
        grid.add_column(titles[i], justify=table.columns[i].align)
    for shown_cells in zip(*(cells[i] for i in visible), strict=True):
        grid.add_row(*shown_cells)
    return grid


def _cell(cell: Text, give: str = "end") -> Text:
    """Return the cell, cropped or folded as `give` says, with a space on each side if its background is coloured."""
    if give == "fold":
        return Text(cell.plain.replace("\n", " "), cell.style, overflow="fold")
    cell = _End(cell.plain, cell.style) if give == "start" else cell.copy()
    if isinstance(cell.style, Style) and cell.style.bgcolor:
        cell.pad(1)
    return cell


class _End(Text):
    """Text that is cropped at its beginning in a narrow column."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        words, width = self.plain, options.max_width
        if cell_len(words) > width:
            words = "…" + next(words[i:] for i in range(len(words) + 1) if cell_len(words[i:]) < width)
        return Text(words, self.style, no_wrap=True, overflow="crop").__rich_console__(console, options)
