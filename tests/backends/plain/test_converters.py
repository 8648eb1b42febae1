"""Conversions between floats and integers against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxq.backends.plain.converters import dequantize, prelu_quantize, quantize
from tests.support.kernels import (
    CHANNELS_LAST,
    OUTS,
    agree,
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (2, 3, 9, 7), (1, 40, 80, 90), (300, 1001)], ids=str)
def test_conversions(shape):
    for qp in OUTS:
        x = torch.randn(shape) * 8
        views = [x, x.transpose(0, 1), x[..., ::2], x.expand(2, *shape)[1]]
        views += [x.contiguous(memory_format=CHANNELS_LAST)] if len(shape) == 4 else []
        for view in views:
            q = quantize(view, qp.s, qp.z, qp.qmax, qp.qmin)
            agree(q, view.double(), qp)
            assert torch.equal(dequantize(q, qp.s, qp.z), q.float().sub(qp.z).mul(qp.s))
            assert len(shape) != 4 or q.is_contiguous(memory_format=CHANNELS_LAST)
            slope = torch.rand(view.shape[1])
            q = prelu_quantize(view, slope, qp.s, qp.z, qp.qmax, qp.qmin)
            agree(q, F.prelu(view.double(), slope.double()), qp)


def test_quantize_saturates():
    x = torch.tensor([float("-inf"), -3e38, -1e9, -1.0, 0.0, 1.0, 1e9, 3e38, float("inf")])
    assert quantize(x, 1e-30, 7, 127).tolist() == [0, 0, 0, 0, 7, 127, 127, 127, 127]
    assert quantize(x, 0.5, 7, 255, 3).tolist() == [3, 3, 3, 5, 7, 9, 255, 255, 255]
