"""A qdq graph beside its float form."""

import pytest
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

import fxq
from fxq.common.data import Batch
from fxq.ops import OPS
from fxq.paired.paired_run import PairedRun, WeightValues, integer_side


def test_the_states_that_a_recurrent_layer_multiplies():
    """Step by step, forwards and backwards, after the initial state."""
    torch.manual_seed(0)
    cell, x, h = nn.GRUCell(3, 5), torch.randn(4, 2, 3), torch.randn(2, 5)
    weights = dict(cell.named_parameters())
    for reverse in (False, True):
        graph = fx.Graph()
        inputs = [graph.placeholder(name) for name in ("x", "h")]
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        read = [graph.get_attr(name) for name in names]
        node = graph.call_function(OPS["gru"].target, (inputs[0], *read, inputs[1]), {"reverse": reverse})
        graph.output(node)
        runs = PairedRun.with_float_form(fx.GraphModule(cell, graph), [Batch((x, h))])
        for before in list(graph.nodes)[:-2]:
            runs.step(before)
        ((got, wanted),) = runs.states(node)
        state, states = h, {}
        for t in reversed(range(4)) if reverse else range(4):
            states[t], state = state, torch.gru_cell(x[t], state, *(weights[name] for name in names))
        assert torch.equal(got, wanted)
        torch.testing.assert_close(got, torch.stack([states[t] for t in range(4)]), rtol=0, atol=1e-6)


def test_values_as_they_are_and_in_float():
    gm = fxq.extend.read_graph(
        """
        x: float32[2, 3] = input()
        x_q = quantize(x, scale=0.5, zero_point=0, qmin=-128, qmax=127, dtype=torch.int8)
        x_dq = dequantize(x_q, scale=0.5, zero_point=0)
        y = relu(x_dq)
        return y
        """,
        {},
    )
    x = torch.tensor([[0.3, -1.1, 2.0], [0.0, 0.7, -0.2]])
    runs = PairedRun.with_float_form(gm, [Batch((x,))])
    for node in list(gm.graph.nodes)[:-2]:
        runs.step(node)
    node = list(gm.graph.nodes)[2]
    ((got, wanted),) = runs.values(node)
    assert torch.equal(got, torch.tensor([[0.5, -1.0, 2.0], [0.0, 0.5, 0.0]])) and torch.equal(wanted, x)
    runs.compared.put(node, torch.zeros(2, 3))
    assert not next(runs.values(node))[0].any()


class Drifts(nn.Module):
    """Adds noise, and what it has seen so far: (N, C), the same out."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.abs().mean()
        return x + torch.randn_like(x) + self.seen


def test_noise_and_modules_that_keep_something_are_the_same_in_both():
    graph = fx.Graph()
    drifting = graph.call_module("leaf", (graph.placeholder("x"),))
    graph.output(drifting)
    leaf = Drifts()
    gm = fx.GraphModule(nn.ModuleDict({"leaf": leaf}), graph)
    runs = PairedRun.with_float_form(gm, [Batch((torch.ones(2, 3),)) for _ in range(3)])
    for node in list(graph.nodes)[:-1]:
        runs.step(node)
    pairs = [*runs.values(drifting)]
    assert len({float(got.sum()) for got, _ in pairs}) == 3
    assert all(torch.equal(got, wanted) for got, wanted in pairs)
    assert leaf.seen == 0


TWO_LAYERS = """
x: float32[2, 3] = input()
a_int: int8[4, 3] = tensor('a')
a = dequantize(a_int, scale=0.5, zero_point=0)
b_int: int8[2, 4] = tensor('b')
b = dequantize(b_int, scale=0.25, zero_point=0)
y = linear(x, a)
z = linear(y, b)
return z
"""


def weights_run(most, batches):
    """Outputs of `TWO_LAYERS` for each batch, one after the other, and how often its weights are dequantized."""
    integers = {"a": torch.arange(-6, 6, dtype=torch.int8).view(4, 3), "b": torch.ones(2, 4, dtype=torch.int8)}
    gm, count = fxq.extend.read_graph(TWO_LAYERS, integers), 0

    class Counting(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal count
            count += getattr(function, "__name__", "").startswith("dequantize")
            return function(*args, **(kwargs or {}))

    weights, outputs = WeightValues(most), []
    with Counting():
        for x in batches:
            outputs += integer_side(gm, [Batch((x,))], weights=weights).run()
    return outputs, count


@pytest.mark.parametrize(("most", "counts"), [(0, 6), (40, 4), (2**20, 2)])
def test_weights_are_computed_once_if_they_fit(most, counts):
    """The first weight has 48 bytes as float32, the second one 32."""
    torch.manual_seed(0)
    batches = [torch.randn(2, 3) for _ in range(3)]
    outputs, count = weights_run(most, batches)
    a, b = torch.arange(-6.0, 6.0).view(4, 3) / 2, torch.full((2, 4), 0.25)
    for x, got in zip(batches, outputs, strict=True):
        torch.testing.assert_close(got, x @ a.T @ b.T, rtol=1e-6, atol=1e-6)
    assert count == counts
