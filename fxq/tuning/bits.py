"""Choice of the bits of each weight within a budget, by the noise that its integers add to the output."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from fxq.common.data import Batch
from fxq.common.isolation import copied, seeded
from fxq.common.metrics import Agreement, tensors
from fxq.errors import InputError
from fxq.graph.info import info, precision_of
from fxq.graph.program import IsolatedGraph
from fxq.graph.query import read_attribute
from fxq.graph.region import integer_weight, weight_sizes
from fxq.graph.run import value_of
from fxq.ledger.ledger import Ledger
from fxq.ledger.output_check import rank
from fxq.paired.layer_fit import LayerFit
from fxq.passes.low_rank import correction_of
from fxq.pipeline.float_form import FloatForm
from fxq.pipeline.manager import PassManager
from fxq.pipeline.samples import on_samples
from fxq.quant.spec import FLOAT, TensorSpec, weight_spec
from fxq.recipe.recipe import Recipe
from fxq.tuning.bits_result import BitsResult, WeightBits
from fxq.tuning.trials import Trials
from fxq.tuning.tunable_layer import TunableLayer, layer_of

SPECS: Mapping[str, TensorSpec] = {
    "2 bits, blocks of 64": weight_spec(2, 64, None),
    "3 bits, blocks of 64": weight_spec(3, 64, None),
    "4 bits, blocks of 128": weight_spec(4, 128, None),
    "4 bits, blocks of 64": weight_spec(4, 64, None),
    "4 bits, blocks of 32": weight_spec(4, 32, None),
    "6 bits": weight_spec(6, None, None),
    "6 bits, blocks of 64": replace(weight_spec(6, 64, None), signed=False, symmetric=False),
    "8 bits": weight_spec(8, None, None),
    "float16": weight_spec(8, None, torch.float16),
}
"""Specs that are tried for each weight.

Blocks have zero points, which lose less per byte than scales alone.
"""
_MAX_CHANGES = 4000
"""Number of specs of all weights up to which pairs of changes are tried; the pairs of more take too much memory."""
_MIN_SAVED = 1e-9
"""Share of the noise that a change has to save."""
_MEASURED = "4 bits, blocks of 64"
"""Spec with which the model runs, rounded to nearest. Noise with other specs follows from the error of the layer."""
_NEAREST = "rounded to nearest"
"""Key of the error of a weight in the measured spec without `gptq`."""
_MAX_SAMPLES = 16
"""Number of samples for the errors of layers."""


@dataclass
class _Weight:
    """Weight of one layer or of several, with its size and error for each spec; of a recurrent layer, all its weights.

    Attributes:
        layers: layers that read it.
        values: number of values.
        sizes: bytes with scales and zero points, by name of the spec.
        errors: noise of the outputs of its layers relative to them, by name of the spec, with float inputs.
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
        config = FLOAT if spec is None else replace(recipe.config, activation=None, weight=spec)
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
    rounded = recipe
    for step in recipe.pipeline:
        rounded = rounded.without_pass(step.name) if isinstance(step, LayerFit) else rounded
    by_key = _weights(trials, recipe, rounded)
    weights = list(by_key.values())
    if not weights:
        raise InputError("the model has no weights in integers, so there are no bits to choose.")
    _measure(trials, rounded, weights, executor, advance)
    total = sum(weight.values for weight in weights)
    alike = [name for name in SPECS if 8 * sum(w.sizes[name] for w in weights) <= budget * total]
    best = min(alike, key=lambda name: sum(w.noise[name] for w in weights), default="")
    uniform = [([best] * len(weights), [w.sizes[best] for w in weights])] if best else []
    try:
        choices = [_fitting(trials, recipe, by_key, budget * total / 8), *uniform]
    except InputError:
        if not uniform:
            raise
        choices = uniform
    scores = trials.scores([_recipe(recipe, weights, names) for names, _ in choices], executor, advance)
    uniform_score = scores[-1] if uniform else math.nan
    (chosen, sizes), score = choices[0], scores[0]
    if uniform and rank(uniform_score) > rank(score):
        (chosen, sizes), score = uniform[0], uniform_score
    rows = tuple(_row(recipe, *parts) for parts in zip(weights, chosen, sizes, strict=True))
    bits = 8 * sum(sizes) / total
    return BitsResult(rows, _recipe(recipe, weights, chosen), bits, budget, score, best, uniform_score)


