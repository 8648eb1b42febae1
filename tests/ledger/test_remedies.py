"""The lines of a recipe that take a layer's noise away."""

import math

import pytest
import torch
from torch import nn

import fxq
from fxq.ledger.remedies import IntegerEdges, Remedies
from tests.support.helpers import REFERENCE, module, steps
from tests.support.ledgers import QUICK, RECIPES, X, pasted
from tests.support.models import NETWORKS, batch, build


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_lines_of_the_worst_layers_take_their_noise_away(name, recipe):
    model, data = build(name), batch(name)
    ledger = fxq.quantize(model, recipe, data=[data]).ledger
    worst = ledger.worst(3)
    faults = [e.fault_sqnr for e in ledger if e.remedy and e.fault_sqnr < math.inf]
    assert [e.fault_sqnr for e in worst] == sorted(faults)[:3]
    for entry in worst:
        others = fxq.quantize(model, pasted(entry.remedy, recipe), data=[data]).ledger
        assert next(e for e in others if e.name == entry.name).fault_sqnr > 80, entry  # dB: float32 alone


def test_a_line_frees_the_integers_that_others_read_too():
    """The layer alone in float would read the values that its neighbour's grid has rounded."""
    torch.manual_seed(0)
    parts = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 4), "c": nn.Linear(6, 4)}
    model = module(lambda self, x: (self.b(y := torch.relu(self.a(x)).reshape(-1, 6)), self.c(y)), **parts)
    entry = fxq.quantize(model, REFERENCE, data=[X.reshape(-1, 6)]).ledger.where(path="b")[0]
    assert entry.remedy == (
        "recipe.override('b', fxq.FLOAT).override(fxq.by_op('reshape'), fxq.FLOAT)"  # the layer in front has one reader
    )
    now = fxq.quantize(model, pasted(entry.remedy, REFERENCE), data=[X.reshape(-1, 6)]).ledger
    assert now.where(path="b")[0].own_sqnr == math.inf
    assert now.where(path="c")[0].precision == "int8"


def test_what_moves_integers_is_not_to_blame():
    ledger = fxq.quantize(build("dense"), REFERENCE, data=[batch("dense")]).ledger
    assert {e.fault_sqnr for e in ledger.where(precision="moves")} == {math.inf}
    assert not ledger.worst(100).where(precision="moves") and len(ledger.worst(0)) == 0


def test_finding_the_lines_takes_time_linear_in_the_readers():
    def ledger(count):
        forward = lambda self, x: sum(self.b(y * 1.0) for y in [torch.relu(self.a(x))] for _ in range(count))  # noqa: E731
        model = module(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
        qmodel = fxq.quantize(model, REFERENCE, data=[torch.randn(2, 4)])

        def find():
            remedies = Remedies(IntegerEdges(qmodel), qmodel.ledger)
            return [remedies.line(node) for node in qmodel.graph.nodes]

        return steps(find)

    assert ledger(32) < 5 * ledger(8)
