"""Tables and lines as HTML for a notebook, with inline styles that are legible on light and on dark backgrounds.

Text of the model is escaped here, and nowhere else.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape

from rich.console import Console
from rich.text import Text

from fxq.display.tables import Part, Table, line, visible

BORDER = "1px solid rgba(128,128,128,.35)"
_SCROLLS = "max-height:36em;overflow:auto"
_GRID = "border-collapse:collapse;margin:0;font-size:inherit;color:inherit"
_GROUND = ";border-radius:3px;padding:0 .4em"
_BAR = ";font-size:.7em;letter-spacing:-.04em"  # lower than its row, and without gaps between the blocks
_CONSOLE = Console(file=io.StringIO())  # rich looks up styles in it; nothing is written to it


def html(parts: Sequence[Part]) -> str:
    """Return lines and tables as HTML."""
    inner = "".join(_table(part) if isinstance(part, Table) else f"<div>{_text(part)}</div>" for part in parts)
    return f'<div style="font-size:13px;line-height:1.5">{inner}</div>'


def folded(summary: str, inner: str, opened: bool = False) -> str:
    """Return HTML that a click on the summary, a text, shows and hides."""
    start = "<details open>" if opened else "<details>"
    return f'{start}<summary style="cursor:pointer;font-size:13px">{escape(summary)}</summary>{inner}</details>'


def text_html(text: str) -> str:
    """Return preformatted text in a box that scrolls."""
    shown = escape("\n".join(map(visible, text.split("\n"))))
    return f'<pre style="{_SCROLLS};font-size:12px">{shown}</pre>'


def _text(text: Text) -> str:
    """Return text with rich's styles as HTML. Dim text is translucent, since rich's grey fits one background only."""
    pieces = []
    for words, style, _ in line(text).render(_CONSOLE):
        css = "" if style is None else "opacity:.6" if style.dim else style.get_html_style()
        if style is not None and style.color:
            css += _GROUND if style.bgcolor else _BAR
        pieces.append(f'<span style="{css}">{escape(words)}</span>' if css else escape(words))
    return "".join(pieces)


def _table(table: Table) -> str:
    styles = [
        f"text-align:{column.align};padding:.1em .6em;white-space:"
        + ("normal;min-width:20em" if column.give == "fold" else "nowrap")
        for column in table.columns
    ]

    def row(tag: str, cells: Sequence[Text], border: str = "") -> str:
        pairs = zip(styles, map(_text, cells), strict=True)
        inner = "".join(f'<{tag} style="{style}{border}">{text}</{tag}>' for style, text in pairs)
        return f"<tr>{inner}</tr>"

    head = row("th", [c.title for c in table.columns], f";border-bottom:{BORDER}") if table.headed else ""
    body = "".join(row("td", cells) for cells in table.rows)
    grid = f'<table style="{_GRID}"><thead>{head}</thead><tbody>{body}</tbody></table>'
    return f'<div style="{_SCROLLS};margin:.4em 0">{grid}</div>'
