"""Modules that compute something else when they are traced, or when they run again."""

import pytest
import torch
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.graphs import graph
from tests.support.helpers import REFERENCE, module
from tests.support.machine import no_warnings
from tests.support.traced import Counts, Keeps, X, close, conv

pytestmark = no_warnings


def test_what_a_forward_leaves_on_the_model_is_taken_off():
    model = nn.Sequential(Keeps(), conv())
    fxq.prepare(model.eval(), REFERENCE, example_inputs=X)
    assert (model[0].last, model[0].all, model[0].calls) == (None, [], 0)


class Remembers(Keeps):
    """Sets a buffer, a number and a list, and reads them again."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def forward(self, x):
        if self.state == "count":
            self.count = self.count + 1
            return x * self.count
        if self.state == "calls":
            self.calls += 1
            return x * self.calls
        self.all.append(x.amax())
        return x + torch.stack(self.all).sum()


@pytest.mark.parametrize(("state", "place"), [("count", "count"), ("calls", "calls"), ("all", r"all\[0\]")])
def test_a_module_that_remembers_is_no_graph(state, place):
    """A trace would repeat the first call for ever."""
    model = nn.Sequential(conv(), Remembers(state), conv()).eval()
    words = f"sets '{place}' and returns other values when it runs again"
    with pytest.warns(fxq.FxqWarning, match=rf'layer "1".*{words}'):
        qmodel = fxq.quantize(model, REFERENCE, data=[X, X])
    assert (float(model[1].count), model[1].calls, model[1].all) == (0, 0, [])
    for _ in range(2):
        assert sqnr(model(X), qmodel(X)) > 30
    with pytest.raises(fxq.TraceError, match=words):
        fxq.prepare(Remembers(state).eval(), REFERENCE, example_inputs=X)


class TracksMaximum(nn.Module):
    """Sets a buffer anew in each call."""

    def __init__(self, used):
        super().__init__()
        self.used = used
        self.register_buffer("most", torch.full((3, 1, 1), -9.0))

    def forward(self, x):
        self.most = torch.maximum(self.most, x.detach().amax(0)[:, :1, :1])
        return x + self.most if self.used else x


def test_a_buffer_that_is_set_anew():
    """The trace ended in an internal error, if the new buffer reached no output: it was a traced value by then."""
    model = nn.Sequential(conv(), TracksMaximum(used=False), conv()).eval()
    qmodel = fxq.quantize(model, REFERENCE, data=[X, X])
    assert sqnr(model(X), qmodel(X)) > 30
    assert "leaf" not in str(qmodel.ledger)
    model = nn.Sequential(conv(), TracksMaximum(used=True), conv()).eval()
    with pytest.warns(fxq.FxqWarning, match="sets 'most' and returns other values when it runs again"):
        qmodel = fxq.quantize(model, REFERENCE, data=[X, X + 1])
    for batch in (X, X + 1, X):
        assert sqnr(model(batch), qmodel(batch)) > 30


def test_a_leaf_that_counts_is_left_as_it_was():
    model = nn.Sequential(Counts(), conv()).eval()
    with pytest.warns(fxq.FxqWarning, match="changes the buffer"):
        qmodel = fxq.quantize(model, REFERENCE, data=[X, X])
    assert float(model[0].count) == 0 and float(qmodel.get_submodule("0").count) == 0


def test_a_cache_is_no_memory():
    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.grid, self.by_size = conv(), None, {}

        def forward(self, x):
            if self.grid is None:
                self.grid = torch.linspace(0, 1, 8)
            self.by_size.setdefault(x.shape[1], x)
            return self.a(x + self.grid)

    close(Caches(), X)


@pytest.mark.parametrize(
    "noise",
    [
        lambda x: torch.rand(1),
        lambda x: torch.randn(3, 1, 1),
        lambda x: torch.rand_like(torch.zeros(1)),
        lambda x: torch.randperm(3).float()[:, None, None],
        lambda x: torch.normal(0.0, 1.0, (1,)),
        lambda x: torch.empty(1).uniform_(-1, 1),
        lambda x: torch.zeros(3, 1, 1).normal_().mul(2),
        lambda x: filled(torch.empty(1)),
        lambda x: nn.init.normal_(torch.empty(1)),
    ],
    ids=["rand", "randn", "rand_like", "randperm", "normal", "uniform_", "normal_", "filled before", "init"],
)
def test_random_numbers_are_drawn_in_every_call(noise):
    model = module(lambda self, x: self.a(x + noise(x)), a=conv()).eval()
    traced = graph(model, X, "trace")
    with torch.no_grad():
        wanted, got = drawn(model), drawn(traced)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(wanted, got, strict=True))
    assert not torch.allclose(*got, atol=1e-2)


def filled(tensor):
    """The tensor itself, not what the method returns."""
    tensor.exponential_()
    return tensor


def drawn(model):
    """Outputs of two calls after one seed."""
    torch.manual_seed(1)
    return [model(X), model(X)]


@pytest.mark.parametrize("noise", [lambda: torch.empty(1).uniform_(1, 9), lambda: filled(torch.empty(1))])
def test_random_numbers_are_drawn_in_every_call_of_the_quantized_model(noise):
    """Random numbers of the example must not become a constant of a kernel."""
    model = module(lambda self, x: self.b(self.a(x) * noise()), a=conv(), b=nn.Conv2d(3, 4, 1)).eval()
    recipe = fxq.Recipe.static(optimize="coverage").with_min_sqnr(None)  # calibration sees other numbers
    qmodel = fxq.quantize(model, recipe, data=[X])
    with torch.no_grad():
        torch.manual_seed(1)
        assert not torch.allclose(qmodel(X), qmodel(X), atol=1e-2)
