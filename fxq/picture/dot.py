"""Graphviz: boxes, module clusters and arrows as DOT text, and running `dot` on it."""

from __future__ import annotations

import re
from collections.abc import Mapping

import graphviz

from fxq.errors import RenderError
from fxq.picture.columns import Box, Group, Pen, Picture, nest
from fxq.text.colours import FONT, QUIET, escape, tooltip

INSTALL = (
    "Graphviz's `dot` is not on the PATH. Install it (Debian, Ubuntu: apt install graphviz; macOS: brew install "
    "graphviz; Windows: winget install graphviz; conda: conda install -c conda-forge graphviz), or write a .dot file, "
    "which needs no `dot`."
)
_FILLS = ("#f4f6f8", "#e9edf1", "#dfe5eb", "#d5dde5")

HEADER = "the header"  # the space keeps it apart from the names of boxes

Attributes = Mapping[str, str]


def digraph(**attributes: str) -> graphviz.Digraph:
    """An empty graph with fxq's defaults."""
    graph = graphviz.Digraph(graph_attr={"fontname": FONT, "ranksep": "0.3", "nodesep": "0.22", **attributes})
    graph.attr("node", shape="plain", fontname=FONT, margin="0")
    graph.attr("edge", fontname=FONT, arrowsize="0.6")
    return graph


def dot_names(picture: Picture) -> dict[str, str]:
    """The DOT name of every box: its key where that is a plain word, else its number."""
    plain = re.compile(r"[A-Za-z_]\w*", re.ASCII)
    return {box.key: box.key if plain.fullmatch(box.key) else f"#{i}" for i, box in enumerate(picture.boxes)}


def add_group(
    graph: graphviz.Digraph, group: Group, names: Mapping[str, str], placed: Mapping[str, Attributes], depth: int = 0
) -> None:
    """Add what is in a module, modules inside as clusters. `placed` has the attributes that fix places, by DOT name."""
    for item in group.items:
        if isinstance(item, Box):
            name = names[item.key]
            graph.node(name, label=f"<{item.label}>", tooltip=item.tooltip, **placed.get(name, {}))
            continue
        name = cluster_name(item, names)
        text = item.path if item.first else f"{item.path} (continued)"
        with graph.subgraph(name=name) as inner:
            inner.attr(
                label=f'<<FONT POINT-SIZE="9" COLOR="{QUIET}">{escape(text)}</FONT>>',
                tooltip=tooltip([item.path]),
                style="filled",
                fillcolor=_FILLS[min(depth, len(_FILLS) - 1)],
                color="#c3cbd3",
                labeljust="l",
                margin="7",
                **placed.get(name, {}),
            )
            add_group(inner, item, names, placed, depth + 1)


def cluster_name(group: Group, names: Mapping[str, str]) -> str:
    """A name for the cluster of a module that no other has: its first box and how deep the module is."""
    first = group.items[0]
    while isinstance(first, Group):
        first = first.items[0]
    return f"cluster {group.path.count('.')} {names[first.key]}"


def add_arrow(graph: graphviz.Digraph, tail: str, head: str, pen: Pen, tip: str, **more: str) -> None:
    """Add an arrow between two DOT names."""
    style = {"style": pen.style} if pen.style != "solid" else {}
    width = {"penwidth": f"{pen.width:g}"} if pen.width != 1.0 else {}
    graph.edge(tail, head, color=pen.colour, tooltip=tooltip([tip]), **style, **width, **more)


def source(picture: Picture) -> str:
    """The picture as DOT text, not laid out: `dot` draws it as one column."""
    names = dot_names(picture)
    graph = digraph(label=f"<{picture.header}>", labelloc="t", labeljust="l")
    add_group(graph, nest(picture.boxes), names, {})
    for arrow in picture.arrows:
        add_arrow(graph, names[arrow.tail], names[arrow.head], arrow.pen, f"{arrow.tail} → {arrow.head}")
    text: str = graph.source
    return text


def run(text: str, form: str, *, keep_positions: bool = False) -> bytes:
    """The output of graphviz on DOT text, which may hold several graphs.

    Raises:
        RenderError: `dot` is missing, or refuses the text.
    """
    engine = "neato" if keep_positions else "dot"
    try:
        # `Source.pipe` would write all its lines before it reads any output, and hang on several large graphs
        out = graphviz.pipe(engine, form, text.encode(), neato_no_op=2 if keep_positions else None, quiet=True)
    except graphviz.ExecutableNotFound as error:
        raise RenderError(INSTALL) from error
    except graphviz.CalledProcessError as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else str(error.stderr)
        raise RenderError(f"{engine} failed: {said.strip()[:500]}") from error
    return bytes(out)
