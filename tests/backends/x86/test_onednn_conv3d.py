"""Convolutions over three axes and transposed ones over one, computed by two-dimensional kernels, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.backends.kernel import PostOp
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.backends.x86.onednn_conv3d import Conv3d
from fxq.common.metrics import sqnr
from fxq.errors import BackendError
from tests.support.helpers import module
from tests.support.kernels import OUTS, X, activations, agree, copies, layer, real, weight
from tests.support.machine import needs_x86, no_warnings

pytestmark = needs_x86
RECIPE = fxq.Recipe.static(backend="x86").with_optimize("coverage")


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_conv3d_of_any_shape(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    kernel, dilation = [draw(st.integers(1, 3)) for _ in "dhw"], [draw(st.integers(1, 2)) for _ in "dhw"]
    stride, padding = [draw(st.integers(1, 3)) for _ in "dhw"], [draw(st.integers(0, 2)) for _ in "dhw"]
    axes = zip(kernel, dilation, padding, strict=True)
    size = [draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 7)) for k, d, p in axes]
    c_in, c_out, batch = draw(st.integers(1, 9)), draw(st.integers(1, 17)), draw(st.sampled_from([0, 1, 2]))
    out, bias = draw(st.sampled_from([None, *OUTS])), draw(st.sampled_from([None, torch.randn(c_out * groups)]))
    axis = draw(st.sampled_from([0, None])) if bias is not None else 0  # one scale and no bias: one tie many times
    q, qp, w = weight(c_out * groups, c_in, *kernel, axis=axis)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    image = activations(batch, c_in * groups, *size)
    if draw(st.booleans()):
        image = image.contiguous(memory_format=torch.channels_last_3d)
    kept = image.clone()
    y = F.conv3d(real(image, X), w, None if bias is None else bias.double(), **options)
    agree(Conv3d(LayerSpec(q, qp, bias, X, out, **options))(image), y, out)
    slope = torch.rand(c_out * groups)
    twice = Conv3d(LayerSpec(q, qp, bias, X, out, post=PostOp("prelu"), slope=slope, **options))
    agree(twice(image), F.prelu(y, slope.double()), out)
    assert torch.equal(image, kept)


@pytest.mark.parametrize("out", [None, OUTS[1]], ids=str)
@pytest.mark.parametrize("post", [p for p in OnednnConv.posts if p not in ("prelu", "leaky_relu", "hardtanh")])
def test_posts(post, out):
    q, qp, w = weight(6, 4, 2, 3, 3)
    image = activations(1, 4, 5, 6, 7)
    y = getattr(F, post)(F.conv3d(real(image, X), w, padding=1))
    conv = Conv3d(LayerSpec(q, qp, None, X, out, padding=1, post=PostOp(post)))
    agree(conv(image), y, out)
    agree(conv(image[0]), y[0], out)
    for copy in copies(conv):
        assert not copy._derived and torch.equal(copy(image), conv(image))


def test_refusals():
    q, qp, _ = weight(4, 4, 2, 3, 3)
    assert Conv3d.refuses(layer(4, 4, 2, 3, 3, padding="same")) == "pads asymmetrically"
    assert Conv3d.refuses(layer(4, 4, 3, 3, 3, padding_mode="circular")) == "pads with mode 'circular'"
    assert Conv3d.refuses(layer(4, 4, 3, 3, 3, post=PostOp("gelu"))) == "the kernel has no gelu"
    with pytest.raises(BackendError, match="depth 1 is smaller"):
        Conv3d(LayerSpec(q, qp, None, X, None))(activations(1, 4, 1, 5, 5))
    with pytest.raises(BackendError, match="slopes of shape"):
        Conv3d(LayerSpec(q, qp, None, X, None, post=PostOp("prelu")))


@pytest.mark.one_in(2)
@no_warnings
@pytest.mark.parametrize("dims", [1, 3])
def test_through_the_pipeline(dims):
    kinds = (nn.Conv1d, nn.ConvTranspose1d) if dims == 1 else (nn.Conv3d, nn.Conv3d)
    layers = {"first": kinds[0](3, 8, 3, padding=1), "norm": (nn.BatchNorm1d, nn.BatchNorm3d)[dims == 3](8)}
    layers |= {"last": kinds[1](8, 4, 3, stride=2), "other": kinds[0](3, 8, 3, padding=1)}
    model = module(lambda m, x: m.last(torch.relu(m.norm(m.first(x) + m.other(x)))), **layers)
    x = torch.randn(2, 3, *[7] * dims)
    quantized = fxq.quantize(model, RECIPE, data=[x])
    names = [type(m).__name__ for m in quantized.modules()]
    assert {"Lookup", "ConvTranspose1d" if dims == 1 else "Conv3d"} <= set(names)
    assert sqnr(model(x), quantized(x)) > 22


@pytest.mark.one_in(2)
@no_warnings
@pytest.mark.parametrize("size", [5, 100])
def test_batch_norm_of_its_own(size):
    """Large tensors are scaled by a convolution, small ones by a look-up table."""
    layers = {"first": nn.Conv2d(3, 8, 3), "other": nn.Conv2d(3, 8, 3)}
    layers["last"] = nn.Conv2d(8, 4, 3, padding=1)  # without padding, the norm would be folded into it
    norm = nn.BatchNorm2d(8)
    norm.running_mean, norm.running_var = torch.randn(8), torch.rand(8) + 0.1
    norm.weight.data, norm.bias.data = torch.randn(8), torch.randn(8)
    model = module(lambda m, x: m.last(m.norm(m.first(x) + m.other(x))), norm=norm, **layers)
    x = torch.randn(2, 3, size, size)
    quantized = fxq.quantize(model, RECIPE, data=[x])
    names = [type(m).__name__ for m in quantized.modules()]
    assert (names.count("OnednnConv"), names.count("Lookup")) == ((3, 1) if size == 5 else (4, 0))
    assert sqnr(model(x), quantized(x)) > 22
