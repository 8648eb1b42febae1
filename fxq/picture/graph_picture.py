"""Picture of a graph: boxes coloured by kind of node, modules as frames, weights as lines in their users' boxes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fxq.display.colours import INK, LOOKS, QUIET, Change, Line, Look, box, font, swatch, tooltip
from fxq.display.tables import duration
from fxq.graph.view import GraphView, NodeView
from fxq.picture.columns import Arrow, Box, Picture
from fxq.picture.writing import write


def render(graph: GraphView, path: str | Path, *, title: str = "") -> Path:
    """Draw a graph to a file: `.svg`, `.png`, `.pdf` or `.dot`.

    A `.dot` file is not laid out and needs no Graphviz. The other formats are laid out in columns by `dot`.

    Args:
        graph: the graph; `fxq.graph.view.view` makes one from a `GraphModule`.
        path: file to write. Its folder is created if missing.
        title: title of the picture; default: the name of the graph.

    Returns:
        The path of the file.

    Raises:
        RenderError: the suffix is none of these, `dot` is missing, or the file cannot be written.
    """
    return write(picture(graph, title or graph.name or "graph"), path)


def picture(graph: GraphView, title: str) -> Picture:
    """Picture of a graph as boxes and arrows."""
    constants, nodes = constants_read(graph), drawn(graph)
    boxes = tuple(node_box(node, constants.get(node.name, ())) for node in nodes)
    names = {node.name for node in nodes}
    arrows = dict.fromkeys(Arrow(name, node.name) for node in nodes for name in node.inputs if name in names)
    return Picture(_header(title, nodes), boxes, tuple(arrows))


def drawn(graph: GraphView) -> list[NodeView]:
    """Nodes that have a box. Constants with users are lines in the boxes of these."""
    read = {name for node in graph for name in node.inputs}
    return [node for node in graph if node.kind != "constant" or node.name not in read]


def constants_read(graph: GraphView) -> dict[str, list[NodeView]]:
    """Weights and other constants that each node reads, by its name."""
    constants = {node.name: node for node in graph if node.kind == "constant"}
    read: dict[str, list[NodeView]] = defaultdict(list)
    for node in graph:
        for name in dict.fromkeys(node.inputs):
            if name in constants:
                read[node.name].append(constants[name])
    return dict(read)


def node_box(
    node: NodeView, constants: Sequence[NodeView] = (), change: Change | None = None, changes: Iterable[Line] = ()
) -> Box:
    """Box of a node. `change` selects its frame; `changes` are further lines, on what changed."""
    look, lines = LOOKS.get(node.kind, LOOKS["op"]), [*node_lines(node, constants), *changes]
    label, height = box(look, node.label or node.name, lines, change)
    return Box(node.name, label, height, node_tooltip(node, constants), node.path)


def node_lines(node: NodeView, constants: Sequence[NodeView] = ()) -> list[Line]:
    """Lines in the box of a node below its op."""
    grid = [Line(_grid(node), "scale")] if node.scale else []
    if LOOKS.get(node.kind, LOOKS["op"]).pill:
        texts = [node.label if node.kind == "constant" else node.name, _value(node)]
        return [Line(line.text) for line in (*map(Line, texts), *grid) if line.text]
    body = _layers(node) if node.is_region else [Line(text, "value") for text in _body(node.body) if node.body]
    lines = [Line(node.name, "name"), *body, Line(_short(node.options)), Line(_value(node), "value"), *grid]
    weights = [Line(text) for text in _weights(constants)]
    return [line for line in (*lines, Line(node.reason, "warn"), *weights) if line.text]


def _layers(node: NodeView) -> list[Line]:
    """Summary of a region: number of ops, layers of its engine with their time, and the slowest layers."""
    ops, layers = f"{len(node.body)} op{'s' if len(node.body) > 1 else ''}", node.layers
    if not layers:
        return [Line(ops, "value")]
    total = f"{ops} in {len(layers)} layers: {duration(sum(layer.us for layer in layers))}"
    share = sum(layer.us for layer in layers if layer.kind == "float") / (sum(layer.us for layer in layers) or 1.0)
    float_share = Line(f"{share:.0%} of it in float; slowest:", "warn") if share else Line("slowest:")
    slowest = sorted(layers, key=lambda layer: -layer.us)[:_MAX_SLOWEST_LAYERS]
    return [Line(total, "value"), float_share, *(Line(str(layer), "scale") for layer in slowest)]


_MAX_SLOWEST_LAYERS, _MAX_TOOLTIP_LAYERS = 3, 40


def _value(node: NodeView) -> str:
    shape = "" if node.shape is None else "×".join(map(str, node.shape)) or "scalar"
    return " · ".join(part for part in (shape, node.dtype) if part)


def _grid(node: NodeView) -> str:
    return f"scale {node.scale} · zp {node.zero_point or 0}"


def _body(body: Sequence[str]) -> list[str]:
    """Ops of a unit on one line, or on a line each if any has options."""
    if not any("(" in op for op in body):
        return [" → ".join(body)]
    return [("" if i == 0 else "→ ") + _short(op).replace("(", " ", 1).removesuffix(")") for i, op in enumerate(body)]


def _short(options: str) -> str:
    """Options with `(2, 2)` written as `2`."""
    return re.sub(r"\((-?\d+)(?:, \1)*,?\)", r"\1", options)


def _weights(constants: Sequence[NodeView]) -> list[str]:
    """Constants of a node, with one line for all of one shape and dtype."""
    groups: dict[str, list[str]] = defaultdict(list)
    for constant in constants:
        dtype = "" if constant.dtype in ("", "float32") else f" {constant.dtype}"
        per = " per channel" if "axis" in constant.scale else ""
        form = f"{'×'.join(map(str, constant.shape or ())) or 'scalar'}{dtype}{per}"
        groups[form].append(constant.label.rpartition(".")[2] or constant.name)
    return [f"{', '.join(names)} {form}" for form, names in groups.items()]


def node_tooltip(node: NodeView, constants: Sequence[NodeView] = ()) -> str:
    """Tooltip of a node: all that its view holds."""
    facts = {
        "module": node.path,
        "kind": LOOKS[node.kind].meaning if node.kind in LOOKS else node.kind,
        "source": node.source,
        "made by": node.made_by,
        "stands for": ", ".join(node.origins),
        "reason": node.reason,
        "note": node.note,
        "inside": "; ".join(node.body),
        "layers": "\n".join(map(str, node.layers[:_MAX_TOOLTIP_LAYERS])),
        "options": node.options,
        "value": _value(node),
        "grid": _grid(node) if node.scale else "",
    }
    weights = [f"{c.label}: {_value(c)}{', ' + _grid(c) if c.scale else ''}" for c in constants]
    return tooltip([node.text or node.name, *(f"{key}: {fact}" for key, fact in facts.items() if fact), *weights])


# ---- header


def _header(title: str, nodes: Sequence[NodeView]) -> str:
    counts = Counter[str](node.kind if node.kind in LOOKS else "op" for node in nodes)
    entries = [(look, f"{look.meaning} · {counts[kind]}") for kind, look in LOOKS.items() if counts[kind]]
    return header(title, f"{len(nodes)} nodes" if len(nodes) != 1 else "1 node", entries)


def header(
    title: str, subtitle: str, entries: Sequence[tuple[Look, str]], table: Mapping[str, int] | None = None
) -> str:
    """HTML-like label with title, legend, and a table of counts, if given."""
    left = 'ALIGN="LEFT"'
    rows = [
        f"<TR><TD {left}>{font(title, 20, INK, bold=True)}   {font(subtitle, 12, QUIET)}</TD></TR>",
    ]
    for start in range(0, len(entries), 6):
        cells = "".join(f"{swatch(look)}<TD>{font(text, 10, INK)}   </TD>" for look, text in entries[start : start + 6])
        inner = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="2" CELLPADDING="3"><TR>{cells}</TR></TABLE>'
        rows.append(f"<TR><TD {left}>{inner}</TD></TR>")
    for text, count in (table or {}).items():
        rows.append(f"<TR><TD {left}>{font(f'{count} ×', 10, INK, bold=True)}  {font(text, 10, INK)}</TD></TR>")
    return f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="3">{"".join(rows)}</TABLE>'
