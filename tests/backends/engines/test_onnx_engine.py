"""Behaviour that all engines that run ONNX share: every test runs with each of them."""

import copy

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.by_name import backend_type
from fxq.backends.engine import EngineBackend
from fxq.common.metrics import sqnr
from tests.support.engine_models import kernels, recipe
from tests.support.machine import quiet

pytestmark = pytest.mark.any_cpu


@pytest.fixture(params=["openvino", "onnxruntime"])
def name(request):
    return request.param


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """Integers cost nothing, so that no test depends on how fast the machine is."""
    monkeypatch.setattr(EngineBackend, "prices", lambda self, gm, example: fxq.extend.Prices({}, 0.0))


@pytest.fixture
def net(name):
    """A model of one region, and its input."""
    x = torch.randn(2, 3, 16, 16)
    with quiet():
        return fxq.quantize(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval(), recipe(name), data=[x]
        ), x


@pytest.mark.one_in(2)
def test_inputs_that_are_not_in_memory_are_refused(net):
    q, x = net
    for odd in (x.to("meta"), x.to_sparse()):
        with pytest.raises(fxq.InputError, match=r"is on the meta device|(give|pass) a dense one"):
            q(odd)


@pytest.mark.one_in(2)
def test_a_view_of_the_negative(net):
    q, x = net
    assert torch.equal(q(torch._neg_view(x)), q(-x))


@pytest.mark.one_in(2)
def test_a_size_that_the_engine_refuses(name, monkeypatch):
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval(), torch.randn(2, 3, 16, 16)
    with quiet():
        q = fxq.quantize(model, recipe(name), data=[x])

    def fails(model, threads, **options):
        raise RuntimeError("too large")

    monkeypatch.setattr(backend_type(name).kernel, "compiled", fails)
    x = torch.randn(5, 3, 16, 16)
    with pytest.warns(fxq.FxqWarning, match="too large\\. Inputs of this size run in qdq form"):
        got = q(x)
    assert sqnr(model(x), got) > 20


@pytest.mark.one_in(2)
def test_values_that_the_engine_refuses(name, monkeypatch):
    """Engines whose request fails when it runs, or when it is bound to memory."""
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    with quiet():
        q = fxq.quantize(model, recipe(name), data=[x])

    def fails(self, *args):
        raise RuntimeError("index out of bounds")

    request = type(kernels(q)[0]._runner([x]).requests())
    monkeypatch.setattr(request, "run", fails)
    with pytest.raises(fxq.InputError, match="RuntimeError: index out of bounds"):
        copy.deepcopy(q)(x)
    monkeypatch.setattr(request, "set_output", fails)
    with pytest.warns(fxq.FxqWarning, match="index out of bounds.*run in qdq form"):
        assert q(torch.randn(3, 8)).shape == (3, 8)


@pytest.mark.one_in(2)
def test_a_wrong_engine_is_caught(name, monkeypatch):
    kind = backend_type(name).kernel
    right = kind.compiled

    def wrong(model, threads, **options):
        requests = right(model, threads, **options)

        def made():
            request = requests()
            outputs, set_output, run = {}, request.set_output, request.run
            request.set_output = lambda i, y: set_output(i, outputs.setdefault(i, y))
            request.run = lambda: (run(), [y.add_(1) for y in outputs.values()])
            return request

        return made

    monkeypatch.setattr(kind, "compiled", wrong)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval(), torch.randn(2, 3, 8, 8)
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong on this machine"):
        q = fxq.quantize(model, recipe(name), data=[x])
    assert not kernels(q) and sqnr(model(x), q(x)) > 20


def test_an_engine_that_refuses_everything(name, monkeypatch):
    def fails(model, threads, **options):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(backend_type(name).kernel, "compiled", fails)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval(), torch.randn(2, 3, 8, 8)
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers.*the engine refuses it: no such instruction"):
        q = fxq.quantize(model, recipe(name), data=[x])
    assert not kernels(q) and sqnr(model(x), q(x)) > 100


@pytest.mark.one_in(2)
def test_an_engine_that_refuses_one_op(name, monkeypatch):
    """The others still run in it."""
    kind = backend_type(name).kernel
    right = kind.compiled

    def picky(model, threads, **options):
        if any(node.op_type == "MaxPool" for node in model.graph.node):
            raise RuntimeError("no pools")
        return right(model, threads, **options)

    monkeypatch.setattr(kind, "compiled", picky)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3)).eval()
    x = torch.randn(2, 3, 12, 12)
    q = fxq.quantize(model, recipe(name), data=[x])
    assert len(kernels(q)) == 2 and sqnr(model(x), q(x)) > 20
    (entry,) = q.ledger.where(op="max_pool2d")
    assert entry.precision == "float" and "the engine refuses it: no pools" in entry.reason


class Rows(nn.Module):
    """Rows of a table by ids as they are given, or computed of these; and places on an axis."""

    def __init__(self, computed):
        super().__init__()
        self.table, self.out, self.computed = nn.Embedding(10, 8), nn.Linear(8, 4), computed

    def forward(self, ids, places):
        read = self.table(ids * self.computed if self.computed else ids.flatten(0, 1))
        return self.out(read).index_select(-1, places)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("computed", [0, 1])
def test_an_index_that_is_out_of_range_is_an_error(name, computed):
    model, ids, places = Rows(computed).eval(), torch.randint(10, (2, 5)), torch.tensor([1, 3])
    with quiet():
        q = fxq.quantize(model, recipe(name), data=[((ids, places))])
    assert kernels(q) and sqnr(model(ids, places), q(ids, places)) > 25
    wrong = [(torch.full((2, 5), i), places) for i in (10, -1, 2**32)] + [(ids, torch.tensor([0, i])) for i in (4, -1)]
    for wrong_input in wrong:
        with pytest.raises((fxq.InputError, IndexError), match="out of range"):
            q(*wrong_input)


@pytest.mark.one_in(2)
def test_a_table_that_is_read_by_position(name):
    """PyTorch computes the positions, the region takes the table: it never becomes floats as a whole."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(6, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.out(self.table(torch.arange(x.shape[1])) + x)

    model, x = Positions().eval(), torch.randn(2, 5, 8)
    with quiet():
        q = fxq.quantize(model, recipe(name), data=[x])
        into = {entry.name: entry.into for entry in q.ledger}
        assert into["table"] == into["out"] != ""
        assert sqnr(model(x), q(x)) > 25
        with pytest.raises((fxq.InputError, IndexError), match="out of range"):
            q(torch.randn(2, 7, 8))


@pytest.mark.one_in(2)
def test_an_index_that_is_cut_off_may_be_out_of_range(name):
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(10, 8), nn.Linear(8, 4)

        def forward(self, ids):
            return self.out(self.table(ids[:, 1:]))

    model, ids = Cut().eval(), torch.randint(10, (2, 5))
    with quiet():
        q = fxq.quantize(model, recipe(name), data=[ids])
    ids[:, 0] = -100
    assert sqnr(model(ids), q(ids)) > 25
