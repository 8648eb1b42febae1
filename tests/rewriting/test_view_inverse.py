"""Writing through each kind of view, against torch."""

import pytest
import torch

from tests.support.graphs import equal, graph
from tests.support.helpers import module

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
VIEWS = {
    "getitem": lambda y: y[:, 1:, ::2],
    "permute": lambda y: y.permute(2, 0, 1),
    "transpose": lambda y: y.mT,
    "reshape": lambda y: y.view(6, 4),
    "squeeze": lambda y: y[:1].squeeze(0),
    "unflatten": lambda y: y.unflatten(2, (2, 2)),
    "chunk": lambda y: y.chunk(2, 2)[1],
    "split": lambda y: torch.split(y, [1, 2], 1)[-1],
    "unbind": lambda y: y.unbind(1)[0],
    "diagonal": lambda y: y.diagonal(0, 1, 2),
    "unfold": lambda y: y.unfold(2, 2, 2)[..., 1],
    "bits": lambda y: y.view(torch.int32)[0],
    "of a view": lambda y: y[0].t().reshape(2, 2, 3)[1].unsqueeze(0),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", VIEWS)
def test_what_is_above_a_view_gets_what_is_written_to_it(name):
    def forward(self, x):
        y = x * 2
        part = VIEWS[name](y)
        part.copy_(part.flip(0) * 1)
        return y, part

    gm = graph(module(forward), X)
    for got, wanted in zip(gm(X), forward(None, X), strict=True):
        assert equal(got, wanted)
    assert not any(str(node.target).endswith("copy_") for node in gm.graph.nodes)
