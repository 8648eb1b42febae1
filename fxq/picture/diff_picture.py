"""Picture of a difference: changes in colour, replaced nodes beside the new ones, and unchanged nodes nearby."""

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
from fxq.picture.columns import Arrow, ArrowStyle, Box, Picture
from fxq.picture.diff_summary import MARKS, grouped_changes
from fxq.picture.graph_changes import Change, GraphChanges
from fxq.picture.graph_picture import constants_read, drawn, header, node_box

if TYPE_CHECKING:
    import networkx as nx

_IN_BOTH, _NEW = ArrowStyle(), ArrowStyle(CHANGES["added"].colour, width=1.6)
_OLD = ArrowStyle(CHANGES["removed"].colour, "dashed", 1.2)
_BECAME = ArrowStyle(CHANGES["changed"].colour, "dotted", 1.4)
_STUB = Look("…", "unchanged, left out", "#eceff2", QUIET, pill=True, border="dotted")
_REPLACED = Look("replaced", "", "#8f8f8f", border="dashed")
_UNCHANGED = Look("=", "unchanged, nearby", "#aab2ba", INK)
_MAX_CHANGE_ROWS, _MAX_LISTED_NODES = 8, 16
_ARROWS = "arrows: green = new, red dashed = removed, brown dotted = became"


def picture(diff: GraphChanges, radius: int, title: str) -> Picture:
    """Picture of the changes of `diff` and of the nodes at most `radius` arrows away from one."""
    if diff.is_empty:
        label, height = box(_UNCHANGED, "no difference", [Line(f"{len(diff.after)} nodes, all equal", "value")])
        return Picture(header(title, "no difference", []), (Box("no difference", label, height),), ())
    union = UnionGraph(diff)
    shown = union.near_changes(radius)
    boxes, home = union.boxes(shown)
    arrows = _merged(Arrow(home[arrow.tail], home[arrow.head], arrow.style) for arrow in union.arrows())
    counts = union.mark_counts
    entries = [(look, f"{look.meaning} · {counts[mark]}") for mark, look in CHANGES.items() if counts[mark]]
    elided, nearby = len(union.nodes) - len(shown), len(shown) - counts.total()
    entries += [(_UNCHANGED, f"{_UNCHANGED.meaning} · {nearby}")] if nearby else []
    entries += [(_STUB, f"{_STUB.meaning} · {elided}")] if elided else []
    return Picture(header(title, _ARROWS, entries, _frequent_changes(diff)), tuple(boxes), arrows)


