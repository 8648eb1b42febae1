"""`BitsResult`: the bits that were chosen for each weight, as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fxq.display.queryable import Rows, decibels, layer_text
from fxq.display.tables import Column, Part, text
from fxq.recipe.recipe import Recipe


@dataclass(frozen=True)
class WeightBits:
    """Weight of a model, with the spec that was chosen for it.

    Attributes:
        name: name of its first layer in the graph.
        path: module path of this layer.
        op: ops of this layer.
        spec: name of the chosen spec.
        bits: bits per value, scales and zero points included.
        values: number of values.
        sqnr: dB of the model's output against the float model's if only this weight were rounded to nearest, with 4
            bits in blocks of 64.
        line: line of a recipe that gives it the spec, as Python.
    """

    name: str
    path: str
    op: str
    spec: str
    bits: float
    values: int
    sqnr: float
    line: str


@dataclass(frozen=True, repr=False)
class BitsResult(Rows[WeightBits]):
    """Result of `fxq.search` with a budget: one row per weight, in execution order. `print` shows a table.

    Attributes:
        entries: the rows.
        recipe: the recipe with these specs, for `fxq.quantize`.
        bits: mean number of bits per value, scales and zero points included, if the model is quantized with the data
            of the search. Without data, `gptq` does not run, and tiny scales of blocks may take float32.
        budget: largest mean that was allowed.
        score: dB of the output with the recipe; with a metric, its value.
        uniform: name of the best spec that fits the budget if all weights have it; empty if none does.
        uniform_score: its score; NaN if there is none.
    """

    entries: tuple[WeightBits, ...]
    recipe: Recipe
    bits: float
    budget: float
    score: float
    uniform: str = ""
    uniform_score: float = float("nan")
    _name: ClassVar[str] = "bits"
    _key: ClassVar[str] = "weights"

    def _facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("bits", "budget", "score", "uniform", "uniform_score")}

    def _short(self) -> str:
        alike = f"; {self.uniform_score:.4g} with {self.uniform} for all" if self.uniform else ""
        return f"{self.bits:.2f} bits per weight of at most {self.budget:g}, score {self.score:.4g}{alike}"

    def _parts(self) -> list[Part]:
        return [self._table(_COLUMNS), text(self._short())]


_COLUMNS: dict[Column, Callable[[WeightBits], str]] = {
    Column("weight", give="start"): lambda e: layer_text(e.name, e.path),
    Column("op"): lambda e: e.op,
    Column("spec"): lambda e: e.spec,
    Column("bits", "right"): lambda e: f"{e.bits:.2f}",
    Column("values", "right", drop=1): lambda e: f"{e.values:,}",
    Column("alone dB", "right"): lambda e: decibels(e.sqnr),
}
