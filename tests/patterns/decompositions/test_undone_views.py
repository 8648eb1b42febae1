"""Views that undo each other, around recurrent layers."""

import pytest
import torch
from torch import nn

import fxq
from fxq.graph.query import is_op
from tests.support.graphs import until
from tests.support.helpers import REFERENCE
from tests.support.models import call, settled


class Last(nn.Module):
    """The last state of a layer, for which callers choose an axis."""

    def __init__(self, read):
        super().__init__()
        self.rnn, self.read = nn.GRU(6, 8), read

    def forward(self, x):
        return self.read(*self.rnn(x))


def views(manager):
    return [node.name for node in manager.gm.graph.nodes if is_op(node, "stack", "squeeze", "unsqueeze")]


@pytest.mark.parametrize(
    "read",
    [
        lambda y, h: h[0],
        lambda y, h: h[-1],
        lambda y, h: h.squeeze(0),
        lambda y, h: h.unsqueeze(2).squeeze(-2)[0],
        lambda y, h: (y.relu(), h[0]),
    ],
)
def test_dropped(read):
    model = settled(lambda: Last(read))
    manager = until(model, torch.randn(5, 2, 6), "decompose")
    assert views(manager) == []
    x = torch.randn(4, 3, 6)
    torch.testing.assert_close(call(manager.gm, x), call(model, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "read", [lambda y, h: h[0, 0], lambda y, h: h[:, 0], lambda y, h: h.squeeze(1), lambda y, h: h]
)
def test_kept(read):
    model, x = settled(lambda: Last(read)), torch.randn(5, 1, 6)
    manager = until(model, x, "decompose")
    assert views(manager)
    torch.testing.assert_close(call(manager.gm, x), call(model, x), rtol=1e-6, atol=1e-6)


def test_results_keep_their_own_memory():
    model, x = settled(lambda: Last(lambda y, h: (y, h[0]))), torch.randn(5, 2, 6)
    assert views(until(model, x, "decompose"))
    y, h = fxq.quantize(model, REFERENCE, data=[x], progress=False)(x)
    before = h.clone()
    y.zero_()
    assert torch.equal(h, before)
