"""Edits of a graph: erased, added, renamed and unchanged nodes."""

import pytest
import torch

from fxq.errors import PassError
from fxq.graph.info import info
from tests.support.graphs import full_text, graph, node
from tests.support.helpers import module, rewriter

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-2, 2, 12).reshape(3, 4)
IMAGE = torch.linspace(-1, 1, 50).reshape(1, 2, 5, 5)


def test_a_node_that_is_read_cannot_be_erased():
    gm = graph(module(lambda self, x: torch.relu(x) + 1), X)
    with pytest.raises(PassError, match="the-test: cannot erase %relu: %add reads it"):
        rewriter(gm).erase(node(gm, "relu"))


def test_unused_nodes_go_unless_they_do_something():
    def forward(self, x):
        y = x * 2
        torch.sigmoid(torch.relu(y))
        torch._assert_async(y.sum())
        return y

    gm = graph(module(forward), X, until="trace")
    rewriter(gm).erase_unused()
    assert "_assert_async" in full_text(gm)  # what it does is not known, so it stays
    gm = graph(module(forward), X)
    assert "sigmoid" not in full_text(gm) and "relu" not in full_text(gm)


def test_constants_get_names_of_their_own_and_are_read_once():
    gm = graph(module(lambda self, x: torch.relu(x)), X)
    hand = rewriter(gm)
    relu = node(gm, "relu")
    first = hand.constant(torch.ones(2), "fc.weight", before=relu)
    second = hand.constant(torch.zeros(2), "fc.weight", before=relu)
    assert (first.target, second.target) == ("fxq_data.fc_weight", "fxq_data.fc_weight_1")
    assert hand.read("fxq_data.fc_weight", torch.ones(2), before=relu) is first
    assert torch.equal(gm.fxq_data.fc_weight_1, torch.zeros(2))
    assert (info(first).shape, info(first).dtype) == ((2,), torch.float32)


def test_a_call_leaves_out_defaults_and_takes_after_its_origin():
    gm = graph(module(lambda self, x: torch.relu(x)), X)
    relu = node(gm, "relu")
    clip = rewriter(gm).call("hardtanh", node(gm, "x"), like=relu, min_val=-1.0, max_val=3.0)
    assert clip.kwargs == {"max_val": 3.0} and clip.next is relu
    assert info(clip).origins == ("relu",) and info(clip).source == info(relu).source
