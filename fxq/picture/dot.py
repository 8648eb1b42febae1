"""Conversion of pictures to DOT text, and layout of that by Graphviz's `dot`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fxq.display.colours import FONT, QUIET, escape, tooltip
from fxq.errors import RenderError
from fxq.picture.columns import Box, Group, Picture, boxes_of, in_columns

if TYPE_CHECKING:
    import graphviz

INSTALL = (
    "Graphviz's `dot` is not on the PATH. Install it (Debian, Ubuntu: apt install graphviz; macOS: brew install "
    "graphviz; Windows: winget install graphviz; conda: conda install -c conda-forge graphviz), or write a .dot file, "
    "which needs no `dot`."
)
_PLAIN = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # keys that are valid names in DOT; others are numbered
_FILLS = ("#f4f6f8", "#e9edf1", "#dfe5eb", "#d5dde5")


def source(picture: Picture, count: int = 1, framed: bool = True, **attributes: str) -> str:
    """Convert a picture to DOT text.

    Args:
        picture: the picture.
        count: approximate number of columns.
        framed: whether to frame modules.
        **attributes: further attributes of the DOT graph.
    """
    import graphviz

    columns, arrows = in_columns(picture, count)
    keys = [box.key for column in columns for box in boxes_of(column)]
    names = {key: key if _PLAIN.fullmatch(key) else f"#{i}" for i, key in enumerate(keys)}
    graph = graphviz.Digraph()
    graph.attr(fontname=FONT, ranksep="0.3", nodesep="0.22", label=f"<{picture.header}>", labelloc="t", labeljust="l")
    graph.attr(pack="22", packmode=f"array_it{max(len(columns), 1)}", **attributes)
    graph.attr("node", shape="plain", fontname=FONT, margin="0")
    graph.attr("edge", fontname=FONT, arrowsize="0.6")
    for i, column in enumerate(columns):
        with graph.subgraph(name=f"cluster column {i}") as part:
            part.attr(style="invis", label="")
            _add_group(part, column if framed else Group("", [*boxes_of(column)]), names)
    for arrow in arrows:
        line = arrow.style
        style = {"style": line.style} if line.style != "solid" else {}
        width = {"penwidth": f"{line.width:g}"} if line.width != 1.0 else {}
        tip = tooltip([f"{arrow.tail} → {arrow.head}"])
        graph.edge(names[arrow.tail], names[arrow.head], color=line.colour, tooltip=tip, **style, **width)
    text: str = graph.source
    return text


def _add_group(graph: graphviz.Digraph, group: Group, names: Mapping[str, str], depth: int = 0) -> None:
    """Add the boxes of a module, with inner modules as clusters."""
    for item in group.items:
        if isinstance(item, Box):
            graph.node(names[item.key], label=f"<{item.label}>", tooltip=item.tooltip)
            continue
        text = item.path if item.first else f"{item.path} (continued)"
        with graph.subgraph(name=f"cluster {depth} {names[boxes_of(item)[0].key]}") as inner:
            inner.attr(
                label=f'<<FONT POINT-SIZE="9" COLOR="{QUIET}">{escape(text)}</FONT>>',
                tooltip=tooltip([item.path]),
                style="filled",
                fillcolor=_FILLS[min(depth, len(_FILLS) - 1)],
                color="#c3cbd3",
                labeljust="l",
                margin="7",
            )
            _add_group(inner, item, names, depth + 1)


def run(text: str, form: str) -> bytes:
    """Run `dot` on DOT text, and return its output in format `form`.

    Some versions of `dot` crash on a few layouts: it runs again with other distances then.

    Raises:
        RenderError: `dot` is missing or fails.
    """
    import graphviz

    for distance in ("", *_OTHER_DISTANCES):
        body, end, after = text.rpartition("}")
        tried = f"{body}\tgraph [nodesep={distance}]\n{end}{after}" if distance else text
        try:
            return bytes(graphviz.pipe("dot", form, tried.encode(), quiet=True))
        except graphviz.ExecutableNotFound as error:
            raise RenderError(INSTALL) from error
        except graphviz.CalledProcessError as error:
            if error.returncode >= 0:
                message = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr
                raise RenderError(f"dot failed: {str(message).strip()[:500]}") from error
            crash = error
    raise RenderError(f"dot crashed with signal {-crash.returncode}, also with other distances of nodes.") from crash


_OTHER_DISTANCES = ("0.3", "0.4")
"""Distances of nodes in inches that are tried if `dot` crashes."""
