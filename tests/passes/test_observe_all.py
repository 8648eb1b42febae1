"""observe-all: every value is watched, and what cannot be is let go."""

import math

import pytest
import torch
from torch import nn

import fxq
from fxq.passes.observe_all import ObserveAll, ObserverSet
from fxq.quant.observers import Histogram, MovingAverage, observer_for
from fxq.quant.spec import TensorSpec
from tests.support.helpers import REFERENCE, module, rewriter

X = torch.rand(2, 3, 8, 8)


def graph(until="fold-batch-norm"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    return fxq.extend.run_passes(model, REFERENCE, example_inputs=X, until=until)


def test_every_value_of_floats_is_watched():
    gm = graph()
    want, before = gm(X), [n.name for n in gm.graph.nodes if n.op == "call_function"]
    editor = rewriter(gm, X)
    ObserveAll(("minmax", "moving_average")).run(editor)
    gm.recompile()
    assert torch.equal(gm(X), want)
    watched = {n.args[0].name: gm.get_submodule(n.target) for n in gm.graph.nodes if n.op == "call_module"}
    assert list(watched) == ["input_1", *before]
    for watch in watched.values():
        kinds = [type(observer) for observer in watch.observers]
        assert kinds[:2] == [Histogram, MovingAverage]  # a histogram knows what minmax does
    assert float(watched[before[1]].observers[0].minimum) == 0.0


def test_readers_read_the_watched_value():
    gm = graph()
    ObserveAll().run(rewriter(gm, X))
    assert [n.name for n in gm.graph.nodes if n.op == "call_function" for r in n.all_input_nodes if r.op == "x"] == []
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert all(read.op in ("get_attr", "call_module") for read in node.all_input_nodes)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_let_go(bad):
    watch = ObserverSet([observer_for(TensorSpec()), observer_for(TensorSpec(), constants=(math.inf,))])
    x = torch.tensor([1.0, bad])
    assert watch(x) is x
    assert len(list(watch.observers)) == (1 if bad == math.inf else 0)


def test_a_value_that_was_let_go_is_refused_when_it_is_wanted():
    model = module(lambda self, x, y: self.b(self.a(x) / y), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    observed = fxq.prepare(model, REFERENCE, example_inputs=(X[0, 0, :, :3], torch.ones(3)), observe_all=True)
    observed(X[0, 0, :, :3], torch.zeros(3))
    with pytest.raises(fxq.RecipeError, match="calibration has not observed"):
        fxq.convert(observed)
    assert fxq.convert(observed, REFERENCE.override("b", fxq.FLOAT)).ledger.where(path="a")[0].precision == "int8"
