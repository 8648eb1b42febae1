"""What happened to a model: one snapshot per pass, each with the graph as data. Holds no weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fxq.edit import Edit
from fxq.errors import InputError, unknown
from fxq.near import NearMiss
from fxq.passbase import Stage
from fxq.view import GraphView


@dataclass(frozen=True)
class Snapshot:
    """The graph after one pass.

    Attributes:
        name: the pass.
        seconds: how long it took, checks and the snapshot itself left out.
        edits: what it changed, rule by rule.
        graph: the graph after it, as data.
        stage: the stage that the graph had reached.
        sqnr: dB against the float model on the example input, where `check="numeric"` ran; else None.
        near: the rules of this pass that almost matched, and why they did not.
    """

    name: str
    seconds: float
    edits: tuple[Edit, ...]
    graph: GraphView
    stage: Stage
    sqnr: float | None = None
    near: tuple[NearMiss, ...] = ()

    def render(self, path: str | Path) -> Path:
        """Draw the graph to a .svg, .png, .pdf or .dot file; the path. Raises `RenderError` (see `fxq/render.py`)."""
        from fxq.render import render

        return render(self.graph, path, title=f"after {self.name}")

    def count(self, *kinds: str) -> int:
        """Number of nodes of these kinds (see `NodeView.kind`); weights are not counted when no kind is given."""
        return sum(n.kind in kinds if kinds else n.kind != "constant" for n in self.graph)

    def __str__(self) -> str:
        return f"{self.name}: {len(self.edits)} edits in {1e3 * self.seconds:.1f} ms\n{self.graph}"


@dataclass
class History(Sequence[Snapshot]):
    """The snapshots in order; `history["fuse"]` is the one after that pass. `print` shows a table.

    Attributes:
        snapshots: one per pass.
        first_loss: name of the first pass that lost more than the recipe allows; None when none did, or when
            `check="numeric"` did not run.
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

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self.snapshots)

    @property
    def names(self) -> list[str]:
        """Names of the passes that ran, in order."""
        return [s.name for s in self.snapshots]

    def __str__(self) -> str:
        checked = any(s.sqnr is not None for s in self.snapshots)
        rows = [
            [
                s.name,
                1e3 * s.seconds,
                len(s.edits),
                s.count(),
                s.count("int8", "moves"),
                s.count("convert"),
                s.count("float"),
            ]
            + ([s.sqnr] if checked else [])
            for s in self.snapshots
        ]
        headers = ["pass", "ms", "edits", "nodes", "int8 ops", "conversions", "float ops"] + (
            ["SQNR dB"] if checked else []
        )
        return tabulate(rows, headers=headers, floatfmt=".1f")
