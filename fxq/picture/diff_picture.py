"""A difference as a picture: what changed in colour, what it replaced next to it, and a little of what is around."""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from fxq.display.colours import CHANGES, INK, MAX_LINE_LENGTH, QUIET, Line, Look, box, tooltip
from fxq.display.colours import Change as Mark
from fxq.graph.view import GraphView, NodeView
from fxq.picture.columns import Arrow, Box, Pen, Picture
from fxq.picture.diff_summary import MARKS, alike
from fxq.picture.graph_changes import Change, GraphChanges
from fxq.picture.graph_picture import constants_read, drawn, header, node_box

if TYPE_CHECKING:
    import networkx as nx

_KEPT, _NEW = Pen(), Pen(CHANGES["added"].colour, width=1.6)
_OLD = Pen(CHANGES["removed"].colour, "dashed", 1.2)
_BECAME = Pen(CHANGES["changed"].colour, "dotted", 1.4)
_STUB = Look("…", "unchanged, left out", "#eceff2", QUIET, pill=True, border="dotted")
_REPLACED = Look("replaced", "", "#8f8f8f", border="dashed")
_UNCHANGED = Look("=", "unchanged, nearby", "#aab2ba", INK)
_MOST_ROWS, _MOST_LISTED = 8, 16
_ARROWS = "arrows: green = new, red dashed = gone, brown dotted = became"


def picture(diff: GraphChanges, radius: int, title: str) -> Picture:
    """The changes of `diff` and what is at most `radius` steps away from one, as boxes and arrows."""
    if diff.is_empty:
        label, height = box(_UNCHANGED, "no difference", [Line(f"{len(diff.after)} nodes, all the same", "value")])
        return Picture(header(title, "no difference", []), (Box("no difference", label, height),), ())
    union = BothGraphs(diff)
    kept = union.near_changes(radius)
    boxes, home = union.boxes(kept)
    arrows = _merged(Arrow(home[arrow.tail], home[arrow.head], arrow.pen) for arrow in union.arrows())
    entries = [(look, f"{look.meaning} · {union.marked[mark]}") for mark, look in CHANGES.items() if union.marked[mark]]
    elided, nearby = len(union.nodes) - len(kept), len(kept) - union.marked.total()
    entries += [(_UNCHANGED, f"{_UNCHANGED.meaning} · {nearby}")] if nearby else []
    entries += [(_STUB, f"{_STUB.meaning} · {elided}")] if elided else []
    return Picture(header(title, _ARROWS, entries, _happened(diff)), tuple(boxes), arrows)


