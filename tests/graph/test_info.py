"""Metadata of a node."""

import pytest
import torch

from fxq.graph.info import info, set_info
from tests.support.graphs import graph, node
from tests.support.helpers import module

pytestmark = pytest.mark.any_cpu

X = torch.linspace(-2, 2, 12).reshape(3, 4)


def test_metadata_is_typed_and_lives_under_one_key():
    gm = graph(module(lambda self, x: torch.relu(x)), X)
    relu = node(gm, "relu")
    set_info(relu, note="seen")
    assert relu.meta["fxq"].note == "seen" and info(relu).shape == (3, 4)
    with pytest.raises(ValueError, match="colour"):
        set_info(relu, colour="red")
