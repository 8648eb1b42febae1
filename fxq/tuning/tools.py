"""Tools that find the layers with the largest quantization error, and remedies: sensitivity, search and bisect."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import replace
from numbers import Real
from typing import Any, overload

from torch import nn

from fxq.backends.by_name import FASTEST
from fxq.common.data import batches
from fxq.common.isolation import untouched
from fxq.common.progress import progress_bar
from fxq.errors import InputError, RecipeError, TraceError
from fxq.model import QuantizedModel
from fxq.recipe.recipe import Recipe, as_recipe
from fxq.tuning.bisection import Bisection, blamed
from fxq.tuning.bits import bits_of, search_bits, with_fewest_bits
from fxq.tuning.bits_result import BitsResult
from fxq.tuning.parts_trials import PartsTrials
from fxq.tuning.search import Search
from fxq.tuning.search_result import SearchResult
from fxq.tuning.sensitivity import Sensitivity, ranked
from fxq.tuning.trials import Metric, Trials, check_metric
from fxq.workflow.entry import compared_model, float_model
from fxq.workflow.steps import float_reference


def sensitivity(
    model: nn.Module,
    recipe: Any = "static",
    data: Iterable[Any] = (),
    *,
    executor: Executor | None = None,
    progress: bool | None = None,
) -> Sensitivity:
    """Rank the layers of a model by the error that quantizing each one adds to the output, with its latency in float.

    One layer at a time is quantized, with all others in float, so that its noise is not hidden by theirs; the noise of
    independent roundings adds up. The model runs over the data once per layer, in exact integer arithmetic. Latencies
    of layers in int8 and float are measured as in `quantize`.

    Args:
        model: a float `nn.Module` in eval mode.
        recipe: as for `quantize`, for one backend.
        data: batches, as for `quantize`, used for calibration and evaluation. All are kept in memory.
        executor: `concurrent.futures.Executor` that evaluates layers: processes, threads, or a cluster
            (`client.get_executor()` of dask). Default: this process, one layer after another.
        progress: whether to show a progress bar. Default: only if stderr is a terminal.

    Returns:
        A table, the worst layer first, with the line of a recipe that sets each layer to float.

    Raises:
        InputError: an argument cannot be used, or the model returns no float tensor.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
        >>> layers = fxq.sensitivity(model, "static", [torch.rand(8, 4)])
        >>> sorted(row.path for row in layers), layers[0].sqnr <= layers[1].sqnr
        (['0', '2'], True)
    """
    trials = calibrated_trials(model, recipe, data, None, progress)
    with progress_bar("evaluating layers", None, progress) as advance:
        return ranked(trials, executor, advance)[0]


@overload
def search(
    model: nn.Module,
    recipe: Any = ...,
    data: Iterable[Any] = ...,
    metric: Metric | None = ...,
    *,
    target: float,
    executor: Executor | None = ...,
    progress: bool | None = ...,
) -> SearchResult: ...


@overload
def search(
    model: nn.Module,
    recipe: Any = ...,
    data: Iterable[Any] = ...,
    metric: Metric | None = ...,
    *,
    budget: str | float,
    executor: Executor | None = ...,
    progress: bool | None = ...,
) -> BitsResult: ...


def search(
    model: nn.Module,
    recipe: Any = "static",
    data: Iterable[Any] = (),
    metric: Metric | None = None,
    *,
    target: float | None = None,
    budget: str | float | None = None,
    executor: Executor | None = None,
    progress: bool | None = None,
) -> SearchResult | BitsResult:
    """Search for the fastest recipe whose accuracy reaches a target, or for the most accurate one within a budget.

    With a target, the search decides which layers run in float, and which observers are used:

    1. Other observers are tried, for all layers at once.
    2. Layers are set to float, those that add the most noise to the output first, until the target is reached.
    3. Layers that need not be float are set back to int8, those that save the most time for the least noise first,
       with other observers if they help.

    Fewer than three candidates are evaluated per layer (a few more in models with few layers), whatever the executor.
    Candidates run in exact integer arithmetic, with every layer on integers that can be. The result of `quantize`
    differs from that by the rounding of kernels; with optimize="speed", it also keeps layers in float that are faster
    there, which adds no noise.

    With a budget, the search chooses bits and block size of each weight of a weight-only recipe. The model runs once
    for each weight, with this weight rounded to 4 bits and all others in float. What other specs cost follows from the
    error of the layer's output, with the integers that the passes of the recipe choose for them, such as `gptq`. Then
    all weights start with the smallest spec, and those that save the most noise per byte get larger ones while the
    budget lasts.

    Args:
        model: a float `nn.Module` in eval mode.
        recipe: the recipe to start from, for one backend.
        data: batches, as for `quantize`, used for calibration and, without a metric, for evaluation.
        metric: function of a model that returns its quality as a number, larger is better, such as its accuracy on
            validation data; `fxq.task_metrics` has some. Default: SQNR of the output against the float model's, in dB.
            With a budget, it judges the result beside the best spec that is the same for all weights.
        target: without a metric, the lowest acceptable SQNR in dB. With a metric, the largest acceptable drop from its
            value for the float model.
        budget: largest mean number of bits per weight, scales and zero points included, such as "4.5 bits" or 4.5;
            instead of a target.
        executor: `concurrent.futures.Executor` that evaluates candidates, as for `sensitivity`.
        progress: whether to show a progress bar. Default: only if stderr is a terminal.

    Returns:
        With a target, a `SearchResult`: the recipe, for `quantize` with the same data, and a table of the candidates,
        with a plot of their Pareto front. With a budget, a `BitsResult`: the recipe, and a table of the weights.

    Raises:
        InputError: an argument cannot be used; the metric returns no number; or the model, data or metric cannot be
            pickled for other processes.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
        >>> data = [torch.rand(8, 4)]
        >>> result = fxq.search(model, "static", data, target=60.0)
        >>> result.reached, result.floats, fxq.quantize(model, result.recipe, data=data).output_sqnr >= 60
        (True, ('0', '2'), True)
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
        >>> small = fxq.search(model, "weight_only", [torch.rand(8, 64)], budget="9 bits")
        >>> small.bits <= 9, [weight.spec for weight in small]
        (True, ['8 bits', '8 bits'])
    """
    if (target is None) == (budget is None):
        raise InputError("search takes either a target or a budget.")
    if budget is not None:
        return _search_within(budget, model, recipe, data, metric, executor, progress)
    target_value: Any = target
    if isinstance(target_value, bool) or not isinstance(target_value, Real) or not target_value == target_value:
        raise InputError(f"target is {target!r}; give a number: dB, or with a metric the largest acceptable drop.")
    check_metric(metric)
    trials = calibrated_trials(model, recipe, data, metric, progress)
    min_score = float(target_value) if metric is None else trials.metric_of(trials.model) - float(target_value)
    if math.isnan(min_score):
        raise InputError("the metric returned NaN for the float model, so no drop from it can be computed.")
    with progress_bar("searching", None, progress) as advance:
        return Search(trials, min_score, executor, advance).run()


def _search_within(
    budget: str | float,
    model: nn.Module,
    recipe: Any,
    data: Iterable[Any],
    metric: Metric | None,
    executor: Executor | None,
    progress: bool | None,
) -> BitsResult:
    """Search for the bits of each weight within a budget, see `search`."""
    most, chosen = bits_of(budget), as_recipe(recipe)
    trials = calibrated_trials(model, with_fewest_bits(chosen), data, metric, progress)
    trials.recipe = replace(trials.recipe, config=chosen.config)
    with progress_bar("searching", None, progress) as advance:
        return search_bits(trials, most, executor, advance)


def bisect(model: nn.Module, q: QuantizedModel, data: Iterable[Any], *, progress: bool | None = None) -> Bisection:
    """Find the layer that causes most of the output error of a quantized model, by binary search.

    Each step picks a layer and runs the quantized model with the errors of this layer and of all layers before it
    removed: their outputs are the float model's, rounded to the grids. The result is the first layer for which this
    removes half of the output's noise. The search takes about log2(number of layers) runs of both models
    over the data. If one layer is wrong, the result is that layer. If all layers have similar errors, it is one in the
    middle, and `before` and `after` are close together.

    Args:
        model: the float model that `q` was made from.
        q: the quantized model.
        data: batches, as for `quantize`. All are kept in memory.
        progress: whether to show a progress bar. Default: only if stderr is a terminal.

    Returns:
        The layer, SQNR of the output with and without its error, and the remedy.

    Raises:
        InputError: `q` was not made from `model`; the models do not run on the data, or return no float tensors to
            compare.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
        >>> coarse = fxq.QuantConfig(weight=fxq.TensorSpec(bits=2, signed=True, symmetric=True, observer="minmax"))
        >>> recipe = fxq.Recipe.static(optimize="coverage").override("2", coarse).with_min_sqnr(None)
        >>> culprit = fxq.bisect(model, fxq.quantize(model, recipe, data=[torch.rand(8, 4)]), [torch.rand(8, 4)])
        >>> culprit.layer.path, culprit.before < 20 < culprit.after
        ('2', True)
    """
    model = compared_model(model, q)
    if isinstance(model, QuantizedModel):
        raise InputError("model is a QuantizedModel: bisect takes the float model, fxq.bisect(float_model, q, data).")
    samples = list(batches(data, model))
    with untouched(model), untouched(q), progress_bar("bisecting", None, progress) as advance:
        return blamed(float_reference(model, q, samples[0]), q, samples, advance)


def calibrated_trials(model: nn.Module, recipe: Any, data: Any, metric: Metric | None, progress: bool | None) -> Trials:
    """Calibrated model that candidates are derived from."""
    chosen: Recipe = as_recipe(recipe)
    if chosen.backend == FASTEST:
        raise RecipeError(
            f"backend={FASTEST!r} stands for several backends: name one, such as q.backend of the quantized model."
        )
    trials = _trials_of(float_model(model), chosen, data, metric)
    with progress_bar("calibrating", len(trials.batches), progress) as advance:
        trials.calibrate(advance)
    return trials


def _trials_of(model: nn.Module, recipe: Recipe, data: Any, metric: Metric | None) -> Trials:
    """Prepare a model as one graph, or in parts, as `fxq.quantize` does."""
    if not recipe.part_modules:
        try:
            return Trials(model, recipe, data, metric)
        except TraceError as error:
            if recipe.strict_trace:
                raise
            failure = error
        try:
            return PartsTrials(model, recipe, data, metric)
        except TraceError:
            raise failure from None
    return PartsTrials(model, recipe, data, metric)
