"""History of a model in the pipeline: one snapshot per pass, with the graph as plain data, without weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from fxq.display.colours import LOOKS
from fxq.display.notebook import html
from fxq.display.printed import Printed
from fxq.display.tables import Column, Part, Table, bar, line, row, text
from fxq.errors import InputError, unknown
from fxq.graph.view import GraphView, NodeView
from fxq.picture.graph_picture import picture, render
from fxq.picture.writing import picture_html
from fxq.recipe.pass_base import Stage
from fxq.rewriting.editor import Edit
from fxq.rewriting.near_miss import NearMiss


@dataclass(frozen=True, repr=False)
class Snapshot(Printed):
    """Snapshot of the graph after one pass.

    Attributes:
        name: name of the pass.
        seconds: time of the pass, without checks and the snapshot.
        edits: edits of the pass, with their rules.
        graph: graph after the pass, as plain data.
        stage: stage of the graph.
        sqnr: SQNR in dB against the float model on the example; None without `check="numeric"`.
        near: near misses of the rules of this pass.
    """

    name: str
    seconds: float
    edits: tuple[Edit, ...]
    graph: GraphView
    stage: Stage
    sqnr: float | None = None
    near: tuple[NearMiss, ...] = ()

    def render(self, path: str | Path) -> Path:
        """Draw the graph to a .svg, .png, .pdf or .dot file, and return the path.

        Raises:
            RenderError: Graphviz is missing, or the graph cannot be drawn.
        """
        return render(self.graph, path, title=f"after {self.name}")

    def count(self, *kinds: str) -> int:
        """Number of nodes of some kinds (see `NodeView.kind`), of a region its ops; without kinds, all but weights."""
        if not kinds:
            return sum(node.kind != "constant" for node in self.graph)
        return sum(kind in kinds for node in self.graph for kind in node.precisions or (node.kind,))

    def _parts(self) -> list[Part]:
        title = line(text(self.name, "strong"), f": {len(self.edits)} edits in {1e3 * self.seconds:.1f} ms")
        return [title, _listing(self.graph)]

    def _repr_html_(self) -> str:
        """HTML of the title and a picture of the graph, or its text if it cannot be drawn."""
        title, *_ = self._parts()
        how = f"history[{self.name!r}].render({self.name + '.svg'!r})"
        return html([title]) + picture_html(picture(self.graph, f"after {self.name}"), str(self.graph), how)

    def _short(self) -> str:
        return f"{self.name}, {len(self.edits)} edits, {self.count()} nodes"


@dataclass(repr=False)
class History(Printed, Sequence[Snapshot]):
    """Snapshots in order. `history["fuse"]` is the one after that pass; `print` shows a table.

    Attributes:
        snapshots: snapshots, one per pass.
        first_loss: name of the first pass that lost more SQNR than the recipe allows; None if there is none, or without
            `check="numeric"`.
    """

    snapshots: list[Snapshot] = field(default_factory=list)
    first_loss: str | None = None

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            for snapshot in self.snapshots:
                if snapshot.name == index:
                    return snapshot
            raise InputError(unknown("pass in the history", index, self.names))
        return self.snapshots[index]

    def __len__(self) -> int:
        return len(self.snapshots)

    @property
    def names(self) -> list[str]:
        """Names of the passes that ran, in order."""
        return [s.name for s in self.snapshots]

    def _short(self) -> str:
        return f"{len(self)} passes" + (f", the last is {self.names[-1]}" if self else "")

    def _parts(self) -> list[Part]:
        parts: list[Part] = [_table(self)]
        if self.first_loss is not None:
            message = " is the first pass that lost more than the recipe allows"
            parts.append(line(text(self.first_loss, "strong"), message))
        return parts


# ---- tables


def _table(history: History) -> Table:
    """Table with a row per pass. On a terminal, bars show its time and the kinds of nodes of the graph."""
    slowest = max((s.seconds for s in history), default=0.0) or 1.0
    largest = max((s.count() for s in history), default=0) or 1
    checked = any(s.sqnr is not None for s in history)
    columns = (*_COLUMNS[:-1], *([_SQNR] if checked else []), _COLUMNS[-1])
    rows = []
    for step in history:
        lost = step.name == history.first_loss
        numbers = [_number(step.count(*kinds)) for kinds in ((), ("int8", "moves"), ("convert",), ("float",))]
        sqnr = text("" if step.sqnr is None else f"{step.sqnr:.1f}", "removed" if lost else "")
        rows.append(
            row(
                text(step.name, "strong" if lost else ""),
                f"{1e3 * step.seconds:.1f}",
                bar(8, (step.seconds / slowest, "op")),
                _number(len(step.edits)),
                *numbers,
                bar(16, *_kind_shares(step, largest)),
                *([sqnr] if checked else []),
                _rules(step),
            )
        )
    return Table(columns, rows)


_COLUMNS = (
    Column("pass"),
    Column("ms", "right"),
    Column("time", drop=2, extra=True),
    Column("edits", "right"),
    Column("nodes", "right"),
    Column("int8 ops", "right", look="int8"),
    Column("conversions", "right", look="convert"),
    Column("float ops", "right", look="float"),
    Column("graph", drop=3, extra=True),
    Column("edits by rule", drop=4),
)
_SQNR = Column("SQNR dB", "right")
_MAX_SHOWN_RULES = 3


def _number(value: int) -> Text:
    return text(str(value), "" if value else "quiet")


def _kind_shares(step: Snapshot, largest: int) -> tuple[tuple[float, str], ...]:
    """Number of nodes of each kind, relative to the `largest` graph of the history."""
    counts = Counter(_kind(node) for node in step.graph if node.kind != "constant")
    return tuple((counts[kind] / largest, kind) for kind in LOOKS if counts[kind])


def _rules(step: Snapshot) -> str:
    """Rules with the most edits, with counts. Edits outside of rules, which have the name of the pass, are left out."""
    counts = Counter(edit.rule for edit in step.edits if edit.rule != step.name)
    named = [f"{count} {rule}" for rule, count in counts.most_common(_MAX_SHOWN_RULES)]
    return ", ".join([*named, f"{len(counts) - len(named)} more"] if len(counts) > len(named) else named)


def _listing(graph: GraphView) -> Table:
    """Table with a line per node: its call, and on a terminal its kind, its value, and why it is float."""
    return Table(_LISTING, [_node(node) for node in graph if node.kind != "constant"])


_LISTING = (Column(extra=True), Column(give="fold"), Column(extra=True, drop=1), Column(extra=True, drop=2))


def _kind(node: NodeView) -> str:
    return node.kind if node.kind in LOOKS else "op"


def _node(node: NodeView) -> list[Text]:
    shape = "" if node.shape is None else "×".join(map(str, node.shape)) or "scalar"
    value = text(f"{shape} {node.dtype}".strip(), "quiet")
    return row(text(LOOKS[_kind(node)].tag, _kind(node)), node.text, value, node.reason)
