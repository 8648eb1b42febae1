"""Tuples that an op takes whole are unpacked into ops of one tensor each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxq
from fxq.backends.kernel import Kernel
from fxq.common.metrics import sqnr
from fxq.errors import InputError
from tests.support.graphs import graph
from tests.support.machine import needs_x86


class Between(nn.Module):
    """Function between two convolutions."""

    def __init__(self, function: Any, channels: int = 8) -> None:
        super().__init__()
        self.before, self.after, self.function = nn.Conv2d(3, 8, 3), nn.Conv2d(channels, 4, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self.before(x)))


WHOLE = {
    "split": lambda y: torch.cat(y.split(2, 1), 1),
    "split_in_the_batch": lambda y: torch.cat(y.split([2, 2, 4], dim=1), 1),
    "chunk_reversed": lambda y: torch.cat(y.chunk(2, 1)[::-1], 1),
    "chunk_named": lambda y: torch.cat(tensors=torch.chunk(y, 2, dim=-1), dim=1),
    "tensor_split": lambda y: torch.cat(torch.tensor_split(y, 3, 1)[:2], 1),
    "unbind": lambda y: torch.stack(y.unbind(1), 1),
}
CHANNELS = {"chunk_named": 16, "tensor_split": 6}


@pytest.mark.one_in(3)
@needs_x86
@pytest.mark.parametrize("name", WHOLE)
def test_runs_on_integers(name):
    torch.manual_seed(0)
    model, x = Between(WHOLE[name], CHANNELS.get(name, 8)).eval(), torch.randn(2, 3, 10, 10)
    recipe = fxq.Recipe.static(backend="x86", optimize="coverage")
    quantized = fxq.quantize(model, recipe, data=[x])
    (joined,) = quantized.ledger.where(lambda e: e.op in ("cat", "stack"))
    assert joined.precision == "moves"
    kernels = [m.name for m in quantized.modules() if isinstance(m, Kernel)]
    assert not [n for n in kernels if n.endswith("dequantize")]
    assert sqnr(model(x), quantized(x)) > 28
    assert sqnr(model(x[:1]), quantized(x[:1])) > 28  # the batch is free


@pytest.mark.parametrize("name", WHOLE)
def test_is_what_it_is_written_out(name):
    """The canonical graph has one op for each part, and gives the same numbers."""
    model, x = Between(WHOLE[name], CHANNELS.get(name, 8)).eval(), torch.randn(2, 3, 10, 10)
    gm = graph(model, x, "canonicalize")
    assert "as a whole" not in str([n.meta["fxq"].traced.kept for n in gm.graph.nodes])
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x), rtol=1e-6, atol=1e-6)


def test_another_number_of_parts_is_refused():
    """A split that gives fewer parts for another size raises an error."""
    model = nn.Sequential(Between(lambda y: torch.cat(y.chunk(4, 3), 1), 32)).eval()
    quantized = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=[torch.randn(1, 3, 10, 10)])
    with pytest.raises(InputError, match="len"):
        quantized(torch.randn(1, 3, 10, 5))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: torch.cat(y.split(1)),
        lambda y: torch.stack(y.unbind()),
        lambda y: torch.cat(y.split(2, 2), 2),
        lambda y: torch.cat(y.chunk(2)),
    ],
)
def test_what_follows_a_size_stays_whole(function):
    """If unpacked, the graph would fit only the example's batch or image size."""
    torch.manual_seed(0)
    model = Between(function).eval()
    quantized = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=[torch.randn(2, 3, 10, 10)])
    for shape in [(3, 3, 10, 10), (1, 3, 12, 10)]:
        x = torch.randn(shape)
        assert sqnr(model(x), quantized(x)) > 25