class BothGraphs:
    """Both graphs in one, constants folded into who reads them.

    Attributes:
        order: names of all nodes, removed ones just before what they became.
        nodes: of both, by name: as they are after, where they are there.
        mark: for each node that differs, how: a node that is both changed and rewired counts as changed.
        became: for each removed node, the nodes that it became.
        marked: how many nodes have each mark.
    """

    def __init__(self, diff: GraphChanges) -> None:
        self.diff = diff
        self.old_constants, self.new_constants = constants_read(diff.before), constants_read(diff.after)
        self.nodes = {node.name: node for node in (*drawn(diff.before), *drawn(diff.after))}
        self.changes: dict[str, Change] = {change.name: change for change in diff.changed}
        self.rewired = set(diff.rewired)
        self.mark: dict[str, Mark] = {}
        for mark, names in (
            ("rewired", diff.rewired),
            ("changed", self.changes),
            ("added", diff.added),
            ("removed", diff.removed),
        ):
            self.mark.update({name: mark for name in names if name in self.nodes})  # type: ignore[misc]
        for name in self.nodes:
            if name not in self.mark and any(
                constant.name in self.changes for constant in self.new_constants.get(name, ())
            ):
                self.mark[name] = "changed"
        self.marked = Counter(self.mark.values())
        heirs = {
            name: [h for h in found if h in self.nodes] for name, found in diff.became.items() if name in self.nodes
        }
        self.became = {name: found for name, found in heirs.items() if found}
        self.order = list(self._ordered())

    def _ordered(self) -> Iterator[str]:
        before_heir: dict[str, list[str]] = defaultdict(list)
        after_anchor: dict[str, list[str]] = defaultdict(list)
        anchor = ""
        removed = set(self.diff.removed)
        for node in self.diff.before:
            if node.name not in self.nodes:
                continue
            if node.name not in removed:
                anchor = node.name
            elif node.name in self.became:
                before_heir[self.became[node.name][0]].append(node.name)
            else:
                after_anchor[anchor].append(node.name)
        yield from after_anchor[""]
        for node in self.diff.after:
            yield from before_heir[node.name]
            if node.name in self.nodes:
                yield node.name
            yield from after_anchor[node.name]

    def arrows(self) -> Iterator[Arrow]:
        """Every arrow of both graphs: those of `before` only, of `after` only, of both, and what became what."""
        old, new = _edges(self.diff.before), _edges(self.diff.after)
        for tail, head in new | old:
            if tail in self.nodes and head in self.nodes:
                pen = _KEPT if (tail, head) in old and (tail, head) in new else _NEW if (tail, head) in new else _OLD
                yield Arrow(tail, head, pen)
        for name, heirs in self.became.items():
            yield from (Arrow(name, heir, _BECAME) for heir in heirs)

    @cached_property
    def neighbours(self) -> nx.Graph[str]:
        """The nodes, and between which of them there are arrows."""
        import networkx as nx

        graph: nx.Graph[str] = nx.Graph((arrow.tail, arrow.head) for arrow in self.arrows())
        graph.add_nodes_from(self.nodes)
        return graph

    def near_changes(self, radius: int) -> set[str]:
        """The nodes that differ and those at most `radius` steps from one, whichever way."""
        import networkx as nx

        layers = nx.bfs_layers(self.neighbours, set(self.mark)) if self.mark else ()
        return {name for layer in islice(layers, radius + 1) for name in layer}

    def boxes(self, kept: set[str]) -> tuple[list[Box], dict[str, str]]:
        """The boxes in order, and for each node the box that it is in.

        A node that is kept has its own; removed nodes that became the same share one; parts left out are one each.
        """
        home = {name: name for name in kept}
        members: dict[str, list[str]] = defaultdict(list)
        for name, heirs in self.became.items():
            members[f"became {' '.join(heirs)}"].append(name)
        members = defaultdict(list, {key: names for key, names in members.items() if len(names) > 1})
        for key, part in self._left_out(kept):
            members[key].append(part)
        home.update({name: key for key, names in members.items() for name in names})
        boxes: dict[str, Box] = {}
        for name in self.order:
            key = home[name]
            if key not in boxes:
                boxes[key] = self._box(name) if key == name else self._group_box(key, members[key])
        return list(boxes.values()), home

    def _left_out(self, kept: set[str]) -> Iterator[tuple[str, str]]:
        """Every node that is not kept, after a key of its part: connected, and not cut by a kept neighbour in order."""
        import networkx as nx

        position = {name: i for i, name in enumerate(self.order)}
        graph = self.neighbours
        for i, part in enumerate(nx.connected_components(graph.subgraph(n for n in self.nodes if n not in kept))):
            cuts = sorted({position[other] for name in part for other in graph[name] if other in kept})
            for name in sorted(part, key=position.__getitem__):
                yield f"unchanged {i}.{bisect(cuts, position[name])}", name

    def _box(self, name: str) -> Box:
        changes = [Line(text, "change") for text in self.texts(name)]
        return node_box(self.nodes[name], self.constants(name), self.mark.get(name), changes)

    def constants(self, name: str) -> Sequence[NodeView]:
        """What a node reads of constants: they are a line in its box."""
        return (self.old_constants if self.mark.get(name) == "removed" else self.new_constants).get(name, ())

    def _group_box(self, key: str, names: list[str]) -> Box:
        nodes = [self.nodes[name] for name in names]
        tip = tooltip(node.text or node.name for node in nodes[:40])
        if names[0] not in self.became:
            text = f"… {len(names)} unchanged node{'s' if len(names) > 1 else ''}"
            label, height = box(_STUB, text, [])
            return Box(key, label, height, tip)
        lines = [Line(f"{node.label}  {node.name}", "value") for node in nodes]
        if len(lines) > _MOST_LISTED:
            lines = [Line(f"{count} × {op}", "value") for op, count in Counter(n.label for n in nodes).most_common()]
        label, height = box(_REPLACED, f"{len(nodes)} nodes", lines, "removed")
        return Box(key, label, height, tip, nodes[0].path)

    def texts(self, name: str) -> list[str]:
        """What changed at a node, on as few lines as it fits on. The body of a unit is in its box anyway."""
        texts: list[str] = []
        if name in self.changes:
            texts += [text for field, text in self.changes[name].by_field.items() if field != "body"]
        for constant in self.new_constants.get(name, ()):
            if constant.name in self.changes:
                what, fields = constant.label.rpartition(".")[2], self.changes[constant.name].by_field
                texts += [f"{what} {fields[field]}" for field in ("shape", "dtype") if field in fields]
        if name in self.rewired:
            lost, gained = self.diff.reads(name)
            texts.append(f"reads {', '.join(lost) or '–'} → {', '.join(gained) or '–'}")
        return list(_joined(texts))


def _happened(diff: GraphChanges) -> dict[str, int]:
    """What happened more than once, most frequent first, and how often."""
    frequent = [(change, names) for change, names in alike(diff) if len(names) > 1][:_MOST_ROWS]
    return {" ".join(filter(None, (MARKS[mark], what, how))): len(names) for (mark, what, how, _), names in frequent}


def _joined(texts: Iterable[str]) -> Iterator[str]:
    """The texts on as few lines as they fit on."""
    line = ""
    for text in texts:
        if line and len(line) + len(text) > MAX_LINE_LENGTH:
            yield line
            line = ""
        line = f"{line}; {text}" if line else text
    if line:
        yield line


def _merged(arrows: Iterable[Arrow]) -> tuple[Arrow, ...]:
    """The arrows, each once. Where one thing became another, an old arrow between the two says nothing more."""
    unique = dict.fromkeys(arrow for arrow in arrows if arrow.tail != arrow.head)
    became = {(arrow.tail, arrow.head) for arrow in unique if arrow.pen is _BECAME}
    kept = (arrow for arrow in unique if arrow.pen is not _OLD or (arrow.tail, arrow.head) not in became)
    return tuple(kept)


def _edges(graph: GraphView) -> dict[tuple[str, str], None]:
    return dict.fromkeys((tail, node.name) for node in graph for tail in node.inputs)
