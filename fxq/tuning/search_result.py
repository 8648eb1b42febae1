"""Result of `fxq.search`: the best recipe, and a table of the candidates."""

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
    """Candidate of a search.

    Attributes:
        change: difference to the recipe that the search started from.
        score: dB of its output against the float model's, or the metric.
        reached: whether the score reaches the target.
        floats: number of layers in float.
        float_macs: multiply-accumulates of these layers.
        extra_us: measured microseconds that these layers take more in float; None if nothing was measured.
        front: whether it is on the Pareto front: no other candidate is both better and cheaper.
        chosen: whether it is the result.
    """

    change: str
    score: float
    reached: bool
    floats: int
    float_macs: int
    extra_us: float | None
    front: bool = False
    chosen: bool = False

    @property
    def cost(self) -> float:
        """Extra microseconds, or if they are unknown, multiply-accumulates in float."""
        return self.float_macs if self.extra_us is None else self.extra_us


@dataclass(frozen=True, repr=False)
class SearchResult(Rows[TriedRecipe]):
    """Result of `fxq.search`: one row per candidate, in the order in which they were tried. `print` shows a table.

    Attributes:
        entries: the rows.
        recipe: the best recipe, for `fxq.quantize` with the same data; the one with the highest score if none reached
            the target.
        floats: module paths or names of its layers in float.
        score: score of the recipe: dB, or the metric.
        least: score that was required: dB, or the metric.
        layers: number of layers.
        forwards: number of evaluated candidates, which is how often a model ran over the data.
        sensitivity: the layers ranked by the error that they add; None if no layer had to be in float.
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
        """Whether the recipe reaches the target."""
        return self.score >= self.least

    @property
    def front(self) -> SearchResult:
        """Candidates on the Pareto front of score and cost, cheapest first."""
        return self._with(sorted((e for e in self.entries if e.front), key=lambda e: e.cost))

    def tables(self) -> dict[str, Rows[Any]]:
        """Return the tables that a report shows: `qmodel.report(path, tuning=...)`."""
        return {"search": self, **(self.sensitivity.tables() if self.sensitivity is not None else {})}

    def render(self, path: str | os.PathLike[str]) -> Path:
        """Plot the score of the candidates over their cost, with the Pareto front, to an `.svg` file.

        Args:
            path: the file. Missing folders are created.

        Raises:
            InputError: `path` is not a path.
            RenderError: the suffix is not .svg, or the file cannot be written.
        """
        timed = all(e.extra_us is not None for e in self.entries)
        across = "milliseconds more than with all on integers" if timed else "multiply-accumulates in float (millions)"
        scale = 1e-3 if timed else 1e-6
        points = [
            ParetoPoint(scale * e.cost, e.score, f"{e.change}: {e.score:.4g}", e.front, e.chosen) for e in self.entries
        ]
        return write_pareto(points, self.least, across, "score (dB, or the metric)", path)

    def _facts(self) -> dict[str, Any]:
        names = ("score", "least", "reached", "layers", "forwards")
        return {"floats": list(self.floats), **{name: getattr(self, name) for name in names}}

    def _short(self) -> str:
        floats = f"{len(self.floats)} of {self.layers} layers in float"
        end = "" if self.reached else ": the target was not reached"
        count = f"{self.forwards} candidates evaluated, {self.forwards / max(self.layers, 1):.1f} per layer"
        return f"{floats}, score {self.score:.4g}, target {self.least:.4g}{end}; {count}"

    def _parts(self) -> list[Part]:
        return [self._table(_COLUMNS, lambda e: "strong" if e.chosen else ""), text(self._short())]


_COLUMNS: dict[Column, Callable[[TriedRecipe], str]] = {
    Column("candidate", give="end"): lambda e: e.change,
    Column("score", "right"): lambda e: f"{e.score:.4g}",
    Column("enough"): lambda e: "yes" if e.reached else "",
    Column("floats", "right"): lambda e: str(e.floats),
    Column("float MACs", "right", drop=1): lambda e: f"{e.float_macs:,}",
    Column("extra µs", "right", optional=True): lambda e: "" if e.extra_us is None else f"{e.extra_us:+.0f}",
    Column("front"): lambda e: "front" if e.front else "",
    Column("", optional=True): lambda e: "chosen" if e.chosen else "",
}
