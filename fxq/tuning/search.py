"""The cheapest mix of integers, observers and float layers that keeps a target."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from fxq.ledger.ledger import Ledger
from fxq.ledger.output_check import rank
from fxq.quant.observers import OBSERVERS, observer_for
from fxq.quant.spec import QuantConfig, TensorSpec
from fxq.recipe.recipe import Recipe
from fxq.tuning.search_result import SearchResult, TriedRecipe
from fxq.tuning.sensitivity import Sensitivity, ranked
from fxq.tuning.trials import Trials
from fxq.tuning.tunable_layer import TunableLayer, layers_of

FORWARDS = 3
"""Fewer candidates than this are judged for each layer; a few for a model of a few layers."""
AT_ONCE = 3
"""How many numbers of float layers are tried at once, to halve what is left twice: an executor judges them together."""


@dataclass
class Search:
    """A search in progress.

    Args:
        trials: the calibrated model.
        least: the score that is enough.
        executor: where candidates are judged; None: here. What is tried does not depend on it.
        advance: is called for every candidate that was judged.

    Attributes:
        tried: the candidates so far.
        forwards: how many were judged, those that rank the layers included.
        timed: whether it is known what layers take in float and on integers.
        layers: the layers that run on integers, in execution order.
        table: the same as a table, by what they cost the output; None where none had to go into float.
    """

    trials: Trials
    least: float
    executor: Executor | None = None
    advance: Callable[[], None] = lambda: None
    tried: list[TriedRecipe] = field(default_factory=list)
    forwards: int = 0
    timed: bool = False
    layers: Sequence[TunableLayer] = ()
    table: Sensitivity | None = None
    _shares: dict[str, float] = field(default_factory=dict)
    _best: tuple[tuple[bool, float, float], Recipe, list[TunableLayer], int] | None = None

    def run(self) -> SearchResult:
        """Try other observers for all layers; then float for the layers that cost most; then take back what is idle."""
        start = self._observers()
        if self._ends():
            return self._result(len(layers_of(self.trials.candidate(start), Ledger(()))))
        layers = self._ranking(start)
        count = self._enough(start, layers)
        if count is not None:
            self._take_back(start, layers[:count])
        return self._result(len(layers))

    def _observers(self) -> Recipe:
        """The recipe, with that observer of activations with which all layers on integers do best."""
        recipe = self.trials.recipe
        if self._ends([("as the recipe says", recipe, [])]):
            return recipe
        others = {text: with_observer(recipe, text) for text in other_observers(recipe.config)}
        found = self._try([(f"{text} for all layers", other, []) for text, other in others.items()])
        best = max(range(len(found)), key=lambda i: found[i], default=None)
        if best is None or found[best] <= self.tried[0].score:
            return recipe
        return list(others.values())[best]

    def _ranking(self, start: Recipe) -> list[TunableLayer]:
        """The layers, those first that add most noise: a few of them often make most of it."""
        plain = copy.copy(self.trials)
        plain.metric, plain.recipe = None, start
        self.table, self.layers = ranked(plain, self.executor, self.advance)
        self.forwards += len(self.layers) + 1
        self.timed = any(layer.extra_us is not None for layer in self.layers)
        self._shares = {row.name: row.share for row in self.table}
        return sorted(self.layers, key=lambda layer: -self._shares[layer.name])

    def _enough(self, start: Recipe, layers: Sequence[TunableLayer]) -> int | None:
        """How many of the layers, from the first on, have to be in float; None where all of them are not enough."""
        low, high = 0, len(layers) + 1  # not enough; enough, or not known
        while high - low > 1:
            step = max((high - low) // (AT_ONCE + 1), 1)
            counts = [low + step * i for i in range(1, AT_ONCE + 1) if low + step * i < high]
            given = [(f"{k} layers in float", in_float(start, layers[:k]), list(layers[:k])) for k in counts]
            for k, score in zip(counts, self._try(given), strict=True):
                if score >= self.least:
                    high = min(high, k)
                elif k < high:
                    low = max(low, k)
        return high if high <= len(layers) else None

    def _take_back(self, start: Recipe, floats: Sequence[TunableLayer]) -> None:
        """Put layers on integers again that are not needed in float: first what costs most for the noise it makes."""

        def worth(layer: TunableLayer) -> float:
            return self._shares.get(layer.name, 0.0) / max(self._cost([layer]), 1e-9)

        types = self.trials.observed.manager.context.types
        others = other_observers(start.config)
        left, recipe = list(floats), start
        for layer in sorted(floats, key=worth):
            rest = [other for other in left if other is not layer]
            name = layer.path or layer.name
            ways = [(name, recipe)] if rest or recipe is not start else []  # with none in float it was not enough
            ways += [(f"{name} with {text}", layer.observed_by(recipe, text, types)) for text in others]
            for what, base in ways:
                if self.forwards + 1 >= FORWARDS * len(self.layers):
                    return
                (score,) = self._try([(f"back on integers: {what}", in_float(base, rest), rest)])
                if score >= self.least:
                    left, recipe = rest, base
                    break

    def _ends(self, given: Sequence[tuple[str, Recipe, list[TunableLayer]]] = ()) -> bool:
        self._try(given)
        return any(entry.reached for entry in self.tried)

    def _try(self, given: Sequence[tuple[str, Recipe, list[TunableLayer]]]) -> list[float]:
        """Judge candidates, and put them on record; their scores."""
        found = self.trials.scores([recipe for _, recipe, _ in given], self.executor, self.advance)
        self.forwards += len(found)
        for (what, recipe, floats), score in zip(given, found, strict=True):
            extra = sum(layer.extra_us or 0.0 for layer in floats) if self.timed else None
            row = TriedRecipe(what, score, score >= self.least, len(floats), sum(e.macs for e in floats), extra)
            self.tried.append(row)
            key = (row.reached, -self._cost(floats) if row.reached else 0.0, rank(score))
            if self._best is None or key > self._best[0]:
                self._best = key, recipe, floats, len(self.tried) - 1
        return found

    def _cost(self, floats: Sequence[TunableLayer]) -> float:
        """What layers cost in float: microseconds where they were measured, else multiply-accumulates."""
        return sum(max(layer.extra_us or 0.0, 0.0) if self.timed else float(layer.macs) for layer in floats)

    def _result(self, layers: int) -> SearchResult:
        assert self._best is not None  # the recipe itself was tried
        _, recipe, floats, chosen = self._best
        rows = [replace(row, extra_us=row.extra_us or 0.0) if self.timed else row for row in self.tried]
        rows = [replace(row, front=on_front(row, rows), chosen=i == chosen) for i, row in enumerate(rows)]
        names = tuple(layer.path or layer.name for layer in self.layers if layer in floats)
        score = rows[chosen].score
        return SearchResult(tuple(rows), recipe, names, score, self.least, layers, self.forwards, self.table)


def in_float(recipe: Recipe, layers: Sequence[TunableLayer]) -> Recipe:
    """A recipe with these layers in float."""
    for layer in layers:
        recipe = layer.in_float(recipe)
    return recipe


def other_observers(config: QuantConfig) -> list[str]:
    """The observers that a histogram can answer for, without that of a config; none where nothing is calibrated."""
    if config.activation is None or not config.is_calibrated:
        return []
    seen = observer_for(TensorSpec())
    asked = {text: observer_for(TensorSpec(observer=text)) for text in OBSERVERS}
    same = config.activation.observer
    return [text for text, observer in asked.items() if text != same and seen.answer_as(observer) is not None]


def with_observer(recipe: Recipe, observer: str) -> Recipe:
    """A recipe with another observer for activations; those of its overrides stay."""
    activation = recipe.config.activation
    assert activation is not None  # there is nothing to observe otherwise
    return replace(recipe, config=replace(recipe.config, activation=replace(activation, observer=observer)))


def on_front(row: TriedRecipe, rows: Sequence[TriedRecipe]) -> bool:
    """Whether no other row is at least as good and as cheap, and better in one of the two."""
    return not any(
        rank(other.score) >= rank(row.score)
        and other.cost <= row.cost
        and (rank(other.score), -other.cost) != (rank(row.score), -row.cost)
        for other in rows
    )
