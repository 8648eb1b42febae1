"""Writing of pictures to files: SVG, PNG and PDF in columns, or plain DOT text."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from html import escape
from math import sqrt
from pathlib import Path

from fxq.common.files import as_path, write_file
from fxq.display.notebook import BORDER, text_html
from fxq.display.tables import visible
from fxq.errors import RenderError
from fxq.picture.columns import Picture, reach
from fxq.picture.dot import run, source

log = logging.getLogger(__name__)

FORMATS = (".svg", ".png", ".pdf", ".dot")
_SHAPE = (1.3, 2.0)  # width / height of a picture, from a sheet of paper to a slide
_MIN_COLUMN_POINTS = 380.0  # shorter pictures are not cut
_MIN_WIDTH_PIXELS = 1800
_MAX_SIDE_PIXELS = 12_000


def write(picture: Picture, path: str | Path) -> Path:
    """Draw a picture to a file: `.svg`, `.png`, `.pdf`, or `.dot`, which is not laid out.

    Raises:
        RenderError: the suffix is none of these, `dot` is missing or fails, or the file cannot be written.
        InputError: `path` is not a path.
    """
    path = as_path(path)
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise RenderError(
            f"cannot draw to {path.name!r}: its suffix selects the format and must be one of {', '.join(FORMATS)}."
        )
    return write_file(path, source(picture).encode() if ending == ".dot" else drawn(picture, ending[1:]))


def drawn(picture: Picture, form: str) -> bytes:
    """Lay out a picture as `svg`, `png` or `pdf`, with a number of columns that gives it the shape of a slide."""
    total = reach(picture)[-1] if picture.boxes else 0.0
    max_columns = max(1, round(total / _MIN_COLUMN_POINTS))
    count = min(max_columns, max(1, round(sqrt(total * 1.6 / 220))))
    tried: dict[int, _Sheet] = {}
    for _ in range(3):
        tried[count] = sheet = _laid_out(picture, count)
        count = min(max_columns, max(1, round(count * sqrt(1.6 * sheet.height / sheet.width))))
        if sheet.fit == 1.0 or count in tried:
            break
    best = max(tried.values(), key=lambda sheet: sheet.fit)
    if form == "svg":
        return best.svg
    dpi = min(max(_MIN_WIDTH_PIXELS * 72 / best.width, 96), 192, _MAX_SIDE_PIXELS * 72 / max(best.width, best.height))
    return run(best.text(dpi=f"{dpi:.0f}") if form == "png" else best.text(), form)


@dataclass(frozen=True)
class _Sheet:
    """Picture laid out in columns.

    Attributes:
        text: function of further attributes that returns its DOT text.
        svg: its layout as SVG.
        width: width in points.
        height: height in points.
    """

    text: Callable[..., str]
    svg: bytes
    width: float
    height: float

    @property
    def fit(self) -> float:
        """Similarity of its shape to that of a slide, up to 1."""
        shape = self.width / self.height
        return min(1.0, shape / _SHAPE[0], _SHAPE[1] / shape)


def _laid_out(picture: Picture, count: int) -> _Sheet:
    """Lay out a picture in about `count` columns."""
    text = partial(source, picture, count, pad="0.25", bgcolor="white")
    try:
        svg = run(text(), "svg")
    except RenderError:
        log.info("dot fails with module frames; trying without", exc_info=True)
        text = partial(text, framed=False)
        svg = run(text(), "svg")
    width, height = (float(side) for side in re.findall(rb'(?:width|height)="([\d.]+)pt"', svg)[:2])
    return _Sheet(text, svg, width, height)


MAX_NOTEBOOK_BOXES = 300
"""Boxes up to which a notebook draws a picture: about three seconds of `dot`."""


def picture_html(picture: Picture, instead: str, how: str) -> str:
    """Convert a picture to HTML with an SVG; without `dot`, or for large pictures, with text and the reason.

    Args:
        picture: the picture.
        instead: text shown in its place.
        how: Python call that draws the picture to a file.
    """
    try:
        if len(picture.boxes) > MAX_NOTEBOOK_BOXES:
            raise RenderError(f"A picture of {len(picture.boxes)} boxes takes long to draw: {how} writes it to a file.")
        svg = drawn(picture, "svg").decode()
    except RenderError as error:
        return f'<div style="opacity:.6">{escape(visible(str(error)))}</div>{text_html(instead)}'
    image = svg[svg.index("<svg") :]  # without the XML declaration and the doctype
    return f'<div style="max-height:48em;overflow:auto;background:#fff;border:{BORDER}">{image}</div>'
