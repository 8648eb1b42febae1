"""Quantized inputs of linear layers, and the errors of rounding them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.paired import linear_inputs
from fxq.paired.linear_inputs import LinearInput, seen_inputs
from fxq.quant.dynamic_grid import DynamicGrid
from tests.support.graphs import until
from tests.support.helpers import REFERENCE, module

pytestmark = pytest.mark.any_cpu


class Seen(LinearInput):
    """Keeps what it is shown."""

    def see(self, x, share):
        self.shown = [*getattr(self, "shown", []), (x, share)]

    def finish(self):
        self.finished = len(self.shown)


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


def test_tokens_count_alike():
    """One token of 1000 times the size would hide all others in a plain sum of squares."""
    torch.manual_seed(0)
    (linear_input,) = inputs(nn.Sequential(nn.Linear(16, 16)).eval(), torch.randn(32, 16))
    assert linear_input.finished == len(linear_input.shown)  # once, after all tokens
    x = torch.randn(32, 16)
    x[0] *= 1000
    coarse = x.clone()
    coarse[1:] = 0
    weights = [layer.real for layer in linear_input.layers]
    linear_input.keep(x)
    (error,) = linear_input.errors_of(lambda parts: [(coarse, weights)])
    assert error.sqnr < 1.0 < 40.0 < sqnr(x @ weights[0].T, coarse @ weights[0].T)


@pytest.mark.parametrize(("per", "axis"), [("row", -1), ("tensor", None)])
def test_inputs_that_are_measured(per, axis):
    """Inputs of a dynamic recipe, with their dynamic grid."""
    recipe = fxq.Recipe.dynamic(backend="reference", activation=fxq.TensorSpec(per=per, range="dynamic"))
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    (linear_input,) = inputs(model, torch.randn(32, 4), recipe=recipe)
    assert linear_input.grid == DynamicGrid(0, 255, torch.uint8, axis, symmetric=False)


def compared(linear_input):
    """Tokens that are compared, and the error of a way that adds 0.1 to each."""
    seen = []

    def ways(parts):
        seen.extend(parts)
        yield torch.cat(parts) + 0.1, [layer.real for layer in linear_input.layers]

    (error,) = linear_input.errors_of(ways)
    return seen, error


@pytest.mark.parametrize(
    ("macs", "least", "most", "count"),
    [
        (1 << 29, 1, 60, 60),
        (1 << 29, 1, 33, 33),
        (12 * 20, 1, 60, 20),
        (12, 1, 60, 1),
        (12, 25, 60, 25),
        (12, 59, 60, 59),
    ],
)
def test_tokens_are_drawn_from_all_batches(macs, least, most, count, monkeypatch):
    """Fewer of them for large layers, but not less than a minimum."""
    monkeypatch.setattr(linear_inputs, "MAX_MACS", macs)
    monkeypatch.setattr(linear_inputs, "MIN_COMPARED", least)
    tokens = torch.arange(60.0)[:, None].repeat(1, 4)
    linear_input = Seen(None, None, [SimpleNamespace(real=torch.ones(3, 4))], most=most)
    for part in (written := tokens.clone()).split([7, 0, 40, 13]):
        linear_input.keep(part)
    written[:] = -1  # the kept ones are copies
    (x,), error = compared(linear_input)
    numbers = x[:, 0].tolist()
    assert len(numbers) == count and numbers == sorted(set(numbers)) and min(numbers) >= 0
    assert count < 20 or (min(numbers) < 15 and max(numbers) > 45)  # of the first and the last quarter
    assert error.sqnr < 80  # dB
    linear_input.kept.clear()
    assert list(linear_input.errors_of(lambda parts: [])) == []


def test_batches_with_ranges_of_their_own_stay_apart():
    grid = DynamicGrid(0, 255, torch.uint8, None, symmetric=False)
    linear_input = Seen(None, grid, [SimpleNamespace(real=torch.ones(3, 4))], most=50)
    batches = torch.randn(60, 4).split([7, 40, 13])
    for batch in batches:
        linear_input.keep(batch)
    parts, _ = compared(linear_input)
    assert [len(part) for part in parts] == [7, 40, 3]
    assert all(torch.equal(part, batch[: len(part)]) for part, batch in zip(parts, batches, strict=True))
