"""A difference as a picture: what changed in colour, what it replaced next to it, and a little of what is around."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import networkx as nx

from fxq.diff import Change, Diff
from fxq.layout import Arrow, Box, Pen, Picture
from fxq.palette import CHANGES, FAINT, INK, QUIET, Line, Look, box, tooltip
from fxq.palette import Change as Mark
from fxq.render import constants_read, header, node_box
from fxq.view import GraphView, NodeView

_KEPT, _NEW = Pen(), Pen(CHANGES["added"].colour, width=1.6)
_OLD = Pen(CHANGES["removed"].colour, "dashed", 1.2)
_BECAME = Pen(CHANGES["removed"].colour, "dotted", 1.2, aside=True)
_STUB = Look("…", "unchanged, left out", "#eceff2", QUIET, pill=True, border="dotted")
_UNCHANGED = Look("=", "unchanged, nearby", "#aab2ba", INK)
_MOST_ROWS = 8


def picture(diff: Diff, radius: int, title: str) -> Picture:
    """The changes of `diff` and what is at most `radius` steps away from one, as boxes and arrows."""
    if diff.is_empty:
        label, height = box(_UNCHANGED, "no difference", [Line(f"{len(diff.after)} nodes, all the same", "value")])
        return Picture(header(title, "no difference", []), (Box("no difference", label, height),), ())
    union = _Union(diff)
    kept = union.near_changes(radius)
    boxes, home = union.boxes(kept)
    arrows = dict.fromkeys(
        Arrow(home[arrow.tail], home[arrow.head], arrow.pen)
        for arrow in union.arrows()
        if home[arrow.tail] != home[arrow.head]
    )
    counts = ", ".join(f"{number} {kind}" for kind, number in diff.counts.items() if number)
    entries = [(look, f"{look.meaning} · {union.marked[mark]}") for mark, look in CHANGES.items() if union.marked[mark]]
    elided, nearby = len(home) - len(kept), len(kept) - union.marked.total()
    entries += [(_UNCHANGED, f"{_UNCHANGED.meaning} · {nearby}")] if nearby else []
    entries += [(_STUB, f"{_STUB.meaning} · {elided}")] if elided else []
    return Picture(header(title, counts, entries, union.summary()), tuple(boxes), tuple(arrows))


class _Union:
    """Both graphs in one, constants folded into who reads them.

    Attributes:
        order: names of all nodes, removed ones just before what they became.
        mark: for each node that differs, how: a node that is both changed and rewired counts as changed.
        marked: how many nodes have each mark.
    """

    def __init__(self, diff: Diff) -> None:
        self.diff = diff
        self.old_constants, self.new_constants = constants_read(diff.before), constants_read(diff.after)
        self.nodes = {**_drawn(diff.before, self.old_constants), **_drawn(diff.after, self.new_constants)}
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
            if name not in self.mark and any(constant.name in self.changes for constant in self.new_constants.get(name, ())):
                self.mark[name] = "changed"
        self.marked = Counter(self.mark.values())
        self.order = list(self._ordered())

    def _ordered(self) -> Iterator[str]:
        became = self.diff.became
        before_heir: dict[str, list[str]] = defaultdict(list)
        after_anchor: dict[str, list[str]] = defaultdict(list)
        anchor = ""
        removed = set(self.diff.removed)
        for node in self.diff.before:
            if node.name not in self.nodes:
                continue
            if node.name not in removed:
                anchor = node.name
            elif node.name in became:
                before_heir[became[node.name][0]].append(node.name)
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
        for name, heirs in self.diff.became.items():
            yield from (Arrow(name, heir, _BECAME) for heir in heirs if name in self.nodes and heir in self.nodes)

    def near_changes(self, radius: int) -> set[str]:
        """The nodes that differ and those at most `radius` steps from one, whichever way."""
        graph: nx.Graph[str] = nx.Graph((arrow.tail, arrow.head) for arrow in self.arrows())
        graph.add_nodes_from(self.nodes)
        kept = set(self.mark)
        for step, layer in enumerate(nx.bfs_layers(graph, kept) if kept else ()):
            if step > radius:
                break
            kept.update(layer)
        return kept

    def boxes(self, kept: set[str]) -> tuple[list[Box], dict[str, str]]:
        """The boxes in order, and for each node the box that it is in: its own, or that of a left-out part."""
        home = {name: name for name in kept}
        size: dict[str, int] = {}
        graph: nx.Graph[str] = nx.Graph((arrow.tail, arrow.head) for arrow in self.arrows())
        graph.add_nodes_from(self.nodes)
        for part in nx.connected_components(graph.subgraph(name for name in self.nodes if name not in kept)):
            first = min(part, key=self._position.__getitem__)
            stub = f"{first} and around"
            size[stub] = len(part)
            home.update(dict.fromkeys(part, stub))
        boxes: dict[str, Box] = {}
        for name in self.order:
            if home[name] == name:
                boxes[name] = self._box(name)
            elif home[name] not in boxes:
                stub = home[name]
                text = f"… {size[stub]} unchanged node{'s' if size[stub] > 1 else ''}"
                label, height = box(_STUB, text, [])
                boxes[stub] = Box(stub, label, height, tooltip([text, f"from {name}"]))
        return list(boxes.values()), home

    @property
    def _position(self) -> Mapping[str, int]:
        if not hasattr(self, "_positions"):
            self._positions = {name: i for i, name in enumerate(self.order)}
        return self._positions

    def _box(self, name: str) -> Box:
        node, mark = self.nodes[name], self.mark.get(name)
        constants = (self.old_constants if mark == "removed" else self.new_constants).get(name, ())
        return node_box(node, constants, mark, list(self._changes(name)))

    def _changes(self, name: str) -> Iterator[Line]:
        if name in self.changes:
            yield from (Line(text, "change") for text in self.changes[name].texts)
        for constant in self.new_constants.get(name, ()):
            if constant.name in self.changes:
                what = constant.label.rpartition(".")[2]
                yield from (Line(f"{what} {text}", "change") for text in self.changes[constant.name].texts)
        if name in self.rewired:
            old, new = self.diff.before[name].inputs, self.diff.after[name].inputs
            gone, come = [n for n in old if n not in new], [n for n in new if n not in old]
            yield Line(f"reads {', '.join(gone) or '–'} → {', '.join(come) or '–'}", "change")

    def summary(self) -> dict[str, int]:
        """The changes that happened more than once, most frequent first."""
        replaced: dict[str, list[str]] = defaultdict(list)
        for name, heirs in self.diff.became.items():
            for heir in heirs:
                replaced[heir].append(self.diff.before[name].label)
        rows: Counter[str] = Counter()
        for name in dict.fromkeys((*self.diff.added, *replaced)):
            if name in self.nodes:
                rows[f"{' + '.join(replaced[name]) or 'new'} → {self.diff.after[name].label}"] += 1
        for name in self.diff.removed:
            if name in self.nodes and name not in self.diff.became:
                rows[f"{self.diff.before[name].label} → removed"] += 1
        for change in self.diff.changed:
            if change.name in self.nodes:
                rows.update(f"{change.after.label}: {text}" for text in change.texts)
        return {text: count for text, count in rows.most_common(_MOST_ROWS) if count > 1}


def _drawn(graph: GraphView, constants: Mapping[str, list[NodeView]]) -> dict[str, NodeView]:
    folded = {constant.name for read in constants.values() for constant in read}
    return {node.name: node for node in graph if node.name not in folded}


def _edges(graph: GraphView) -> dict[tuple[str, str], None]:
    return dict.fromkeys((tail, node.name) for node in graph for tail in node.inputs)