class UnionGraph:
    """Union of the graphs before and after. Constants have no nodes; they are listed with their users.

    Attributes:
        order: names of all nodes; removed ones directly before the nodes that they became.
        nodes: nodes of both graphs by name; of `after`, if both have the name.
        mark: kind of change of each node that differs. A node that is both changed and rewired counts as changed.
        became: for each removed node, the nodes that it became.
        mark_counts: number of nodes with each mark.
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
        self.mark_counts = Counter(self.mark.values())
        heirs_of = {
            name: [h for h in heirs if h in self.nodes] for name, heirs in diff.became.items() if name in self.nodes
        }
        self.became = {name: heirs for name, heirs in heirs_of.items() if heirs}
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
        """Arrows of both graphs, styled by the graphs that have them, and arrows from removed nodes to their heirs."""
        old, new = _edges(self.diff.before), _edges(self.diff.after)
        for edge in new | old:
            tail, head = edge
            if tail in self.nodes and head in self.nodes:
                yield Arrow(tail, head, _IN_BOTH if edge in old and edge in new else _NEW if edge in new else _OLD)
        for name, heirs in self.became.items():
            yield from (Arrow(name, heir, _BECAME) for heir in heirs)

    @cached_property
    def neighbours(self) -> nx.Graph[str]:
        """Undirected graph of the nodes and arrows."""
        import networkx as nx

        graph: nx.Graph[str] = nx.Graph((arrow.tail, arrow.head) for arrow in self.arrows())
        graph.add_nodes_from(self.nodes)
        return graph

    def near_changes(self, radius: int) -> set[str]:
        """Nodes that differ, and nodes at most `radius` arrows from one, in either direction."""
        import networkx as nx

        layers = nx.bfs_layers(self.neighbours, set(self.mark)) if self.mark else ()
        return {name for layer in islice(layers, radius + 1) for name in layer}

    def boxes(self, shown: set[str]) -> tuple[list[Box], dict[str, str]]:
        """Make the boxes, in order.

        Each node of `shown` has its own box, removed nodes that became the same nodes share one, and each connected
        part of the other nodes has one.

        Returns:
            The boxes, and for each node the key of its box.
        """
        home = {name: name for name in shown}
        members: dict[str, list[str]] = defaultdict(list)
        for name, heirs in self.became.items():
            members[f"became {' '.join(heirs)}"].append(name)
        members = defaultdict(list, {key: names for key, names in members.items() if len(names) > 1})
        for key, part in self._left_out(shown):
            members[key].append(part)
        home.update({name: key for key, names in members.items() for name in names})
        boxes: dict[str, Box] = {}
        for name in self.order:
            key = home[name]
            if key not in boxes:
                boxes[key] = self._box(name) if key == name else self._group_box(key, members[key])
        return list(boxes.values()), home

    def _left_out(self, shown: set[str]) -> Iterator[tuple[str, str]]:
        """Nodes that are not shown, each after the key of its part.

        A part is connected, and no shown neighbour is between its nodes in `order`.
        """
        import networkx as nx

        position = {name: i for i, name in enumerate(self.order)}
        graph = self.neighbours
        for i, part in enumerate(nx.connected_components(graph.subgraph(n for n in self.nodes if n not in shown))):
            cuts = sorted({position[near] for name in part for near in graph[name] if near in shown})
            for name in sorted(part, key=position.__getitem__):
                yield f"unchanged {i}.{bisect(cuts, position[name])}", name

    def _box(self, name: str) -> Box:
        changes = [Line(text, "change") for text in self.texts(name)]
        return node_box(self.nodes[name], self.constants(name), self.mark.get(name), changes)

    def constants(self, name: str) -> Sequence[NodeView]:
        """Constants that a node reads, which are lines in its box."""
        return (self.old_constants if self.mark.get(name) == "removed" else self.new_constants).get(name, ())

    def _group_box(self, key: str, names: list[str]) -> Box:
        nodes = [self.nodes[name] for name in names]
        tip = tooltip(node.text or node.name for node in nodes[:40])
        if names[0] not in self.became:
            text = f"… {len(names)} unchanged node{'s' if len(names) > 1 else ''}"
            label, height = box(_STUB, text, [])
            return Box(key, label, height, tip)
        lines = [Line(f"{node.label}  {node.name}", "value") for node in nodes]
        if len(lines) > _MAX_LISTED_NODES:
            lines = [Line(f"{count} × {op}", "value") for op, count in Counter(n.label for n in nodes).most_common()]
        label, height = box(_REPLACED, f"{len(nodes)} nodes", lines, "removed")
        return Box(key, label, height, tip, nodes[0].path)

    def texts(self, name: str) -> list[str]:
        """Changes of a node, on as few lines as possible, except for the body of a unit, which is in its box."""
        texts: list[str] = []
        if name in self.changes:
            texts += [text for field, text in self.changes[name].by_field.items() if field != "body"]
        for constant in self.new_constants.get(name, ()):
            if constant.name in self.changes:
                label, fields = constant.label.rpartition(".")[2], self.changes[constant.name].by_field
                texts += [f"{label} {fields[field]}" for field in ("shape", "dtype") if field in fields]
        if name in self.rewired:
            lost, gained = self.diff.reads(name)
            texts.append(f"reads {', '.join(lost) or '–'} → {', '.join(gained) or '–'}")
        return list(_joined(texts))


def _frequent_changes(diff: GraphChanges) -> dict[str, int]:
    """Changes of more than one node, most frequent first, with their number of nodes."""
    frequent = [(change, names) for change, names in grouped_changes(diff) if len(names) > 1][:_MAX_CHANGE_ROWS]
    return {" ".join(filter(None, (MARKS[mark], ops, how))): len(names) for (mark, ops, how, _), names in frequent}


def _joined(texts: Iterable[str]) -> Iterator[str]:
    """Texts joined to as few lines as possible."""
    line = ""
    for text in texts:
        if line and len(line) + len(text) > MAX_LINE_LENGTH:
            yield line
            line = ""
        line = f"{line}; {text}" if line else text
    if line:
        yield line


def _merged(arrows: Iterable[Arrow]) -> tuple[Arrow, ...]:
    """Arrows without duplicates, and without old arrows between a node and one that it became."""
    unique = dict.fromkeys(arrow for arrow in arrows if arrow.tail != arrow.head)
    became = {(arrow.tail, arrow.head) for arrow in unique if arrow.style is _BECAME}
    return tuple(arrow for arrow in unique if arrow.style is not _OLD or (arrow.tail, arrow.head) not in became)


def _edges(graph: GraphView) -> dict[tuple[str, str], None]:
    return dict.fromkeys((tail, node.name) for node in graph for tail in node.inputs)
