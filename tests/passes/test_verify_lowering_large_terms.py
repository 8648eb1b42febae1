"""verify-lowering where a kernel adds up terms that are far larger than the result: no right kernel is accused."""

import warnings

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.packed import quantized_tensors as packed
from fxq.backends.x86.onednn_conv import OnednnConv
from tests.support.graphs import kinds
from tests.support.kernels import planted
from tests.support.machine import X86, needs_x86, quiet


class Wide(nn.Module):
    """Layers whose terms are large beside the results of the batch that kernels are verified on."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(64, 64, 3), nn.Conv2d(64, 8, 1)

    def forward(self, x):
        return self.b(self.a(x))


class Difference(nn.Module):
    """A difference of large values that are nearly the same."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(64, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = self.a(x)
        return self.b((y + 1e6) - (y * 1.001 + 1e6))


class Cancels(nn.Module):
    """Weights that add up to zero, of an input that is nearly constant."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(64, 8, 3)
        with torch.no_grad():
            self.a.weight -= self.a.weight.mean((1, 2, 3), keepdim=True)

    def forward(self, x):
        return self.a(x)


CANCELLING_TERMS = [
    (Wide, [(0.0, 1.0), (0.0, 1e4)]),
    (Wide, [(0.0, 1.0), (0.0, 1e6)]),
    (Difference, [(0.0, 1.0)]),
    (Cancels, [(1e6, 1e-3)]),
]
MINMAX = fxq.TensorSpec(observer="minmax")
BACKENDS = ["x86", *(name for name in ("fbgemm",) if packed.has_engine(name))]


@pytest.mark.one_in(8)
@needs_x86
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("model", "batches"), CANCELLING_TERMS)
def test_what_is_left_of_large_terms_is_as_inexact_as_they_are(model, batches, backend):
    """No right kernel is accused where the grid is far wider than the values, or where its terms cancel."""
    torch.manual_seed(0)
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage", activation=MINMAX)
    recipe = recipe.without_pass("keep-small-values").without_pass("split-inputs")  # on integers all the same
    data = [torch.randn(4, 64, 8, 8) * scale + mean for mean, scale in batches]
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxq.FxqWarning)
        warnings.filterwarnings("ignore", message="this CPU has no VNNI")
        quantized = fxq.quantize(model().eval(), recipe.with_min_sqnr(None), data=data)
    assert not quantized.history["verify-lowering"].edits


@pytest.mark.one_in(3)
@needs_x86
@pytest.mark.parametrize("batches", [batches for model, batches in CANCELLING_TERMS if model is Wide])
@pytest.mark.parametrize("change", [lambda y: y * 1.02, lambda y: y + y.abs().max() * 0.01, lambda y: y.roll(1, 1)])
def test_a_wrong_kernel_is_found_there_all_the_same(monkeypatch, change, batches):
    """By two in a hundred of the largest result that a batch of the grid's own size gives."""
    data = [torch.randn(4, 64, 8, 8) * scale + mean for mean, scale in reversed(batches)]
    recipe = fxq.Recipe.static(backend="x86", optimize="coverage", activation=MINMAX)
    recipe = recipe.without_pass("keep-small-values").without_pass("split-inputs")
    planted(monkeypatch, OnednnConv, lambda y: change(y) if y.dtype == torch.float32 else y)
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong on this machine"):
        quantized = fxq.quantize(Wide().eval(), recipe, data=data)
    assert [entry.precision for entry in quantized.ledger] == ["int8", "float"]


@needs_x86
def test_a_convolution_of_nothing_but_padding_is_not_accused():
    """Its taps step over the one element that there is: zero, but for the rounding of the zero point's products."""
    torch.manual_seed(0)
    model = nn.Conv1d(6, 6, 2, padding=1, dilation=2, groups=6, bias=False).eval()
    data = [(torch.rand(64, 6, 1) * 300 - 80,)]
    recipe = fxq.Recipe.static(backend="x86", optimize="coverage").with_min_sqnr(None)
    quantized = fxq.quantize(nn.Sequential(model).eval(), recipe, data=data)
    assert [entry.precision for entry in quantized.ledger] == ["int8"]
    assert float(quantized(*data[0]).abs().max()) < 1e-4


@needs_x86
def test_a_kernel_may_leave_a_little_where_the_result_is_zero():
    """The input is all zeros on a grid whose zero is 255: the products and their correction cancel in float32."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 1, 1), nn.AvgPool2d(2), nn.ReLU6(), nn.ConvTranspose2d(1, 6, 2, bias=False)
    network = nn.Sequential(*layers).eval()
    with torch.no_grad():
        network[0].weight.fill_(1.0)
        network[0].bias.fill_(-2.0)
    with quiet():
        quantized = fxq.quantize(network, X86.with_min_sqnr(None), data=[torch.rand(2, 1, 4, 4)])
    assert "x86.conv_transpose2d" in kinds(quantized)
    assert not quantized.history["verify-lowering"].edits
