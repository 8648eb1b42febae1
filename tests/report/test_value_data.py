"""How values lie, as data for the report page."""

import pytest
import torch
from torch import nn

import fxq
from fxq.graph.region import Weight
from fxq.ledger.layer_qparams import LayerQParams
from fxq.quant.qparams import QParams
from fxq.report.report import report_data
from fxq.report.value_data import _weight
from tests.support.helpers import REFERENCE
from tests.support.models import NETWORKS, batch, build

pytestmark = [pytest.mark.any_cpu, pytest.mark.usefixtures("one_round")]


def test_values_of_the_float_model_are_there(qmodel, data):
    assert data["values"].keys() == qmodel.record.values.keys() != set()
    for name, seen in qmodel.record.values.items():
        about = data["values"][name]
        assert (about["low"], about["high"]) == pytest.approx((seen.low, seen.high), rel=1e-4)
        assert about["counts"] == seen.counts
        assert about["clip"] == (pytest.approx(seen.clip, rel=1e-4) if seen.clip else None)
        assert about["outside"] == pytest.approx(seen.outside, rel=1e-2)


@pytest.mark.one_in(15)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_int8_layer_shows_its_weights(name):
    recipe = fxq.Recipe.static(backend="reference", optimize="coverage")
    qmodel = fxq.quantize(build(name), recipe, data=[batch(name)])
    weights, layers = report_data(qmodel)["weights"], qmodel.qparams()
    shown = sorted(((e.into, weights[e.name]) for e in qmodel.ledger if e.name in weights), key=lambda pair: pair[0])
    expected = sorted(layers.values(), key=lambda layer: layer.node)
    assert [node for node, _ in shown] == [layer.node for layer in expected] != []
    for layer, (_, about) in zip(expected, shown, strict=True):
        assert about["axis"] == layer.axis
        assert len(about["low"]) == (layer.weight.shape[layer.axis] if layer.axis is not None else 1)
        assert sum(about["counts"]) == layer.weight.numel()


def test_weight_ranges_are_those_of_the_integers(qmodel, data):
    layer = next(iter(qmodel.qparams().values()))
    (row,) = [entry for entry in qmodel.ledger if entry.into == layer.node and entry.macs]
    about = data["weights"][row.name]
    real = layer.weight * layer.weight_scale.view(-1, *[1] * (layer.weight.dim() - 1))
    assert layer.axis == about["axis"] == 0
    assert about["low"] == pytest.approx(real.flatten(1).amin(1).tolist(), rel=5e-3)
    assert about["high"] == pytest.approx(real.flatten(1).amax(1).tolist(), rel=5e-3)
    assert about["scale"] == pytest.approx(layer.weight_scale.tolist(), rel=5e-3)
    assert about["range"] == pytest.approx([real.min().item(), real.max().item()], rel=5e-4)
    assert sum(about["counts"]) == real.numel()
    middle = about["range"][0] + (about["range"][1] - about["range"][0]) / 2
    half = len(about["counts"]) // 2
    assert sum(about["counts"][:half]) == pytest.approx((real < middle).sum().item(), abs=2)


def test_a_weight_of_equal_values_is_one_bin():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    nn.init.zeros_(model[0].weight)
    page_data = report_data(fxq.quantize(model, REFERENCE, data=[torch.rand(2, 4)]))
    assert page_data["weights"]["_0"]["counts"] == [16]


def test_a_weight_in_blocks_is_shown_by_its_rows():
    grid = QParams(torch.tensor([[0.5, 2.0], [1.0, 0.25]]), torch.zeros(2, 2).int(), -7, 7, torch.int8, 1, 2)
    values = torch.tensor([[1, -2, 3, -4], [5, 6, 7, -7]], dtype=torch.int8)
    none = (None,) * 4
    about = _weight(LayerQParams({"weight": Weight(values, grid)}, {}, {}, None, "", "float", *none, "fc"))
    assert about["axis"] == 0 and about["scale"] == [2.0, 1.0] and about["range"] == [-8.0, 6.0]
    assert about["low"] == [-8.0, -1.75] and about["high"] == [6.0, 6.0] and sum(about["counts"]) == 8
