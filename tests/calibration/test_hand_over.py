"""Observers of one graph for another; tests/workflow/test_steps.py compares whole models."""

import pytest
import torch
from torch import nn

import fxq
from fxq.calibration.hand_over import check_computes_alike, check_traced_alike, hand_over, nodes_of
from fxq.errors import RecipeError
from fxq.quant.observer_base import Observer
from tests.support.helpers import REFERENCE

X = torch.rand(2, 3, 8, 8)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()


def observers(gm):
    return {m.name: m for m in gm.modules() if isinstance(m, Observer) and not m.paused}


def test_observers_are_handed_over_by_what_they_watch():
    seen = fxq.prepare(network(), REFERENCE, example_inputs=X, observe_all=True)
    seen(X)
    to = fxq.prepare(network(), REFERENCE.override("1", fxq.FLOAT), example_inputs=X)
    assert hand_over(seen, to, "") == len(observers(to)) > 0
    alone = fxq.prepare(network(), REFERENCE.override("1", fxq.FLOAT), example_inputs=X)
    alone(X)
    for name, observer in observers(alone).items():
        assert observers(to)[name].seen and observers(to)[name].qparams().same_as(observer.qparams())


def test_weights_are_no_matter_of_calibration():
    seen, to = (fxq.prepare(network(), REFERENCE, example_inputs=X) for _ in range(2))
    seen(X)
    paused = [m for m in to.modules() if isinstance(m, Observer) and m.paused]
    hand_over(seen, to, "")
    assert len(paused) == 2 and [m for m in to.modules() if isinstance(m, Observer) and m.paused] == paused


def test_a_value_that_calibration_has_not_observed():
    seen = fxq.prepare(network(), REFERENCE.override("2", fxq.FLOAT), example_inputs=X)
    to = fxq.prepare(network(), REFERENCE, example_inputs=X)
    with pytest.raises(RecipeError, match=r"wants the range of %_0_relu .*which calibration has not observed.* Do so"):
        hand_over(seen, to, "Do so.")


def test_other_graphs_and_other_tracing():
    gm = fxq.extend.run_passes(network(), REFERENCE, example_inputs=X, until="fold-batch-norm")
    lines = nodes_of(gm.graph)
    check_computes_alike(lines, list(lines))
    with pytest.raises(RecipeError, match=r"another graph before fusion.*it has fewer nodes"):
        check_computes_alike(lines, lines[:-1])
    check_traced_alike(REFERENCE, REFERENCE.override("0", fxq.FLOAT))
    with pytest.raises(RecipeError, match="other leaf_modules"):
        check_traced_alike(REFERENCE, REFERENCE.leaf("0"))
