"""Table of how many values the calibrated grids of a quantized model clip, which shows that its inputs have changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from fxq.backends.qdq_graph import qdq_graph
from fxq.common.data import Batch, naming_batch
from fxq.common.isolation import copied, seeded, untouched, without_autocast
from fxq.display.queryable import Rows, layer_text
from fxq.display.tables import Column, Part, text
from fxq.graph.info import info
from fxq.graph.query import arguments_of, constant, is_op, options_of
from fxq.graph.run import Runner


@dataclass(frozen=True)
class ClippedRow:
    """Row of the table: counts of the values of one grid.

    Attributes:
        name: name of the value that is quantized, after the name of its graph if the model has several.
        path: path of the module that computes it; empty for an input.
        values: number of values.
        share: share of them outside of the grid, from 0 to 1.
        below: share below its smallest number.
        above: share above its largest number.
        reach: largest distance of a value from the grid, in units of the grid's width.
    """

    name: str
    path: str
    values: int
    share: float
    below: float
    above: float
    reach: float


@dataclass(frozen=True, repr=False)
class Clipped(Rows[ClippedRow]):
    """Result of `QuantizedModel.clipped`: a row for each grid with a fixed range, in execution order.

    Attributes:
        entries: the rows. Grids whose ranges are computed at run time clip nothing, and have no row.
        batches: number of batches.
        dynamic: number of grids whose ranges are computed at run time.
    """

    entries: tuple[ClippedRow, ...]
    batches: int
    dynamic: int
    _name: ClassVar[str] = "table of clipped values"
    _key: ClassVar[str] = "grids"

    @property
    def share(self) -> float:
        """Share of all values that is clipped, from 0 to 1."""
        values = sum(row.values for row in self.entries)
        return sum(row.share * row.values for row in self.entries) / values if values else 0.0

    @property
    def worst(self) -> ClippedRow | None:
        """Row with the largest share; None if there are no rows."""
        return max(self.entries, key=lambda row: row.share, default=None)

    def _facts(self) -> dict[str, Any]:
        return {"share": self.share, "batches": self.batches, "dynamic": self.dynamic}

    def _short(self) -> str:
        if not self.entries:
            ranges = f"{self.dynamic} have ranges computed at run time" if self.dynamic else "there are none"
            return f"nothing is clipped: no grid has a fixed range ({ranges})"
        worst = self.worst
        assert worst is not None  # there are rows
        most = f"most at {layer_text(worst.name, worst.path)}, {worst.share:.3%}" if worst.share else "none anywhere"
        return f"{self.share:.3%} of the values are clipped, {most}; {self.batches} batches"

    def _parts(self) -> list[Part]:
        return [*([self._table(_COLUMNS)] if self.entries else []), text(self._short())]


_COLUMNS: dict[Column, Callable[[Any], str]] = {
    Column("value", give="start"): lambda row: layer_text(row.name, row.path),
    Column("values", "right", drop=1): lambda row: f"{row.values:,}",
    Column("clipped", "right"): lambda row: f"{row.share:.3%}",
    Column("below", "right", drop=1): lambda row: f"{row.below:.3%}",
    Column("above", "right", drop=1): lambda row: f"{row.above:.3%}",
    Column("reach", "right"): lambda row: f"{row.reach:.3g}",
}


@dataclass
class _Counts:
    """Number of values of a grid, of those below and above it, and the largest distance from it in grid widths."""

    path: str = ""
    values: int = 0
    below: int = 0
    above: int = 0
    reach: float = 0.0

    def add(self, integers: Tensor, qmin: int, qmax: int) -> None:
        """Count values, given as integers that are not clamped to the grid."""
        self.values += integers.numel()
        self.below += int((integers < qmin).sum())
        self.above += int((integers > qmax).sum())
        if integers.numel():
            low, high = int(integers.min()), int(integers.max())
            self.reach = max(self.reach, max(qmin - low, high - qmax, 0) / (qmax - qmin))

    def row(self, name: str) -> ClippedRow:
        """Return the row of the table."""
        below, above = (count / max(self.values, 1) for count in (self.below, self.above))
        return ClippedRow(name, self.path, self.values, below + above, below, above, self.reach)


@dataclass
class _Graph:
    """Counts of one quantized graph, whose qdq graph runs on the inputs of each call of one thread.

    Attributes:
        name: prefix of its rows; empty for a model that is one graph.
        gm: its qdq graph.
        counts: counts of its grids with fixed ranges, by node.
        dynamic: number of its other grids.
        batch: inputs of the current call.
        thread: thread whose calls count; other threads may call the model meanwhile, as a server does.
    """

    name: str
    gm: fx.GraphModule
    batch: Batch | None = None
    thread: int = field(default_factory=threading.get_ident)
    counts: dict[fx.Node, _Counts] = field(init=False)
    dynamic: int = field(init=False)

    def __post_init__(self) -> None:
        grids = [node for node in self.gm.graph.nodes if is_op(node, "quantize") and node.all_input_nodes]
        self.counts = {node: _Counts(info(node).path) for node in grids if _is_fixed(self.gm, node)}
        self.dynamic = len(grids) - len(self.counts)

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        """Copy the inputs of a call, as a forward pre-hook: the call may change them.

        PyTorch omits `kwargs` in a call of another thread that began before the hook was removed.
        """
        if threading.get_ident() == self.thread:
            self.batch = copied(Batch(args, kwargs))

    def end(self, *_: Any) -> None:
        """Run the qdq graph on the inputs of the call, as a forward hook, and count: the graph has served the call."""
        if threading.get_ident() != self.thread:
            return
        assert self.batch is not None  # `begin` ran
        with torch.no_grad(), seeded():
            _Counting(self.gm, self.batch, self.counts).run()
        self.batch = None

    def rows(self) -> Iterable[ClippedRow]:
        """Rows of the grids that have seen values."""
        for node, counts in self.counts.items():
            read = node.all_input_nodes[0]
            name = str(read.target) if read.op == "placeholder" else read.name
            yield counts.row(f"{self.name}: {name}" if self.name else name)


class _Counting(Runner):
    """Run of a qdq graph that counts the values which are clipped."""

    def __init__(self, gm: fx.GraphModule, batch: Batch, counts: Mapping[fx.Node, _Counts]) -> None:
        super().__init__(gm, batch)
        self.counts = counts

    def compute(self, node: fx.Node) -> Any:
        if node in self.counts:
            (x, *_), kwargs = arguments_of(node, self.values)
            options: dict[str, Any] = {**options_of(node), **kwargs}
            wide: Any = {**options, "qmin": -_WIDE, "qmax": _WIDE, "dtype": torch.int32}
            target: Any = node.target
            self.counts[node].add(target(x, **wide), options["qmin"], options["qmax"])
        return super().compute(node)


_WIDE = 2**30
"""Largest magnitude of an integer that stands for a value outside of its grid."""


def _is_fixed(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the scale of a quantize is a number or a constant."""
    scale = node.kwargs.get("scale")
    return not isinstance(scale, fx.Node) or constant(gm, scale) is not None


def count_clipped(model: nn.Module, graphs: Mapping[str, fx.GraphModule], data: Iterable[Batch]) -> Clipped:
    """Run a quantized model on data, and count the values that the grids of its graphs clip.

    Args:
        model: the model.
        graphs: its quantized graphs, by the name that their rows have.
        data: batches.

    Raises:
        InputError: the model does not run on a batch; the message says on which.
        BackendError: a kernel was inserted by hand, so that its grids are not known.
    """
    counted = [_Graph(name, qdq_graph(graph)) for name, graph in graphs.items()]
    count = 0
    with ExitStack() as stack:
        for own, graph in zip(counted, graphs.values(), strict=True):
            stack.enter_context(graph.register_forward_pre_hook(own.begin, with_kwargs=True))
            stack.enter_context(graph.register_forward_hook(own.end))
        stack.enter_context(untouched(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_autocast())
        for count, batch in enumerate(data, 1):
            with naming_batch(count - 1, batch):
                model(*batch.args, **batch.kwargs)
    rows = tuple(row for own in counted for row in own.rows())
    return Clipped(rows, count, sum(own.dynamic for own in counted))
