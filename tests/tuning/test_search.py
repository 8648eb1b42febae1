"""The search: what it finds keeps the target, costs no more than it must, and does not depend on who judges."""

import math
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxq
from fxq.errors import InputError
from fxq.tuning.search import MAX_CANDIDATES_PER_LAYER, Search, in_float, on_front, other_observers, with_observer
from fxq.tuning.search_result import TriedRecipe
from fxq.tuning.trials import Trials
from fxq.tuning.tunable_layer import TunableLayer
from tests.support.tuning_models import DATA, STATIC, Wide, agreement, wide


@pytest.mark.one_in(3)
@pytest.mark.parametrize("target", [30.0, 42.0, 55.0])
def test_what_is_found_keeps_the_target(target):
    result = fxq.search(wide(), STATIC, DATA, target=target)
    assert result.reached and result.score >= target == result.least
    q = fxq.quantize(wide(), result.recipe, data=DATA)
    assert q.output_sqnr >= target - 0.1  # judged on all of the data, and not on the samples that are recorded
    assert {e.path for e in q.ledger if e.precision == "float" and e.macs} == {p for p in result.floats if p}
    assert result.forwards < MAX_CANDIDATES_PER_LAYER * max(result.layers, 3)
    if target == 30.0:
        assert len(result) == 1 and result.floats == () and result.recipe == STATIC
    if target == 42.0:
        assert result.floats == ("bad",)


@pytest.mark.slow
def test_a_target_out_of_reach_gives_the_best():
    result = fxq.search(wide(), STATIC, DATA, lambda model: float(isinstance(model, Wide)), target=0.5)
    assert not result.reached and result.score == 0.0 and "the target was not reached" in str(result)


@pytest.mark.slow
def test_a_metric_with_a_tolerated_drop():
    result = fxq.search(wide(), STATIC, DATA, agreement, target=0.1)
    assert result.least == pytest.approx(0.9) and result.reached and result.floats == ("bad",)
    assert agreement(fxq.quantize(wide(), result.recipe, data=DATA)) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", pytest.param("fork", marks=pytest.mark.slow)])  # `Trials` has both
def test_the_executor_makes_no_difference(kind):
    here = fxq.search(wide(), STATIC, DATA, target=45.0)
    with ThreadPoolExecutor(2) if kind == "threads" else ProcessPoolExecutor(2, get_context("fork")) as executor:
        there = fxq.search(wide(), STATIC, DATA, target=45.0, executor=executor)
    assert there == here and there.sensitivity == here.sensitivity


@pytest.mark.slow
def test_a_dask_cluster_makes_no_difference():
    distributed = pytest.importorskip("dask.distributed")
    here = fxq.search(wide(), STATIC, DATA, target=45.0)
    with (
        distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster,
        cluster.get_client() as c,
    ):
        assert fxq.search(wide(), STATIC, DATA, target=45.0, executor=c.get_executor()) == here


@dataclass
class Planted:
    """Trials whose score follows from the layers that are in float: noise that adds up."""

    noises: tuple[float, ...]
    recipe: fxq.Recipe = STATIC

    def __post_init__(self):
        self.types = Trials(wide(), STATIC, DATA).types
        self.seen = []

    def scores(self, recipes, executor, advance):
        return [self.score(recipe) for recipe in recipes]

    def score(self, recipe):
        floats = {selector.path for selector, config in recipe.overrides if config.is_float}
        self.seen.append(floats)
        noise = sum(noise for i, noise in enumerate(self.noises) if str(i) not in floats)
        return -10 * math.log10(noise) if noise else math.inf


@settings(max_examples=8, deadline=None)
@given(st.lists(st.floats(1e-6, 1e-2), min_size=4, max_size=20), st.floats(15, 70))
def test_enough_layers_and_none_that_could_go_back(noises, target):
    planted = Planted(tuple(noises))
    order = sorted(range(len(noises)), key=lambda i: -noises[i])
    layers = [TunableLayer(f"_{i}", str(i), "linear", (fxq.recipe.selector.Selector(path=str(i)),), 10) for i in order]
    search = Search(planted, target, layers=layers)
    count = search._enough(STATIC, layers)
    assert planted.score(in_float(STATIC, layers[:count])) >= target
    assert count == 0 or count == 1 or planted.score(in_float(STATIC, layers[: count - 1])) < target
    search.forwards = len(noises)
    search._take_back(STATIC, layers[:count])
    result = search._result(len(layers))
    assert result.reached and len(result.floats) <= count and result.forwards < MAX_CANDIDATES_PER_LAYER * len(layers)


def test_observers_that_a_histogram_can_answer_for():
    others = other_observers(STATIC.config)
    assert "minmax" in others and "histogram" not in others and "moving_average" not in others
    assert other_observers(fxq.Recipe.dynamic().config) == other_observers(fxq.Recipe.weight_only().config) == []
    assert with_observer(STATIC, "minmax").config.activation.observer == "minmax"


def row(cost, score):
    return TriedRecipe("", score, True, 0, cost, None)


def test_the_front():
    rows = [row(0, 10.0), row(5, 10.0), row(5, 12.0), row(9, 11.0), row(9, math.nan), row(9, 20.0), row(9, 20.0)]
    assert [on_front(candidate, rows) for candidate in rows] == [True, False, True, False, False, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "high"}, "target is 'high'; give a number"),
        ({"target": math.nan}, "target is nan"),
        ({"target": 1.0, "metric": 3}, "metric is 3; give a function"),
    ],
)
def test_what_is_no_target(options, message):
    with pytest.raises(fxq.InputError, match=message):
        fxq.search(wide(), STATIC, DATA, **options)


@pytest.mark.parametrize("score", [None, "good", float("nan")])
def test_a_metric_that_says_no_number_is_refused(score):
    with pytest.raises(InputError, match="the metric returned"):
        fxq.search(wide(), STATIC, DATA, lambda model: score, target=0.1)


def test_a_metric_may_change_the_mode_and_a_target_may_be_a_number_of_numpy():
    model = wide()

    def metric(candidate):
        candidate.train()
        return 1.0

    result = fxq.search(model, STATIC, DATA, metric, target=np.float32(0.1))
    assert result.reached and not model.training and not any(m.training for m in model.modules())
