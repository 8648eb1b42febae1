"""verify-lowering on a single sample, as well as on a batch."""

import warnings

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.passes.verify_lowering import _Verifier
from tests.graphs import kinds
from tests.kernels import planted
from tests.machine import X86, needs_x86
from tests.models import batch, build


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


@pytest.mark.parametrize("several", [Several, Causal])
def test_what_has_no_samples_is_not_cut(several):
    x = torch.randn(4, 4) if several is Several else torch.randn(6, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxq.FxqWarning)
        warnings.filterwarnings("ignore", message="this CPU has no VNNI")
        warnings.filterwarnings("ignore", message=".* is estimated to take")
        quantized = fxq.quantize(several().eval(), X86.with_optimize("coverage"), data=[x])
    assert quantized.output_sqnr > 25


@needs_x86
def test_a_kernel_that_is_wrong_for_one_sample_only(monkeypatch):
    """Kernels plan by input shape."""
    planted(monkeypatch, OnednnConv, lambda y: y if len(y) > 1 else y + 2)
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong"):
        quantized = fxq.quantize(build("residual"), X86, data=[batch("residual")])
    assert "x86.conv" not in kinds(quantized)
