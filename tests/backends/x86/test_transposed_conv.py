"""Transposed convolutions of one and two dimensions against float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.transposed_conv import ConvTranspose1d, ConvTranspose2d
from tests.support.kernels import (
    OUTS,
    X,
    activations,
    agree,
    real,
    weight,
)
from tests.support.machine import needs_x86

pytestmark = needs_x86


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_transposed_conv_of_any_shape(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    kernel, stride = [draw(st.integers(1, 9)) for _ in "hw"], [draw(st.integers(1, 4)) for _ in "hw"]
    padding, more = [draw(st.integers(0, 4)) for _ in "hw"], [draw(st.integers(0, s - 1)) for s in stride]
    axes = zip(kernel, stride, padding, more, strict=True)
    size = [draw(st.integers(max(1, (2 * p - k - o) // s + 2), 11)) for k, s, p, o in axes]
    groups, out = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([None, *OUTS]))
    channels = draw(st.integers(1, 4))
    q, qp, w = weight(groups * draw(st.integers(1, 9)), channels, *kernel, axis=draw(st.sampled_from([1, 1, None])))
    bias, options = torch.randn(channels * groups), {"stride": stride, "padding": padding, "output_padding": more}
    conv = ConvTranspose2d(LayerSpec(q, qp, bias, X, out, groups=groups, **options))
    image = activations(draw(st.integers(0, 2)), q.shape[0], *size)
    agree(conv(image), F.conv_transpose2d(real(image, X), w, bias.double(), groups=groups, **options), out)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_transposed_conv1d_of_any_shape(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    kernel, stride, padding = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(0, 4))
    more, groups = draw(st.integers(0, stride - 1)), draw(st.sampled_from([1, 1, 2, 3]))
    length = draw(st.integers(max(1, (2 * padding - kernel - more) // stride + 2), 11))
    q, qp, w = weight(groups * draw(st.integers(1, 9)), draw(st.integers(1, 4)), kernel, axis=1)
    out, sizes = draw(st.sampled_from([None, *OUTS])), {"stride": stride, "padding": padding, "output_padding": more}
    wide = {"stride": (1, stride), "padding": (0, padding), "output_padding": (0, more)}
    conv = ConvTranspose1d(LayerSpec(q.unsqueeze(2), qp, None, X, out, groups=groups, **wide))
    signal = activations(draw(st.integers(0, 2)), q.shape[0], length)
    y = F.conv_transpose1d(real(signal, X), w, groups=groups, **sizes)
    agree(conv(signal), y, out)
    if len(signal):
        agree(conv(signal[0]), y[0], out)
