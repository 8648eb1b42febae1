"""Search for the fastest recipe that reaches a target, over float layers and observers."""

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
from fxq.tuning.tunable_layer import TunableLayer

MAX_CANDIDATES_PER_LAYER = 3
"""Upper limit of the number of candidates relative to the number of layers."""
PARALLEL_COUNTS = 3
"""Numbers of float layers that are tried in parallel, which halves the interval twice per step."""


@dataclass
class Search:
    """State of a search.

    Args:
        trials: the calibrated model.
        least: the score that is required.
        executor: executor that evaluates candidates; None: this process. The candidates do not depend on it.
        advance: called after each candidate.

    Attributes:
        tried: the candidates so far.
        forwards: number of evaluated candidates, including those that rank the layers.
        timed: whether latencies of layers in float and on integers are known.
        layers: the layers that run on integers, in execution order.
        table: the layers ranked by the error that they add; None if no layer had to be in float.
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
        """Try other observers; then set the worst layers to float; then set back those that need not be float."""
        start = self._observers()
        if self._is_reached():
            return self._result(len(self.trials.layers(start, Ledger(()))))
        layers = self._ranking(start)
        count = self._enough(start, layers)
        if count is not None:
            self._take_back(start, layers[:count])
        return self._result(len(layers))

    def _observers(self) -> Recipe:
        """Return the recipe with the best observer of activations, judged with all layers on integers."""
        recipe = self.trials.recipe
        if self._is_reached([("as the recipe says", recipe, [])]):
            return recipe
        alternatives = {text: with_observer(recipe, text) for text in other_observers(recipe.config)}
        scores = self._try([(f"{text} for all layers", changed, []) for text, changed in alternatives.items()])
        best = max(range(len(scores)), key=lambda i: scores[i], default=None)
        if best is None or scores[best] <= self.tried[0].score:
            return recipe
        return list(alternatives.values())[best]

    def _ranking(self, start: Recipe) -> list[TunableLayer]:
        """Return the layers, those that add the most noise first."""
        plain = copy.copy(self.trials)
        plain.metric, plain.recipe = None, start
        self.table, self.layers = ranked(plain, self.executor, self.advance)
        self.forwards += len(self.layers) + 1
        self.timed = any(layer.extra_us is not None for layer in self.layers)
        self._shares = {row.name: row.share for row in self.table}
        return sorted(self.layers, key=lambda layer: -self._shares[layer.name])

    def _enough(self, start: Recipe, layers: Sequence[TunableLayer]) -> int | None:
        """Return how many of the first layers must be in float to reach the target; None if all are not enough."""
        low, high = 0, len(layers) + 1  # `low` layers are not enough, `high` are, or are more than there are
        while high - low > 1:
            step = max((high - low) // (PARALLEL_COUNTS + 1), 1)
            counts = [low + step * i for i in range(1, PARALLEL_COUNTS + 1) if low + step * i < high]
            candidates = [(f"{k} layers in float", in_float(start, layers[:k]), list(layers[:k])) for k in counts]
            for k, score in zip(counts, self._try(candidates), strict=True):
                if score >= self.least:
                    high = min(high, k)
                elif k < high:
                    low = max(low, k)
        return high if high <= len(layers) else None

    def _take_back(self, start: Recipe, floats: Sequence[TunableLayer]) -> None:
        """Set layers back to integers that need not be float, those with the most time per noise first."""

        def noise_per_cost(layer: TunableLayer) -> float:
            return self._shares.get(layer.name, 0.0) / max(self._cost([layer]), 1e-9)

        types = self.trials.types
        observers = other_observers(start.config)
        left, recipe = list(floats), start
        for layer in sorted(floats, key=noise_per_cost):
            rest = [kept for kept in left if kept is not layer]
            name = layer.path or layer.name
            # with no layer in float and no other observer, the target was not reached before
            bases = [(name, recipe)] if rest or recipe is not start else []
            bases += [(f"{name} with {text}", layer.observed_by(recipe, text, types)) for text in observers]
            for label, base in bases:
                if self.forwards + 1 >= MAX_CANDIDATES_PER_LAYER * len(self.layers):
                    return
                (score,) = self._try([(f"back on integers: {label}", in_float(base, rest), rest)])
                if score >= self.least:
                    left, recipe = rest, base
                    break

    def _is_reached(self, candidates: Sequence[tuple[str, Recipe, list[TunableLayer]]] = ()) -> bool:
        self._try(candidates)
        return any(entry.reached for entry in self.tried)

    def _try(self, candidates: Sequence[tuple[str, Recipe, list[TunableLayer]]]) -> list[float]:
        """Evaluate and record candidates, and return their scores."""
        scores = self.trials.scores([recipe for _, recipe, _ in candidates], self.executor, self.advance)
        self.forwards += len(scores)
        for (change, recipe, floats), score in zip(candidates, scores, strict=True):
            extra = sum(layer.extra_us or 0.0 for layer in floats) if self.timed else None
            row = TriedRecipe(change, score, score >= self.least, len(floats), sum(e.macs for e in floats), extra)
            self.tried.append(row)
            key = (row.reached, -self._cost(floats) if row.reached else 0.0, rank(score))
            if self._best is None or key > self._best[0]:
                self._best = key, recipe, floats, len(self.tried) - 1
        return scores

    def _cost(self, floats: Sequence[TunableLayer]) -> float:
        """Cost of layers in float: extra microseconds if they were measured, otherwise multiply-accumulates."""
        return sum(max(layer.extra_us or 0.0, 0.0) if self.timed else float(layer.macs) for layer in floats)

    def _result(self, layers: int) -> SearchResult:
        assert self._best is not None  # at least the recipe itself was tried
        _, recipe, floats, chosen = self._best
        rows = [replace(row, extra_us=row.extra_us or 0.0) if self.timed else row for row in self.tried]
        rows = [replace(row, front=on_front(row, rows), chosen=i == chosen) for i, row in enumerate(rows)]
        names = tuple(layer.path or layer.name for layer in self.layers if layer in floats)
        score = rows[chosen].score
        return SearchResult(tuple(rows), recipe, names, score, self.least, layers, self.forwards, self.table)


def in_float(recipe: Recipe, layers: Sequence[TunableLayer]) -> Recipe:
    """Return a recipe with these layers in float."""
    for layer in layers:
        recipe = layer.in_float(recipe)
    return recipe


def other_observers(config: QuantConfig) -> list[str]:
    """Return the observers that a histogram can replace, except that of a config; none without calibrated ranges."""
    if config.activation is None or not config.is_calibrated:
        return []
    histogram = observer_for(TensorSpec())
    observers = {text: observer_for(TensorSpec(observer=text)) for text in OBSERVERS}
    own = config.activation.observer
    return [text for text, observer in observers.items() if text != own and histogram.answer_as(observer) is not None]


def with_observer(recipe: Recipe, observer: str) -> Recipe:
    """Return a recipe with another observer for activations; its overrides keep theirs."""
    activation = recipe.config.activation
    assert activation is not None  # `other_observers` returned one
    return replace(recipe, config=replace(recipe.config, activation=replace(activation, observer=observer)))


def on_front(row: TriedRecipe, rows: Sequence[TriedRecipe]) -> bool:
    """Whether a row is on the Pareto front: no row is at least as good and as cheap, and better in one of the two."""
    return not any(
        rank(candidate.score) >= rank(row.score)
        and candidate.cost <= row.cost
        and (rank(candidate.score), -candidate.cost) != (rank(row.score), -row.cost)
        for candidate in rows
    )
