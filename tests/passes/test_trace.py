"""trace: the model as a graph, with shapes; what cannot be traced."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from fxq.workflow.steps import manager_for
from tests.support.graphs import equal, expected, graph, text
from tests.support.helpers import REFERENCE
from tests.support.models import NETWORKS, batch, build, call, settled


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

    def forward(self, x):
        x = self.stem(x)
        return F.adaptive_avg_pool2d(x, 1).flatten(1) + 1


def test_text_and_metadata():
    model = Mixed().eval()
    gm = graph(model, torch.randn(2, 3, 8, 8), "trace")
    assert text(gm) == expected("""
        x = input
        stem_0 = module Conv2d(x)
        stem_1 = module ReLU(stem_0)
        adaptive_avg_pool2d = adaptive_avg_pool2d(stem_1, 1)
        flatten = .flatten(adaptive_avg_pool2d, 1)
        add = add(flatten, 1)
        return add
    """)
    nodes = {n.name: info(n) for n in gm.graph.nodes}
    start = inspect.getsourcelines(Mixed.forward)[1]
    assert (nodes["stem_0"].path, nodes["flatten"].path) == ("stem.0", "")
    assert nodes["flatten"].source == f"passes/test_trace.py:{start + 2}"
    assert (nodes["stem_1"].shape, nodes["stem_1"].dtype) == ((2, 4, 6, 6), torch.float32)
    assert nodes["x"].shape == (2, 3, 8, 8)
    assert nodes["add"].origins == ("add",)


def test_a_plain_sequential_has_no_line_of_its_own():
    """The source line of the caller would say nothing about the model, and two calls would give two models."""
    gm = graph(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.rand(2, 4), "trace")
    assert [(info(n).path, info(n).source) for n in gm.graph.nodes if n.op == "call_module"] == [("0", ""), ("1", "")]
    with pytest.raises(fxq.InputError, match=r'layer "0" got float32\[2, 5\]'):
        graph(nn.Sequential(nn.Linear(4, 4)).eval(), torch.rand(2, 5), "trace")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_traced_model_is_the_model(name):
    model, inputs = build(name), batch(name)
    gm = graph(model, inputs, "trace")
    assert equal(call(gm, inputs), call(model, inputs))
    assert {p.data_ptr() for p in gm.parameters()} <= {p.data_ptr() for p in model.parameters()}


# ---- what cannot be traced


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.fc(x)
        if hidden.sum() > 0:
            return hidden
        return -hidden


class Loop(nn.Module):
    def forward(self, x):
        for row in x:
            x = x + row
        return x


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.before, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.inner(self.before(x)))


@pytest.mark.parametrize(("inner", "line", "value"), [(Branch, 2, "%gt = gt(%sum_1)"), (Loop, 1, "%before")])
def test_strict_tracing_refuses_control_flow(inner, line, value):
    with pytest.raises(fxq.TraceError) as error:
        graph(Outer(inner()).eval(), torch.randn(3, 4), "trace", fxq.Recipe.static(strict_trace=True))
    message = str(error.value)
    number = inspect.getsourcelines(inner.forward)[1] + line
    assert f"passes/test_trace.py:{number}" in message
    assert 'in layer "inner"' in message
    assert value in message
    assert 'recipe.leaf("inner")' in message
    assert "torch.where" in message


def test_control_flow_in_the_model_itself_has_no_path():
    with pytest.raises(fxq.TraceError, match=r'recipe\.leaf\("path\.of\.module"\)'):
        graph(Branch().eval(), torch.randn(3, 4), "trace")


def test_a_leaf_runs_in_float():
    model, x = settled(lambda: Outer(Branch())), torch.randn(64, 4)
    quantized = fxq.quantize(model, REFERENCE.leaf("inner"), data=[x])
    assert sqnr(call(model, x), call(quantized, x)) > 30
    entry = next(e for e in quantized.ledger if e.path == "inner")
    assert entry.precision == "float"
    assert entry.reason
    assert text(quantized.history["trace"].graph) == expected("""
        x = input
        before = module Linear(x)
        inner = module Branch(before)
        last = module Linear(inner)
        return last
    """)


def test_a_leaf_that_is_not_there():
    with pytest.raises(fxq.RecipeError, match=r"'iner' matches no module of the model; near: inner"):
        graph(Outer(Branch()).eval(), torch.randn(3, 4), "trace", REFERENCE.leaf("iner"))


# ---- inputs


def test_a_missing_input_is_named():
    with pytest.raises(fxq.InputError, match="the model also needs y"):
        graph(build("several_inputs"), torch.randn(1, 3, 8, 8), "trace")


def test_an_input_that_does_not_fit_names_the_layer():
    with pytest.raises(
        fxq.InputError, match=r'layer "stem\.0" \(passes/test_trace\.py:\d+\) got float32\[1, 5, 8, 8\]'
    ):
        graph(Mixed().eval(), torch.randn(1, 5, 8, 8), "trace")


@pytest.mark.parametrize(
    "steps", [lambda m, x: fxq.prepare(m, REFERENCE, example_inputs=x), lambda m, x: graph(m, x, "trace")]
)
def test_messages_end_where_they_end(steps):
    """They ended with what torch.fx appends: the node, the whole traceback and an advert."""
    with pytest.raises(fxq.InputError) as error:
        steps(Mixed().eval(), torch.randn(1, 5, 8, 8))
    assert "While executing" not in str(error.value)
    assert "tlparse" not in str(error.value)


def test_messages_of_an_interpreter_inside_the_model_are_cut():
    class Interprets(nn.Module):
        def __init__(self):
            super().__init__()
            self.gm = torch.fx.symbolic_trace(nn.Linear(4, 4))

        def forward(self, x):
            return torch.fx.Interpreter(self.gm).run(x)

    model = nn.Sequential(Interprets(), nn.Linear(4, 2)).eval()
    recipe = REFERENCE.leaf("0")
    with pytest.raises(fxq.InputError, match=r'layer "0" .*shapes cannot be multiplied \(3x5 and 4x4\)$'):
        fxq.prepare(model, recipe, example_inputs=torch.randn(3, 5))
    with pytest.raises(fxq.InputError, match=r"data, batch 1 .*shapes cannot be multiplied \(3x5 and 4x4\)$"):
        fxq.quantize(model, recipe, data=[torch.randn(3, 4), torch.randn(3, 5)])


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


@pytest.mark.parametrize(
    ("model", "example", "runs"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4), False),
        (Counter(), torch.ones(2, 4), True),
        (nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 4)), torch.tensor([[1, 2]]), True),
    ],
)
def test_state_is_compared_if_the_graph_may_change_it(model, example, runs):
    manager = manager_for(model.eval(), REFERENCE, example)
    manager.run(REFERENCE.pipeline[:1])
    assert manager.context.runs_model_code is runs
