"""The history of a model as data for the report page: every distinct node once, and the changes of each pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

from fxq.display.colours import CHANGES, LOOKS, Look, clip
from fxq.graph.view import NodeView
from fxq.picture.diff import diff
from fxq.picture.diff_picture import UnionGraph
from fxq.picture.graph_picture import constants_read, node_lines
from fxq.pipeline.history import History, Snapshot

_DEFAULTS = {f.name: f.default for f in fields(NodeView) if f.default is not MISSING}

Data = dict[str, Any]


class NodeRecords:
    """Nodes of several graphs as plain data; nodes that look the same, with their constants, are stored once.

    Attributes:
        records: the nodes, with the lines of their boxes. Fields with their default value are left out.
    """

    def __init__(self) -> None:
        self.records: list[Data] = []
        self._by_id: dict[tuple[int, ...], int] = {}  # avoids hashing values, as most snapshots share their views
        self._by_value: dict[tuple[NodeView, ...], int] = {}

    def index(self, node: NodeView, constants: Sequence[NodeView]) -> int:
        """Return the index of a node among the records."""
        views = (node, *constants)
        key = tuple(map(id, views))
        if key not in self._by_id:
            self._by_id[key] = self._by_value.setdefault(views, len(self.records))
            if self._by_id[key] == len(self.records):
                self.records.append(_record(node, constants))
        return self._by_id[key]


def _record(node: NodeView, constants: Sequence[NodeView]) -> Data:
    values = {f.name: getattr(node, f.name) for f in fields(node)}
    lines = [[line.role, clip(line.text)] for line in node_lines(node, constants)]
    return {**{k: v for k, v in values.items() if v != _DEFAULTS.get(k, MISSING)}, "lines": lines}


def passes(history: History, nodes: NodeRecords) -> list[Data]:
    """Return a record per pass: its time, the nodes after it as indices into `nodes`, rewrites and near misses."""
    graphs = graph_records(((snapshot.name, snapshot) for snapshot in history), nodes)
    return [{**graph, **_about(snapshot)} for graph, snapshot in zip(graphs, history, strict=True)]


def _about(snapshot: Snapshot) -> Data:
    about: Data = {
        "ms": round(1e3 * snapshot.seconds, 3),
        "stage": str(snapshot.stage),
        "rewrites": [vars(edit) for edit in snapshot.edits],
        "near": [vars(miss) for miss in snapshot.near],
    }
    return about if snapshot.sqnr is None else {**about, "sqnr": number(snapshot.sqnr)}


def graph_records(graphs: Iterable[tuple[str, Snapshot]], nodes: NodeRecords) -> Iterator[Data]:
    """Records of named graphs in the format of passes, with the difference to the graph before."""
    before: Snapshot | None = None
    for name, snapshot in graphs:
        read = constants_read(snapshot.graph)
        places = [nodes.index(node, read.get(node.name, ())) for node in snapshot.graph]
        yield {"name": name, "nodes": places, "rewrites": [], "near": [], "diff": _diff(before, snapshot, nodes)}
        before = snapshot


def _diff(before: Snapshot | None, after: Snapshot, nodes: NodeRecords) -> Data | None:
    """Difference between two graphs; `order` has the nodes of both in drawing order, as indices into `nodes`."""
    if before is None:
        return None
    both = UnionGraph(diff(before, after))
    return {
        "order": [nodes.index(both.nodes[name], both.constants(name)) for name in both.order],
        "mark": both.mark,
        "told": {name: texts for name in both.mark if (texts := both.texts(name))},
        "became": both.became,
    }


def looks() -> Data:
    """Return the colours and shapes of kinds of nodes and changes, which `fxq/display/colours.py` defines."""
    tables: dict[str, Mapping[Any, Look]] = {"looks": LOOKS, "changes": CHANGES}
    return {table: {name: asdict(look) for name, look in looks.items()} for table, looks in tables.items()}


def number(value: float, digits: int = 5) -> float | str:
    """Round a number to significant digits for JSON; numbers that are not finite become text."""
    short = float(f"{value:.{digits}g}")
    return short if short - short == 0 else str(short)


def numbers(values: Sequence[float], digits: int = 4) -> list[float | str]:
    """Round several numbers as `number` does."""
    return [number(value, digits) for value in values]
