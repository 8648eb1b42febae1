"""What a search has tried, and the best of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fxq.display.queryable import Rows
from fxq.display.tables import Column, Part, text
from fxq.recipe.recipe import Recipe
from fxq.tuning.pareto_picture import ParetoPoint, write_pareto
from fxq.tuning.sensitivity import Sensitivity


@dataclass(frozen=True)
class TriedRecipe:
    """One candidate.

    Attributes:
        what: how it differs from the one before, or from the recipe that the search began with.
        score: dB of its output against the float model's; or what the metric says.
        reached: whether that is good enough.
        floats: how many layers are in float.
        float_macs: their multiply-accumulates.
        extra_us: measured microseconds that they take more in float; None where nothing was measured.
        front: whether no other candidate is both better and cheaper.
        chosen: whether it is the result.
    """

    what: str
    score: float
    reached: bool
    floats: int
    float_macs: int
    extra_us: float | None
    front: bool = False
    chosen: bool = False

    @property
    def cost(self) -> float:
        """Microseconds, or where they are not known, multiply-accumulates in float."""
        return self.float_macs if self.extra_us is None else self.extra_us


@dataclass(frozen=True, repr=False)
class SearchResult(Rows[TriedRecipe]):
    """What `fxq.search` found: one row per candidate, as they were tried. `print` shows a table.

    Attributes:
        entries: the rows.
        recipe: the best recipe: give it to `fxq.quantize`, with the same data. Where nothing reached the target, the
            one with the highest score.
        floats: module paths, or names, of the layers that it puts into float.
        score: what it reaches, in dB or as the metric says.
        least: what was asked for, the same way.
        layers: how many layers there are.
        forwards: how many candidates were judged, which is how often the data was run through a model.
        sensitivity: the layers by what they cost the output; None where none had to go into float.
    """

    entries: tuple[TriedRecipe, ...]
    recipe: Recipe
    floats: tuple[str, ...]
    score: float
    least: float
    layers: int
    forwards: int
    sensitivity: Sensitivity | None = field(default=None, compare=False)
    _name: ClassVar[str] = "search"
    _key: ClassVar[str] = "candidates"
    _choices: ClassVar[Mapping[str, Sequence[str]]] = {}

    @property
    def reached(self) -> bool:
        """Whether the recipe is good enough."""
        return self.score >= self.least

    @property
    def front(self) -> SearchResult:
        """The candidates that no other one beats in both score and cost, cheapest first."""
        return self._with(sorted((e for e in self.entries if e.front), key=lambda e: e.cost))

    def tables(self) -> dict[str, Rows[Any]]:
        """The tables that a report shows: `qmodel.report(path, tuning=...)`."""
        return {"search": self, **(self.sensitivity.tables() if self.sensitivity is not None else {})}

    def render(self, path: str | os.PathLike[str]) -> Path:
        """Draw the candidates, score against cost, with their Pareto front: an `.svg` file; folders are made.

        Raises:
            InputError: `path` is no path.
            RenderError: it does not end in .svg, or cannot be written.
        """
        timed = all(e.extra_us is not None for e in self.entries)
        across = "milliseconds more than with all on integers" if timed else "multiply-accumulates in float (millions)"
        scale = 1e-3 if timed else 1e-6
        points = [
            ParetoPoint(scale * e.cost, e.score, f"{e.what}: {e.score:.4g}", e.front, e.chosen) for e in self.entries
        ]
        return write_pareto(points, self.least, across, "score (dB, or the metric)", path)

    def _facts(self) -> dict[str, Any]:
        known = ("score", "least", "reached", "layers", "forwards")
        return {"floats": list(self.floats), **{name: getattr(self, name) for name in known}}

    def _short(self) -> str:
        found = f"{len(self.floats)} of {self.layers} layers in float"
        end = "" if self.reached else ": the target was not reached"
        count = f"{self.forwards} candidates judged, {self.forwards / max(self.layers, 1):.1f} for each layer"
        return f"{found}, score {self.score:.4g}, {self.least:.4g} asked for{end}; {count}"

    def _parts(self) -> list[Part]:
        return [self._table(_COLUMNS, lambda e: "strong" if e.chosen else ""), text(self._short())]


_COLUMNS: dict[Column, Callable[[TriedRecipe], str]] = {
    Column("candidate", give="end"): lambda e: e.what,
    Column("score", "right"): lambda e: f"{e.score:.4g}",
    Column("enough"): lambda e: "yes" if e.reached else "",
    Column("floats", "right"): lambda e: str(e.floats),
    Column("float MACs", "right", drop=1): lambda e: f"{e.float_macs:,}",
    Column("extra µs", "right", optional=True): lambda e: "" if e.extra_us is None else f"{e.extra_us:+.0f}",
    Column("front"): lambda e: "front" if e.front else "",
    Column("", optional=True): lambda e: "chosen" if e.chosen else "",
}
