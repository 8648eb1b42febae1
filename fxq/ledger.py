"""The ledger: what became of every op of the model, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate
from torch import fx

from fxq.graph import info
from fxq.history import History
from fxq.passbase import Stage
from fxq.view import NodeView


@dataclass(frozen=True)
class Entry:
    """One op of the model.

    Attributes:
        name: its node in the traced graph.
        path: its module path.
        op: what it is.
        fate: `int8`, `moves` (moves integers), `float`, or `folded` (into another op, or removed).
        into: the node of the final graph that stands for it; empty when it is gone.
        reason: why it is float, or where it went.
        fix: the line of the recipe that would decide otherwise; empty where none can. For int8 ops not printed.
        source: `file:line` of the model.
    """

    name: str
    path: str
    op: str
    fate: str
    into: str = ""
    reason: str = ""
    fix: str = ""
    source: str = ""


@dataclass(frozen=True)
class Ledger(Sequence[Entry]):
    """One entry per op of the model, in execution order. `print` shows a table.

    Example:
        >>> Ledger((Entry("conv", "conv", "conv2d", "int8"),)).count("int8")
        1
    """

    entries: tuple[Entry, ...]

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def where(self, condition: Callable[[Entry], bool]) -> Ledger:
        """The entries for which `condition` is true."""
        return Ledger(tuple(e for e in self.entries if condition(e)))

    def count(self, value: Any) -> int:
        """Number of entries of that fate."""
        return sum(e.fate == value for e in self.entries)

    def main_reason(self) -> str:
        """The most frequent reason for float, with its share."""
        reasons = Counter(e.reason for e in self.entries if e.fate == "float")
        if not reasons:
            return "the model has no op that could"
        reason, count = reasons.most_common(1)[0]
        return f"{count} of {len(self)} ops stay in float because: {reason}"

    def __str__(self) -> str:
        rows = [
            [e.path or e.name, e.op, e.fate, f"{e.reason} [{e.fix}]" if e.reason and e.fix else e.reason]
            for e in self.entries
        ]
        totals = ", ".join(f"{self.count(f)} {f}" for f in ("int8", "moves", "float", "folded"))
        return (
            tabulate(
                rows,
                headers=["layer", "op", "runs as", "why"],
                maxcolwidths=[None, None, None, 70],
                disable_numparse=True,
            )
            + f"\n{totals}"
        )


def ledger_of(history: History, gm: fx.GraphModule) -> Ledger:
    """The ledger of a finished pipeline.

    Args:
        history: its snapshots. The model's ops are those of the last one before a batch norm or another op was folded:
            the one after canonicalize, or what comes closest.
        gm: the graph that runs.
    """
    early = [s for s in history if s.stage <= Stage.CANONICAL]
    canonical = next((s for s in early if s.name == "canonicalize"), early[-1])
    fixes = {n.name: plan.fix for n in gm.graph.nodes if (plan := info(n).plan) is not None and plan.fix}
    covering: dict[str, NodeView] = {}
    for node in history[-1].graph:
        if node.kind not in ("convert", "constant", "io"):
            covering.update(dict.fromkeys(node.origins, node))
    ops = [op for op in canonical.graph if op.kind not in ("constant", "io") and op.shape is not None]
    return Ledger(tuple(_entry(op, covering.get(next(iter(op.origins), op.name)), fixes) for op in ops))


def _entry(op: NodeView, now: NodeView | None, fixes: dict[str, str]) -> Entry:
    about = {"name": op.name, "path": op.path, "op": op.label, "source": op.source}
    if now is None:
        return Entry(**about, fate="folded", reason="has no effect on the output")
    runs = any(part.partition("(")[0] == op.label for part in (now.label, *now.body))
    if op.label == "batch_norm" and not runs and now.kind != "float":
        return Entry(**about, fate="folded", into=now.name, reason=f"into {now.name}")
    if now.kind in ("int8", "moves"):
        return Entry(**about, fate=now.kind, into=now.name, fix=f"recipe.override({op.path or '*'!r}, fxq.FLOAT)")
    return Entry(**about, fate="float", into=now.name, reason=now.reason, fix=fixes.get(now.name, ""))
