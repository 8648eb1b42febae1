"""When the time of a trial rules a backend out, and what is measured to find that out."""

import math

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.engine import EngineBackend
from fxq.graph.info import EngineLayer, info
from fxq.graph.query import CONVERSIONS, is_op
from fxq.graph.unit import calls_of
from fxq.workflow.steps import all_on_integers
from fxq.workflow.time_estimate import MAX_GAIN, Estimate

pytestmark = [pytest.mark.any_cpu, pytest.mark.filterwarnings("ignore::fxq.FxqWarning")]


def estimate(share, bound):
    """Estimate of 100 us, and the list of what was asked."""
    asked = []

    def answers(name, value):
        def answer():
            asked.append(name)
            if math.isnan(value):
                raise RuntimeError("it cannot be profiled")
            return value

        return answer

    return Estimate(100.0, answers("share", share), answers("bound", bound)), asked


@pytest.mark.parametrize(
    ("share", "bound", "limit_us", "rules_out", "asked"),
    [
        (0.9, 0.5, 101.0, False, []),
        (0.9, 0.5, 99 / MAX_GAIN, True, []),
        (0.9, 0.85, 80.0, True, ["bound"]),
        (0.9, 0.7, 80.0, True, ["bound", "share"]),
        (0.75, 0.7, 80.0, False, ["bound", "share"]),
        (0.75, math.nan, 80.0, False, ["bound", "share"]),
        (math.nan, 0.7, 80.0, False, ["bound", "share"]),
    ],
)
def test_what_is_measured_until_it_is_known(share, bound, limit_us, rules_out, asked):
    candidate, order = estimate(share, bound)
    for _ in range(2):  # what is known is not measured again
        assert candidate.cannot_be_below(limit_us) == rules_out
    assert order == asked


def test_another_limit_may_need_more():
    candidate, asked = estimate(0.9, 0.85)
    assert candidate.cannot_be_below(80.0) and asked == ["bound"]
    assert not candidate.cannot_be_below(95.0) and asked == ["bound", "share"]


def test_a_dropped_model_is_not_measured():
    candidate, asked = estimate(0.9, 0.85)
    candidate.drop_model()
    assert not candidate.cannot_be_below(80.0) and not asked and candidate.share_bound is None


class Layers(nn.Module):
    """A narrow layer, a wide one, one with groups, and a wide one with a float result."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(3, 32, 1), nn.Conv2d(32, 32, 1)
        self.grouped, self.last = nn.Conv2d(32, 32, 1, groups=2), nn.Linear(32, 64)

    def forward(self, x):
        return self.last(self.grouped(self.wide(self.narrow(x).relu()).relu()).relu().mean((2, 3)))


INT8_US = {"narrow": 1.0, "wide": 20.0, "grouped": 4.0, "mean": 5.0, "last": 30.0}


@pytest.mark.parametrize(("gains", "bound"), [(True, 50 / 60), (False, 0.0)])
def test_large_layers_bound_the_share(monkeypatch, gains, bound):
    """They take 50 of 60 us. Floats of the other layers take no time, so that the prices give that share, too."""
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    model, x, profiles = Layers().eval(), torch.randn(2, 3, 4, 4), []
    observed = fxq.prepare(model, fxq.Recipe.static(backend="openvino"), example_inputs=x)
    observed(x)
    trial = all_on_integers(observed)
    backend = trial.manager.context.backend
    monkeypatch.setattr(type(backend), "large_layers_gain", gains)

    def profiled(gm, inputs, floats=False, **options):
        profiles.append(floats)
        us = {"wide": 90.0, "last": 90.0} if floats else INT8_US
        nodes = [node for node in gm.graph.nodes if calls_of(gm, node) and not is_op(node, *CONVERSIONS)]
        times = {node.name: us.get(info(node).path or "mean", 0.0) for node in nodes}
        return [EngineLayer((name,), "", "uint8", "int8", time) for name, time in times.items()]

    monkeypatch.setattr(type(backend).kernel, "profiled", profiled)
    assert trial.share_bound() == pytest.approx(bound, rel=1e-6) and profiles == [False] * gains
    monkeypatch.setattr("fxq.workflow.steps.time_ratio", lambda *_: 0.9)
    assert trial.least_share() == 0.9 and profiles == [False, True]  # what is profiled on integers is so once
    prices = backend.prices(trial.manager.gm, trial.manager.context.example)
    assert {cost.float_us for cost in prices.ops.values()} == {0.0, 90.0} and profiles == [False, True] * 2


def test_other_backends_have_no_bound(monkeypatch):
    model, x = nn.Linear(32, 32), torch.randn(4, 32)
    observed = fxq.prepare(model, fxq.Recipe.static(backend="x86"), example_inputs=x)
    observed(x)
    trial = all_on_integers(observed)
    assert not isinstance(trial.manager.context.backend, EngineBackend) and trial.share_bound() == 0.0
