"""Layers as overrides name them."""

import pytest
import torch
from torch import nn

import fxq
from fxq.ledger.ledger import Entry, Ledger
from fxq.tuning.trials import Trials
from fxq.tuning.tunable_layer import layers_of
from tests.support.helpers import module
from tests.support.tuning_models import DATA, STATIC, wide


def layers(model, data, ledger=None):
    trials = Trials(model, STATIC, data)
    trials.calibrate()
    entries = fxq.quantize(model, STATIC, data=data).ledger if ledger is None else ledger
    return layers_of(trials.candidate(STATIC), entries)


def test_units_are_one_layer_and_go_by_what_has_weights():
    tunable_layers = layers(wide(), DATA)
    assert [(e.path, e.op) for e in tunable_layers if e.macs] == [
        ("first", "conv2d+relu"),
        ("second", "conv2d+relu"),
        ("bad", "linear+relu"),
        ("last", "linear"),
    ]
    assert tunable_layers[0].line == "recipe.override('first', fxq.FLOAT)" and tunable_layers[0].extra_us is None
    assert tunable_layers[0].macs == 4 * 6 * 8 * 8 * 3 * 9


def test_a_line_puts_the_layer_into_float():
    model = wide()
    for layer in layers(model, DATA):
        recipe = eval(layer.line, {"recipe": STATIC, "fxq": fxq})
        assert recipe == layer.in_float(STATIC)
        precisions = {e.name: e.precision for e in fxq.quantize(model, recipe, data=DATA).ledger}
        assert precisions[layer.name] == "float"


def test_a_layer_that_is_called_twice_is_one():
    model = module(lambda self, x: self.a(self.b(self.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    tunable_layers = layers(model, [torch.rand(2, 4)])
    assert [(e.path, e.macs) for e in tunable_layers] == [("a", 64), ("b", 32)]


def test_what_it_takes_more_in_float():
    entries = [
        Entry("_0", "0", "linear", "int8", float_us=9.0, int8_us=4.0, conversions_us=2.0),
        Entry("_1", "1", "linear", "float", float_us=9.0, int8_us=14.0),
        Entry("_2", "2", "linear", "int8"),
    ]
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).eval()
    assert [e.extra_us for e in layers(model, [torch.rand(2, 4)], Ledger(tuple(entries)))] == [3.0, 0.0, None]


@pytest.mark.parametrize("path", ["first", "bad"])
def test_another_observer_for_one_layer(path):
    layer = next(e for e in layers(wide(), DATA) if e.path == path)
    recipe = layer.observed_by(STATIC, "percentile:60", {})
    config, _ = recipe.config_for(path, ("conv2d",), {})
    assert (config.activation.observer, config.weight) == ("percentile:60", STATIC.config.weight)
    assert STATIC.override(path, fxq.FLOAT) == layer.observed_by(STATIC.override(path, fxq.FLOAT), "minmax", {})
