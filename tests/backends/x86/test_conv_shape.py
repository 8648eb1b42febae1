"""The x86 convolution for the shapes that oneDNN gets wrong on AMX, against exact sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxq.backends import cpu
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.conv_shape import misread
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.quant.qparams import QParams
from tests.support.kernels import OUTS, RESIDUAL, X, activations, agree, bytes_, real, weight
from tests.support.machine import QMAX, needs_x86

pytestmark = needs_x86
# C_in per group, kernel: rows of 128 bytes and more in complete tiles of 64.
WRONG = [
    (c, (1, k))
    for c, ks in {4: (32, 64), 8: (16, 24), 12: (16,), 16: (8, 12), 20: (16,), 28: (16,)}.items()
    for k in ks
]
WRONG += [(8, (16, 1)), (8, (3, 16)), (16, (8, 1)), (16, (2, 8)), (16, (8, 8)), (24, (8, 1))]
RIGHT = [(3, (1, 64)), (8, (1, 8)), (16, (1, 4)), (16, (4, 4)), (16, (1, 9)), (64, (1, 2)), (64, (1, 8))]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """One thread; the correction is applied on every CPU here, not only where it is needed."""
    monkeypatch.setattr(cpu, "has_amx", lambda: True)
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("channels", "kernel"), WRONG + RIGHT, ids=str)
def test_against_exact_sums(channels, kernel):
    for groups, c_out, padding in ((1, 16, (0, 0)), (2, 5, (0, 1)), (1, 40, (2, 3))):
        for x in (X, QParams.per_tensor(0.0217, 0, 0, QMAX)):
            q, qp, w = weight(c_out * groups, channels, *kernel)
            conv = OnednnConv(LayerSpec(q, qp, None, x, OUTS[0], padding=padding, groups=groups))
            image = activations(1, channels * groups, kernel[0] + 4, kernel[1] + 15)
            agree(conv(image), F.conv2d(real(image, x), w, padding=padding, groups=groups), OUTS[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("channels", "kernel"), [(8, 16), (16, 8), (16, 16), (32, 4), (32, 8), (48, 4), (3, 16)], ids=str
)
def test_patches(channels, kernel):
    """A stride equal to the kernel size, with and without remaining pixels."""
    q, qp, w = weight(24, channels, kernel, kernel)
    conv = OnednnConv(LayerSpec(q, qp, torch.ones(24), X, OUTS[1], stride=kernel))
    for size in (4 * kernel, 5 * kernel - 1, kernel):
        image = activations(2, channels, size, 14 * kernel)
        y = F.conv2d(real(image, X), w, torch.ones(24).double(), stride=kernel)
        agree(conv(image), y, OUTS[1])
        agree(
            conv(image.transpose(2, 3)),
            F.conv2d(real(image.transpose(2, 3), X), w, torch.ones(24).double(), stride=kernel),
            OUTS[1],
        )


def test_one_dimension_a_stride_and_a_residual():
    for stride in (1, 2, 3, 8):
        q, qp, w = weight(16, 16, 8)
        image = activations(2, 16, 201)
        y = F.conv1d(real(image, X), w, stride=stride)
        residual = bytes_(*y.shape)
        conv = OnednnConv(LayerSpec(q, qp, None, X, OUTS[0], stride=stride, residual=RESIDUAL))
        agree(conv(image, residual), y + real(residual, RESIDUAL), OUTS[0])


def test_which_shapes_are_taken_for_wrong(monkeypatch):
    def wrong(channels: int, kernel: tuple[int, int], dilation: tuple[int, int] = (1, 1)) -> bool:
        return misread(torch.zeros(8, channels, *kernel, dtype=torch.int8), dilation)

    assert all(wrong(*shape) for shape in WRONG) and not any(wrong(*shape) for shape in RIGHT)
    assert not wrong(16, (1, 8), (1, 2)) and wrong(16, (1, 8), (2, 1)) and not wrong(16, (8, 1), (2, 1))
    monkeypatch.setattr(cpu, "has_amx", lambda: False)
    assert not any(wrong(*shape) for shape in WRONG)
