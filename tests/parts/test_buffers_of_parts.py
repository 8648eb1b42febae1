"""Buffers of a model in parts that its calls change: its file has them, and the float model need not."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import FileError, FxqWarning

pytestmark = pytest.mark.any_cpu

RECIPE = fxq.Recipe.dynamic(backend="reference", optimize="coverage")


class Averaging(nn.Module):
    """Model that subtracts the moving mean of its features, counts its calls, and keeps the last input."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("same_mean", self.mean)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", None)
        self.register_buffer("gain", torch.ones(8))

    def forward(self, x):
        h = self.features(x)
        self.mean.mul_(0.5).add_(h.mean(0), alpha=0.5)
        self.calls += 1
        self.last = x
        return h * self.gain - self.same_mean if float(h.abs().max()) < 1e6 else h


@pytest.fixture
def quantized():
    model = Averaging().eval()
    with pytest.warns(FxqWarning, match="is quantized in"):
        return model, fxq.quantize(model, RECIPE, example_inputs=torch.randn(4, 16))


def test_the_file_has_buffers_that_calls_changed(quantized, tmp_path):
    model, q = quantized
    for rows in (4, 3):
        q(torch.randn(rows, 16))
    loaded = fxq.load(q.save(tmp_path / "q.fxq"), into=model)
    assert int(model.calls) == 0 and int(loaded.calls) == 2 and loaded.last.shape == (3, 16)
    assert loaded.mean is loaded.same_mean and torch.equal(loaded.mean, q.mean) and q.mean.abs().sum() > 0
    x = torch.randn(2, 16)
    want = q(x)
    assert torch.equal(loaded(x), want)
    again = fxq.load(pickle.loads(pickle.dumps(copy.deepcopy(loaded))).save(tmp_path / "again.fxq"), into=model)
    assert torch.equal(again(x), q(x)) and int(again.calls) == 4


def test_other_buffers_are_those_of_the_float_model(quantized, tmp_path):
    model, q = quantized
    path = q.save(tmp_path / "q.fxq")
    q(torch.randn(4, 16))
    assert int(fxq.load(path, into=model).calls) == 0
    doubled = copy.deepcopy(model)
    doubled.gain.fill_(2)
    with pytest.raises(FileError, match="for instance 'gain'"):
        fxq.load(path, into=doubled)
    q.gain.fill_(2)
    assert torch.equal(fxq.load(q.save(tmp_path / "changed.fxq"), into=model).gain, doubled.gain)


class Emptying(nn.Module):
    """Model whose Python code reads and changes a buffer of a part, and empties another."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
        self.register_buffer("first", torch.ones(8))

    def forward(self, x):
        h = self.inner(x)
        if self.first is not None and float(h.sum()) < 1e9:
            h, self.first = h + self.first, None
        self.inner[1].running_mean.add_(1)
        return h + self.inner[1].running_mean


def test_emptied_buffers_and_those_of_parts(tmp_path):
    model, x = Emptying().eval(), torch.randn(4, 16)
    with pytest.warns(FxqWarning, match="is quantized in"):
        q = fxq.quantize(model, RECIPE, example_inputs=x)
    q(x)
    loaded = fxq.load(q.save(tmp_path / "q.fxq"), into=model)
    assert q.first is None and loaded.first is None and model.first is not None
    assert torch.equal(loaded.inner[1].running_mean, q.inner[1].running_mean)
    assert torch.equal(loaded(x), q(x))


def test_sparse_buffers():
    model, x = Averaging().eval(), torch.randn(4, 16)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.warns(FxqWarning, match="is quantized in"):
        q = fxq.quantize(model, RECIPE, example_inputs=x)
    assert q(x).shape == (4, 8) and q.sparse.is_sparse
