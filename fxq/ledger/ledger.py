"""The ledger: what became of every op of the model, and why. `fxq/ledger/build.py` makes it."""

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
from fxq.quant.spec import REDUCIBLE_ROLES, ReducibleRole


@dataclass(frozen=True)
class Entry:
    """One op of the model.

    Attributes:
        name: its node in the canonical graph; two calls of one module have two names.
        path: its module path: of the module itself, or of the one whose forward calls the function.
        op: what it is.
        precision: `int8`, `weight-only` (a float layer with an integer weight), `moves` (moves integers), `float`, or
            `folded` (into another op's weights, or without an effect).
        into: the node of the final graph that runs it or has it in its weights; one for all ops of a unit; empty where
            there is none.
        reason: why it is float, or where it went; of an op on integers, what its user should know of that.
        fix: the line of a recipe that would decide otherwise, as Python; empty where none can.
        kind: what sort of reason that is for a float op, one of `fxq.graph.info.DECISION_KINDS`; see `Decision`.
        decided_by: the pass that decided what it runs as; empty where it is folded, or no pass has.
        source: `file:line` of the model.
        macs: multiply-accumulates for the batch that shapes were found with, see `fxq.graph.analysis.macs.macs_of`.
        sqnr: dB of its output against the float model's on a recorded calibration batch, errors of the ops
            before it included; infinite when they are equal. None inside a unit (the row of its last op has it), and
            where it is no float tensor.
        own_sqnr: the same for the op's own error: it runs on the float model's values of its inputs, on the grids that
            it reads.
        fault_sqnr: the same without the rounding of its output, which counts as the error of the ops that read it as
            integers: the noise that `mend` takes away.
        mend: the line of a recipe that takes this noise away, as Python: it puts the whole unit into float, and the
            ops that make its inputs where others read the same integers. Empty where nothing in it runs on integers.
        saved_bytes: how much smaller its weight is than in float32, scales counted; a weight that several layers share
            counts for each.
        float_us, int8_us: microseconds of the op in float, and on integers or with an integer weight, on one thread;
            for a unit, in the row of its first op. None if there is no price.
        conversions_us: microseconds of the conversions around it when it runs on integers, less those when it runs in
            float, with all other ops as they are.
        priced_by: "measured" on this machine, "table" (estimated, `cost/price_table.py`), or empty without a price.
    """

    name: str
    path: str
    op: str
    precision: str
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
    mend: str = ""
    saved_bytes: int = 0
    float_us: float | None = None
    int8_us: float | None = None
    conversions_us: float | None = None
    priced_by: str = ""


@dataclass(frozen=True)
class NodeRow:
    """The row of a node of the final graph.

    Attributes:
        row: the last of the ops that the node runs.
        value: the op whose value the node makes: the same, or one behind it that went into its weights.
    """

    row: Entry
    value: Entry


def rows_by_node(entries: Iterable[Entry]) -> dict[str, NodeRow]:
    """The rows of the nodes of the final graph, by the node's name, in the order of the rows."""
    found: dict[str, NodeRow] = {}
    for entry in entries:
        known = found.pop(entry.into, None)
        if entry.precision != "folded":
            found[entry.into] = NodeRow(entry, entry)
        elif known is not None:
            found[entry.into] = NodeRow(known.row, entry)
    return found


@dataclass(frozen=True)
class ReducedRange:
    """What has 7 bits, because kernels of this machine add pairs of products in 16 bits, which 8 bits of both overflow.

    Attributes:
        role: "weights" or "activations"; see `Recipe.reduce_range`.
        sqnr: by the role that has 7 bits, dB of the qdq graph's output (see `Ledger.output_sqnr`) before any pass looks
            at samples to mend it; None where there is no float output. Empty where the recipe names the role.
    """

    role: ReducibleRole
    sqnr: Mapping[ReducibleRole, float | None] = field(default_factory=dict)

    def __str__(self) -> str:
        found = [
            f"{decibels(self.sqnr[role])} dB with {role}" for role in REDUCIBLE_ROLES if self.sqnr.get(role) is not None
        ]
        why = f"output of the qdq graph: {', '.join(found)}" if found else "the recipe says so"
        return f"{self.role} have 7 bits where 8 overflow in this CPU's kernels; {why}"


PRECISIONS = ("int8", "weight-only", "moves", "float", "folded")


