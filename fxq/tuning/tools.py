"""The tools that say where quantization goes wrong, and what to do: sensitivity, search and bisect."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Executor
from numbers import Real
from typing import Any

from torch import nn

from fxq.backends.by_name import FASTEST
from fxq.common.data import batches
from fxq.common.isolation import untouched
from fxq.common.progress import progress_bar
from fxq.errors import InputError, RecipeError
from fxq.model import QuantizedModel
from fxq.recipe.recipe import Recipe, as_recipe
from fxq.tracing.wrappers import unwrapped
from fxq.tuning.bisection import Bisection, blamed
from fxq.tuning.search import Search
from fxq.tuning.search_result import SearchResult
from fxq.tuning.sensitivity import Sensitivity, ranked
from fxq.tuning.trials import Metric, Trials
from fxq.workflow.steps import check_compared, check_model, float_reference


def sensitivity(
    model: nn.Module,
    recipe: Any = "static",
    data: Iterable[Any] = (),
    *,
    executor: Executor | None = None,
    progress: bool | None = None,
) -> Sensitivity:
    """Rank the layers of a model by what their quantization costs its output, beside what float would cost in time.

    Each layer runs on integers alone, with all others in float: its noise is not lost in theirs then, and that of
    independent roundings adds up. The data runs through the model once for each layer, in exact integer arithmetic.
    What layers take in float and on integers is measured as `quantize` does it.

    Args:
        model: a float `nn.Module` in eval mode.
        recipe: as for `quantize`, for one backend.
        data: batches, as for `quantize`: they calibrate, and layers are judged on them. All are kept in memory.
        executor: where layers are judged, any `concurrent.futures.Executor`: processes, threads, a cluster
            (`client.get_executor()` of dask). Default: here, one after the other.
        progress: show a progress bar; default: when stderr is a terminal.

    Returns:
        A table, the worst layer first, with the line of a recipe that puts each into float.

    Raises:
        InputError: bad input, or the model returns no float tensor.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
        >>> found = fxq.sensitivity(model, "static", [torch.rand(8, 4)])
        >>> sorted(row.path for row in found), found[0].sqnr <= found[1].sqnr
        (['0', '2'], True)
    """
    trials = _trials(model, recipe, data, None, progress)
    with progress_bar("judging layers", None, progress) as advance:
        return ranked(trials, executor, advance)[0]


def search(
    model: nn.Module,
    recipe: Any = "static",
    data: Iterable[Any] = (),
    metric: Metric | None = None,
    *,
    target: float,
    executor: Executor | None = None,
    progress: bool | None = None,
) -> SearchResult:
    """Find the fastest mix of integers, other observers and float layers that is good enough.

    Other observers are tried first, for all layers together. Then layers go into float, those first that add most noise
    to the output; and those that are not needed there go back, first what costs most for the noise it makes, with other
    observers where that helps. Fewer than three candidates are judged for each layer, some more in models of a few
    layers. They are graphs in exact integer arithmetic with all on integers that can run on them; kernels differ from
    it by their rounding, and what is faster in float stays there with optimize="speed", which adds no noise. The
    candidates do not depend on the executor.

    Args:
        model: a float `nn.Module` in eval mode.
        recipe: the recipe to start from, for one backend.
        data: batches, as for `quantize`: they calibrate, and without a metric candidates are judged on them.
        metric: a function of a model that says how good it is, larger is better: the accuracy on data of your own.
            Default: SQNR of the output against the float model's, in dB.
        target: dB that the output is to keep; with a metric, how much less than for the float model it may say.
        executor: where candidates are judged, as for `sensitivity`.
        progress: show a progress bar; default: when stderr is a terminal.

    Returns:
        The recipe, for `quantize` with the same data, and what was tried: a table, with a picture of its Pareto front.

    Raises:
        InputError: bad input; the metric returns no number; or what goes to other processes cannot be pickled.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
        >>> data = [torch.rand(8, 4)]
        >>> found = fxq.search(model, "static", data, target=60.0)
        >>> found.reached, found.floats, fxq.quantize(model, found.recipe, data=data).output_sqnr >= 60
        (True, ('0', '2'), True)
    """
    given: Any = target
    if isinstance(given, bool) or not isinstance(given, Real) or not given == given:
        raise InputError(f"target is {target!r}; it is a number: dB, or with a metric the drop that is tolerated.")
    if metric is not None and not callable(metric):
        raise InputError(f"metric is {metric!r}; it is a function of a model that returns a number, larger is better.")
    trials = _trials(model, recipe, data, metric, progress)
    least = float(target) if metric is None else trials.told(trials.model) - float(target)
    if math.isnan(least):
        raise InputError("the metric returned NaN for the float model, from which no drop can be counted.")
    with progress_bar("searching", None, progress) as advance:
        return Search(trials, least, executor, advance).run()


def bisect(model: nn.Module, q: QuantizedModel, data: Iterable[Any], *, progress: bool | None = None) -> Bisection:
    """Name the first layer of a quantized model whose own error is to blame for that of its output.

    The quantized model runs with the float model's values for all layers up to one, on the grids that it has: the layer
    is the first one with which half of the output's noise is gone. It is found by halving, in about log2 of the layers
    runs of both models over the data. Where one layer is wrong, it is that one; where all err alike, one in the middle,
    and `before` and `after` are close together.

    Args:
        model: the float model that `q` was made from.
        q: the quantized model.
        data: batches, as for `quantize`; all are kept in memory.
        progress: show a progress bar; default: when stderr is a terminal.

    Raises:
        InputError: `model` is not the one that `q` was made from; the models do not run on the data, or return nothing
            that can be compared.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
        >>> coarse = fxq.QuantConfig(weight=fxq.TensorSpec(bits=2, signed=True, symmetric=True, observer="minmax"))
        >>> recipe = fxq.Recipe.static(optimize="coverage").override("2", coarse).with_min_sqnr(None)
        >>> found = fxq.bisect(model, fxq.quantize(model, recipe, data=[torch.rand(8, 4)]), [torch.rand(8, 4)])
        >>> found.layer.path, found.before < 20 < found.after
        ('2', True)
    """
    model = unwrapped(model)
    check_compared(model, q)
    if isinstance(model, QuantizedModel):
        raise InputError("model is a QuantizedModel: bisect takes the float model, fxq.bisect(float_model, q, data).")
    given = list(batches(data, model))
    with untouched(model), untouched(q), progress_bar("bisecting", None, progress) as advance:
        return blamed(float_reference(model, q, given[0]), q, given, advance)


def _trials(model: nn.Module, recipe: Any, data: Any, metric: Metric | None, progress: bool | None) -> Trials:
    """A calibrated model to try recipes on."""
    chosen: Recipe = as_recipe(recipe)
    if chosen.backend == FASTEST:
        raise RecipeError(f"backend={FASTEST!r} is many: give the name of one, as q.backend says after quantize.")
    model = unwrapped(model)
    check_model(model)
    trials = Trials(model, chosen, data, metric)
    with progress_bar("calibrating", len(trials.batches), progress) as advance:
        trials.calibrate(advance)
    return trials
