"""Repeated work while a model is quantized, counted in events rather than in seconds."""

import torch
from torch import fx, nn

import fxq
from fxq.runtime import binding
from fxq.tracing.tracer import Tracer


def test_code_is_generated_only_for_graphs_that_are_called(monkeypatch):
    """Every pass, and the q/dq form of every kernel, generated the code of its graph."""
    generated, generate = [], fx.Graph.python_code

    def counting(graph, *args, **kwargs):
        generated.append(graph)
        return generate(graph, *args, **kwargs)

    monkeypatch.setattr(fx.Graph, "python_code", counting)

    def count(depth):
        generated.clear()
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth))).eval()
        fxq.quantize(model, "weight_only", example_inputs=torch.randn(2, 16))
        return len(generated)

    few = count(2)
    assert few <= 20
    assert count(8) <= few + 1  # not one for each layer


class Branching(nn.Module):
    """Branches on a size before many layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        if x.shape[0] > 100:
            x = x * 2
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_trial_of_a_branch_ends_where_its_graph_differs(monkeypatch):
    traced = []

    class Counted(Tracer):
        def trace_model(self, model):
            try:
                return super().trace_model(model)
            finally:
                traced.append(len(self.calls))

    monkeypatch.setattr("fxq.passes.trace.Tracer", Counted)
    model = Branching().eval()
    qmodel = fxq.quantize(model, fxq.Recipe.weight_only(backend="reference"), example_inputs=torch.randn(2, 8))
    assert len(traced) == 2 and min(traced) < max(traced) - 5
    try:
        qmodel(torch.randn(101, 8))
    except fxq.FxqError:
        pass  # the branch is checked, since it matters
    else:
        raise AssertionError("a call for which the branch goes the other way must be refused")


def test_inputs_are_checked_once_for_each_combination_of_types(monkeypatch):
    """A decoder's past is longer at every token, so no two of its calls have inputs of one shape."""
    checks, check = [], binding.check_call
    monkeypatch.setattr(binding, "check_call", lambda *call: (checks.append(1), check(*call)))
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    qmodel = fxq.quantize(model, fxq.Recipe.weight_only(backend="reference"), example_inputs=torch.randn(2, 8))
    checks.clear()
    for rows in range(1, 6):
        qmodel(torch.randn(rows, 8))
    assert len(checks) <= 1
