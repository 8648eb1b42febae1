"""Recipes of the efforts of `fxq.quantize`: one that takes little time, and the most accurate of several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from fxq.backends.by_name import FASTEST
from fxq.common.ranks import Ranks
from fxq.errors import FxqError, RecipeError, unknown, warn, words_of
from fxq.ledger.output_check import rank
from fxq.passes import (
    AdaRound,
    CorrectBias,
    Equalize,
    FoldBatchNorm,
    Gptq,
    KeepSmallValues,
    Smooth,
    SmoothDepthwise,
    SplitInputs,
    VerifyLowering,
)
from fxq.recipe.pass_base import Pass
from fxq.recipe.recipe import Recipe
from fxq.tuning.search import other_observers, with_observer
from fxq.tuning.tools import calibrated_trials

Effort = Literal["fast", "default", "best"]
EFFORTS: tuple[Effort, ...] = ("fast", "default", "best")

QUICK_PASSES: tuple[Pass, ...] = (
    KeepSmallValues(samples=2),
    Smooth(samples=16, rows=512),
    SmoothDepthwise(samples=16),
    CorrectBias(samples=16, tested=False, pieces=2),
    SplitInputs(samples=2),
    VerifyLowering(sizes=False),
)
"""Passes of a quick conversion in place of those of the same name with default options."""


def check_effort(effort: Any) -> None:
    """Raise `RecipeError` unless this is one of the efforts."""
    if effort not in EFFORTS:
        raise RecipeError(unknown("effort", str(effort), EFFORTS))


def quick(recipe: Recipe) -> Recipe:
    """Return the recipe of a quick conversion: no op is timed, nothing is fitted twice, passes use fewer samples.

    Passes with options that the user chose stay as they are.
    """
    role = "weights" if recipe.reduce_range == "auto" else recipe.reduce_range
    optimize = "coverage" if recipe.optimize == "speed" else recipe.optimize
    recipe = replace(recipe, optimize=optimize, reduce_range=role)
    for step in QUICK_PASSES:
        line = recipe.pipeline
        if type(step)() in line:
            before = line[line.position(step.name) - 1].name
            recipe = recipe.without_pass(step.name).insert_pass(step, after=before)
    return recipe


def best(model: nn.Module, recipe: Recipe, data: list[Any] | None, group: Any, progress: bool | None) -> Recipe:
    """Return the most accurate of several recipes, for the fastest of all backends.

    The pass `equalize` is tried first, then observers of activations, then passes that choose the rounding of weights,
    each with the best before. `equalize` changes what is calibrated, so that it costs a second calibration; all other
    candidates share one. All are evaluated in exact integer arithmetic on all of the data.

    Args:
        model: the float model.
        recipe: the recipe to start from. A backend that it names stays.
        data: batches, for calibration and evaluation. Without data, nothing is tried but backends.
        group: processes that calibrate together, as for `fxq.quantize`.
        progress: whether to show a progress bar.

    Raises:
        RecipeError: there are several processes, each of which would choose its own recipe.
    """
    if data is not None and Ranks.of(group).size > 1:
        raise RecipeError('effort="best" runs in one process: pass group=None, or search for a recipe beforehand.')
    named = recipe.backend not in ("auto", FASTEST)
    if data:
        try:
            recipe = _most_accurate(model, recipe if named else recipe.with_backend("auto"), data, progress)
        except FxqError as error:
            warn(f'effort="best": no other recipes are tried, since this model cannot be searched: {words_of(error)}')
    return recipe if named else recipe.with_backend(FASTEST)


def _most_accurate(model: nn.Module, recipe: Recipe, data: Iterable[Any], progress: bool | None) -> Recipe:
    trials = calibrated_trials(model, recipe, data, None, progress)
    chosen, score = recipe, trials.score(trials.recipe)
    for equalized in _with_equalize(recipe):
        equalized_trials = calibrated_trials(model, equalized, data, None, progress)
        own = equalized_trials.score(equalized_trials.recipe)
        if rank(own) > rank(score) + MIN_GAIN_DB:
            trials, chosen, score = equalized_trials, equalized, own
    role = trials.recipe.reduce_range
    for tried in (_with_observers, _with_rounding):
        recipes = tried(chosen)
        scores = trials.scores([replace(candidate, reduce_range=role) for candidate in recipes])
        for candidate, own in zip(recipes, scores, strict=True):
            if rank(own) > rank(score) + MIN_GAIN_DB:
                chosen, score = candidate, own
    return chosen


MIN_GAIN_DB = 0.2
"""SQNR that a candidate must gain, in dB: less may be chance."""


def _with_equalize(recipe: Recipe) -> list[Recipe]:
    """Recipe with channels of even ranges, if the recipe folds batch norms and does not have the pass."""
    names = {step.name for step in recipe.pipeline}
    if FoldBatchNorm.name not in names or Equalize.name in names:
        return []
    return [recipe.insert_pass(Equalize(), after=FoldBatchNorm.name)]


def _with_observers(recipe: Recipe) -> list[Recipe]:
    """Recipes with each other observer of activations."""
    return [with_observer(recipe, text) for text in other_observers(recipe.config)]


def _with_rounding(recipe: Recipe) -> list[Recipe]:
    """Recipes with each pass that chooses the rounding of weights, if the recipe has none."""
    names = [step.name for step in recipe.pipeline]
    if "smooth" not in names or {AdaRound.name, Gptq.name} & set(names):
        return []
    return [recipe.insert_pass(step, after="smooth") for step in (AdaRound(), Gptq())]
