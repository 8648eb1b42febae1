"""Quantized inputs of linear layers, and the errors of rounding them."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.paired.linear_inputs import LinearInput, seen_inputs
from fxq.quant.dynamic_grid import DynamicGrid
from tests.support.graphs import until
from tests.support.helpers import REFERENCE, module

pytestmark = pytest.mark.any_cpu


class Seen(LinearInput):
    """Keeps what it is shown."""

    def see(self, x, share):
        self.shown = [*getattr(self, "shown", []), (x, share)]


def inputs(model, data, least=1, recipe=REFERENCE):
    manager = until(model, data, "insert-qdq", recipe)
    return seen_inputs(manager.gm, manager.context, Seen, 64, 1024, least)


def network():
    torch.manual_seed(0)
    children = {"a": nn.Linear(6, 8), "b": nn.Linear(6, 4), "conv": nn.Conv1d(5, 5, 1)}
    return module(lambda self, x: (self.a(self.conv(x)), self.b(self.conv(x)).tanh()), **children)


def test_an_input_is_seen_in_float_with_all_layers_that_read_it():
    model, x = network(), torch.randn(4, 5, 6)
    seen = inputs(model, x)
    assert [len(linear_input.layers) for linear_input in seen] == [1, 1]  # the convolution is written twice
    tokens = torch.cat([some for some, _ in seen[0].shown])
    torch.testing.assert_close(tokens, model.conv(x).reshape(-1, 6), rtol=0, atol=1e-5)
    assert torch.equal(seen[0].layers[0].real, model.a.weight)


def test_inputs_with_too_few_tokens_are_left_out():
    assert inputs(network(), torch.randn(4, 5, 6), least=21) == []
    assert inputs(network(), torch.randn(4, 5, 6), least=20) != []


def test_tokens_count_alike_and_no_more_than_asked():
    """One token of 1000 times the size would hide all others in a plain sum of squares."""
    torch.manual_seed(0)
    (linear_input,) = inputs(nn.Sequential(nn.Linear(16, 16)).eval(), torch.randn(32, 16))
    x = torch.randn(32, 16)
    x[0] *= 1000
    coarse = x.clone()
    coarse[1:] = 0
    weights = [layer.real for layer in linear_input.layers]
    (error,) = linear_input.errors_of(x, lambda some: [(coarse[: len(some)], weights)])
    assert error.sqnr < 1.0 < 40.0 < sqnr(x @ weights[0].T, coarse @ weights[0].T)
    assert linear_input.most == 1024 - 32
    linear_input.most = 8
    assert len(list(linear_input.errors_of(x, lambda some: [(some, weights)] if len(some) == 8 else []))) == 1
    assert linear_input.most == 0
    assert list(linear_input.errors_of(x, lambda some: [(some, weights)])) == []  # nothing is left to compare


@pytest.mark.parametrize(("per", "axis"), [("row", -1), ("tensor", None)])
def test_inputs_that_are_measured(per, axis):
    """Inputs of a dynamic recipe, with their dynamic grid."""
    recipe = fxq.Recipe.dynamic(backend="reference", activation=fxq.TensorSpec(per=per, range="dynamic"))
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    (linear_input,) = inputs(model, torch.randn(32, 4), recipe=recipe)
    assert linear_input.grid == DynamicGrid(0, 255, torch.uint8, axis, symmetric=False)