def with_fewest_bits(recipe: Recipe) -> Recipe:
    """Recipe to calibrate with: passes for weights of few bits, such as `gptq`, read more samples than others."""
    if recipe.config.weight is None or recipe.config.activation is not None:
        return recipe
    return replace(recipe, config=replace(recipe.config, weight=SPECS[_MEASURED]))


def _recipe(recipe: Recipe, weights: Sequence[_Weight], chosen: Sequence[str]) -> Recipe:
    for weight, name in zip(weights, chosen, strict=True):
        recipe = weight.with_spec(recipe, SPECS[name])
    return recipe


def _fitting(
    trials: Trials, recipe: Recipe, weights: Mapping[Any, _Weight], most: float
) -> tuple[list[str], list[int]]:
    """Spec of each weight within a number of bytes, and the bytes of each weight with these specs.

    With `gptq`, scales of a weight, and thus their dtype, depend on the specs of earlier weights. So the bytes are
    those of the chosen recipe. If they are too many, the choice is repeated with them.
    """
    group = list(weights.values())
    while True:
        chosen = _within(group, most)
        stored = _stored_bytes(trials, _recipe(recipe, group, chosen))
        sizes = [stored[key] for key in weights]
        if sum(sizes) <= most:
            return chosen, sizes
        for weight, name, size in zip(group, chosen, sizes, strict=True):
            weight.sizes[name] = max(weight.sizes[name], size)  # never less, so that the loop ends


def _row(recipe: Recipe, weight: _Weight, name: str, size: int) -> WeightBits:
    first, spec = weight.layers[0], SPECS[name]
    selectors = dict.fromkeys(selector for layer in weight.layers for selector in layer.selectors)
    code = _options(spec)
    code += "" if recipe.config.compute == "float32" else f", compute={recipe.config.compute!r}"
    line = "recipe" + "".join(f".override({s}, fxq.Recipe.weight_only({code}).config)" for s in selectors)
    bits = 8 * size / weight.values
    return WeightBits(first.name, first.path, first.op, name, bits, weight.values, weight.sqnr, line)


def _options(spec: TensorSpec) -> str:
    """Options of `Recipe.weight_only` for a spec, as Python."""
    if spec.format == "float16":
        return "dtype=torch.float16"
    is_usual = spec == weight_spec(spec.bits, spec.per, None)
    return f"bits={spec.bits}, per={spec.per!r}" if is_usual else f"weight=fxq.{spec!r}"


def _weights(trials: Trials, recipe: Recipe, rounded: Recipe) -> dict[Any, _Weight]:
    """Weights that run on integers, by key (see `_reads`), with their size and error for each spec.

    Args:
        trials: the calibrated model.
        recipe: recipe whose passes choose the integers.
        rounded: the recipe without `gptq`, and other passes that fit weights to samples.
    """
    weights: dict[Any, _Weight] = {}
    everywhere = _Weight(trials.layers(rounded, Ledger(())))
    candidates = {name: everywhere.with_spec(recipe, spec) for name, spec in SPECS.items()}
    candidates[_NEAREST] = everywhere.with_spec(rounded, SPECS[_MEASURED])
    for name, candidate in candidates.items():
        keys: dict[Any, Any] = {}
        for manager in trials.managers(candidate):
            _add(weights, manager, name, keys)
    return {key: weight for key, weight in weights.items() if len(weight.errors) == len(SPECS) + 1}


def _stored_bytes(trials: Trials, recipe: Recipe) -> dict[Any, int]:
    """Bytes of each weight with scales and zero points, by key, as a candidate stores them."""
    keys: dict[Any, Any] = {}
    stored: Counter[Any] = Counter()
    for manager in trials.managers(recipe):
        for read in _reads(manager, keys):
            stored[read.key] += read.sizes(manager.gm)[1] if read.is_first else 0
    return dict(stored)


