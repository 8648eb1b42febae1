"""backend="jit" on odd networks and in odd surroundings; each was wrong once."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxq
from fxq.backends.engine import EngineBackend
from fxq.backends.loops import jit_engine
from fxq.backends.loops.programs.plan import planned
from fxq.backends.loops.programs.planned_values import NotPlannedError
from fxq.backends.loops.programs.region_program import RegionProgram
from fxq.common.metrics import sqnr
from tests.backends.loops.test_jit_engine import convs, form, image, kernels, quantized

pytest.importorskip("numba")
pytestmark = [pytest.mark.any_cpu, pytest.mark.filterwarnings("ignore::fxq.FxqWarning")]
_PRICES = EngineBackend.prices


@pytest.fixture(autouse=True)
def free(monkeypatch):
    monkeypatch.setattr(EngineBackend, "prices", lambda self, gm, example: fxq.extend.Prices({}, 0.0))


class Flattened(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Conv2d(3, 16, 3), nn.Conv2d(3, 16, 3), nn.Linear(2048, 5)

    def forward(self, x):
        return self.out(torch.cat([F.relu(self.a(x)).flatten(1), F.relu(self.b(x)).flatten(1)], 1))


def test_flattened_values_that_are_joined():
    """Calibrated with one sample, where it is right, and run with three."""
    q = quantized(Flattened(), image(1))
    x = image(3)
    assert sqnr(form(kernels(q)[0])(x), q(x)) > 40


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("channels", "kernel"), [(20, 2), (7, 4), (5, 2), (4, 2), (24, 2)])
def test_transposed_layers_of_other_channels(channels, kernel):
    x = image()
    q = quantized(
        nn.Sequential(nn.ConvTranspose2d(3, channels, kernel, kernel), nn.ReLU(), nn.Conv2d(channels, 4, 1)), x
    )
    assert len(kernels(q)) == 1 and sqnr(form(kernels(q)[0])(x), q(x)) > 40


def test_a_layer_in_float_before_one_on_integers():
    model, x = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 5)).eval(), torch.randn(4, 8)
    recipe = fxq.Recipe.static(backend="jit", optimize="coverage").with_min_sqnr(None).override("0", fxq.FLOAT)
    q = fxq.quantize(model, recipe, data=[x], progress=False)
    assert q.ledger.where(op="linear")[1].precision == "int8"
    assert sqnr(model(x), q(x)) > 30


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layer", [nn.LeakyReLU(0.1), nn.LayerNorm(20, elementwise_affine=False)])
def test_another_default_dtype(layer):
    x = torch.randn(5, 8)
    q = quantized(nn.Sequential(nn.Linear(8, 20), layer, nn.Linear(20, 4)), x)
    want, copied = q(x), copy.deepcopy(q)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(copied(x), want)
    finally:
        torch.set_default_dtype(torch.float32)


def test_another_default_device():
    x = image()
    q = quantized(convs(nn.ReLU())(), x)
    want, copied = q(x), copy.deepcopy(q)
    with torch.device("meta"):
        assert torch.equal(copied(x), want)


class Wider(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.by = nn.Conv2d(3, 1, 3), nn.Conv2d(4, 4, 1), nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x):
        return self.b(self.a(x) + self.by)


def test_a_constant_of_more_channels():
    x = image()
    model = Wider()
    q = quantized(model, x)
    assert sqnr(model(x), q(x)) > 20


def test_flattened_at_the_end():
    x = image()
    q = quantized(nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten()), x)
    assert len(kernels(q)) == 1 and q.ledger.coverage == 1.0


class Beside(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.out = function, nn.Linear(16, 4)

    def forward(self, x):
        return self.function(x), self.out(x)


@pytest.mark.parametrize("function", [F.gelu, F.silu])
def test_functions_far_out(function):
    q = quantized(Beside(function), torch.randn(8, 16))
    x = torch.full((8, 16), -1e30)
    assert torch.equal(q(x)[0].abs(), torch.zeros(8, 16))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("function", [F.relu, F.relu6, torch.sigmoid, torch.tanh, F.hardsigmoid])
def test_functions_of_what_is_no_number(function):
    q = quantized(Beside(function), torch.randn(8, 16))
    assert q(torch.full((8, 16), torch.nan))[0].isnan().all()


def test_images_beyond_int32():
    q = quantized(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)), image())
    with pytest.raises(NotPlannedError, match=r"2\*\*31 elements or more"):
        planned(form(kernels(q)[0]), [torch.empty(1, device="meta").expand(1, 3, 12000, 12000)])


def test_prices_are_found(monkeypatch, caplog):
    monkeypatch.setattr(EngineBackend, "prices", _PRICES)
    caplog.set_level("DEBUG", logger="fxq")
    fxq.quantize(convs(nn.ReLU())().eval(), fxq.Recipe.static(backend="jit"), data=[image()], progress=False)
    assert "does not profile" not in caplog.text


@pytest.mark.slow
def test_programs_that_are_dropped_are_freed():
    """Without the collector: it counts objects, not the memory of programs."""
    q = quantized(convs(nn.ReLU())(), image())
    gc.collect()
    gc.disable()
    try:
        for n in range(1, 40):
            q(image(n))
        assert sum(type(o) is RegionProgram for o in gc.get_objects()) < 20
    finally:
        gc.enable()


class Unread(nn.Module):
    """Heads that no op reads, and whose number is computed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        y = self.first(x)
        n, length, channels = y.shape
        y.view(n, length, 4, channels // 4).transpose(1, 2)
        return self.second(y)


def test_unread_sizes():
    x = torch.randn(2, 9, 32)
    q = quantized(Unread().eval(), x)
    assert len(kernels(q)) == 1 and "floordiv" not in str(q.graph)


class Strided(nn.Module):
    """Attention that is read as it lies in memory in PyTorch: place by place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        q = self.layer(x).view(2, 9, 4, 8).transpose(1, 2)
        return torch.as_strided(F.scaled_dot_product_attention(q, q, q), (2, 9, 32), (288, 32, 1))


def test_heads_lie_as_in_pytorch():
    model, x = Strided().eval(), torch.randn(2, 9, 32)
    assert sqnr(model(x), quantized(model, x)(x)) > 30


class Sorted(nn.Module):
    """Layers with a sum each, between ops that no loop computes."""

    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(blocks)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.sort(layer(x) + x).values
        return x


def test_regions_with_a_node_that_is_refused_beside_others_are_planned_twice_at_most(monkeypatch):
    """Once with the node, and once without: the time is linear in their number."""
    blocks, calls = 8, []

    def refusal(gm, region):
        calls.append(region)
        sums = [node for node in region.nodes if node.name.startswith("add")]
        if not sums or not any(node.name.startswith("layers") for node in region.nodes):
            return None
        error = NotPlannedError("no step computes a sum beside a layer")
        error.node = sums[0].name
        return error

    q = quantized(Sorted(blocks).eval(), torch.randn(64, 8), backend="reference")
    monkeypatch.setattr(jit_engine, "_region_refusal", refusal)
    regions = list(jit_engine.Jit().regions(q))
    assert len(regions) == blocks and not any(node.name.startswith("add") for r in regions for node in r.nodes)
    assert len(calls) <= 3 * blocks


def test_kernels_are_bound_to_their_programs():
    """A kernel is bound to its program, instead of looking it up in each call."""
    x = image()
    (kernel,) = kernels(quantized(Flattened(), x))
    assert isinstance(kernel.callable_for(x), RegionProgram)
    assert torch.equal(kernel.callable_for(x)(x), kernel(x))
    with FakeTensorMode() as mode:  # has no memory
        assert kernel.callable_for(mode.from_tensor(x)) == kernel.forward
