"""Average pooling against float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxq.backends import cpu
from fxq.backends.plain.pool import MaxPool2d
from fxq.backends.x86.onednn_pool import AdaptiveAvgPool2d, AvgPool2d
from fxq.quant.qparams import QParams
from tests.support.kernels import (
    CHANNELS_LAST,
    OUTS,
    X,
    activations,
    agree,
    real,
)
from tests.support.machine import needs_x86

pytestmark = needs_x86


def test_pooling():
    x = activations(2, 6, 13, 9)
    for image in [x, x[:0], x.contiguous(memory_format=CHANNELS_LAST), x[:, ::2]]:
        for ceil in (False, True):
            y = F.max_pool2d(image.float(), 3, 2, 1, ceil_mode=ceil)
            assert torch.equal(MaxPool2d(3, 2, 1, ceil_mode=ceil)(image).float(), y)
        agree(AvgPool2d(X, OUTS[0], (3, 2), 2, (1, 0))(image), F.avg_pool2d(real(image, X), (3, 2), 2, (1, 0)), OUTS[0])
        for size in [(13, 3), (1, 9), (4, 2), (None, 1)]:
            y = F.adaptive_avg_pool2d(real(image, X), size)
            agree(AdaptiveAvgPool2d(X, OUTS[0], size)(image), y, OUTS[0])
            agree(AdaptiveAvgPool2d(X, None, size)(image), y, None)
    assert torch.equal(MaxPool2d(3, 2, 1, dims=1)(x[0]).float(), F.max_pool1d(x[0].float(), 3, 2, 1))
    agree(AvgPool2d(X, None, 3, 2, 1, dims=1)(x[0]), F.avg_pool1d(real(x[0], X), 3, 2, 1), None)


def test_averages_take_all_bits_on_any_cpu(monkeypatch):
    monkeypatch.setattr(cpu, "has_vnni", lambda: False)
    grid = QParams.per_tensor(1.0, 0)
    x = torch.randint(250, 256, (2, 24, 40, 40), dtype=torch.uint8)
    assert torch.equal(AvgPool2d(grid, None, 2)(x), F.avg_pool2d(x.float(), 2))
