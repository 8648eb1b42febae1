"""How far an op is off, with what comes before it and alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.helpers import PLAIN, plain
from tests.support.ledgers import RECIPES, X, net, pasted


@pytest.mark.one_in(2)
def test_sqnr_is_that_of_the_value(ledger):
    """The last op of a unit has the SQNR; recomputed here from the float model alone."""
    recipe = PLAIN
    model, qmodel = net(), fxq.quantize(net(), recipe, data=[X])
    want = model.stem(X)
    qp = qmodel.qparams()["stem"]
    grid = torch.clamp(torch.round(want / qp.output_scale) + qp.output_zero_point, 0, 255) - qp.output_zero_point
    rounding = sqnr(want, grid * qp.output_scale)
    by_name = {e.name: e for e in qmodel.ledger}
    assert rounding - 6 < by_name["stem"].sqnr < rounding  # the rounding of input and weight comes on top
    assert by_name["erf"].sqnr == pytest.approx(sqnr(model(X), qmodel(X)), abs=1e-6)
    inner = [e for e in qmodel.ledger if e.op in ("add", "batch_norm", "dropout")] + [by_name["block_conv"]]
    assert {e.sqnr for e in inner} == {None}
    assert [e.name for e in ledger if e.sqnr is not None] == ["stem", "relu", "relu_1", "mean", "head", "erf"]


def test_own_sqnr_is_that_of_the_op_on_float_values():
    """Recomputed here: the head on the float model's mean, quantized to its grids, in float64."""
    model, qmodel = net(), fxq.quantize(net(), PLAIN, data=[X])
    inputs = {}
    model.head.register_forward_pre_hook(lambda layer, args: inputs.update(head=args[0]))
    with torch.no_grad():
        model(X)
        want = model.head(inputs["head"]).double()
    layer = qmodel.qparams()["head"]
    grid = torch.clamp(torch.round(inputs["head"] / layer.input_scale) + layer.input_zero_point, 0, 255)
    x = (grid - layer.input_zero_point).double() * float(layer.input_scale)
    weight = layer.weight.double() * layer.weight_scale.double().reshape(-1, 1)
    got = F.linear(x, weight, model.head.bias.detach().double())
    by_name = {e.name: e for e in qmodel.ledger}
    assert by_name["head"].own_sqnr == pytest.approx(sqnr(want, got), abs=1e-3)
    assert by_name["head"].own_sqnr > by_name["head"].sqnr
    assert by_name["stem"].own_sqnr == by_name["stem"].sqnr  # nothing is before it
    assert by_name["erf"].own_sqnr == math.inf  # float, on float values
    assert [e.name for e in qmodel.ledger if e.own_sqnr is not None] == [
        e.name for e in qmodel.ledger if e.sqnr is not None
    ]


def test_sqnr_names_the_layer_that_is_at_fault():
    """A layer whose weights need more than 8 bits per tensor: the drop stands in its row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)).eval()
    with torch.no_grad():
        model[1].weight[0] *= 1000
        model[2].weight[:, 0] /= 1000
    weight = fxq.TensorSpec(signed=True, symmetric=True, per="tensor", observer="minmax")
    recipe = plain(fxq.Recipe.static(backend="reference", weight=weight)).without_pass("keep-small-values")
    ledger = fxq.quantize(model, recipe, data=[X]).ledger
    first, _, third, last = (e.sqnr for e in ledger)
    assert first > 35 and third < first - 15 and last < first - 15  # the last one inherits it
    assert ledger.sort("own_sqnr")[0].path == "2"
    assert ledger[3].own_sqnr > 35


class Outlier(nn.Module):
    """A function whose values a layer reads on a grid that one large channel makes coarse."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.first.weight[0] *= 200
            self.second.weight[:, 0] /= 200

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_layer_is_blamed_that_reads_a_coarse_grid(recipe):
    torch.manual_seed(0)
    model, x = Outlier().eval(), torch.randn(64, 8)
    recipe = plain(recipe).without_pass("keep-small-values")  # it would leave the layer in float: no error to attribute
    qmodel = fxq.quantize(model, recipe, data=[x])
    gelu = qmodel.ledger.where(op="gelu")[0]
    worst = qmodel.ledger.worst(1)[0]
    assert worst.name == "second" and worst.remedy == "recipe.override('second', fxq.FLOAT)"
    assert gelu.fault_sqnr > gelu.own_sqnr  # rounding to the next layer's grid counts as the next layer's error
    before = sqnr(model(x), qmodel(x))
    of_gelu, of_layer = (
        sqnr(model(x), fxq.quantize(model, pasted(line, recipe), data=[x])(x)) for line in (gelu.fix, worst.remedy)
    )
    assert of_layer > before + 5 > of_gelu
