"""Placing a picture on a sheet, in columns.

`dot` lays out every column on its own, which keeps it fast. Here the columns are put side by side, and the lines
between them are routed: down, below the columns between, up a gap, and in from above.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

from fxq.errors import RenderError
from fxq.picture.columns import Arrow, Group, Pen, Picture, boxes_of, columns, divided, nest, reach
from fxq.picture.dot import HEADER, Attributes, add_arrow, add_group, digraph, dot_names, run

log = logging.getLogger(__name__)

SHAPE = (1.3, 2.0)  # width / height of a picture, from a sheet of paper to a slide
GAP = 22.0  # points between columns
LANE = 8.0  # points between two lines that run side by side
CORNER = 6.0  # radius of a line's corners, points
_SHORTEST = 380.0  # points; a picture that fits is not cut
_PAIR = re.compile(r"(-?[\d.]+(?:e[-+]?\d+)?),(-?[\d.]+(?:e[-+]?\d+)?)")

Point = tuple[float, float]


@dataclass(frozen=True)
class Wire:
    """A value that other columns read: it leaves at a point below its own column, and arrives above each of theirs."""

    index: int
    tail: str
    pen: Pen
    column: int
    heads: tuple[int, ...]

    @property
    def exit(self) -> str:
        """DOT name of the point where it leaves."""
        return f"exit {self.index}"

    def entry(self, column: int) -> str:
        """DOT name of the point where it arrives."""
        return f"entry {self.index} {column}"


@dataclass(frozen=True)
class RoutedEdge:
    """An edge inside a column, between DOT names: an arrow, or an end of a wire."""

    name: str
    tail: str
    head: str
    pen: Pen
    tip: str
    wire: Literal["leaves", "arrives", ""] = ""

    @property
    def attributes(self) -> dict[str, str]:
        """What graphviz must know beyond the pen. An end of a wire goes to the very point, not to its rim."""
        ends = {"leaves": {"arrowhead": "none", "headclip": "false"}, "arrives": {"tailclip": "false"}}
        return {"id": self.name, **ends.get(self.wire, {})}


@dataclass(frozen=True)
class SheetColumn:
    """A column: its part of the module tree, its edges, and the points where wires arrive and leave."""

    group: Group
    edges: list[RoutedEdge]
    arriving: list[str]
    leaving: list[str]

    def source(self, names: dict[str, str]) -> str:
        """The column as DOT text, to be laid out."""
        graph = digraph()
        add_group(graph, self.group, names, {})
        for rank, points in (("source", self.arriving), ("sink", self.leaving)):
            if points:
                with graph.subgraph() as row:
                    row.attr(rank=rank)
                    for point in points:
                        row.node(point, shape="point", width="0.02", style="invis")
        for edge in self.edges:
            add_arrow(graph, edge.tail, edge.head, edge.pen, edge.tip, **edge.attributes)
        text: str = graph.source
        return text


def cut(picture: Picture, names: dict[str, str], count: int) -> tuple[list[SheetColumn], list[Wire]]:
    """The picture in about `count` columns, and the wires between them."""
    runs = columns(picture, count)
    where = {box.key: c for c, part in enumerate(runs) for box in part}
    groups = divided(nest(picture.boxes), where)
    made = [SheetColumn(groups.get(c, Group("")), [], [], []) for c in range(len(runs))]
    crossing: dict[tuple[str, Pen], list[Arrow]] = defaultdict(list)
    for i, arrow in enumerate(picture.arrows):
        tail, head = where[arrow.tail], where[arrow.head]
        if tail == head:
            ends = (names[arrow.tail], names[arrow.head])
            made[tail].edges.append(RoutedEdge(f"edge-{i}", *ends, arrow.pen, f"{arrow.tail} → {arrow.head}"))
        else:
            crossing[arrow.tail, arrow.pen].append(arrow)
    wires = []
    for i, ((key, pen), arrows) in enumerate(crossing.items()):
        wire = Wire(i, key, pen, where[key], tuple(sorted({where[arrow.head] for arrow in arrows})))
        wires.append(wire)
        made[wire.column].leaving.append(wire.exit)
        made[wire.column].edges.append(RoutedEdge(f"exit-{i}", names[key], wire.exit, pen, key, "leaves"))
        for c in wire.heads:
            made[c].arriving.append(wire.entry(c))
        for j, arrow in enumerate(arrows):
            c, tip = where[arrow.head], f"{arrow.tail} → {arrow.head}"
            made[c].edges.append(RoutedEdge(f"entry-{i}-{j}", wire.entry(c), names[arrow.head], pen, tip, "arrives"))
    return made, wires


@dataclass
class Sheet:
    """A picture with everything in its place. y grows upwards; the columns hang from y = 0.

    Attributes:
        placed: the attributes that fix the places of boxes, clusters, edges and the header, by DOT name.
        points: where wires leave and arrive.
        lines: every wire, the column it goes to, and the corners of its line.
        size: width and height, points.
    """

    columns: list[SheetColumn]
    names: dict[str, str]
    placed: dict[str, Attributes]
    points: dict[str, Point]
    lines: list[tuple[Wire, int, list[Point]]]
    size: Point


def lay_out(picture: Picture) -> Sheet:
    """The picture with as many columns as give it the shape of a slide."""
    names = dot_names(picture)
    total = reach(picture)[-1] if picture.boxes else 0.0
    most = max(1, round(total / _SHORTEST))
    count = min(most, max(1, round(sqrt(total * 1.6 / 220))))
    tried: dict[int, tuple[float, Sheet]] = {}
    for _ in range(3):
        sheet = _placed(picture, names, count)
        shape = sheet.size[0] / max(sheet.size[1], 1.0)
        fit = 1.0 if SHAPE[0] <= shape <= SHAPE[1] else min(shape / SHAPE[0], SHAPE[1] / shape)
        tried[count] = (fit, sheet)
        count = min(most, max(1, round(count * sqrt(1.6 / shape))))
        if fit == 1.0 or count in tried:
            break
    return max(tried.values(), key=lambda pair: pair[0])[1]


def _placed(picture: Picture, names: dict[str, str], count: int) -> Sheet:
    made, wires = cut(picture, names, count)
    header = digraph()
    header.node(HEADER, label=f"<{picture.header}>")
    head = json.loads(run(header.source, "json0"))
    laid = [_laid_out(column, names) for column in made]
    gutters = [sum(c in wire.heads for wire in wires) for c in range(len(made))]
    placed: dict[str, Attributes] = {}
    points: dict[str, Point] = {}
    left, right, bottom, x = [], [], [], 0.0
    for lanes, graph in zip(gutters, laid, strict=True):
        x += GAP + lanes * LANE
        _, _, width, height = _numbers(graph["bb"])
        left.append(x)
        right.append(x + width)
        bottom.append(-height)
        _move(graph, x, -height, placed, points)
        x += width
    roof = LANE * (2 + max(gutters, default=0))
    _, _, width, height = _numbers(head["bb"])
    _move(head, left[0] if left else 0.0, roof, placed, points)
    lines = list(_routed(wires, points, left, bottom, gutters))
    size = (max(x, width), roof + height - min(bottom, default=0.0))
    return Sheet(made, names, placed, points, lines, size)


def _laid_out(column: SheetColumn, names: dict[str, str]) -> dict[str, Any]:
    """What `dot` makes of a column. One process a column: `dot` 2.43 can crash on the second graph of a stream."""
    try:
        return dict(json.loads(run(column.source(names), "json0")))
    except RenderError:
        log.info("dot fails on a column with module frames; trying without", exc_info=True)
        column.group.items[:] = boxes_of(column.group)
        return dict(json.loads(run(column.source(names), "json0")))


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _move(graph: dict[str, Any], dx: float, dy: float, placed: dict[str, Attributes], points: dict[str, Point]) -> None:
    """Note the places of everything in a laid-out graph, moved by (dx, dy)."""

    def moved(places: str) -> str:
        return _PAIR.sub(lambda m: f"{float(m[1]) + dx:.2f},{float(m[2]) + dy:.2f}", places)

    for item in graph.get("objects", []):
        if item.get("shape") == "point":
            x, y = _numbers(item["pos"])
            points[item["name"]] = (x + dx, y + dy)
        elif "pos" in item or "lp" in item:
            placed[item["name"]] = {key: moved(item[key]) for key in ("pos", "bb", "lp") if key in item}
    for edge in graph.get("edges", []):
        if "pos" in edge:
            placed[edge["id"]] = {"pos": moved(edge["pos"])}


# ---- wires


def _routed(
    wires: list[Wire], points: dict[str, Point], left: list[float], bottom: list[float], gutters: list[int]
) -> Iterator[tuple[Wire, int, list[Point]]]:
    """Every wire's lines. Wires get lanes of their own wherever they run side by side."""
    below: list[set[int]] = [set() for _ in left]
    used = [0] * len(left)
    for wire in sorted(wires, key=lambda w: (_span(w)[1] - _span(w)[0], -points[w.entry(w.heads[-1])][0])):
        low, high = _span(wire)
        under = range(low, high)
        lane = next(i for i in range(len(wires)) if not any(i in below[c] for c in under))
        for c in under:
            below[c].add(lane)
        x, y = points[wire.exit]
        floor = min(bottom[c] for c in under) - LANE * (lane + 1)
        for c in wire.heads:
            end_x, end_y = points[wire.entry(c)]
            gap_x = left[c] - GAP / 2 - LANE * (gutters[c] - 1 - used[c])
            roof = LANE * (gutters[c] - used[c])
            used[c] += 1
            yield wire, c, [(x, y), (x, floor), (gap_x, floor), (gap_x, roof), (end_x, roof), (end_x, end_y)]


def _span(wire: Wire) -> tuple[int, int]:
    """The columns that a wire passes below: from the first (included) to the last (not included)."""
    return min(wire.column, *wire.heads), max(wire.column + 1, *wire.heads)


def spline(corners: list[Point]) -> str:
    """A line through the corners, rounded, as the `pos` of an edge (cubic Bezier pieces)."""
    pieces = [corners[0]]

    def straight(to: Point) -> None:
        pieces.extend([pieces[-1], to, to])

    for before, at, after in zip(corners, corners[1:], corners[2:], strict=False):
        straight(_towards(at, before))
        pieces.extend([at, at, _towards(at, after)])
    straight(corners[-1])
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in pieces)


def _towards(start: Point, end: Point) -> Point:
    """The point a corner's radius from `start` towards `end`, or half way where they are near."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = abs(dx) + abs(dy)
    part = min(CORNER, length / 2) / length if length else 0.0
    return start[0] + dx * part, start[1] + dy * part
