"""Gradients that the graph of eval mode does not have are told before a model is trained."""

import warnings

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import FxqWarning
from fxq.quant.fake_quantize import FakeQuantizeValue
from tests.support.helpers import module
from tests.support.trainings import prepared


def no_gradients(self, x):
    with torch.no_grad():
        y = self.a(x).relu()
    return self.b(y)


def straight_through(self, x):
    y = self.a(x)
    return self.b(y + (y.round() - y).detach())


OTHER = {
    "detached": lambda self, x: self.b(self.a(x).relu().detach()),
    "in part": lambda self, x: self.b(self.a(x).relu()) + self.a(x).detach(),
    "no_grad": no_gradients,
    "straight through": straight_through,
}
MODELS_WITH_EQUAL_GRADIENTS = {
    "plain": lambda self, x: self.b(self.a(x).relu()),
    "a constant": lambda self, x: self.b(self.a(x) * torch.ones(4).detach()),
    "inf": lambda self, x: self.b(self.a(x)).masked_fill(x > 0, float("-inf")),
}


def made(forward):
    torch.manual_seed(0)
    return module(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval(), torch.randn(2, 4)


@pytest.mark.parametrize("name", OTHER)
def test_other_gradients_are_told(name):
    with pytest.warns(FxqWarning, match=r"a\.weight, a\.bias have other gradients than in the float model"):
        prepared(*made(OTHER[name]))


@pytest.mark.parametrize("name", MODELS_WITH_EQUAL_GRADIENTS)
def test_nothing_is_told_of_the_same(name):
    with warnings.catch_warnings(action="error", category=FxqWarning):
        prepared(*made(MODELS_WITH_EQUAL_GRADIENTS[name]))


def test_fake_quantizers_are_as_they_were():
    trained = prepared(*made(MODELS_WITH_EQUAL_GRADIENTS["plain"]), fxq.Recipe.qat(backend="reference", learned=True))
    assert all(m.started for m in trained.modules() if isinstance(m, FakeQuantizeValue))
    assert not any("forward" in vars(m) for m in trained.modules())
    assert trained.training
