"""Layout of a picture: boxes and arrows, module frames, and the cut into columns.

Most networks are chains, which would be drawn as a long strip. Columns give a picture the shape of a slide. No arrow
runs between columns: each of its ends is a small box with the name of the other end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise, takewhile
from typing import Literal

from fxq.display.colours import QUIET, Look, tooltip
from fxq.display.colours import box as box_label

_ELSEWHERE = Look("", "", "#ffffff", QUIET, pill=True, border="dotted")


@dataclass(frozen=True)
class Box:
    """Box to draw.

    Attributes:
        key: unique name.
        label: HTML-like label of Graphviz.
        height: approximate height in points.
        tooltip: text shown on hover.
        path: path of the module that contains it.
    """

    key: str
    label: str
    height: float
    tooltip: str = ""
    path: str = ""


@dataclass(frozen=True)
class ArrowStyle:
    """Colour (#rrggbb), line style and width (points) of an arrow."""

    colour: str = "#707070"
    style: Literal["solid", "dashed", "dotted"] = "solid"
    width: float = 1.0


@dataclass(frozen=True)
class Arrow:
    """Arrow between two boxes, given by their keys."""

    tail: str
    head: str
    style: ArrowStyle = ArrowStyle()


@dataclass(frozen=True)
class Picture:
    """Picture to draw: header (HTML-like label), boxes in execution order, and arrows between them."""

    header: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


@dataclass
class Group:
    """Part of a picture inside one module.

    Attributes:
        path: path of the module.
        items: boxes and inner groups, in order.
        size: number of boxes.
        first: whether it is the first part of the module, if columns divide it.
    """

    path: str
    items: list[Box | Group] = field(default_factory=list)
    size: int = 0
    first: bool = True


# ---- modules


def nest(boxes: Sequence[Box], smallest: int = 3) -> Group:
    """Group boxes into a tree of modules.

    A module is a run of neighbours whose paths start with its path. Runs shorter than `smallest`, and modules that
    contain only one other module, get no group.
    """
    return _nested("", list(zip(boxes, _filled(boxes), strict=True)), smallest)


def _nested(path: str, run: Sequence[tuple[Box, str]], smallest: int) -> Group:
    """Make the group of a module from a run of boxes, each with its path."""
    group, depth = Group(path, size=len(run)), len(path.split(".")) if path else 0
    for inside, part in groupby(run, lambda entry: ".".join(entry[1].split(".")[: depth + 1])):
        entries = list(part)
        if inside == path:
            group.items += [box for box, _ in entries]
            continue
        inner = _nested(inside, entries, smallest)
        is_frame = inner.size >= smallest and not (len(inner.items) == 1 and isinstance(inner.items[0], Group))
        group.items += [inner] if is_frame else inner.items
    return group


def _filled(boxes: Sequence[Box]) -> list[str]:
    """Paths of the boxes. A box without a path gets the common prefix of its neighbours' paths."""
    paths = [box.path for box in boxes]
    following = [""] * len(paths)
    for i in range(len(paths) - 2, -1, -1):
        following[i] = paths[i + 1] or following[i + 1]
    last = ""
    for i, path in enumerate(paths):
        if not path:
            paths[i] = ".".join(_shared(last, following[i]))
        last = path or last
    return paths


def _shared(a: str, b: str) -> list[str]:
    """Modules that two paths have in common, outermost first."""
    pairs = zip(a.split("."), b.split("."), strict=False)
    return [x for x, y in takewhile(lambda pair: pair[0] == pair[1], pairs) if x]


def boxes_of(group: Group) -> list[Box]:
    """Boxes of a group and of the groups inside it, in order."""
    return [box for item in group.items for box in ([item] if isinstance(item, Box) else boxes_of(item))]


def divided(group: Group, column: Mapping[str, int], drawn: Mapping[str, Sequence[Box]]) -> dict[int, Group]:
    """Divide a group into its parts in each column. Columns without boxes of the group have no part.

    Args:
        group: the group.
        column: column of each box, by key.
        drawn: boxes to draw for each box, by key: itself, and the ends of arrows next to it.
    """
    parts: dict[int, Group] = {}

    def part(c: int) -> Group:
        return parts.setdefault(c, Group(group.path, size=group.size, first=not parts))

    for item in group.items:
        if isinstance(item, Box):
            part(column[item.key]).items.extend(drawn[item.key])
        else:
            for c, piece in divided(item, column, drawn).items():
                part(c).items.append(piece)
    return parts


# ---- columns


def in_columns(picture: Picture, count: int) -> tuple[list[Group], list[Arrow]]:
    """Divide a picture into about `count` columns: the group of each column, and arrows, each inside one column."""
    column = {box.key: c for c, run in enumerate(columns(picture, count)) for box in run}
    drawn = {box.key: [box] for box in picture.boxes}
    arrows: list[Arrow] = []
    crossing: dict[tuple[str, ArrowStyle], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for arrow in picture.arrows:
        if column[arrow.tail] == column[arrow.head]:
            arrows.append(arrow)
        else:
            crossing[arrow.tail, arrow.style][column[arrow.head]].append(arrow.head)
    for i, ((tail, style), heads_in) in enumerate(crossing.items()):
        first, *others = [head for heads in heads_in.values() for head in heads]
        leaves = _end(f"leaves {i}", f"→ {first} and {len(others)} more" if others else f"→ {first}", [first, *others])
        drawn[tail].append(leaves)
        arrows.append(Arrow(tail, leaves.key, style))
        for c, heads in heads_in.items():
            arrives = _end(f"arrives {i} {c}", f"{tail} →", [tail])
            drawn[heads[0]].insert(0, arrives)
            arrows.extend(Arrow(arrives.key, head, style) for head in heads)
    parts = divided(nest(picture.boxes), column, drawn)
    return [parts[c] for c in sorted(parts)], arrows


def _end(key: str, text: str, names: Sequence[str]) -> Box:
    """Small box for the other end of an arrow between columns."""
    label, height = box_label(_ELSEWHERE, text, [])
    return Box(key, label, height, tooltip(names))


def columns(picture: Picture, count: int) -> list[tuple[Box, ...]]:
    """Cut the boxes, in order, into about `count` runs of similar height, where few values and modules are cut."""
    boxes = picture.boxes
    position = {box.key: i for i, box in enumerate(boxes)}
    height = reach(picture)
    cost = _cut_costs(picture, position)
    cuts: list[int] = []
    start, done = 0, 0.0
    for remaining in range(count, 1, -1):
        share = (height[-1] - done) / remaining
        low = max(start, bisect_left(height, done + 0.6 * share))
        window = range(low, min(bisect_right(height, done + 1.2 * share), len(boxes) - 1))
        if not window:
            continue
        best = min(window, key=lambda i: cost[i] + 6 * abs((height[i] - done) / share - 1))
        cuts.append(best + 1)
        start, done = best + 1, height[best]
    return [boxes[a:b] for a, b in pairwise([0, *cuts, len(boxes)])]


def reach(picture: Picture) -> list[float]:
    """For each box, the height (points) of the picture down to it, with parallel boxes side by side."""
    position = {box.key: i for i, box in enumerate(picture.boxes)}
    bottom = [0.0] * len(picture.boxes)
    tails: dict[int, list[int]] = defaultdict(list)
    for arrow in picture.arrows:
        tail, head = position[arrow.tail], position[arrow.head]
        if tail < head:
            tails[head].append(tail)
    reach, lowest = [], 0.0
    for i, box in enumerate(picture.boxes):
        bottom[i] = max((bottom[t] for t in tails[i]), default=0.0) + box.height + 22
        lowest = max(lowest, bottom[i])
        reach.append(lowest)
    return reach


def _cut_costs(picture: Picture, position: Mapping[str, int]) -> list[float]:
    """For each box, the cost of a cut below it: one per value that crosses, 1.5 per module that is cut."""
    last: dict[str, int] = {}
    for arrow in picture.arrows:
        last[arrow.tail] = max(last.get(arrow.tail, 0), position[arrow.head])
    steps = [0] * (len(picture.boxes) + 1)
    for key, end in last.items():
        if position[key] < end:
            steps[position[key]] += 1
            steps[end] -= 1
    paths = [*_filled(picture.boxes), ""]
    costs, live = [], 0
    for i in range(len(picture.boxes)):
        live += steps[i]
        costs.append(live + 1.5 * len(_shared(paths[i], paths[i + 1])))
    return costs
