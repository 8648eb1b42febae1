"""The onnxruntime backend alone."""

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.engines.onnxruntime import OnnxruntimeKernel
from fxq.onnx.graph import write_onnx

pytestmark = pytest.mark.any_cpu


def test_the_profile_names_the_nodes_of_the_graph():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    x = torch.randn(1, 3, 16, 16)
    q = fxq.quantize(model, fxq.Recipe.static(backend="reference"), data=[x])
    written = write_onnx(q, [x])
    scopes = {name.partition("/")[0] for layer in OnnxruntimeKernel.profile(written.model, [x]) for name in layer.nodes}
    assert {"_0_relu", "_2"} <= scopes


def test_only_clamps_join_a_layer():
    """Another function behind a convolution would make it run in float."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.slope = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.PReLU(8)

        def forward(self, x):
            return self.slope(self.b(torch.relu(self.a(x))))

    recipe = fxq.Recipe.static(backend="onnxruntime", optimize="coverage")
    q = fxq.quantize(Net().eval(), recipe, data=[torch.randn(2, 3, 8, 8)])
    graph = fxq.run_passes(Net().eval(), recipe, torch.randn(2, 3, 8, 8), until="fuse")
    assert [n.name for n in graph.graph.nodes if n.op == "call_module"] == ["a_relu"]
    assert [entry.fate for entry in q.ledger.where(op="conv2d")] == ["int8", "int8"]
