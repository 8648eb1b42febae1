"""Sizes in engines: sizes that a network computes with, and images of changing size."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends.by_name import backend_type
from fxq.backends.engine import EngineBackend
from fxq.backends.engines.request import Request
from fxq.common.metrics import sqnr
from tests.support.engine_models import kernels, recipe
from tests.support.graphs import equal
from tests.support.machine import quiet

pytestmark = pytest.mark.any_cpu


@pytest.fixture(params=("openvino", "onnxruntime"))
def name(request):
    return request.param


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """Set the price of integers to 0, so that no test depends on the speed of the machine."""
    monkeypatch.setattr(EngineBackend, "prices", lambda self, gm, example: fxq.extend.Prices({}, 0.0))


class Heads(nn.Module):
    """Attention as it is often written, with sizes read from tensors; a leaf after it reads one, too."""

    def __init__(self, leaf=False):
        super().__init__()
        self.qkv, self.out, self.leaf = nn.Linear(16, 48), nn.Linear(16, 16), leaf

    def forward(self, x):
        batch, steps, width = x.shape
        q, k, v = self.qkv(x).view(batch, steps, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = torch.softmax(q @ k.transpose(-2, -1) * (width // 4) ** -0.5, -1) @ v
        y = y.transpose(1, 2).reshape(batch, y.size(2), -1)
        y = self.out(y)
        return (y, torch.asinh(y).reshape(y.size(0), -1)) if self.leaf else y


@pytest.mark.one_in(4)
@pytest.mark.parametrize("leaf", [False, True])
def test_sizes_that_are_read_off_values_are_inside(name, leaf):
    torch.manual_seed(0)
    model, x, *others = Heads(leaf).eval(), torch.randn(2, 6, 16), torch.randn(3, 5, 16), torch.randn(1, 9, 16)
    with quiet():
        q = fxq.quantize(model, recipe(name), data=[x, *others])
    assert len(kernels(q)) == 1
    for inputs in (x, *others):
        want, got = (list(torch.utils._pytree.tree_leaves(m(inputs))) for m in (model, q))
        assert sqnr(want, got) > 25 and [y.shape for y in want] == [y.shape for y in got]
    assert equal(copy.deepcopy(q)(x), q(x))
    assert equal(pickle.loads(pickle.dumps(q))(x), q(x))


class Ones(Request):
    """Leaf that returns ones."""

    def set_input(self, i, x):
        pass

    def set_output(self, i, y):
        y.fill_(1)

    def run(self):
        pass


@pytest.mark.one_in(2)
def test_a_region_with_sizes_that_is_wrong_is_put_back(name, monkeypatch):
    monkeypatch.setattr(backend_type(name).kernel, "compiled", lambda model, threads, **options: Ones)
    torch.manual_seed(0)
    model, x = Heads().eval(), torch.randn(2, 6, 16)
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong on this machine"):
        q = fxq.quantize(model, recipe(name), data=[x])
    assert not kernels(q) and sqnr(model(x), q(x)) > 25
    assert q(torch.randn(3, 5, 16)).shape == (3, 5, 16)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("options", [{"size": (5, 9)}, {"scale_factor": 1.5}], ids=["size", "factor"])
def test_images_channels_last_that_change_their_size(name, mode, options):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x):
            return self.conv(F.interpolate(x, mode=mode, **options))

    model, x = Scaled().eval(), torch.randn(2, 3, 12, 12)
    q = fxq.quantize(model, recipe(name), data=[x])
    assert len(kernels(q)) == 1
    assert torch.allclose(q(x), q(x.contiguous(memory_format=torch.channels_last)), rtol=0, atol=1e-6)
    assert sqnr(model(x), q(x)) > 25
