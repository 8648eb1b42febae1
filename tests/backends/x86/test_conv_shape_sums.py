"""Residuals of dilated depthwise convolutions, which oneDNN adds wrongly on CPUs with AVX2-VNNI, against exact sums."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fxq.backends import cpu
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.conv_shape import geometry, sum_is_misread
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.quant.qparams import QParams
from tests.support.kernels import OUTS, POSTS, RESIDUAL, X, activations, agree, bytes_, real, weight
from tests.support.machine import needs_x86
from tests.support.processes import in_new_python

pytestmark = needs_x86
FROM_ZERO = QParams.per_tensor(0.0471, 0)
CASES = list(product((6, 16), (1, 3), (1, 2, 3), (FROM_ZERO, *OUTS), (None, "relu", "relu6")))


def check(cases=CASES, sizes=(8, 14, 23)):
    """Images of several sizes: with 6 and 16 channels oneDNN's sum is right at 8 x 8, and wrong from 12 columns on."""
    torch.manual_seed(0)
    for channels, taps, dilation, out, name in cases:
        post, function = POSTS[name] if name else (None, lambda y: y)
        options = {"padding": dilation * (taps // 2), "dilation": dilation, "groups": channels}
        q, qp, w = weight(channels, 1, taps, taps)
        conv = OnednnConv(LayerSpec(q, qp, torch.ones(channels), X, out, post=post, residual=RESIDUAL, **options))
        for size in sizes:
            image, residual = activations(2, channels, size, size), bytes_(2, channels, size, size)
            y = F.conv2d(real(image, X), w, torch.ones(channels).double(), **options) + real(residual, RESIDUAL)
            agree(conv(image, residual), function(y), out)


def test_against_exact_sums(monkeypatch):
    """The correction is applied on every CPU here, not only where it is needed."""
    monkeypatch.setattr(cpu, "has_avx2_vnni", lambda: True)
    check()


@pytest.mark.slow
def test_against_exact_sums_as_on_a_client_cpu():
    """CPUs with AVX-VNNI run oneDNN's kernels for it here, others those for AVX2."""
    code = f"from {__name__} import CASES, check; check(CASES[::3])"
    done = in_new_python(code, cwd=Path(__file__).parents[3], ONEDNN_MAX_CPU_ISA="AVX2_VNNI")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("client", [True, False])
def test_which_sums_are_taken_for_wrong(monkeypatch, client):
    monkeypatch.setattr(cpu, "has_avx2_vnni", lambda: client)
    wrong = {
        (shape, dilation, groups)
        for shape, groups in (((6, 1, 3, 3), 6), ((6, 6, 3, 3), 1), ((6, 3, 3, 3), 2))
        for dilation in ((1, 1), (1, 2), (2, 1))
        if sum_is_misread(torch.ones(shape, dtype=torch.int8), dilation, groups)
    }
    assert wrong == ({((6, 1, 3, 3), (1, 2), 6), ((6, 1, 3, 3), (2, 1), 6)} if client else set())


def test_dilation_of_a_single_tap_means_nothing():
    w = torch.ones(6, 1, 1, 3, dtype=torch.int8)
    conv = geometry(w, torch.Size([1, 6, 9, 9]), stride=(1, 1), padding=(0, 2), dilation=(3, 2), groups=6, native=False)
    assert conv.arguments[2] == [1, 2]
    assert conv.shape == (1, 6, 9, 9)
