"""Candidates: what is judged is what `quantize` makes, wherever it is judged."""

import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.errors import InputError
from fxq.tuning.trials import Trials
from tests.support.tuning_models import DATA, STATIC, agreement, wide

RECIPES = [STATIC, *(STATIC.override(path, fxq.FLOAT) for path in ("first", "second", "bad", "last"))]


@pytest.fixture(scope="module")
def trials():
    wide_trials = Trials(wide(), STATIC, DATA)
    wide_trials.calibrate()
    return wide_trials


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", [*RECIPES, STATIC.override("first", fxq.Recipe.dynamic().config)])
def test_a_candidate_is_what_quantize_makes(trials, recipe):
    model, quantized = wide(), fxq.quantize(wide(), recipe.with_optimize("coverage"), data=DATA)
    gm = trials.candidate(recipe).gm
    assert all(torch.equal(gm(x), quantized(x)) for x in DATA)
    want, got = (torch.cat([m(x) for x in DATA]) for m in (model, quantized))
    assert trials.score(recipe) == pytest.approx(sqnr(want, got), abs=1e-3)


def pool(kind):
    if kind == "threads":
        return ThreadPoolExecutor(2)
    return ProcessPoolExecutor(2, get_context(kind))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", ["threads", "fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("metric", [None, agreement])
def test_the_executor_makes_no_difference(kind, metric):
    wide_trials = Trials(wide(), STATIC, DATA, metric)
    wide_trials.calibrate()
    counted = []
    with pool(kind) as executor:
        trial_scores = wide_trials.scores(RECIPES, executor, lambda: counted.append(1))
    assert trial_scores == wide_trials.scores(RECIPES) and len(counted) == len(RECIPES) and len(set(trial_scores)) > 1


def test_what_is_pickled_is_calibrated(trials):
    again = pickle.loads(pickle.dumps(trials))
    assert again.score(RECIPES[1]) == trials.score(RECIPES[1])
    assert len(again.observed.manager.context.samples) == len(trials.observed.manager.context.samples) == 2


def test_what_cannot_be_pickled_says_so():
    wide_trials = Trials(wide(), STATIC, DATA, lambda model: 1.0)
    wide_trials.calibrate()
    with ProcessPoolExecutor(1, get_context("fork")) as executor, pytest.raises(InputError, match="cannot be sent to"):
        wide_trials.scores(RECIPES[:1], executor)
    with ThreadPoolExecutor(1) as executor:
        assert wide_trials.scores(RECIPES[:2], executor) == [1.0, 1.0]


def test_a_model_without_a_float_output():
    class Classes(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(1)

    class_trials = Trials(Classes(3, 3).eval(), STATIC, [torch.rand(2, 3)])
    with pytest.raises(InputError, match="returns no float tensor"):
        class_trials.calibrate()


def test_the_role_with_7_bits_is_decided_once(monkeypatch):
    monkeypatch.setattr(fxq.backends.cpu, "has_vnni", lambda: False)
    wide_trials = Trials(wide(), fxq.Recipe.static(backend="x86"), DATA)
    wide_trials.calibrate()
    assert wide_trials.recipe.reduce_range in ("weights", "activations")
