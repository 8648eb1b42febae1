"""Warnings about specs of growing states that store none as integers."""

import warnings

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import FxqWarning
from fxq.quant.spec import CACHE, DYNAMIC_STATE
from tests.support.helpers import module

X, PAST = torch.randn(2, 1, 16), torch.randn(2, 5, 16)


def appends(self, x, past):
    return torch.cat([past, self.layer(x)], 1)


def transposes(self, x, past):
    return torch.cat([past, self.layer(x)], 1).transpose(1, 2)


def heard(forward, recipe, layer=None, inputs=(X, PAST)):
    model = module(forward, layer=layer or nn.Linear(16, 16)).eval()
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always", FxqWarning)
        fxq.quantize(model, recipe, example_inputs=inputs)
    return [
        str(w.message) for w in recorded if "states that grow" in str(w.message) or "a state stays" in str(w.message)
    ]


def weight_only(state):
    return fxq.Recipe.weight_only(backend="reference", state=state)


@pytest.mark.parametrize("state", [CACHE, fxq.TensorSpec(bits=4, per=8, range="dynamic")])
def test_a_spec_without_a_state_that_grows(state):
    (text,) = heard(transposes, weight_only(state))
    assert "the model has none, so the spec has no effect" in text
    assert not heard(appends, weight_only(state))
    for recipe in (weight_only(None), weight_only(DYNAMIC_STATE)):
        assert not heard(transposes, recipe)


def test_a_spec_in_an_override():
    recipe = weight_only(None).override("layer", fxq.QuantConfig(activation=None, state=CACHE))
    assert len(heard(transposes, recipe)) == 1


def test_a_state_that_stays_in_float():
    (text,) = heard(lambda self, x, past: torch.cat([past, self.layer(x)], -1), weight_only(CACHE), inputs=(X, X))
    assert "a state stays in float" in text and "whose rows do not grow" in text


def test_a_recurrent_layer_has_a_state():
    recipe = fxq.Recipe.dynamic(backend="reference", state=CACHE)
    assert not heard(lambda self, x: self.layer(x)[0], recipe, nn.GRU(16, 16), torch.randn(5, 2, 16))


def test_several_programs_of_which_one_has_a_state():
    def forward(self, x, past=None):
        y = self.layer(x)
        return y if past is None else torch.cat([past, y], 1)

    model = module(forward, layer=nn.Linear(16, 16)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxqWarning)
        qmodel = fxq.quantize(model, weight_only(CACHE), example_inputs=[{"x": X}, {"x": X, "past": PAST}])
    assert isinstance(qmodel(x=X, past=PAST), fxq.results.QuantizedRows) and type(qmodel(x=X)) is torch.Tensor