@dataclass(frozen=True, repr=False)
class Ledger(Rows[Entry]):
    """One entry per op of the model, in execution order. `print` shows a table.

    Attributes:
        entries: the rows. The `precision` of an op is "int8", "weight-only", "moves" (it moves integers), "float" or
            "folded"; see `Entry`.
        output_sqnr: dB of the model's output against the float model's, over recorded calibration samples; of several,
            that of the one that is furthest off. Infinite when they are equal, NaN where one is not finite and the
            float model's is. None where there is no float output.
        reduced_range: role that has 7 bits on this machine; None where none has.

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
    _choices: ClassVar[Mapping[str, Sequence[str]]] = {"precision": PRECISIONS, "kind": DECISION_KINDS}

    @property
    def coverage(self) -> float:
        """Share of the multiply-accumulates that run on integers, 0 to 1; 0 when there are none.

        Counted are convolutions, linear layers, matrix products, attention, and modules that are kept as they are with
        weights inside, see `fxq.graph.analysis.macs.macs_of`.
        """
        return self._share("int8")

    @property
    def weight_coverage(self) -> float:
        """The same for those that run in float with integer weights."""
        return self._share("weight-only")

    def _share(self, precision: str) -> float:
        total = sum(e.macs for e in self.entries)
        return sum(e.macs for e in self.entries if e.precision == precision) / total if total else 0.0

    def count(self, value: Any) -> int:
        """Number of entries of that precision. Raises `InputError` where there is no such precision."""
        self._check_value("precision", value)
        return sum(e.precision == value for e in self.entries)

    def worst(self, count: int = 5) -> Ledger:
        """The layers that add most noise, as a table, worst first: those that a line of a recipe mends (`Entry.mend`).

        The order is that of `Entry.fault_sqnr`: a layer is blamed for the grids of what it reads, and not for that of
        its output, which another layer reads. For a function in front of a layer, its own line would change nothing.

        Args:
            count: at most so many.

        Example:
            >>> a = Entry("a", "a", "linear", "int8", fault_sqnr=44.0, mend="recipe.override('a', fxq.FLOAT)")
            >>> b = Entry("b", "b", "linear", "int8", fault_sqnr=39.0, mend="recipe.override('b', fxq.FLOAT)")
            >>> [(entry.path, entry.mend) for entry in Ledger((a, b)).worst(1)]
            [('b', "recipe.override('b', fxq.FLOAT)")]
        """
        mended = self.where(lambda e: bool(e.mend) and e.fault_sqnr is not None and e.fault_sqnr < math.inf)
        return mended._with(mended.sort("fault_sqnr").entries[:count])

    def main_reason(self) -> str:
        """The reason for float that weighs most, with its share: of the multiply-accumulates, where there are any."""
        stay = self.where(precision="float")
        if not stay:
            return "the model has no op that could"
        total = sum(e.macs for e in stay)
        weights, counts = Counter[str](), Counter(e.reason for e in stay)
        for entry in stay:
            weights[entry.reason] += entry.macs if total else 1
        reason, weight = weights.most_common(1)[0]
        share = f", with {_percent(weight / sum(e.macs for e in self))} of the multiply-accumulates," if total else ""
        return f"{counts[reason]} of {len(self)} ops{share} stay in float because: {reason}"

    def _facts(self) -> dict[str, Any]:
        found = self.reduced_range
        tried = {f"sqnr_reduced_{role}": value for role, value in found.sqnr.items()} if found is not None else {}
        reduced_range = {} if found is None else {"reduce_range": found.role, **tried}
        return {
            "coverage": self.coverage,
            "weight_coverage": self.weight_coverage,
            "output_sqnr": self.output_sqnr,
            **reduced_range,
        }

    def _short(self) -> str:
        weighed = f"; {self.coverage:.1%} of the multiply-accumulates in int8" if any(e.macs for e in self) else ""
        if self.count("weight-only"):
            saved = sum(e.saved_bytes for e in self if e.precision == "weight-only")
            weighed += f", {self.weight_coverage:.1%} with integer weights, {_count(saved)}B smaller"
        found = self.output_sqnr
        output = "" if found is None else f"; output {decibels(found)}{'' if found == math.inf else ' dB SQNR'}"
        return (
            ", ".join(f"{self.count(f)} {f}" for f in PRECISIONS if f != "weight-only" or self.count(f))
            + weighed
            + output
        )

    def _parts(self) -> list[Part]:
        fixes = Counter(e.fix for e in self.entries if e.precision == "float" and e.fix)
        notes = {fix: f"[{i}]" for i, fix in enumerate((fix for fix, count in fixes.items() if count > 1), 1)}
        columns = {**_COLUMNS, _WHY: lambda e: _why(e, notes)}
        table = self._table(columns, lambda e: "quiet" if e.precision == "folded" else "")
        fixes_once = [line(text(note, "strong"), f" {fix}") for fix, note in notes.items()]
        reduced_range = [text(str(self.reduced_range))] if self.reduced_range is not None else []
        return [table, *fixes_once, *reduced_range, text(self._short())]


def _percent(share: float) -> str:
    """A share that is not all of it is not called 100 %."""
    return f"{share:.0%}" if share in (0.0, 1.0) else f"{min(share, 0.9999):.2%}"


def _why(entry: Entry, notes: Mapping[str, str]) -> str:
    """Reason and way out of a float op: a note where several ops share it, else the line in one piece.

    For int8 ops the line stands only in `fix`. Where float is faster for the conversions alone, it says what they cost.
    """
    reason = entry.reason + _converted(entry)
    fix = notes.get(entry.fix, f"[{entry.fix}]") if entry.precision == "float" and entry.fix else ""
    gap = " " if len(reason) + len(fix) < _WIDE else "\n"
    return textwrap.fill(reason, _WIDE) + (gap + fix if fix else "")


_WIDE = 78


def _converted(entry: Entry) -> str:
    """What the conversions of a float op cost that has the faster kernel; else empty."""
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
    """A number with three digits and a letter: 118M."""
    if value == 0:
        return ""
    power = min((len(str(value)) - 1) // 3, 4)
    return f"{value / 1000**power:.3g}{'kMGT'[power - 1] if power else ''}"


def _time(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


_WHY = Column("why", give="fold", optional=True)
_COLUMNS: dict[Column, Callable[[Entry], str]] = {
    Column("layer", give="start"): lambda e: layer_text(e.name, e.path),
    Column("op"): lambda e: e.op,
    Column("runs as", coloured=True): lambda e: e.precision,
    Column("SQNR dB", "right", optional=True): lambda e: decibels(e.sqnr),
    Column("own dB", "right", optional=True): lambda e: decibels(e.own_sqnr),
    Column("MACs", "right", drop=2, optional=True): lambda e: _count(e.macs),
    Column("saved B", "right", drop=3, optional=True): lambda e: (
        _count(e.saved_bytes) if e.precision == "weight-only" else ""
    ),
    Column("float µs", "right", drop=1, optional=True): lambda e: _time(e.float_us),
    Column("int8 µs", "right", drop=1, optional=True): lambda e: _time(e.int8_us),
}
