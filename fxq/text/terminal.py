"""Tables and lines in a terminal: in the palette's colours, and no wider than it is. rich does both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TextIO

from fxq.text.cells import BADGES, Cell, Column, Part, Table, lines_of, plain, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

GAP = 2  # characters between columns
_EIGHTHS = " ▏▎▍▌▋▊▉"
_ROLES = {"quiet": "dim", "strong": "bold"}


def shown(parts: Callable[[], Sequence[Part]], brief: Callable[[], Sequence[Part]]) -> str:
    """What `print` is to show on stdout: all of `parts`, plain; in a terminal, `brief`, coloured and fitted.

    Characters that stdout's encoding does not have become question marks; `to_text` has them all.

    NO_COLOR, FORCE_COLOR and TERM=dumb mean what they mean to rich: without colours a table still fits the terminal,
    and where colours are forced into a file, nothing is left out.
    """
    from rich.console import Console  # only what prints needs rich

    if sys.stdout is None:
        return plain(parts())
    console = Console(force_jupyter=False)
    if not console.is_terminal or console.is_dumb_terminal or console.legacy_windows or console.options.ascii_only:
        return _encodable(plain(parts()), sys.stdout)
    if not getattr(sys.stdout, "isatty", bool)():
        return coloured(parts(), console, None)
    return coloured(brief(), console, console.width)


def _encodable(text: str, stream: TextIO) -> str:
    """The text with a question mark for what the stream cannot write, as a pipe of cp1252 cannot: print would fail."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def coloured(parts: Sequence[Part], console: Console, width: int | None) -> str:
    """The parts with the console's colours, at most `width` characters wide; None: as wide as they are."""
    with console.capture() as capture:
        for part in parts:
            if isinstance(part, Table):
                widths = fitted(part, width)
                console.width = max(1, _together(widths.values()))
                console.print(_grid(part, widths))
            else:
                console.print(_line(part), soft_wrap=True)
    return "\n".join(line.rstrip(" ") for line in capture.get().rstrip("\n").split("\n"))


def _line(line: Sequence[Cell]) -> Text:
    from rich.text import Text

    return Text.assemble(*(_text(cell) for cell in line))


def _text(cell: Cell, folds: bool = False) -> Text:
    """A cell in its colours, a space on either side of a badge. The line breaks of one that folds become spaces."""
    from rich.style import Style
    from rich.text import Text

    text = " ".join(lines_of(cell)) if folds else visible(cell.text)
    look = cell.badge
    if look is None or not text:
        return Text(text, _ROLES.get(cell.look, ""))
    return Text().append(f" {text} ", Style(color=look.ink, bgcolor=look.colour))


def _grid(table: Table, widths: dict[int, int]) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable

    rule = table.headed  # the box with a rule has a character between columns
    grid = RichTable(
        box=box.SIMPLE_HEAD if rule else None,
        show_header=rule,
        show_edge=False,
        pad_edge=False,
        padding=(0, GAP - rule, 0, 0),
        header_style="bold",
    )
    for i, width in widths.items():
        column = table.columns[i]
        folds = column.give == "fold"
        overflow: Literal["fold", "ellipsis"] = "fold" if folds else "ellipsis"
        grid.add_column(_aligned(_header(column), column, width), width=width, no_wrap=not folds, overflow=overflow)
    for row in table.rows:
        grid.add_row(*(_cell(row[i], table.columns[i], width) for i, width in widths.items()))
    return grid


def _header(column: Column) -> Text:
    return _text(Cell(BADGES[column.look].tag, column.look) if column.look else Cell(column.header))


def _cell(cell: Cell, column: Column, width: int) -> Text:
    from rich.text import Text

    if column.bars:
        return _bar(cell, min(column.bars, width))
    text = _text(cell, column.give == "fold")
    if column.give == "start" and text.cell_len > width:
        text = text[-width:]
        while text.cell_len >= width:
            text = text[1:]
        return Text("…") + text
    return _aligned(text, column, width)


def _aligned(text: Text, column: Column, width: int) -> Text:
    """Text at the right of its column, if that is where it belongs. rich would cut the space that ends a badge."""
    if column.align == "right":
        text.pad_left(width - text.cell_len)
    return text


def _bar(cell: Cell, size: int) -> Text:
    """A bar of blocks; one piece alone ends on an eighth of a character."""
    from rich.text import Text

    bar, reached, end = Text(), 0, 0.0
    for share, look in cell.bar:
        end += share * size
        whole = round(end) if len(cell.bar) > 1 else int(end)
        bar.append("█" * (whole - reached), BADGES[look].colour)
        reached = whole
    if len(cell.bar) == 1:
        bar.append(_EIGHTHS[int(8 * (end - reached))].strip(), BADGES[cell.bar[0][1]].colour)
    return bar


# ---- fitting


def fitted(table: Table, width: int | None) -> dict[int, int]:
    """The columns to show, by number, and their widths in characters: with gaps at most `width`, if there is one.

    Columns that may be left out go first. Those that give way share what is left, from left to right; where that is not
    enough, the widest ones give way.
    """
    natural = [_natural(table, i) for i in range(len(table.columns))]
    kept = [i for i, size in enumerate(natural) if size]
    if width is None:
        return {i: natural[i] for i in kept}
    least = [min(n, c.least) if c.give else n for n, c in zip(natural, table.columns, strict=True)]
    for number in sorted({c.drop for c in table.columns if c.drop}, reverse=True):
        if _together(least[i] for i in kept) <= width:
            break
        kept = [i for i in kept if table.columns[i].drop != number]
    sizes = {i: least[i] for i in kept}
    spare = width - _together(sizes.values())
    for i in kept if spare > 0 else ():
        more = min(spare, natural[i] - least[i])
        sizes[i] += more
        spare -= more
    while spare < 0 and max(sizes.values()) > 1:
        widest = max(sizes, key=sizes.__getitem__)
        sizes[widest] -= 1
        spare += 1
    return sizes


def _natural(table: Table, i: int) -> int:
    """The width of a column when nothing is cropped."""
    column = table.columns[i]
    texts = [_text(row[i], column.give == "fold") for row in table.rows]
    if table.headed:
        texts.append(_header(column))
    return max((column.bars, *(text.cell_len for text in texts)))


def _together(widths: Iterable[int]) -> int:
    """The width of columns with the gaps between them."""
    sizes = list(widths)
    return sum(sizes) + GAP * max(0, len(sizes) - 1)