class _Read(NamedTuple):
    """Layer of a graph that reads integer weights.

    Attributes:
        node: node of the layer.
        weights: dequantized weights; a recurrent layer has two.
        layer: the layer as overrides select it.
        key: key of the weights in the model.
        is_first: whether no earlier layer reads them.
        correction: nodes that add a correction of the weights to the output, in order; see `fxq.passes.LowRank`.
    """

    node: fx.Node
    weights: tuple[fx.Node, ...]
    layer: TunableLayer
    key: Any
    is_first: bool
    correction: tuple[fx.Node, ...] = ()

    def sizes(self, gm: fx.GraphModule) -> tuple[int, int]:
        """Number of values of the weights, and their bytes with scales, zero points and the correction."""
        (values, _), *_ = sizes = [weight_sizes(gm, node) for node in (self.node, *self.correction)]
        return values, sum(size for _, size in sizes)


def _reads(manager: PassManager, keys: dict[Any, Any]) -> Iterator[_Read]:
    """Yield the layers of a graph with integer weights.

    `keys` has the key of each tensor and of each override of the candidate: the first layer that reads it, since tied
    weights share a tensor, and candidates have copies of their own of transposed weights. The layers of a recurrent
    module share an override, and thus a key.
    """
    gm = manager.gm
    for node in gm.graph.nodes:
        layer = layer_of(manager, node, {}) if precision_of(node) == "weight-only" else None
        weights = tuple(read for read in node.all_input_nodes if integer_weight(gm, read) is not None)
        if layer is None or not weights or not all(info(weight).stands_for for weight in weights):
            continue
        reals = [read_attribute(gm, info(weight).stands_for) for weight in weights]
        place = tuple((real.data_ptr(), real.shape) for real in reals)
        first = layer.selectors, info(weights[0]).stands_for
        key, is_first = keys.get(place, keys.get(layer.selectors, first)), place not in keys
        keys[place] = keys[layer.selectors] = key
        yield _Read(node, weights, layer, key, is_first, correction_of(node))


def _add(weights: dict[Any, _Weight], manager: PassManager, name: str, keys: dict[Any, Any]) -> None:
    """Add the weights of a graph, with their sizes and errors for one spec; see `_reads` for `keys`."""
    reads = list(_reads(manager, keys))
    for read in reads:
        weight = weights.setdefault(read.key, _Weight())
        if read.layer.selectors not in [earlier.selectors for earlier in weight.layers]:
            weight.layers.append(read.layer)
        if name in SPECS and read.is_first:
            values, size = read.sizes(manager.gm)
            weight.values += values if name == _MEASURED else 0
            weight.sizes[name] = weight.sizes.get(name, 0) + size
    for read, error in zip(reads, _errors(manager, reads), strict=True):
        errors = weights[read.key].errors
        errors[name] = errors.get(name, 0.0) + error


def _errors(manager: PassManager, reads: Sequence[_Read]) -> list[float]:
    """Noise of the output of each layer relative to the output if only its weights are in integers.

    Args:
        manager: manager of a qdq graph, with recorded samples.
        reads: the layers.
    """
    gm, context = manager.gm, manager.context
    agreements, by_node = {read.node: Agreement() for read in reads}, {read.node: read for read in reads}

    def run(batches: Sequence[Batch]) -> list[float]:
        for batch in batches:
            program = IsolatedGraph(gm, gm.graph)
            floats = FloatForm(gm, copied(batch), program.graph, program.modules)
            with torch.no_grad(), seeded():
                for node in program.graph.nodes:
                    rounded = _with_integers(floats, by_node[node]) if node in by_node else None
                    value = floats.step(node)
                    for pair in zip(tensors(value), tensors(rounded), strict=True) if node in by_node else ():
                        agreements[node].add(*pair)
        return [agreement.noise / max(agreement.signal, 1e-30) for agreement in agreements.values()]

    return on_samples(context, _MAX_SAMPLES, run)


