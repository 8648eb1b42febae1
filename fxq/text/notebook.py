"""Tables, lines and pictures as HTML for a notebook. Styles are inline, and legible on light and on dark.

Whatever comes from the model is data: it is escaped here, and nowhere before.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fxq.text.cells import BADGES, Cell, Column, Part, Table, lines_of, visible

BORDER = "1px solid rgba(128,128,128,.35)"
_ROLES = {"quiet": "opacity:.6", "strong": "font-weight:600"}
_SCROLLS = "max-height:36em;overflow:auto"
_GRID = "border-collapse:collapse;margin:0;white-space:nowrap;font-size:inherit;color:inherit"


def html(parts: Sequence[Part]) -> str:
    """Lines and tables as HTML."""
    inner = "".join(_table(part) if isinstance(part, Table) else f"<div>{_line(part)}</div>" for part in parts)
    return f'<div style="font-size:13px;line-height:1.5">{inner}</div>'


def folded(summary: str, inner: str, opened: bool = False) -> str:
    """HTML that comes and goes at a click on the summary, which is text."""
    start = "<details open>" if opened else "<details>"
    return f'{start}<summary style="cursor:pointer;font-size:13px">{escape(summary)}</summary>{inner}</details>'


def text_html(text: str) -> str:
    """Text as it stands, in a box that scrolls."""
    shown = escape("\n".join(map(visible, text.split("\n"))))
    return f'<pre style="{_SCROLLS};font-size:12px">{shown}</pre>'


def _line(line: Sequence[Cell]) -> str:
    return "".join(map(_span, line))


def _span(cell: Cell, folds: bool = False) -> str:
    text = escape(" ".join(lines_of(cell)) if folds else visible(cell.text))
    look = cell.badge
    if look is not None and text:
        return f'<span style="background:{look.colour};color:{look.ink};border-radius:3px;padding:0 .4em">{text}</span>'
    return f'<span style="{_ROLES[cell.look]}">{text}</span>' if cell.look in _ROLES else text


def _table(table: Table) -> str:
    head = "".join(_th(column) for column in table.columns) if table.headed else ""
    body = "".join(f"<tr>{''.join(map(_td, row, table.columns))}</tr>" for row in table.rows)
    thead = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div style="{_SCROLLS};margin:.4em 0"><table style="{_GRID}">{thead}<tbody>{body}</tbody></table></div>'


def _th(column: Column) -> str:
    text = _span(Cell(BADGES[column.look].tag, column.look) if column.look else Cell(column.header))
    return f'<th style="{_aligned(column)};border-bottom:{BORDER}">{text}</th>'


def _td(cell: Cell, column: Column) -> str:
    if column.bars:
        return f'<td style="{_aligned(column)}">{_bar(cell, column.bars)}</td>'
    folds = column.give == "fold"
    wraps = ";white-space:normal;min-width:20em" if folds else ""
    return f'<td style="{_aligned(column)}{wraps}">{_span(cell, folds)}</td>'


def _aligned(column: Column) -> str:
    return f"text-align:{column.align};padding:.1em .6em"


def _bar(cell: Cell, size: int) -> str:
    pieces = "".join(
        f'<span style="display:inline-block;height:.8em;width:{share * size / 2:.2f}em;'
        f'background:{BADGES[look].colour}"></span>'
        for share, look in cell.bar
    )
    return f'<span style="white-space:nowrap">{pieces}</span>'
