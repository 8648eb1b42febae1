"""Grouped convolutions whose channels are not multiples of four: right, and joined if oneDNN has no fast kernel."""

import pytest
import torch
import torch.nn.functional as F

from fxq.backends import cpu
from fxq.backends.kernel import PostOp
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.conv_shape import geometry
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.quant.qparams import QParams
from tests.support.kernels import agree, real, weight
from tests.support.machine import needs_x86

pytestmark = needs_x86
X = QParams.per_tensor(0.0217, 51, 0, 127)  # a grid that every CPU takes
OUT = QParams.per_tensor(0.0471, 60, 0, 127)


def as_avx2(monkeypatch):
    monkeypatch.setattr(cpu, "has_vnni", lambda: False)
    monkeypatch.setattr(cpu, "has_avx512", lambda: False)


def joined(groups, channels, outputs, kernel=(3, 3)):
    """Number of groups, and of channels per group, that oneDNN is called with."""
    w = torch.ones(groups * outputs, channels, *kernel, dtype=torch.int8)
    shape = torch.Size([1, groups * channels, 8, 8])
    conv = geometry(w, shape, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=groups, native=False)
    assert conv.weight.sum() == w.sum() and len(conv.weight) == len(w)
    return conv.arguments[3], conv.weight.shape[1]


def test_the_fewest_groups_that_fit_are_joined(monkeypatch):
    as_avx2(monkeypatch)
    assert joined(32, 5, 5) == (8, 20)
    assert joined(6, 6, 8) == (3, 12)
    assert joined(6, 8, 6) == (3, 16)
    assert joined(16, 1, 2) == (4, 4)
    assert joined(3, 35, 35) == (1, 105)  # no divisor of three is a multiple of four
    assert joined(6, 5, 5) == (1, 30)


def test_groups_with_a_fast_kernel_stay(monkeypatch):
    as_avx2(monkeypatch)
    assert joined(4, 12, 8) == (4, 12)
    assert joined(24, 1, 1) == (24, 1)
    assert joined(1, 5, 7) == (1, 5)
    monkeypatch.setattr(cpu, "has_vnni", lambda: True)
    assert joined(3, 35, 35) == (3, 35)


@pytest.mark.parametrize("avx2", [True, False])
@pytest.mark.parametrize(("groups", "channels", "outputs"), [(3, 5, 7), (8, 7, 3), (4, 1, 2), (6, 6, 6), (2, 9, 16)])
@pytest.mark.parametrize("post", [None, PostOp("relu"), PostOp("leaky_relu", (0.1,))])
def test_joined_groups_are_right(avx2, groups, channels, outputs, post, monkeypatch):
    if avx2:
        as_avx2(monkeypatch)
    q, qp, w = weight(groups * outputs, channels, 3, 3)
    bias, x = torch.randn(groups * outputs), torch.randint(0, 128, (2, groups * channels, 9, 7), dtype=torch.uint8)
    conv = OnednnConv(LayerSpec(q, qp, bias, X, OUT, stride=2, padding=1, groups=groups, post=post))
    y = F.conv2d(real(x, X), w, bias.double(), 2, 1, groups=groups)
    if post is not None:
        y = F.relu(y) if post.name == "relu" else F.leaky_relu(y, 0.1)
    agree(conv(x), y, OUT)


@pytest.mark.parametrize("avx2", [True, False])
def test_joined_groups_with_a_residual_and_of_signals(avx2, monkeypatch):
    if avx2:
        as_avx2(monkeypatch)
    q, qp, w = weight(15, 5, 3)
    x, residual = (torch.randint(0, 128, (2, 15, n), dtype=torch.uint8) for n in (11, 9))
    grid = QParams.per_tensor(0.0313, 47, 0, 127)
    conv = OnednnConv(LayerSpec(q, qp, None, X, OUT, groups=3, residual=grid))
    agree(conv(x, residual), F.conv1d(real(x, X), w, groups=3) + real(residual, grid), OUT)
