"""Writing a picture to a file: SVG, PNG and PDF laid out in columns, or plain DOT text."""

from __future__ import annotations

from html import escape
from pathlib import Path

from fxq.common.files import as_path, write_file
from fxq.errors import RenderError
from fxq.picture.columns import Picture
from fxq.picture.dot import HEADER, add_arrow, add_group, digraph, run, source
from fxq.picture.routing import lay_out, spline
from fxq.text.notebook import BORDER, text_html
from fxq.text.tables import visible

FORMATS = (".svg", ".png", ".pdf", ".dot")
_PIXELS_WIDE = 1800  # of a small picture
_OVERLAP = 2.0  # points by which a line reaches into its ends, so that no gap shows
_MOST_PIXELS = 12_000  # of either side


def write(picture: Picture, path: str | Path) -> Path:
    """Draw the picture into a file; its ending says how: `.svg`, `.png`, `.pdf`, or `.dot`, which is not laid out.

    Raises:
        RenderError: the ending is none of these, `dot` is missing or fails, or the file cannot be written.
        InputError: `path` is no path.
    """
    path = as_path(path)
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise RenderError(
            f"cannot draw to {path.name!r}: its ending says the format, and must be one of {', '.join(FORMATS)}."
        )
    return write_file(path, source(picture).encode() if ending == ".dot" else drawn(picture, ending[1:]))


def drawn(picture: Picture, form: str) -> bytes:
    """The picture as `svg`, `png` or `pdf`."""
    sheet = lay_out(picture)
    graph = digraph(pad="0.25", bgcolor="white")
    if form == "png":
        width, longest = max(sheet.size[0], 72.0) / 72, max(*sheet.size, 72.0) / 72
        graph.attr(dpi=f"{min(max(_PIXELS_WIDE / width, 96), 192, _MOST_PIXELS / longest):.0f}")
    graph.node(HEADER, label=f"<{picture.header}>", tooltip=" ", **sheet.placed[HEADER])
    for name, (x, y) in sheet.points.items():
        graph.node(name, shape="point", width="0.02", style="invis", pos=f"{x:.2f},{y:.2f}")
    for wire, column, ((x, y), *corners, (u, v)) in sheet.lines:
        line = [(x, y + _OVERLAP), *corners, (u, v - _OVERLAP)]
        add_arrow(graph, wire.exit, wire.entry(column), wire.pen, wire.tail, pos=spline(line), arrowhead="none")
    for part in sheet.columns:
        add_group(graph, part.group, sheet.names, sheet.placed)
        for edge in part.edges:
            add_arrow(
                graph, edge.tail, edge.head, edge.pen, edge.tip, **edge.attributes, **sheet.placed.get(edge.name, {})
            )
    return run(graph.source, form, keep_positions=True)


MOST_BOXES = 300
"""Most boxes of a picture that a notebook draws by itself: about three seconds of `dot`."""


def picture_html(picture: Picture, instead: str, how: str) -> str:
    """The picture as SVG. Where there is no `dot`, or more boxes than it draws quickly, text and the reason.

    Args:
        picture: what to draw.
        instead: the text.
        how: the call that draws the picture into a file, as Python.
    """
    try:
        if len(picture.boxes) > MOST_BOXES:
            raise RenderError(f"A picture of {len(picture.boxes)} boxes takes long to draw: {how} writes it to a file.")
        svg = drawn(picture, "svg").decode()
    except RenderError as error:
        return f'<div style="opacity:.6">{escape(visible(str(error)))}</div>{text_html(instead)}'
    image = svg[svg.index("<svg") :]  # without the XML declaration and the doctype
    return f'<div style="max-height:48em;overflow:auto;background:#fff;border:{BORDER}">{image}</div>'
