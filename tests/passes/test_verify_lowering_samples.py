"""verify-lowering on a single sample, as well as on a batch."""

import warnings

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.plain.weight_only import WeightOnlyLinear
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.passes import verify_lowering
from fxq.passes.verify_lowering import _Verifier
from tests.support.graphs import kinds
from tests.support.kernels import planted
from tests.support.machine import X86, needs_x86, quiet
from tests.support.models import batch, build


def test_one_sample_that_the_lowered_graph_cannot_run(monkeypatch):
    """Said where the float model runs on it, and only there."""
    run = _Verifier.run

    def of_several(self):
        if any(len(value) == 1 for value in self.values.values()):  # the inputs
            raise RuntimeError("only several")
        return run(self)

    monkeypatch.setattr(_Verifier, "run", of_several)
    model, x = build("residual"), batch("residual")
    with pytest.warns(fxq.FxqWarning, match="does not run on .*as the float model does: RuntimeError: only several"):
        fxq.quantize(model, X86, data=[x])


class Several(nn.Module):
    """Cannot run on one sample."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x).view(2, -1, 4)


class Causal(nn.Module):
    """Attends to the steps before, of (L, E); without its mask it runs on a single step, too."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(16, 2), nn.Linear(16, 16)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6))

    def forward(self, x):
        return self.head(self.attention(x, x, x, attn_mask=self.mask, is_causal=True, need_weights=False)[0])


@pytest.mark.parametrize("whole_batches", [Several, Causal])
def test_what_has_no_samples_is_not_cut(whole_batches):
    x = torch.randn(4, 4) if whole_batches is Several else torch.randn(6, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxq.FxqWarning)
        warnings.filterwarnings("ignore", message="this CPU has no VNNI")
        warnings.filterwarnings("ignore", message=".* is estimated to take")
        quantized = fxq.quantize(whole_batches().eval(), X86.with_optimize("coverage"), data=[x])
    assert quantized.output_sqnr > 25


@needs_x86
def test_a_kernel_that_is_wrong_for_one_sample_only(monkeypatch):
    """Kernels plan by input shape."""
    planted(monkeypatch, OnednnConv, lambda y: y if len(y) > 1 else y + 2)
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong"):
        quantized = fxq.quantize(build("residual"), X86, data=[batch("residual")])
    assert "x86.conv" not in kinds(quantized)


class Sizes(nn.Module):
    """Layers that images of any size pass through, with a residual, and a signal's."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.up, self.c = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv1d(4, 4, 3)

    def forward(self, x):
        y = self.a(x)
        return self.c(self.up(torch.relu(self.b(y) + y)).flatten(2))


@pytest.mark.one_in(2)
@needs_x86
@pytest.mark.parametrize("shape", [(4, 3, 8, 8), (1, 3, 9, 5)], ids=str)
def test_kernels_that_are_right_at_other_sizes_stay(shape):
    sizes = []
    forward = OnednnConv.forward
    with pytest.MonkeyPatch.context() as patch, quiet():
        patch.setattr(OnednnConv, "forward", lambda self, x, *r: sizes.append(x.shape[-1]) or forward(self, x, *r))
        quantized = fxq.quantize(Sizes().eval(), X86.with_optimize("coverage"), data=[torch.randn(shape)])
    assert {3, 29} <= set(sizes) and 57 in sizes  # as wide as results, and with stride 2
    assert kinds(quantized).count("x86.conv") == 3


@pytest.mark.one_in(3)
@needs_x86
@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (lambda y: y.shape[-1] > 14, r"on inputs cut or repeated to \(1, 3, 3, 57\): off by"),
        (lambda y: y.shape[-1] < 4, r"on inputs cut or repeated to \(1, 3, 3, 5\): off by"),
        (lambda y: y.shape[-1] == 6, "off by up to"),
    ],
)
def test_a_kernel_that_is_wrong_for_images_of_another_size(monkeypatch, wrong, where):
    """Sizes of their own choice are tried on kernels alone, and those of the calibration data on the network."""
    planted(monkeypatch, OnednnConv, lambda y: y + 2 if wrong(y) else y)
    data = [torch.randn(2, 3, 8, 8), torch.randn(2, 3, 12, 12)]
    with pytest.warns(fxq.FxqWarning, match=f"a.*kernel is wrong on this machine: {where}"):
        quantized = fxq.quantize(Sizes().eval(), X86.with_optimize("coverage"), data=data)
    assert kinds(quantized).count("x86.conv") < 3


class Alike(nn.Module):
    """Layers that differ only in their weights, but for the last one."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(16, size) for size in (16, 16, 16, 8))

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x).relu()).relu()).relu())


def quantized_alike(model, samples=3):
    recipe = fxq.Recipe.weight_only()
    return fxq.quantize(model, recipe, example_inputs=torch.randn(samples, 16))


def test_kernels_that_are_alike_are_all_compared_on_the_batch(monkeypatch):
    model = Alike().eval()
    planted(monkeypatch, WeightOnlyLinear, lambda y: y + (y.abs().sum() > 0))
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong") as told:
        quantized = quantized_alike(model)
    assert "weight_only.linear" not in kinds(quantized)
    assert sum("kernel is wrong" in str(warning.message) for warning in told) == 4


def test_one_wrong_kernel_of_those_that_are_alike(monkeypatch):
    """Its weight makes the difference, so that no other layer stands for it."""
    model, forward = Alike().eval(), WeightOnlyLinear.forward
    with torch.no_grad():
        model.c.weight.mul_(100)

    def wrong(self, x):
        return forward(self, x) * (1.5 if self._buffers["weight_scale"].max() > 0.1 else 1)

    monkeypatch.setattr(WeightOnlyLinear, "forward", wrong)
    monkeypatch.setattr(WeightOnlyLinear, "bind", lambda self, x: self.forward)
    with pytest.warns(fxq.FxqWarning, match='layer "c".*kernel is wrong'):
        quantized = quantized_alike(model)
    assert kinds(quantized).count("weight_only.linear") == 3


def test_at_other_sizes_one_of_those_that_are_alike_is_compared(monkeypatch):
    rows, compared = [], []
    forward, compare = WeightOnlyLinear.forward, verify_lowering.difference
    monkeypatch.setattr(WeightOnlyLinear, "forward", lambda self, x: rows.append(len(x)) or forward(self, x))
    monkeypatch.setattr(verify_lowering, "difference", lambda *a: compared.append(len(a[4])) or compare(*a))
    quantized = quantized_alike(Alike().eval())
    assert kinds(quantized).count("weight_only.linear") == 4
    assert [compared.count(n) for n in (3, 1)] == [4, 2]  # on the batch all; on one sample, and with many rows, two
    assert len(compared) == 8 and rows.count(1) >= 4


def test_kernels_that_are_wrong_for_one_sample_and_alike(monkeypatch):
    planted(monkeypatch, WeightOnlyLinear, lambda y: y if len(y) > 1 else y + 2)
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong"):
        quantized = quantized_alike(Alike().eval())
    assert "weight_only.linear" not in kinds(quantized)
