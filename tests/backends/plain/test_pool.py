"""Pooling of plain uint8 tensors, compared exactly with the float op on the same integers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxq
from fxq.backends.kernel import Kernel
from fxq.backends.plain.pool import AdaptiveMaxPool, MaxPool2d, MaxPool3d, Mean
from fxq.common.metrics import sqnr
from fxq.errors import BackendError, InputError
from fxq.quant.qparams import QParams
from tests.support.kernels import (
    BYTE,
    CHANNELS_LAST,
    OUTS,
    agree,
    bytes_,
    real,
)
from tests.support.machine import needs_x86


def layouts(x: Tensor) -> list[Tensor]:
    """`x` with other strides, an empty batch, and an image without a batch axis."""
    last = x.movedim(1, -1).contiguous().movedim(-1, 1)
    return [x, last, x.transpose(1, -1).contiguous().transpose(1, -1), x[..., ::2], x[:0], x[0]]


@pytest.mark.parametrize("size", [(1,), (4,), (3,), (None,)], ids=str)
def test_adaptive_1d(size):
    for x in layouts(torch.randint(0, 256, (2, 5, 12), dtype=torch.uint8)):
        assert torch.equal(AdaptiveMaxPool(size)(x).float(), F.adaptive_max_pool1d(x.float(), size[0] or x.shape[-1]))


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (4, 3), (5, 7), (None, 2), (3, None), (20, 2)], ids=str)
def test_adaptive_2d(size):
    for x in layouts(torch.randint(0, 256, (2, 5, 12, 9), dtype=torch.uint8)):
        assert torch.equal(AdaptiveMaxPool(size)(x).float(), F.adaptive_max_pool2d(x.float(), size))


@pytest.mark.parametrize("size", [(1, 1, 1), (2, 3, 2), (4, 2, 3), (None, 2, 5), (1, 7, 1)], ids=str)
def test_adaptive_3d(size):
    for x in layouts(torch.randint(0, 256, (2, 5, 6, 9, 4), dtype=torch.uint8)):
        assert torch.equal(AdaptiveMaxPool(size)(x).float(), F.adaptive_max_pool3d(x.float(), size))


def test_no_window_is_refused():
    with pytest.raises(BackendError, match="adaptive pooling to no value"):
        AdaptiveMaxPool((3, 0))


@settings(max_examples=15, deadline=None)
@given(
    st.integers(5, 11), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1), st.integers(1, 2), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_3d(depth, kernel, stride, padding, dilation, ceil, wide):
    padding = min(padding, kernel // 2)
    options = (kernel, stride, padding, dilation, ceil)
    if wide:  # other numbers along the other axes
        options = ((kernel, 2, 3), (stride, 2, 1), (padding, 0, 1), (dilation, 1, 2), ceil)
    for x in layouts(torch.randint(0, 256, (2, 3, depth, 10, 14), dtype=torch.uint8)):
        y, shape = MaxPool3d(*options)(x), F.max_pool3d(x.new_zeros((1, *x.shape[-4:])).float(), *options).shape
        assert y.dtype == torch.uint8 and y.shape == (*x.shape[:-4], *shape[1:])
        if len(x):  # of an empty batch torch's own op has no values either
            assert torch.equal(y.float(), F.max_pool3d(x.float(), *options))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_1d_and_2d(data):
    """Windows as long as the image, and windows with one tap or all taps in the padding."""
    dims, channels = data.draw(st.integers(1, 2)), data.draw(st.sampled_from((1, 3, 256)))
    options = []
    for _ in range(dims):
        kernel, dilation = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 2))
        padding = data.draw(st.integers(0, min(kernel, dilation * (kernel - 1) + 1) // 2))
        options.append((kernel, data.draw(st.integers(1, 3)), padding, dilation))
    ceil = data.draw(st.booleans())
    sizes = [dilation * (kernel - 1) + 1 + data.draw(st.integers(0, 9)) for kernel, _, _, dilation in options]
    kernel, stride, padding, dilation = zip(*options, strict=True)
    pool, function = MaxPool2d(kernel, stride, padding, dilation, ceil, dims), (F.max_pool1d, F.max_pool2d)[dims - 1]
    for x in layouts(torch.randint(0, 256, (2, channels, *sizes[:-1], 2 * sizes[-1]), dtype=torch.uint8)):
        y = pool(x)
        assert y.dtype == torch.uint8
        if len(x):  # of an empty batch torch's own op has no values either
            assert torch.equal(y.float(), function(x.float(), kernel, stride, padding, dilation, ceil))
            assert torch.equal(pool.bind(x)(x), y)


def test_images_smaller_than_the_window_are_refused():
    with pytest.raises(InputError, match=r"3 values along an axis are too few for a pooling window of 4"):
        MaxPool2d(4)(torch.zeros(1, 2, 8, 3, dtype=torch.uint8))
    with pytest.raises(InputError, match="must have 2 spatial dimensions"):
        MaxPool2d(2)(torch.zeros(4, 4, dtype=torch.uint8))


OPS = [
    *[(nn.Conv1d, (2, 3, 24), pool) for pool in (nn.AdaptiveMaxPool1d(1), nn.AdaptiveMaxPool1d(5))],
    *[(nn.Conv2d, (2, 3, 12, 12), pool) for pool in (nn.AdaptiveMaxPool2d(1), nn.AdaptiveMaxPool2d((5, 4)))],
    *[(nn.Conv3d, (2, 3, 8, 8, 8), p) for p in (nn.AdaptiveMaxPool3d(3), nn.AdaptiveMaxPool3d(2), nn.MaxPool3d(2))],
]


@pytest.mark.one_in(7)
@needs_x86
@pytest.mark.parametrize(("conv", "shape", "pool"), OPS, ids=str)
def test_no_float_round_trip(conv, shape, pool):
    """Between two layers there is no conversion, and results equal those of the qdq graph."""
    torch.manual_seed(0)
    model = nn.Sequential(conv(3, 16, 3), pool, conv(16, 8, 1)).eval()
    x = torch.randn(shape)
    recipe = fxq.Recipe.static(backend="x86", optimize="coverage")
    quantized = fxq.quantize(model, recipe, data=[x])
    assert [e.precision for e in quantized.ledger.where(lambda e: "pool" in e.op)] == ["moves"]
    kernels = [m.name for m in quantized.modules() if isinstance(m, Kernel)]
    assert not [name for name in kernels if name.endswith("dequantize")]
    qdq = fxq.quantize(model, recipe.without_pass("lower").without_pass("verify-lowering"), data=[x])
    assert sqnr(qdq(x), quantized(x)) > 50  # a tie in the first layer moves an element by a step


@pytest.mark.parametrize("dim", [(2, 3), (-1,), (1,), 1, (0, 1, 2, 3), (-3, -2, -1)], ids=str)
def test_mean_and_sum(dim):
    x = bytes_(3, 6, 13, 9)
    for image in [x, x.contiguous(memory_format=CHANNELS_LAST), x[:, ::2], x.transpose(1, 3)]:
        for keepdim in (False, True):
            for out in (None, OUTS[1]):
                agree(Mean(BYTE, out, dim, keepdim)(image), real(image, BYTE).mean(dim, keepdim=keepdim), out)
            wide = QParams.per_tensor(1.93, 100)
            agree(Mean(BYTE, wide, dim, keepdim, total=True)(image), real(image, BYTE).sum(dim, keepdim=keepdim), wide)
    long = bytes_(2, 70001)  # beyond what float32 sums exactly
    agree(Mean(BYTE, OUTS[2], -1)(long), real(long, BYTE).mean(-1), OUTS[2])
    agree(Mean(BYTE, OUTS[2], 0)(x[:1]), real(x[:1], BYTE).mean(0), OUTS[2])
    assert Mean(BYTE, OUTS[0], (1, 2))(x[:0]).shape == (0, 9)
    assert Mean(BYTE, OUTS[0], 0, total=True)(x[:0]).eq(OUTS[0].z).all()
    with pytest.raises(BackendError, match="mean of no elements"):
        Mean(BYTE, OUTS[0], 0)(x[:0])
