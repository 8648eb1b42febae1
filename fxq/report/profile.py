"""Where the time of a model goes: every node on its own, and inside of an engine's region every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fxq.display.queryable import Rows
from fxq.display.tables import Column, Part, duration, text


@dataclass(frozen=True)
class TimedLayer:
    """What a model runs in one go.

    Attributes:
        node: the node of the graph.
        layer: where an engine runs it as several layers, what this one is made of: names of nodes of the qdq graph,
            separated by " + "; empty for what the engine has put in, and for a node that runs as a whole.
        op: the kernel, the op, or what the engine calls the layer.
        dtype: the type of its value; of a layer, of what it computes with.
        kind: `int8`, `weight-only`, `float`, `moves`, `convert` or `size`; see `NodeView`.
        us: microseconds.
    """

    node: str
    layer: str
    op: str
    dtype: str
    kind: str
    us: float


@dataclass(frozen=True, repr=False)
class Profile(Rows[TimedLayer]):
    """What took how long, in execution order. `print` shows a table, `sort("us", reverse=True)` puts the slowest first.

    Attributes:
        entries: the rows.
        batch: what the model ran on, and with how many threads.
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
