"""Choice of the bits of each weight within a budget, by the noise that rounding it adds to the output."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from fxq.display.queryable import Rows, decibels, layer_text
from fxq.display.tables import Column, Part, text
from fxq.errors import InputError
from fxq.graph.info import info, precision_of
from fxq.graph.query import read_attribute
from fxq.graph.region import integer_weight, weight_sizes
from fxq.ledger.ledger import Ledger
from fxq.ledger.output_check import rank
from fxq.pipeline.manager import PassManager
from fxq.quant.spec import FLOAT, QuantConfig, TensorSpec, weight_spec
from fxq.recipe.recipe import Recipe
from fxq.tuning.trials import Trials
from fxq.tuning.tunable_layer import TunableLayer, layer_of

SPECS: Mapping[str, TensorSpec] = {
    "4 bits, blocks of 128": weight_spec(4, 128, None),
    "4 bits, blocks of 64": weight_spec(4, 64, None),
    "4 bits, blocks of 32": weight_spec(4, 32, None),
    "8 bits": weight_spec(8, None, None),
    "float16": weight_spec(8, None, torch.float16),
}
"""Specs that are tried for each weight. Fewer than 4 bits take as many bytes as 4, and 5 to 7 as many as 8."""
_MEASURED = "4 bits, blocks of 64"
"""Spec with which the model runs. Noise with other specs is estimated from the rounding error of the weight."""


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
        sqnr: dB of the model's output against the float model's if only this weight were quantized, with 4 bits in
            blocks of 64.
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
        bits: mean number of bits per value, scales and zero points included.
        budget: largest mean that was allowed.
        score: dB of the output with the recipe and weights rounded to nearest; with a metric, its value.
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


@dataclass
class _Weight:
    """Weight of one layer or of several, with its size and error for each spec.

    Attributes:
        layers: layers that read it.
        values: number of values.
        sizes: bytes with scales and zero points, by name of the spec.
        errors: sum of squared rounding errors, by name of the spec.
        sqnr: dB of the output if only this weight is quantized, with the measured spec.
        noise: noise of the output relative to the output, by name of the spec.
    """

    layers: list[TunableLayer] = field(default_factory=list)
    values: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    sqnr: float = float("nan")
    noise: dict[str, float] = field(default_factory=dict)

    def with_spec(self, recipe: Recipe, spec: TensorSpec | None) -> Recipe:
        """Recipe in which its layers have this spec for the weight; None: float."""
        config = FLOAT if spec is None else QuantConfig(None, spec, state=recipe.config.state)
        for selector in dict.fromkeys(selector for layer in self.layers for selector in layer.selectors):
            recipe = recipe.override(selector, config)
        return recipe

    def options(self) -> list[str]:
        """Names of the specs that have less noise than all smaller ones, from small to large."""
        ordered = sorted(self.sizes, key=lambda name: (self.sizes[name], self.noise[name]))
        return [name for i, name in enumerate(ordered) if all(self.noise[name] < self.noise[b] for b in ordered[:i])]


def bits_of(budget: str | float) -> float:
    """Number of bits per weight of a budget such as "4.5 bits" or 4.5. Raises `InputError` for anything else."""
    number, _, unit = budget.strip().partition(" ") if isinstance(budget, str) else (budget, "", "bits")
    try:
        bits = float(number)
    except (TypeError, ValueError):
        bits = math.nan
    if isinstance(budget, bool) or unit.strip() not in ("bits", "") or not 0 < bits < math.inf:
        raise InputError(f'budget is {budget!r}; give the mean number of bits per weight, such as "4.5 bits".')
    return bits


def search_bits(
    trials: Trials, budget: float, executor: Executor | None = None, advance: Callable[[], None] = lambda: None
) -> BitsResult:
    """Choose the spec of each weight so that the output has the least noise within a budget.

    Args:
        trials: the calibrated model, with a recipe for weights only.
        budget: largest mean number of bits per value, scales and zero points included.
        executor: executor that evaluates candidates; None: this process.
        advance: called after each candidate.

    Raises:
        InputError: the recipe quantizes activations, there are no integer weights, or the budget is too small.
    """
    recipe = trials.recipe
    if any(config.activation is not None for config in (recipe.config, *(c for _, c in recipe.overrides))):
        raise InputError("a budget of bits is for weights alone: start with the recipe fxq.Recipe.weight_only(bits=4).")
    has_gptq = any(step.name == "gptq" for step in recipe.pipeline)
    rounded = recipe.without_pass("gptq") if has_gptq else recipe  # it would run for every candidate
    weights = _weights(trials, rounded)
    if not weights:
        raise InputError("the model has no weights in integers, so there are no bits to choose.")
    _measure(trials, rounded, weights, executor, advance)
    total = sum(weight.values for weight in weights)
    chosen = _within(weights, budget * total / 8)
    alike = [name for name in SPECS if 8 * sum(w.sizes[name] for w in weights) <= budget * total]
    choices = [chosen, *([name] * len(weights) for name in alike)]
    candidates = [_recipe(rounded, weights, choice) for choice in choices]
    score, *uniform_scores = trials.scores(candidates, executor, advance)
    best = max(range(len(alike)), key=lambda i: rank(uniform_scores[i]), default=None)
    if best is not None and rank(uniform_scores[best]) > rank(score):
        chosen, score = [alike[best]] * len(weights), uniform_scores[best]
    rows = tuple(_row(weight, name) for weight, name in zip(weights, chosen, strict=True))
    bits = sum(row.bits * row.values for row in rows) / total
    uniform = {} if best is None else {"uniform": alike[best], "uniform_score": uniform_scores[best]}
    return BitsResult(rows, _recipe(recipe, weights, chosen), bits, budget, score, **uniform)  # type: ignore[arg-type]


def _recipe(recipe: Recipe, weights: Sequence[_Weight], chosen: Sequence[str]) -> Recipe:
    for weight, name in zip(weights, chosen, strict=True):
        recipe = weight.with_spec(recipe, SPECS[name])
    return recipe


def _row(weight: _Weight, name: str) -> WeightBits:
    first, spec = weight.layers[0], SPECS[name]
    selectors = dict.fromkeys(selector for layer in weight.layers for selector in layer.selectors)
    code = "dtype=torch.float16" if spec.format == "float16" else f"bits={spec.bits}, per={spec.per!r}"
    line = "recipe" + "".join(f".override({s}, fxq.Recipe.weight_only({code}).config)" for s in selectors)
    bits = 8 * weight.sizes[name] / weight.values
    return WeightBits(first.name, first.path, first.op, name, bits, weight.values, weight.sqnr, line)


def _weights(trials: Trials, recipe: Recipe) -> list[_Weight]:
    """Weights that run on integers with a recipe, with their size and error for each spec."""
    weights: dict[Any, _Weight] = {}
    layers = {layer.selectors: layer for layer in trials.layers(recipe, Ledger(()))}
    everywhere = _Weight(list(layers.values()))
    for name, spec in SPECS.items():
        for manager in trials.managers(everywhere.with_spec(recipe, spec)):
            for node in manager.gm.graph.nodes:
                _add(weights, manager, node, name)
    return [weight for weight in weights.values() if len(weight.sizes) == len(SPECS)]


def _add(weights: dict[Any, _Weight], manager: PassManager, node: fx.Node, name: str) -> None:
    """Add the weight that a node reads, with its size and error for one spec."""
    layer = layer_of(manager, node, {}) if precision_of(node) == "weight-only" else None
    reads = [read for read in node.all_input_nodes if integer_weight(manager.gm, read) is not None]
    if layer is None or len(reads) != 1 or not info(reads[0]).stands_for:
        return
    real = read_attribute(manager.gm, info(reads[0]).stands_for)
    weight = weights.setdefault((real.data_ptr(), tuple(real.shape)), _Weight())
    if layer.selectors not in [earlier.selectors for earlier in weight.layers]:
        weight.layers.append(layer)
    if name not in weight.sizes:
        weight.values, weight.sizes[name] = weight_sizes(manager.gm, node)
        weight.errors[name] = _error(manager, reads[0], real)


def _error(manager: PassManager, node: fx.Node, real: torch.Tensor) -> float:
    """Sum of the squared errors of a dequantized weight against the float one."""

    def value_of(read: fx.Node) -> Any:
        return read_attribute(manager.gm, str(read.target))

    args: Any = fx.node.map_arg(node.args, value_of)
    kwargs: Any = fx.node.map_arg(node.kwargs, value_of)
    rounded = node.target(*args, **kwargs)  # type: ignore[operator]
    return float((rounded - real.detach()).double().square().sum())


def _measure(
    trials: Trials,
    recipe: Recipe,
    weights: Sequence[_Weight],
    executor: Executor | None,
    advance: Callable[[], None],
) -> None:
    """Measure the noise of the output with each weight alone in the measured spec, and derive that of other specs."""
    all_float = recipe
    for weight in weights:
        all_float = weight.with_spec(all_float, None)
    alone = [weight.with_spec(all_float, SPECS[_MEASURED]) for weight in weights]
    metric, trials.metric = trials.metric, None
    try:
        scores = trials.scores(alone, executor, advance)
    finally:
        trials.metric = metric
    for weight, sqnr in zip(weights, scores, strict=True):
        weight.sqnr, noise = sqnr, 10 ** (-rank(sqnr) / 10)
        most = max(weight.errors[_MEASURED], 1e-30)
        weight.noise = {name: noise * error / most for name, error in weight.errors.items()}


def _within(weights: Sequence[_Weight], most: float) -> list[str]:
    """Choose a spec for each weight within a number of bytes, first those that save the most noise per further byte.

    Raises:
        InputError: the smallest specs are too large.
    """
    options = [weight.options() for weight in weights]
    places = [0] * len(weights)
    size = sum(weight.sizes[names[0]] for weight, names in zip(weights, options, strict=True))
    if size > most:
        total = sum(weight.values for weight in weights)
        raise InputError(
            f"the budget is {8 * most / total:.2f} bits per weight, and the smallest specs take "
            f"{8 * size / total:.2f}, scales included: raise the budget."
        )
    steps: list[tuple[float, int, int]] = []

    def push(i: int) -> None:
        weight, names, place = weights[i], options[i], places[i]
        for later in range(place + 1, len(names)):
            a, b = names[place], names[later]
            gain = (weight.noise[a] - weight.noise[b]) / (weight.sizes[b] - weight.sizes[a])
            heapq.heappush(steps, (-gain, i, later))

    for i in range(len(weights)):
        push(i)
    while steps:
        _, i, later = heapq.heappop(steps)
        extra = weights[i].sizes[options[i][later]] - weights[i].sizes[options[i][places[i]]]
        if later > places[i] and size + extra <= most:
            size, places[i] = size + extra, later
            push(i)
    return [names[place] for names, place in zip(options, places, strict=True)]
