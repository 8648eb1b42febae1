"""Graph modules whose code is generated when they are called."""

import copy
import operator
import pickle

import pytest
import torch
from torch import fx, nn

from fxq.graph.uncompiled import UncompiledModule


def _module() -> UncompiledModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("layer", (x,)))
    return UncompiledModule({"layer": nn.Linear(3, 2)}, graph)


def test_code_is_generated_at_the_first_call_after_an_edit():
    gm, x = _module(), torch.randn(4, 3)
    assert "_code" not in vars(gm)
    want = gm.layer(x)
    torch.testing.assert_close(gm(x), want, rtol=0, atol=0)
    forward = gm.forward
    node = gm.graph.find_nodes(op="call_module")[0]
    with gm.graph.inserting_after(node):
        doubled = gm.graph.call_function(operator.mul, (node, 2))
    node.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    torch.testing.assert_close(forward(x), want, rtol=0, atol=0)  # as of any graph module that is not recompiled
    gm.recompile()
    torch.testing.assert_close(gm(x), 2 * want, rtol=0, atol=0)


@pytest.mark.parametrize("remade", [copy.deepcopy, copy.copy, lambda gm: pickle.loads(pickle.dumps(gm))])
def test_copies_compute_alike(remade):
    gm, x = _module(), torch.randn(4, 3)
    torch.testing.assert_close(remade(gm)(x), gm.layer(x), rtol=0, atol=0)
    assert "_compiles" not in vars(gm) and "_compiles" not in vars(remade(gm))


def test_text_and_code_are_of_the_graph():
    assert "self.layer" in str(_module())
    assert "self.layer" in _module().code
