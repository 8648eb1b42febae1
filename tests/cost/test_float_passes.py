"""How much a quantization computes, in passes over the calibration data: multiplications of layers are counted."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxq
from fxq.pipeline import float_ops
from tests.support.helpers import REFERENCE

pytestmark = pytest.mark.any_cpu


class CountedConvolutions(TorchDispatchMode):
    """Counts the multiplications of float convolutions."""

    macs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            self.macs += result.numel() * args[1][0].numel()
        return result


def network():
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks).eval()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("batches", "most"), [(1, 8.5), (8, 3.0)])
def test_passes_over_the_data(monkeypatch, batches, most):
    """One batch of 8: model, trace, calibration, end comparison once each, an integer pass at most twice, parts of a
    batch for checks. Of 8 batches, all but calibration and correction read the first one or a few samples.
    """
    monkeypatch.setattr(float_ops, "_MIN_LARGE_MACS", 0)
    torch.manual_seed(0)
    model, data = network(), [torch.randn(8, 3, 24, 24) for _ in range(batches)]
    with torch.no_grad(), CountedConvolutions() as once:
        for x in data:
            model(x)
    with CountedConvolutions() as counted:
        quantized = fxq.quantize(model, REFERENCE, data=data)
    assert quantized.output_sqnr > 25  # dB
    assert once.macs < counted.macs < most * once.macs
