"""Convolutions with prelu and leaky_relu on integers, as the larger or the smaller of two results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.backends.kernel import PostOp
from fxq.backends.table.layer_spec import LayerSpec, slope_refused
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.backends.x86.transposed_conv import ConvTranspose2d
from fxq.backends.x86.x86 import X86
from fxq.common.metrics import sqnr
from fxq.errors import BackendError
from fxq.graph.unit import calls_of
from tests.support.graphs import graph
from tests.support.kernels import CHANNELS_LAST, OUTS, RESIDUAL, X, activations, agree, copies, layer, real, weight
from tests.support.machine import needs_x86, no_warnings

pytestmark = needs_x86
RECIPE = fxq.Recipe.static(backend="x86").with_optimize("coverage")
PRELU = PostOp("prelu")


def slopes(kind: str, channels: int) -> torch.Tensor:
    """Slopes at most 1 (negative ones and 0 among them), or at least 1."""
    drawn = torch.rand(1 if kind == "one" else channels)
    if kind == "steep":
        return drawn * 3 + 1
    return (drawn * 3 - 2) if kind != "one" else drawn.mul_(0.3)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_conv_prelu_of_any_shape(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    dims, groups = draw(st.sampled_from([1, 2, 2])), draw(st.sampled_from([1, 1, 2, 5]))
    kernel, padding = [draw(st.integers(1, 3)) for _ in range(dims)], draw(st.integers(0, 1))
    size = [draw(st.integers(3, 12)) for _ in range(dims)]
    c_in, c_out, batch = draw(st.integers(1, 20)), draw(st.integers(1, 40)), draw(st.sampled_from([0, 1, 2]))
    out, kind = draw(st.sampled_from([None, *OUTS])), draw(st.sampled_from(["one", "each", "steep"]))
    bias, slope = draw(st.sampled_from([None, torch.randn(c_out * groups)])), slopes(kind, c_out * groups)
    axis = draw(st.sampled_from([0, None])) if bias is not None else 0  # one scale and no bias: one tie many times
    q, qp, w = weight(c_out * groups, c_in, *kernel, axis=axis)
    options = {"stride": draw(st.integers(1, 2)), "padding": padding, "groups": groups}
    image = activations(batch, c_in * groups, *size)
    if dims == 2 and draw(st.booleans()):
        image = image.contiguous(memory_format=CHANNELS_LAST)
    y = (F.conv2d if dims == 2 else F.conv1d)(real(image, X), w, None if bias is None else bias.double(), **options)
    got = OnednnConv(LayerSpec(q, qp, bias, X, out, post=PRELU, slope=slope, **options))(image)
    agree(got, F.prelu(y, slope.double()), out)
    got = OnednnConv(LayerSpec(q, qp, bias, X, out, post=PostOp("leaky_relu", (float(slope[0]),)), **options))(image)
    agree(got, torch.where(y < 0, y * float(slope[0]), y), out)


@pytest.mark.parametrize("kind", ["one", "each", "steep"])
def test_transposed(kind):
    q, qp, w = weight(6, 5, 4, 3, axis=1)
    slope, image = slopes(kind, 10), activations(2, 6, 7, 5)
    conv = ConvTranspose2d(LayerSpec(q, qp, None, X, OUTS[0], stride=2, padding=1, groups=2, post=PRELU, slope=slope))
    y = F.conv_transpose2d(real(image, X), w, stride=2, padding=1, groups=2)
    agree(conv(image), F.prelu(y, slope.double()), OUTS[0])
    for copy in copies(conv):
        assert torch.equal(copy(image), conv(image))


def test_copies_keep_the_slopes():
    q, qp, _ = weight(8, 4, 3, 3)
    for groups in (1, 2):
        conv = OnednnConv(LayerSpec(q, qp, None, X, OUTS[0], groups=groups, post=PRELU, slope=torch.rand(8)))
        image = activations(1, 4 * groups, 9, 9)
        y = conv(image)
        for copy in copies(conv):
            assert torch.equal(copy(image), y)


def test_refusals():
    q, qp, _ = weight(4, 4, 3, 3)
    mixed = "prelu has slopes above 1 in some channels and below 1 in others"
    assert slope_refused(torch.tensor([0.5, 2.0])) == mixed
    assert OnednnConv.refuses(layer(2, 4, 3, 3, post=PRELU, slope=torch.tensor([0.5, 2.0]))) == mixed
    assert slope_refused(torch.tensor([0.5, float("nan")])) == "prelu has slopes that are not finite"
    assert slope_refused(torch.tensor([1.0, 2.0])) is None
    assert OnednnConv.refuses(layer(4, 4, 3, 3, post=PRELU, residual=RESIDUAL)) == "prelu after a residual"
    for post, slope in [(PRELU, None), (None, torch.ones(4)), (PRELU, torch.ones(3))]:
        with pytest.raises(BackendError, match="slopes of shape"):
            OnednnConv(LayerSpec(q, qp, None, X, OUTS[0], post=post, slope=slope))
    with pytest.raises(BackendError, match="after a residual"):
        OnednnConv(LayerSpec(q, qp, None, X, OUTS[0], post=PRELU, slope=torch.ones(4), residual=RESIDUAL))


def network(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), activation, nn.Conv2d(8, 4, 3)).eval()


@pytest.mark.one_in(3)
@no_warnings
@pytest.mark.parametrize("activation", [nn.PReLU(), nn.PReLU(8), nn.LeakyReLU(0.2)], ids=str)
def test_through_the_pipeline(activation):
    model, x = network(activation), torch.randn(2, 3, 12, 12)
    quantized = fxq.quantize(model, RECIPE, data=[x])
    names = [type(m).__name__ for m in quantized.modules()]
    assert (names.count("Quantize"), names.count("OnednnConv"), names.count("PReLUQuantize")) == (1, 2, 0)
    assert sqnr(model(x), quantized(x)) > 25


@pytest.mark.parametrize(
    ("slope", "ops", "fewer"), [(torch.tensor([0.1]), 2, 1), (torch.linspace(0.5, 1.5, 8), 1, 0)], ids=str
)
def test_what_is_supported(slope, ops, fewer):
    prelu = nn.PReLU(len(slope))
    prelu.weight.data = slope
    gm = graph(network(prelu), torch.randn(1, 3, 12, 12), until="fuse")
    node = next(n for n in gm.graph.nodes if len(calls_of(gm, n)) == 2)
    support = X86().supports(gm, node, calls_of(gm, node), fxq.QuantConfig())
    assert (support.ops, support.fewer) == (ops, fewer)
    assert support.reason
