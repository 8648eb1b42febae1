"""Looks of the kinds of nodes, and labels of boxes. Each kind also has a tag or a shape, not only a colour.

Colours: Okabe and Ito 2008, "Color Universal Design", which are distinct for the common forms of colour blindness.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

FONT = "Helvetica,Arial,sans-serif"
INK, QUIET, FAINT = "#1a1a1a", "#5c5c5c", "#b8b8b8"
MAX_LINE_LENGTH = 38  # characters in a line of a box

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]+")


@dataclass(frozen=True)
class Look:
    """Look of a box.

    Attributes:
        tag: word on the box, which says the same as the colour.
        meaning: text in the legend.
        colour: colour of the head (or the whole pill) and the border.
        ink: colour of the text on it.
        pill: whether it is drawn as a small rounded pill instead of a box with a head.
        border: style of the border, `solid`, `dashed` or `dotted`.
    """

    tag: str
    meaning: str
    colour: str
    ink: str = "#ffffff"
    pill: bool = False
    border: Literal["solid", "dashed", "dotted"] = "solid"


LOOKS: dict[str, Look] = {
    "int8": Look("int8", "int8 compute", "#0072b2"),
    "weight-only": Look("weight", "integer weight, float compute", "#009e73"),
    "moves": Look("moves", "data movement", "#a6d4ee", INK),
    "convert": Look("q/dq", "quantize, dequantize", "#f2c14e", INK, pill=True),
    "float": Look("float", "float fallback", "#c8500a", border="dashed"),
    "observer": Look("observer", "observer", "#cc79a7", INK, pill=True),
    "op": Look("op", "not decided yet", "#6f7780"),
    "size": Look("size", "sizes, plain values", "#d9d4e3", INK, pill=True),
    "constant": Look("constant", "unused constant", "#e4e4e4", INK, pill=True),
    "io": Look("io", "input, output", "#333333", pill=True),
}

Change = Literal["added", "removed", "changed", "rewired"]
CHANGES: dict[Change, Look] = {
    "added": Look("+ added", "added", "#007a5a"),
    "removed": Look("− removed", "removed", "#c0392b", border="dashed"),
    "changed": Look("~ changed", "changed: old → new", "#8a5a00"),
    "rewired": Look("> rewired", "reads other inputs", "#5e4fa2"),
}


@dataclass(frozen=True)
class Line:
    """Line of text in a box; `role` selects its size and colour."""

    text: str
    role: Literal["name", "value", "scale", "detail", "warn", "change"] = "detail"


_FONTS = {
    "name": (8, QUIET),
    "value": (9.5, INK),
    "scale": (9, "#00548a"),
    "detail": (8, QUIET),
    "warn": (8, "#a83f00"),
    "change": (8.5, "#7a4f00"),
}


def clean(text: str) -> str:
    """Return `text` without line breaks and characters that XML or a font cannot show."""
    return _UNPRINTABLE.sub(" ", text)


def clip(text: str, length: int = MAX_LINE_LENGTH) -> str:
    """Return `text`, without its middle if it is longer than `length` characters."""
    text = clean(text)
    return text if len(text) <= length else f"{text[: length - length // 3 - 1]}…{text[-(length // 3) :]}"


def escape(text: str) -> str:
    """Return `text` escaped for an HTML-like label of Graphviz."""
    text = clean(text)
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("\\", "&#92;")):
        text = text.replace(sign, entity)
    return text or " "


def tooltip(lines: Iterable[str]) -> str:
    """Return the non-empty lines as a tooltip attribute, with Graphviz's own escape sequences escaped."""
    text = "\n".join(clean(line) for line in lines if line)
    return " " + text.replace("&", "&amp;").replace(
        "\\", "\\\\"
    )  # the space keeps `<...>` from being taken for an HTML-like label


def font(text: str, size: float, colour: str, bold: bool = False) -> str:
    """Return `text`, escaped, in one font."""
    inner = escape(text)
    inner = f"<B>{inner}</B>" if bold else inner
    return f'<FONT POINT-SIZE="{size}" COLOR="{colour}">{inner}</FONT>'


def box(look: Look, head: str, lines: Sequence[Line], change: Change | None = None) -> tuple[str, float]:
    """Return the HTML-like label of a box, and its approximate height in points.

    A box has a coloured head with the op and the tag of its look, and lines below; a pill is all in its colour.

    Args:
        look: the look.
        head: text of the head.
        lines: lines below it.
        change: kind of change since an earlier graph, shown by the frame and a strip on top.
    """
    border = CHANGES[change].border if change else look.border
    colour = CHANGES[change].colour if change else look.colour
    width = 2.5 if change else 1
    rows: list[str] = []
    if change:
        strip = font(CHANGES[change].tag, 8, CHANGES[change].colour, bold=True)
        rows.append(f'<TR><TD ALIGN="LEFT" BGCOLOR="#ffffff">{strip}</TD></TR>')
    if look.pill:
        rows += _pill_rows(look, head, lines)
        style, fill = ("rounded" if border == "solid" else f"rounded,{border}"), look.colour
    else:
        rows += _head_rows(look, head, lines)
        style, fill = border, "#ffffff"
    label = (
        f'<TABLE BORDER="{width}" CELLBORDER="0" CELLSPACING="0" CELLPADDING="2" COLOR="{colour}" '
        f'BGCOLOR="{fill}" STYLE="{style}">{"".join(rows)}</TABLE>'
    )
    return label, (18 if look.pill else 26) + 13 * len(lines) + (13 if change else 0)


def _head_rows(look: Look, head: str, lines: Sequence[Line]) -> list[str]:
    name = f'<TD ALIGN="LEFT">{font(clip(head, 30), 12, look.ink, bold=True)}</TD>'
    tag = f'<TD ALIGN="RIGHT">{font(f"  {look.tag} ", 8, look.ink)}</TD>'
    inner = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="1"><TR>{name}{tag}</TR></TABLE>'
    rows = [f'<TR><TD BGCOLOR="{look.colour}">{inner}</TD></TR>']
    for line in lines:
        size, colour = _FONTS[line.role]
        length = round(MAX_LINE_LENGTH * 9 / size)
        rows.append(f'<TR><TD ALIGN="LEFT">{font(f" {clip(line.text, length)} ", size, colour)}</TD></TR>')
    return rows


def _pill_rows(look: Look, head: str, lines: Sequence[Line]) -> list[str]:
    rows = [f"<TR><TD>{font(clip(head, 30), 10, look.ink, bold=True)}</TD></TR>"]
    for line in lines:
        rows.append(f"<TR><TD>{font(f'  {clip(line.text)}  ', 8, look.ink)}</TD></TR>")
    return rows


def swatch(look: Look) -> str:
    """Return the cell of a legend that shows a look."""
    return f'<TD BGCOLOR="{look.colour}">{font(look.tag, 9, look.ink, bold=True)}</TD>'