def _with_integers(floats: FloatForm, read: _Read) -> Any:
    """Output of the next layer of a float run with its dequantized weights, and with their correction."""
    gm, before, nodes = floats.gm, dict(floats.values), (read.node, *read.correction)
    for weight in dict.fromkeys(value for node in nodes for value in node.all_input_nodes if integer_weight(gm, value)):
        stored = {value: read_attribute(gm, str(value.target)) for value in weight.all_input_nodes}
        floats.values[weight] = value_of(gm, weight, stored)
    for node in nodes:
        floats.values[node] = value = floats.compute(node)
    floats.values.clear()
    floats.values.update(before)
    return value


def _measure(
    trials: Trials,
    recipe: Recipe,
    weights: Sequence[_Weight],
    executor: Executor | None,
    advance: Callable[[], None],
) -> None:
    """Measure the noise of the output with each weight alone in the measured spec, and derive that of other specs.

    Args:
        trials: the calibrated model.
        recipe: the recipe without `gptq` and the like, which would run for each weight.
        weights: weights with their errors; receive their noise.
        executor: executor that evaluates candidates.
        advance: called after each candidate.
    """
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
        nearest = max(weight.errors[_NEAREST], 1e-30)
        weight.noise = {name: noise * weight.errors[name] / nearest for name in SPECS}


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
    steps: list[tuple[float, int, int, int]] = []

    def push(i: int) -> None:
        weight, names, place = weights[i], options[i], places[i]
        for later in range(place + 1, len(names)):
            a, b = names[place], names[later]
            gain = (weight.noise[a] - weight.noise[b]) / (weight.sizes[b] - weight.sizes[a])
            heapq.heappush(steps, (-gain, i, place, later))

    for i in range(len(weights)):
        push(i)
    while steps:
        _, i, place, later = heapq.heappop(steps)
        extra = weights[i].sizes[options[i][later]] - weights[i].sizes[options[i][place]]
        if place == places[i] and size + extra <= most:  # else its gain is that of a spec that it has left
            size, places[i] = size + extra, later
            push(i)
    _exchange(weights, options, places, most - size)
    return [names[place] for names, place in zip(options, places, strict=True)]


def _exchange(weights: Sequence[_Weight], options: Sequence[Sequence[str]], places: list[int], left: float) -> None:
    """Change the specs of one or two weights at a time, as long as that lowers the noise most and fits.

    A step that saves much may not fit any more, but would if another weight took a smaller spec.

    Args:
        weights: the weights.
        options: specs of each weight, by size.
        places: place of the chosen spec of each weight in its options; changed in place.
        left: bytes of the budget that are left.
    """
    changes = [(-1, 0), *((i, k) for i, names in enumerate(options) for k in range(len(names)))]  # the first: none
    if len(changes) > _MAX_CHANGES:
        return
    owner = torch.tensor([i for i, _ in changes])
    all_sizes, all_noise = (
        torch.tensor([0.0, *(table[i][name] for i, names in enumerate(options) for name in names)], dtype=torch.float64)
        for table in ([weight.sizes for weight in weights], [weight.noise for weight in weights])
    )
    firsts = [1 + sum(map(len, options[:i])) for i in range(len(options))]
    while True:
        chosen = torch.tensor([0, *(first + place for first, place in zip(firsts, places, strict=True))])
        size, noise = (values - values[chosen[owner + 1]] for values in (all_sizes, all_noise))
        fits = (size[:, None] + size <= left) & (owner[:, None] != owner)
        saved = torch.where(fits, noise[:, None] + noise, math.inf)
        best = int(saved.argmin())
        if not float(saved.view(-1)[best]) < -_MIN_SAVED * float(all_noise[chosen].sum()):
            return
        for change in divmod(best, len(changes)):
            i, k = changes[change]
            left -= float(size[change])
            if i >= 0:
                places[i] = k
