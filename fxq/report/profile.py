"""Profile of a model: times of its nodes, and of the layers inside regions that an engine runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fxq.display.queryable import Rows
from fxq.display.tables import Column, Part, duration, text
from fxq.graph.precision import NodeKind


@dataclass(frozen=True)
class TimedLayer:
    """Time of a node, or of a layer inside a region.

    Attributes:
        node: name of the node of the graph.
        layer: names of the nodes of the qdq graph that a layer of an engine fuses, separated by " + "; empty for nodes
            that are timed as a whole, and for layers that the engine inserted.
        op: name of the kernel or op, or the engine's name of the layer.
        dtype: dtype of the node's value; for a layer, the dtype that it computes in.
        kind: `int8`, `weight-only`, `float`, `moves`, `convert` or `size`; see `NodeView`.
        us: microseconds.
    """

    node: str
    layer: str
    op: str
    dtype: str
    kind: NodeKind
    us: float


@dataclass(frozen=True, repr=False)
class Profile(Rows[TimedLayer]):
    """Times of nodes and layers, in execution order. `print` shows a table; `sort("us", reverse=True)`: slowest first.

    Attributes:
        entries: the rows.
        batch: description of the batch, and number of threads.
    """

    entries: tuple[TimedLayer, ...]
    batch: str = ""
    _name: ClassVar[str] = "profile"
    _key: ClassVar[str] = "rows"

    def _facts(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def _short(self) -> str:
        return f"{duration(sum(row.us for row in self))} in {len(self)} rows, on {self.batch}"

    def _parts(self) -> list[Part]:
        return [self._table(_COLUMNS), text(self._short())]


_COLUMNS: dict[Column, Callable[[TimedLayer], str]] = {
    Column("node"): lambda row: row.node,
    Column("layer", optional=True): lambda row: row.layer,
    Column("op"): lambda row: row.op,
    Column("runs as", coloured=True): lambda row: row.kind,
    Column("type"): lambda row: row.dtype,
    Column("µs", "right"): lambda row: f"{row.us:.1f}",
}
