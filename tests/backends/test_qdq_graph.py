"""The qdq graph of a lowered model computes what its kernels do."""

import operator

import pytest
import torch
from torch import fx, nn

import fxq
from fxq.backends.kernel import Kernel
from fxq.backends.qdq_graph import qdq_graph
from fxq.common.metrics import sqnr
from fxq.errors import BackendError
from tests.support.helpers import REFERENCE
from tests.support.models import batch, build


def kernels(gm):
    return [module for module in gm.modules() if isinstance(module, Kernel)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["residual", "dense", "called_twice", "squeeze_excite", "upscaler"])
def test_it_is_the_graph_that_was_lowered(name):
    model, x = build(name), batch(name)
    lowered = fxq.quantize(model, fxq.Recipe.static(optimize="coverage"), data=[x])
    gm = qdq_graph(lowered)
    assert kernels(lowered) and not kernels(gm)
    assert sqnr(lowered(x), gm(x)) > 30
    gm.graph.lint()


def test_a_graph_without_kernels_stays_as_it_is():
    model, x = build("residual"), batch("residual")
    qmodel = fxq.quantize(model, REFERENCE, data=[x])
    gm = qdq_graph(qmodel)
    assert [node.name for node in gm.graph.nodes] == [node.name for node in qmodel.graph.nodes]
    assert torch.equal(gm(x), qmodel(x))


def test_of_a_region_of_an_engine_with_several_values():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            y = self.first(x).relu()
            return y, self.second(y)

    x = torch.rand(2, 3, 8, 8)
    lowered = fxq.quantize(Two().eval(), fxq.Recipe.static(backend="onnxruntime"), data=[x])
    assert any(node.target is operator.getitem for node in lowered.graph.nodes)
    for got, wanted in zip(qdq_graph(lowered)(x), lowered(x), strict=True):
        assert sqnr(wanted, got) > 30


def test_a_kernel_without_a_form_is_refused():
    class Hand(Kernel):
        name = "test.hand"

        def forward(self, x):
            return x

    graph = fx.Graph()
    graph.output(graph.call_module("hand", (graph.placeholder("x"),)))
    with pytest.raises(BackendError, match=r"hand: its kernel test\.hand was inserted into the graph by hand"):
        qdq_graph(fx.GraphModule({"hand": Hand()}, graph))
