"""The squeeze-and-excitation kernel against independent float64 arithmetic."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.backends.x86 import onednn_binary as x86_elementwise
from fxq.backends.x86.squeeze_excite import FUNCTIONS, GATES, SqueezeExcite
from fxq.common.metrics import sqnr
from fxq.errors import BackendError, InputError
from fxq.quant.qparams import QParams
from tests.support.helpers import module
from tests.support.kernels import BYTE, CHANNELS_LAST, OUTS, agree, bytes_, copies, real, weight
from tests.support.machine import needs_x86, no_warnings

pytestmark = needs_x86

# No product is so near to a tie that float32 and float64 round it differently in more than a few elements.
PRODUCTS = [
    QParams.per_tensor(0.0133, 101),
    QParams.per_tensor(0.0131, 60, 0, 127),
    QParams.per_tensor(0.017, 99, 20, 180),
]


def kernel(
    channels: int, squeezed: int, x: QParams, out: QParams | None, function="relu", gate="sigmoid", bias=True, axis=0
):
    """The kernel, and a function that computes its result in float64."""
    (q1, p1, w1), (q2, p2, w2) = weight(squeezed, channels, axis=axis), weight(channels, squeezed, axis=axis)
    b1, b2 = (torch.randn(squeezed), torch.randn(channels)) if bias else (None, None)
    kernel = SqueezeExcite(
        squeeze=q1, squeeze_scale=p1.scale, squeeze_bias=b1, excite=q2, excite_scale=p2.scale, excite_bias=b2,
        x=x, out=out, function=function, gate=gate,
    )  # fmt: skip

    def means(image):
        y = F.linear(image.mean((2, 3)), w1, None if b1 is None else b1.double())
        y = F.linear(getattr(F, function)(y), w2, None if b2 is None else b2.double())
        return image * getattr(F, gate)(y)[:, :, None, None]

    return kernel, means


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_shape(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    channels, squeezed, size = draw(st.integers(1, 40)), draw(st.integers(1, 20)), st.integers(1, 12)
    x = QParams.per_tensor(0.0217, draw(st.sampled_from([0, 1, 128, 255])))
    out, axis = draw(st.sampled_from([None, *PRODUCTS])), draw(st.sampled_from([0, None]))
    function, gate = draw(st.sampled_from(FUNCTIONS)), draw(st.sampled_from(GATES))
    excite, means = kernel(channels, squeezed, x, out, function, gate, draw(st.booleans()), axis)
    image = bytes_(draw(st.integers(0, 3)), channels, draw(size), draw(size))
    image = image.contiguous(memory_format=CHANNELS_LAST) if draw(st.booleans()) else image
    kept = image.clone()
    y = excite(image)
    agree(y, means(real(image, x)), out)
    assert torch.equal(image, kept)
    assert y.is_contiguous(memory_format=CHANNELS_LAST) or out is None or not y.numel()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("limits", [None, (0, 0)], ids=["as it is", "large"])
@pytest.mark.parametrize("shape", [(1, 40, 70, 101), (3, 24, 41, 33)], ids=str)
def test_large(shape, limits, monkeypatch):
    """A large image is multiplied by a convolution whose scales are the factors."""
    if limits is not None:
        monkeypatch.setattr(x86_elementwise, "MAX_UNCHUNKED_ELEMENTS", limits[0])
        monkeypatch.setattr(x86_elementwise, "_MIN_GATED_ELEMENTS", limits[1])
    image = bytes_(*shape)
    for out in (None, *PRODUCTS):
        excite, means = kernel(shape[1], 7, BYTE, out)
        agree(excite(image), means(real(image, BYTE)), out)
        agree(excite(image[:, :, ::2]), means(real(image[:, :, ::2], BYTE)), out)


def test_copies():
    image = bytes_(2, 8, 5, 7)
    for bias in (True, False):
        for out in (None, PRODUCTS[0]):
            excite, _ = kernel(8, 3, BYTE, out, "silu", "hardsigmoid", bias)
            y = excite(image)
            for copy in copies(excite):
                assert not copy._derived and torch.equal(copy(image), y)


def test_refusals():
    signed = QParams.per_tensor(0.1, 0, -128, 127, torch.int8)
    for x, out in ((signed, None), (BYTE, signed)):
        with pytest.raises(BackendError, match=r"x86\.squeeze_excite"):
            kernel(4, 2, x, out)
    excite, _ = kernel(4, 2, BYTE, OUTS[0])
    with pytest.raises(InputError, match=r"x86\.squeeze_excite: the input has 5 channels; the layer takes 4"):
        excite(bytes_(1, 5, 3, 3))
    with pytest.raises(InputError, match="without a batch"):
        excite(bytes_(4, 9))


LAYERS = {
    "first": nn.Conv2d(3, 8, 3),
    "squeeze": nn.Conv2d(8, 4, 1),
    "excite": nn.Conv2d(4, 8, 1),
    "last": nn.Conv2d(8, 4, 3),
}


def excited(m, x):
    y = F.hardswish(m.first(x))
    return m.last(y * torch.sigmoid(m.excite(F.silu(m.squeeze(y.mean((2, 3), keepdim=True))))))


def returned(m, x):
    y = F.hardswish(m.first(x))
    return y * torch.sigmoid(m.excite(F.silu(m.squeeze(y.mean((2, 3), keepdim=True)))))


@pytest.mark.one_in(4)
@no_warnings
@pytest.mark.parametrize("forward", [excited, returned], ids=lambda f: f.__name__)
@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_through_the_pipeline(forward, per):
    """One kernel, verified; with a result in integers and in float, weights per tensor and per channel."""
    model, x = module(forward, **LAYERS), torch.randn(2, 3, 20, 20)
    spec = fxq.TensorSpec(signed=True, symmetric=True, per=per, observer="minmax")
    recipe = fxq.Recipe.static(backend="x86", weight=spec).with_optimize("coverage")
    quantized = fxq.quantize(model, recipe, data=[x])
    (kernel,) = (m for m in quantized.modules() if isinstance(m, SqueezeExcite))
    assert (kernel.out is None) == (forward is returned)
    with torch.no_grad():
        assert sqnr(model(x), quantized(x)) > 25
    entries = {entry.path: entry for entry in quantized.ledger}
    assert {entries[name].precision for name in ("squeeze", "excite")} == {"int8"}
    assert quantized.ledger.coverage == 1.0
