"""Names of ONNX files that are no names in Python, or that `torch.fx.GraphModule` uses itself."""

import numpy as np
import pytest
import torch

import fxq
from tests.support.onnx_text import parsed

pytest.importorskip("onnx")

NAMES = ["1", "0.weight", "a/b:0", "x y", "ünï", "class", "self", "torch", "graph", "code", "meta", "forward", "print"]


def renamed(model, names):
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in [*model.graph.initializer, *model.graph.input, *model.graph.output]:
        value.name = names.get(value.name, value.name)
    return model


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_names_of_inputs_weights_and_values(name):
    weights = {"w": np.eye(3, dtype=np.float32) * 2, "v": np.arange(3, dtype=np.float32)}
    x = torch.randn(4, 3)
    for names in ({"x": name}, {"w": f"{name}.weight", "v": name}, {"w": f"{name}/a", "v": f"{name}/b"}, {"t": name}):
        read = fxq.read_onnx(
            renamed(parsed("t = MatMul(x, w) y = Add(t, v)", "float[N, 3] x", "float[N, 3] y", weights), names)
        )
        torch.testing.assert_close(read(x), 2 * x + torch.arange(3.0), rtol=0, atol=1e-5)
        again = fxq.read_onnx(renamed(parsed("y = Neg(x)", "float[N, 3] x", "float[N, 3] y"), {"x": name}))
        assert torch.equal(again(x), -x)


def test_inputs_whose_names_differ_only_in_signs():
    names = {"a": "x/1", "b": "x:1", "c": "x.1"}
    read = fxq.read_onnx(
        renamed(parsed("t = Sub(a, b) y = Div(t, c)", "float[N] a, float[N] b, float[N] c", "float[N] y"), names)
    )
    a, b, c = torch.rand(3, 4) + 1
    torch.testing.assert_close(read(a, b, c), (a - b) / c, rtol=1e-6, atol=0)
