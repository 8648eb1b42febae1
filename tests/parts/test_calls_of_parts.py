"""Calls of a part: a graph for each kind, calls in float, and modules with state, which are divided."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import FileError, FxqWarning, InputError

pytestmark = pytest.mark.any_cpu

COVERAGE = fxq.Recipe.static(optimize="coverage")
EXACT = fxq.Recipe.static(backend="reference", optimize="coverage")
DATA = [torch.randn(4, 16) for _ in range(3)]


class Ways(nn.Module):
    """Calls one module with and without an option, with other shapes, and by keyword."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x, scale=None, flip=False):
            x = self.layer(x)
            if scale is not None:
                x = x * scale
            return -x if flip else x

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        if x.sum() > 1e9:
            return x
        y = self.inner(x) + self.inner(x[:1], scale=x[:1]) + self.inner(x[:, None], flip=True)[:, 0]
        return y + self.inner(x[:2].mean(0, keepdim=True), x[:1])


def test_a_part_has_a_graph_for_each_kind_of_call(tmp_path):
    model = Ways().eval()
    with pytest.warns(FxqWarning, match="3 parts"):
        q = fxq.quantize(model, EXACT, data=DATA)
    assert list(q.parts) == ["inner", "inner (2)", "inner (3)"] and q.output_sqnr > 30
    x = torch.randn(7, 16)
    want, got = model(x), q(x)
    assert 20 * torch.log10(want.norm() / (want - got).norm()) > 25
    assert torch.equal(fxq.load(q.save(tmp_path / "q.fxq"), into=model)(x), got)
    with pytest.raises(InputError, match=r"none of the graphs inner, inner \(2\), inner \(3\) takes this call"):
        q.inner(x, x, True)
    assert fxq.compare(model, q, DATA).output_sqnr > 30


def storages(model):
    """Number of graphs that hold each of the larger tensors, by the address of its values."""
    graphs = model.parts.values()
    return Counter(p for graph in graphs for p in {t.data_ptr() for t in tensors_of(graph) if t.numel() >= 64})


