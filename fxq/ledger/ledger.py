"""The ledger: precision of every op of the float model, and the reason for it. `fxq/ledger/build.py` builds it."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fxq.display.queryable import Rows, decibels, layer_text
from fxq.display.tables import Column, Part, line, text
from fxq.graph.info import DECISION_KINDS
from fxq.graph.precision import ENTRY_PRECISIONS, EntryPrecision, Precision
from fxq.quant.spec import REDUCIBLE_ROLES, ReducibleRole


@dataclass(frozen=True)
class Entry:
    """Row of the ledger: one op of the float model.

    Attributes:
        name: name of its node in the canonical graph; two calls of one module have two names.
        path: path of its module, or of the module whose forward calls the function.
        op: kind of op, such as "conv2d".
        precision: `int8`, `weight-only` (a float layer with an integer weight), `moves` (moves integers), `float`, or
            `folded` (into another op's weights, or without effect).
        into: name of the node of the final graph that runs it, or whose weights include it; the same for all ops of a
            unit. Empty if there is none.
        reason: why it is float or folded; for an op on integers, a note for the user.
        fix: line of a recipe that would change its precision, as Python; empty if no line can.
        kind: kind of reason for float, one of `fxq.graph.info.DECISION_KINDS`; see `Decision`.
        decided_by: name of the pass that decided its precision; empty if it is folded or no pass did.
        source: `file:line` of the model.
        macs: multiply-accumulates for the example batch, see `fxq.graph.analysis.macs.macs_of`.
        sqnr: dB of its output against the float model's on a recorded calibration batch, with the errors of all ops
            before it; infinite when equal. None inside a unit (the row of its last op has it) and for values that are
            not float tensors.
        own_sqnr: dB of its output when it runs on the float model's values of its inputs, on the grids that it reads.
        fault_sqnr: as `own_sqnr`, without the rounding of its output, which is counted for the ops that read it as
            integers: the noise that `remedy` removes.
        remedy: line of a recipe that removes this noise, as Python: it sets the whole unit to float, and the ops that
            compute its inputs if other ops read the same integers. Empty if the unit has no integers.
        saved_bytes: bytes that its weight with its scales takes less than in float32. A weight that several layers
            share counts for each.
        weight_values: number of values of its integer weight; 0 without one.
        float_us, int8_us: microseconds of the op in float, and on integers or with an integer weight, on one thread;
            for a unit, in the row of its first op. None if there is no price.
        conversions_us: microseconds of the conversions around it when it runs on integers, minus those when it runs in
            float, with all other ops unchanged.
        priced_by: "measured" on this machine, "table" (estimated, `fxq/cost/price_table.py`), or empty without a price.
    """

    name: str
    path: str
    op: str
    precision: EntryPrecision
    into: str = ""
    reason: str = ""
    fix: str = ""
    kind: str = ""
    decided_by: str = ""
    source: str = ""
    macs: int = 0
    sqnr: float | None = None
    own_sqnr: float | None = None
    fault_sqnr: float | None = None
    remedy: str = ""
    saved_bytes: int = 0
    weight_values: int = 0
    float_us: float | None = None
    int8_us: float | None = None
    conversions_us: float | None = None
    priced_by: str = ""

    @property
    def weight_bits(self) -> float | None:
        """Bits per value of its integer weight, scales and zero points included; None without one."""
        return bits_per_weight([self])


def bits_per_weight(entries: Iterable[Entry]) -> float | None:
    """Bits per value of the integer weights of ops, scales and zero points included; None if there are none."""
    weighted = [entry for entry in entries if entry.weight_values]
    values = sum(entry.weight_values for entry in weighted)
    return 32 - 8 * sum(entry.saved_bytes for entry in weighted) / values if values else None


@dataclass(frozen=True)
class NodeRow:
    """Rows of a node of the final graph.

    Attributes:
        row: row of the last op that the node runs.
        value: row of the op whose value the node computes: that op, or one after it that was folded into its weights.
    """

    row: Entry
    value: Entry


def rows_by_node(entries: Iterable[Entry]) -> dict[str, NodeRow]:
    """Return the rows of each node of the final graph, by the node's name, in the order of the rows."""
    rows: dict[str, NodeRow] = {}
    for entry in entries:
        earlier = rows.pop(entry.into, None)
        if entry.precision != "folded":
            rows[entry.into] = NodeRow(entry, entry)
        elif earlier is not None:
            rows[entry.into] = NodeRow(earlier.row, entry)
    return rows


@dataclass(frozen=True)
class ReducedRange:
    """Role that has 7 bits because kernels of this CPU add products in 16-bit sums, which saturate with 8 bits of both.

    Attributes:
        role: "weights" or "activations"; see `Recipe.reduce_range`.
        sqnr: for each role with 7 bits, dB of the qdq graph's output (see `Ledger.output_sqnr`) before passes correct
            it on samples; None if there is no float output. Empty if the recipe names the role.
    """

    role: ReducibleRole
    sqnr: Mapping[ReducibleRole, float | None] = field(default_factory=dict)

    def __str__(self) -> str:
        results = [
            f"{decibels(self.sqnr[role])} dB with {role}" for role in REDUCIBLE_ROLES if self.sqnr.get(role) is not None
        ]
        why = f"output of the qdq graph: {', '.join(results)}" if results else "as the recipe says"
        return f"{self.role} have 7 bits where 8 would saturate in this CPU's kernels; {why}"


@dataclass(frozen=True, repr=False)
class Ledger(Rows[Entry]):
    """Table of the ops of the float model, in execution order: the precision of each op, and the reason for it.

    `print` shows it. See `Entry` for the columns.

    Attributes:
        entries: rows, one per op. The `precision` of an op is "int8", "weight-only", "moves" (it moves integers),
            "float" or "folded".
        output_sqnr: dB of the model's output against the float model's, over recorded calibration samples; the minimum
            over outputs. Infinite when equal, NaN if it is not finite where the float model's is. None if there is no
            float output.
        reduced_range: the role that has 7 bits on this machine; None if none needs it.

    Example:
        >>> ledger = Ledger((Entry("a", "a", "conv2d", "int8", macs=90), Entry("b", "b", "linear", "float", macs=10)))
        >>> ledger.coverage, ledger.count("int8"), [e.name for e in ledger.where(precision="float")]
        (0.9, 1, ['b'])
        >>> ledger.where(op=("conv2d", "linear"), path="a*").sort("macs", reverse=True).count("int8")
        1
    """

    entries: tuple[Entry, ...]
    output_sqnr: float | None = None
    reduced_range: ReducedRange | None = None
    _name: ClassVar[str] = "ledger"
    _key: ClassVar[str] = "ops"
    _choices: ClassVar[Mapping[str, Sequence[str]]] = {"precision": ENTRY_PRECISIONS, "kind": DECISION_KINDS}

    @property
    def coverage(self) -> float:
        """Share of the multiply-accumulates that run on integers, 0 to 1; 0 if there are none.

        Counts convolutions, linear layers, matrix products, attention, and leaf modules with weights, see
        `fxq.graph.analysis.macs.macs_of`.
        """
        return self._share("int8")

    @property
    def weight_coverage(self) -> float:
        """Share of the multiply-accumulates that run in float with integer weights, 0 to 1."""
        return self._share("weight-only")

    def _share(self, precision: Precision) -> float:
        total = sum(e.macs for e in self.entries)
        return sum(e.macs for e in self.entries if e.precision == precision) / total if total else 0.0

    def count(self, value: Any) -> int:
        """Number of ops with a precision. Raises `InputError` if there is no such precision."""
        self._check_value("precision", value)
        return sum(e.precision == value for e in self.entries)

    def worst(self, count: int = 5) -> Ledger:
        """Table of the layers that add the most noise and have a remedy (`Entry.remedy`), worst first.

        They are sorted by `Entry.fault_sqnr`, which counts the rounding of a layer's inputs, but not that of its
        output, which counts for the layer that reads it.

        Args:
            count: maximum number of layers.

        Example:
            >>> a = Entry("a", "a", "linear", "int8", fault_sqnr=44.0, remedy="recipe.override('a', fxq.FLOAT)")
            >>> b = Entry("b", "b", "linear", "int8", fault_sqnr=39.0, remedy="recipe.override('b', fxq.FLOAT)")
            >>> [(entry.path, entry.remedy) for entry in Ledger((a, b)).worst(1)]
            [('b', "recipe.override('b', fxq.FLOAT)")]
        """
        noisy = self.where(lambda e: bool(e.remedy) and e.fault_sqnr is not None and e.fault_sqnr < math.inf)
        return noisy._with(noisy.sort("fault_sqnr").entries[:count])

    def main_reason(self) -> str:
        """Reason for float with the largest share of the multiply-accumulates, or of the ops if there are none."""
        stay = self.where(precision="float")
        if not stay:
            return "no op of the model has an integer form"
        total = sum(e.macs for e in stay)
        weights, counts = Counter[str](), Counter(e.reason for e in stay)
        for entry in stay:
            weights[entry.reason] += entry.macs if total else 1
        reason, weight = weights.most_common(1)[0]
        share = f", with {_percent(weight / sum(e.macs for e in self))} of the multiply-accumulates," if total else ""
        return f"{counts[reason]} of {len(self)} ops{share} stay in float because: {reason}"

    def _facts(self) -> dict[str, Any]:
        reduced = self.reduced_range
        sqnrs = {f"sqnr_reduced_{role}": value for role, value in reduced.sqnr.items()} if reduced is not None else {}
        reduce_range = {} if reduced is None else {"reduce_range": reduced.role, **sqnrs}
        return {
            "coverage": self.coverage,
            "weight_coverage": self.weight_coverage,
            "output_sqnr": self.output_sqnr,
            **reduce_range,
        }

    def _short(self) -> str:
        weighed = f"; {self.coverage:.1%} of the multiply-accumulates in int8" if any(e.macs for e in self) else ""
        if self.count("weight-only"):
            saved = sum(e.saved_bytes for e in self if e.precision == "weight-only")
            weighed += f", {self.weight_coverage:.1%} with integer weights, {_count(saved)}B smaller"
            bits = bits_per_weight(self)
            weighed += "" if bits is None else f" at {bits:.2f} bits per weight"
        sqnr = self.output_sqnr
        output = "" if sqnr is None else f"; output {decibels(sqnr)}{'' if sqnr == math.inf else ' dB SQNR'}"
        return (
            ", ".join(f"{self.count(f)} {f}" for f in ENTRY_PRECISIONS if f != "weight-only" or self.count(f))
            + weighed
            + output
        )

    def _parts(self) -> list[Part]:
        fixes = Counter(e.fix for e in self.entries if e.precision == "float" and e.fix)
        notes = {fix: f"[{i}]" for i, fix in enumerate((fix for fix, count in fixes.items() if count > 1), 1)}
        columns = {**_COLUMNS, _WHY: lambda e: _why(e, notes)}
        table = self._table(columns, lambda e: "quiet" if e.precision == "folded" else "")
        fixes_once = [line(text(note, "strong"), f" {fix}") for fix, note in notes.items()]
        reduced = [text(str(self.reduced_range))] if self.reduced_range is not None else []
        return [table, *fixes_once, *reduced, text(self._short())]


def _percent(share: float) -> str:
    """Format a share as a percentage; shares below 1 are never rounded up to 100 %."""
    return f"{share:.0%}" if share in (0.0, 1.0) else f"{min(share, 0.9999):.2%}"


def _why(entry: Entry, notes: Mapping[str, str]) -> str:
    """Text of the "why" column: the reason, and for float ops the override that changes the precision.

    An override that several ops share is replaced by the number of a footnote. If an op is in float only because of its
    conversions, the text says what they cost.
    """
    reason = entry.reason + _converted(entry)
    fix = notes.get(entry.fix, f"[{entry.fix}]") if entry.precision == "float" and entry.fix else ""
    gap = " " if len(reason) + len(fix) < _MAX_WHY_WIDTH else "\n"
    return textwrap.fill(reason, _MAX_WHY_WIDTH) + (gap + fix if fix else "")


_MAX_WHY_WIDTH = 78
"""Characters in a line of the "why" column."""


def _converted(entry: Entry) -> str:
    """Cost of the conversions, as text, if an op is in float although its kernel is faster; otherwise empty."""
    real, kernel, around = entry.float_us, entry.int8_us, entry.conversions_us
    if (
        entry.precision != "float"
        or real is None
        or kernel is None
        or around is None
        or not kernel <= real < kernel + around
    ):
        return ""
    return f" (kernel {_time(kernel)} µs, conversions {_time(around)} µs; float {_time(real)} µs)"


def _count(value: int) -> str:
    """Format a number with three digits and a letter, as in "118M"; 0 as an empty string."""
    if value == 0:
        return ""
    power = min((len(str(value)) - 1) // 3, 4)
    return f"{value / 1000**power:.3g}{'kMGT'[power - 1] if power else ''}"


def _time(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _shows_size(entry: Entry) -> bool:
    """Whether a row shows the size of a weight: layers on integers only do if it has fewer bits than their inputs."""
    bits = entry.weight_bits
    return bits is not None and (entry.precision == "weight-only" or (entry.precision == "int8" and bits < 8))


_WHY = Column("why", give="fold", optional=True)
_COLUMNS: dict[Column, Callable[[Entry], str]] = {
    Column("layer", give="start"): lambda e: layer_text(e.name, e.path),
    Column("op"): lambda e: e.op,
    Column("runs as", coloured=True): lambda e: e.precision,
    Column("SQNR dB", "right", optional=True): lambda e: decibels(e.sqnr),
    Column("own dB", "right", optional=True): lambda e: decibels(e.own_sqnr),
    Column("MACs", "right", drop=2, optional=True): lambda e: _count(e.macs),
    Column("saved B", "right", drop=3, optional=True): lambda e: _count(e.saved_bytes) if _shows_size(e) else "",
    Column("bits", "right", drop=3, optional=True): lambda e: f"{e.weight_bits:.2f}" if _shows_size(e) else "",
    Column("float µs", "right", drop=1, optional=True): lambda e: _time(e.float_us),
    Column("int8 µs", "right", drop=1, optional=True): lambda e: _time(e.int8_us),
}