def tensors_of(graph):
    return [*graph.parameters(), *graph.buffers()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", [EXACT, COVERAGE], ids=["exact", "kernels"])
def test_the_graphs_of_a_part_share_their_weights(recipe, tmp_path):
    model = Ways().eval()
    with pytest.warns(FxqWarning, match="3 parts"):
        q = fxq.quantize(model, recipe, data=DATA)
    for again in (q, copy.deepcopy(q), fxq.load(q.save(tmp_path / "q.fxq"), into=model)):
        assert storages(again) and set(storages(again).values()) == {3}


def test_a_kind_of_call_that_only_the_data_has_is_traced_then():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Ways.Inner()

        def forward(self, x):
            return self.inner(x, flip=True) if x.mean() > 1 else self.inner(x)

    model = Sometimes().eval()
    with pytest.warns(FxqWarning, match="2 parts"):
        q = fxq.quantize(model, EXACT, data=[DATA[0], DATA[1] + 5])
    want, got = model(DATA[2] + 5), q(DATA[2] + 5)
    assert 20 * torch.log10(want.norm() / (want - got).norm()) > 30


def test_a_module_that_changes_its_input_is_divided():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x, log):
            log.append(1)
            return self.layer(x)

    class Logged(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            log = []
            y = self.inner(x, log)
            return y * len(log) if y.sum() > -1e9 else y

    model = Logged().eval()
    with pytest.warns(FxqWarning, match="parts?: inner.layer"):
        q = fxq.quantize(model, EXACT, data=DATA)
    (row,) = q.ledger.where(op="python", path="inner")
    assert "it changes its input log in place" in row.reason or "it changes its input args" in row.reason
    assert q.output_sqnr > 30


class Branches(nn.Module):
    """Submodule of one that branches: its calls with an option branch on values, and cannot be traced."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x, branch=False):
        y = self.layer(x)
        return -y if branch and float(y.sum()) > -1e9 else y


class SometimesBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Branches()

    def forward(self, x):
        return self.inner(x, branch=True) if float(x.mean()) > 1 else self.inner(x)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("at", [1, 5])
def test_calls_that_cannot_be_traced_run_in_float(at, tmp_path):
    model, high = SometimesBranches().eval(), DATA[0] + 5
    data = [torch.randn(4, 16) for _ in range(6)]
    data[at] = high
    with pytest.warns(FxqWarning, match='1 part: inner.* Part "inner" also gets calls that run in float: .*depends on'):
        q = fxq.quantize(model, EXACT, data=data, example_inputs=data[0])
    assert q.output_sqnr > 30 and "depends on" in q.ledger.where(op="python", path="inner")[0].reason
    for again in (q, copy.deepcopy(q), pickle.loads(pickle.dumps(q)), fxq.load(q.save(tmp_path / "q.fxq"), into=model)):
        assert torch.equal(again(high), model(high)) and torch.equal(again(data[0]), q(data[0]))
    assert not torch.equal(q(data[0]), model(data[0]))  # these calls are on integers
    assert fxq.compare(model, q, [data[0], high]).output_sqnr > 30
    with torch.no_grad():
        model.inner.layer.weight.add_(1)
    with pytest.raises(FileError, match=r"for instance 'inner\.layer\.weight'"):
        fxq.load(tmp_path / "q.fxq", into=model)


def test_sensitivity_of_a_model_with_calls_in_float():
    ranked = fxq.sensitivity(SometimesBranches().eval(), EXACT, [DATA[0], DATA[0] + 5])
    assert [row.path for row in ranked] == ["inner.layer"] and ranked.output_sqnr > 30


class Stateful(nn.Module):
    """Module that keeps something at each call, as `kept` says."""

    def __init__(self, kept, log):
        super().__init__()
        self.layer, self.kept, self.log = nn.Linear(16, 16), kept, log
        self.last, self.calls, self.scale = None, 0, 1.0
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        y = self.layer(x) * self.scale
        if self.kept == "list":
            self.log.append(y)
        elif self.kept == "attribute":
            self.last = y
        elif self.kept == "count":
            self.calls += 1
        elif self.kept == "buffer":
            self.mean = y.mean(0)
        return y


class ReadsState(nn.Module):
    """Reads what its submodule keeps, or sets an attribute that the submodule reads."""

    def __init__(self, kept):
        super().__init__()
        log = []
        self.log, self.inner, self.kept = log, Stateful(kept, log), kept

    def forward(self, x):
        self.log.clear()
        if self.kept == "set outside":
            y = torch.zeros_like(x)
            for self.inner.scale in (1.0, 3.0, 1.0):  # as before at the end
                y = y + self.inner(x)
        else:
            y = self.inner(x)
        if float(y.sum()) > 1e9:
            return y
        kept = {"list": self.log, "attribute": [self.inner.last], "buffer": [self.inner.mean]}.get(self.kept, ())
        return (y + sum(kept)) * (self.inner.calls or 1)


CALLS = [0]


class CountsOutside(Ways):
    """Counts its calls in a variable of the Python module."""

    def forward(self, x):
        CALLS[0] += 1
        return super().forward(x)


def test_variables_of_the_code_around_parts_are_restored():
    model = CountsOutside().eval()
    CALLS[0] = 0
    with pytest.warns(FxqWarning, match="3 parts"):
        q = fxq.quantize(model, EXACT, data=DATA)
    assert CALLS == [0]
    fxq.compare(model, q, DATA[:1])
    assert CALLS == [0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kept", ["list", "attribute", "count", "buffer", "set outside"])
def test_a_module_with_state_is_divided(kept):
    model = ReadsState(kept).eval()
    with pytest.warns(FxqWarning, match="1 part: inner.layer"):
        q = fxq.quantize(model, EXACT.override("*", fxq.FLOAT), data=DATA)
    (row,) = q.ledger.where(op="python", path="inner")
    assert "its attribute" in row.reason
    for x in DATA:  # the count goes on from call to call
        assert torch.allclose(q(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_hook_that_sets_equal_weights_is_no_state():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 16)), nn.ReLU()).eval()
    model(DATA[0])
    with pytest.warns(FxqWarning, match="1 part: 0"):
        q = fxq.quantize(model, EXACT.parts("0"), data=DATA)
    assert q.output_sqnr > 30
