"""The integer kernels against independent float64 arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends import cpu
from fxq.backends.kernel import Kernel, PostOp
from fxq.backends.plain.clamp_and_pad import Clamp, Pad
from fxq.backends.plain.pool import MaxPool2d, Mean
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86 import onednn_conv as x86_conv
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.backends.x86.onednn_conv3d import Conv3d
from fxq.backends.x86.onednn_linear import OnednnLinear
from fxq.backends.x86.onednn_pool import AdaptiveAvgPool2d, AvgPool2d
from fxq.backends.x86.transposed_conv import ConvTranspose2d
from fxq.errors import BackendError, InputError
from fxq.quant.qparams import QParams
from tests.support.kernels import (
    CHANNELS_LAST,
    OUTS,
    POSTS,
    RESIDUAL,
    ZERO_POINTS,
    X,
    activations,
    agree,
    bytes_,
    copies,
    layer,
    real,
    weight,
)
from tests.support.machine import QMAX, needs_x86

pytestmark = needs_x86


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_conv_of_any_shape(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    dims, groups, small = draw(st.sampled_from([1, 2, 2])), draw(st.sampled_from([1, 1, 2, 3])), st.integers(1, 4)
    kernel, dilation = [draw(small) for _ in range(dims)], [draw(st.integers(1, 2)) for _ in range(dims)]
    stride, padding = [draw(st.integers(1, 3)) for _ in range(dims)], [draw(st.integers(0, 4)) for _ in range(dims)]
    size = [
        draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 12))
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    c_in, c_out, batch = draw(st.integers(1, 20)), draw(st.integers(1, 40)), draw(st.sampled_from([0, 1, 2]))
    x = QParams.per_tensor(0.0217, draw(st.sampled_from(ZERO_POINTS)), 0, QMAX)
    out = draw(st.sampled_from([None, *OUTS]))
    residual = RESIDUAL if out is not None and draw(st.booleans()) else None
    q, qp, w = weight(c_out * groups, c_in, *kernel, axis=draw(st.sampled_from([0, 0, None])))
    bias = draw(st.sampled_from([None, torch.randn(c_out * groups)]))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    conv = OnednnConv(LayerSpec(q, qp, bias, x, out, residual=residual, **options))
    image = activations(batch, c_in * groups, *size)
    if dims == 2 and draw(st.booleans()):
        image = image.contiguous(memory_format=CHANNELS_LAST)
    reference = F.conv2d if dims == 2 else F.conv1d
    y = reference(real(image, x), w, None if bias is None else bias.double(), **options)
    if residual is None:
        agree(conv(image), y, out)
    else:
        addend = bytes_(*y.shape)
        agree(conv(image, addend), y + real(addend, residual), out)


@pytest.mark.parametrize("out", [None, *OUTS], ids=str)
@pytest.mark.parametrize("post", [name for name in POSTS if name in OnednnConv.posts])
def test_conv_posts(post, out):
    q, qp, w = weight(24, 8, 3, 3)
    conv = OnednnConv(LayerSpec(q, qp, None, X, out, padding=1, post=POSTS[post][0]))
    image = activations(2, 8, 17, 13)
    agree(conv(image), POSTS[post][1](F.conv2d(real(image, X), w, padding=1)), out)


@pytest.mark.parametrize("out", OUTS, ids=str)
@pytest.mark.parametrize("post", [None, "relu", "relu6", "hardtanh"])
@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_residual(kind, post, out):
    rule, function = POSTS[post] if post else (None, lambda y: y)
    q, qp, w = weight(24, 16, 1, 1) if kind == "conv" else weight(24, 16)
    x = activations(2, 16, 9, 7) if kind == "conv" else activations(3, 5, 16)
    y = F.conv2d(real(x, X), w) if kind == "conv" else F.linear(real(x, X), w)
    residual = bytes_(*y.shape)
    before = residual.clone()
    kernel = OnednnConv if kind == "conv" else OnednnLinear
    y = function(y + real(residual, RESIDUAL))
    agree(kernel(LayerSpec(q, qp, None, X, out, post=rule, residual=RESIDUAL))(x, residual), y, out)
    assert torch.equal(residual, before)
    agree(kernel(LayerSpec(q, qp, None, X, out, post=rule, residual=RESIDUAL, inplace=True))(x, residual), y, out)
    with pytest.raises(BackendError, match="residual"):
        kernel(LayerSpec(q, qp, None, X, out, residual=RESIDUAL))(x, residual[:1])
    with pytest.raises(BackendError, match="residual"):
        kernel(LayerSpec(q, qp, None, X, out, residual=RESIDUAL))(x)


LAYERS = {
    "linear": (OnednnLinear, (4, 8), {}, [(2, 16), (2, 4), (64,), (0, 3, 9), (2, 0), ()], r"takes 8 features"),
    "residual": (OnednnLinear, (4, 8), {"residual": RESIDUAL}, [(2, 16), (0, 9)], r"takes 8 features"),
    "conv1d": (OnednnConv, (6, 4, 3), {}, [(1, 3, 9), (5, 9), (9,), (1, 1, 4, 9)], r"takes (4\.|3 dimensions, or 2)"),
    "conv2d": (
        OnednnConv,
        (6, 4, 3, 3),
        {},
        [(1, 3, 9, 9), (0, 5, 9, 9), (3, 9, 9)],
        r"input has [0-9] channels; .* 4\.",
    ),
    "dimensions": (
        OnednnConv,
        (6, 4, 3, 3),
        {},
        [(9, 9), (1, 1, 4, 9, 9)],
        r"takes 4 dimensions, or 3 without a batch",
    ),
    "groups": (OnednnConv, (6, 4, 3, 3), {"groups": 2}, [(1, 4, 9, 9), (1, 12, 9, 9)], r"the layer takes 8\."),
    "conv3d": (Conv3d, (6, 4, 3, 3, 3), {}, [(1, 3, 5, 5, 5), (5, 5, 5), (3, 5, 5, 5)], r"takes (4|5 dimensions)"),
    "transposed": (ConvTranspose2d, (4, 6, 3, 3), {}, [(1, 3, 5, 5), (5, 5)], r"(takes 4\.|takes 4 dimensions)"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_an_input_of_another_shape(name):
    """The message names the expected shape; oneDNN's own speaks of primitive descriptors."""
    kind, size, options, shapes, words = LAYERS[name]
    kernel = kind(LayerSpec(*weight(*size, axis=kind.channel_axis)[:2], None, X, OUTS[0], **options))
    for shape in shapes:
        inputs = [activations(*shape), *([bytes_(*shape[:-1], 4)] if "residual" in options else [])]
        with pytest.raises(InputError, match=words):
            kernel(*inputs)


def test_one_kernel_serves_every_input():
    q, qp, w = weight(16, 6, 3, 3)
    conv = OnednnConv(LayerSpec(q, qp, None, X, OUTS[0], padding=1))
    inputs = [activations(n, 6, h, 9) for n, h in [(1, 8), (3, 8), (0, 8), (1, 20), (2, 1), (1, 8), (4, 30)]]
    inputs += [
        activations(2, 12, 9, 9)[:, ::2],
        activations(2, 9, 9, 6).permute(0, 3, 1, 2),
        activations(1, 6, 9, 18)[..., 3:12],
    ]
    for x in [*inputs, activations(6, 9, 9)]:
        y = conv(x)
        agree(y, F.conv2d(real(x, X), w, padding=1), OUTS[0])
        assert x.dim() == 3 or y.is_contiguous(memory_format=CHANNELS_LAST)
    assert len(conv._derived.values_by_size) <= conv.max_cached_sizes


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options", [{}, {"groups": 8}, {"groups": 2, "padding": 1}, {"post": PostOp("leaky_relu", (0.1,))}]
)
def test_many_sizes_share_a_few_packed_weights(options, monkeypatch):
    """A kernel that was called with other sizes before returns what a new kernel returns."""
    q, qp, _ = weight(8, 8 // options.get("groups", 1), 3, 3)
    grid = QParams.per_tensor(0.0217, 50, 0, 127)
    conv, packed = OnednnConv(LayerSpec(q, qp, torch.randn(8), grid, OUTS[1], **options)), []
    prepack = torch.ops.onednn.qconv_prepack
    monkeypatch.setattr(x86_conv, "_onednn", Counting(packed, prepack))
    sizes = [(1, h, 5 + 3 * h) for h in range(3, 9)] + [(n, 9, 9) for n in range(1, 5)] + [(1, 33, 40), (2, 56, 56)]
    inputs = [torch.randint(0, 128, (n, 8, h, w_), dtype=torch.uint8) for n, h, w_ in sizes]
    results = [conv(x) for x in inputs for _ in range(2)]
    forms = 2 if options.get("groups", 1) > 1 and "post" in options else 1
    assert len(packed) <= x86_conv.MAX_PACKED_SIZES * forms
    monkeypatch.undo()
    for i, x in enumerate(inputs):
        fresh = copies(conv)[0]
        assert torch.equal(results[2 * i], fresh(x)) and torch.equal(results[2 * i + 1], fresh(x))


class Counting:
    """oneDNN's operators, which count how often a weight is packed."""

    def __init__(self, packed, prepack):
        self.packed, self.prepack = packed, prepack

    def qconv_prepack(self, *args):
        self.packed.append(args)
        return self.prepack(*args)

    def __getattr__(self, name):
        return getattr(torch.ops.onednn, name)


def test_same_padding():
    q, qp, w = weight(5, 4, 3, 5)
    x = activations(1, 4, 9, 9)
    agree(OnednnConv(LayerSpec(q, qp, None, X, None, padding="same"))(x), F.conv2d(real(x, X), w, padding="same"), None)
    assert OnednnConv.refuses(layer(5, 4, 2, 3, padding="same")) == "pads asymmetrically"


def test_copies_compute_the_same_and_hold_nothing_packed():
    x = activations(2, 8, 9, 7)
    q, qp, _ = weight(8, 4, 3, 3)
    kernels: list[Kernel] = [
        OnednnConv(LayerSpec(q, qp, torch.randn(8), X, OUTS[1], groups=2, padding=1, post=PostOp("relu6"))),
        ConvTranspose2d(layer(8, 3, 4, 4, axis=1, stride=2, padding=1, post=PostOp("relu"))),
        MaxPool2d(3, 2, 1),
        AvgPool2d(X, OUTS[0], 3, 2, 1),
        Mean(X, None, (2, 3), keepdim=True),
        AdaptiveAvgPool2d(X, OUTS[0], (3, None)),
        AdaptiveAvgPool2d(X, None, (2, 3)),
        Clamp(X, PostOp("relu6")),
        Pad(X, (1, 2, 0, 3)),
    ]
    for kernel in kernels:
        y = kernel(x)
        for copy in copies(kernel):
            assert not copy._derived
            assert torch.equal(copy(x), y)


def _of(largest, *shape):
    """An int8 weight with one entry other than 0."""
    values = torch.zeros(shape, dtype=torch.int8)
    values.view(-1)[0] = largest
    return values, QParams.per_tensor(1.0, 0, -128, 127, torch.int8), None


@pytest.mark.parametrize("largest", [127, -127, 65, -65, 64, -64])
@pytest.mark.parametrize("qmax", [255, 127])
def test_without_vnni_two_products_must_fit_int16(monkeypatch, largest, qmax):
    monkeypatch.setattr(cpu, "has_vnni", lambda: False)
    x = QParams.per_tensor(0.1, 3, 0, qmax)
    makers = [
        lambda: OnednnConv(LayerSpec(*_of(largest, 4, 2, 3, 3), x, None)),
        lambda: OnednnConv(LayerSpec(*_of(largest, 2, 1, 3, 3), x, None)),
        lambda: Conv3d(LayerSpec(*_of(largest, 4, 2, 3, 3, 3), x, None)),
        lambda: OnednnLinear(LayerSpec(*_of(largest, 4, 8), x, None)),
        lambda: ConvTranspose2d(LayerSpec(*_of(largest, 2, 4, 3, 3), x, None)),
    ]
    for make in makers:
        if 2 * qmax * abs(largest) < 2**15:
            make()
        else:
            with pytest.raises(BackendError, match=f"up to {qmax} and weights up to {abs(largest)} overflow; use 7"):
                make()


@pytest.mark.skipif(not cpu.has_exact_depthwise(), reason="oneDNN adds a depthwise convolution's products in int16")
def test_a_depthwise_convolution_takes_all_bits_on_any_cpu(monkeypatch):
    exact = cpu.has_exact_depthwise()
    monkeypatch.setattr(cpu, "has_vnni", lambda: False)
    monkeypatch.setattr(cpu, "has_exact_depthwise", lambda: exact)
    x = torch.randint(250, 256, (2, 24, 9, 7), dtype=torch.uint8)
    weight = torch.randint(100, 128, (24, 1, 3, 3)).to(torch.int8)
    unit = QParams.per_tensor(1.0, 0, -128, 127, torch.int8)
    y = OnednnConv(LayerSpec(weight, unit, None, QParams.per_tensor(1.0, 0), None, padding=1, groups=24))(x)
    assert torch.equal(y.double(), F.conv2d(x.double(), weight.double(), padding=1, groups=24))


def test_refusals():
    q, qp, _ = weight(4, 4, 3, 3)
    shifted = QParams(qp.scale, torch.ones(4, dtype=torch.int32), -127, 127, torch.int8, 0)
    signed = QParams.per_tensor(0.1, 0, -128, 127, torch.int8)
    wrong = {
        "a zero point other than 0": (q, shifted, None, X, None),
        "the input is int8": (q, qp, None, signed, None),
        "the output is int8": (q, qp, None, X, signed),
        "the kernels need axis 0": (q, replace(qp, axis=1), None, X, None),
    }
    for words, arguments in wrong.items():
        with pytest.raises(BackendError, match=rf"x86\.conv: .*{words}"):
            OnednnConv(LayerSpec(*arguments))
    image, rows = (4, 4, 3, 3), (4, 4)
    assert OnednnConv.refuses(layer(*image)) is None
    assert OnednnConv.refuses(layer(*image, post=PostOp("gelu", algorithm="none"))) == "the kernel has no gelu"
    assert OnednnConv.refuses(layer(*image, post=PostOp("silu"), residual=RESIDUAL)) == "silu after a residual"
    assert OnednnConv.refuses(layer(*image, 3)) == "3-d convolution has no kernel"
    assert OnednnConv.refuses(layer(*image, padding_mode="reflect")) == "pads with mode 'reflect'"
    assert "the sum is uint8" in OnednnConv.refuses(layer(*image, residual=RESIDUAL, out=None))
    assert OnednnConv.refuses(layer(*image, residual=replace(RESIDUAL, qmax=300))).startswith(
        "the residual has the grid"
    )
    assert OnednnLinear.refuses(layer(*rows)) is None
    assert OnednnLinear.refuses(layer(*rows, post=PostOp("prelu"), slope=torch.ones(1))) == "the kernel has no prelu"
    assert OnednnLinear.refuses(layer(*rows, post=PostOp("gelu", algorithm="other"))) == "gelu with approximate='other'"
    assert OnednnLinear.refuses(layer(*image)) == "2-d linear layer has no kernel"
    transposed = layer(*image, axis=1)
    assert ConvTranspose2d.refuses(transposed) is None
    assert ConvTranspose2d.refuses(replace(transposed, dilation=2)) == "dilated transposed convolution has no kernel"
    assert ConvTranspose2d.refuses(replace(transposed, residual=RESIDUAL)) == "it adds a residual"
    assert AvgPool2d.refuses(ceil_mode=True) and AvgPool2d.refuses(divisor_override=2)
    assert AvgPool2d.refuses(padding=1, count_include_pad=False) and not AvgPool2d.refuses(count_include_pad=False)
    with pytest.raises(BackendError, match="silu is not a clamp"):
        Clamp(X, PostOp("silu"))
    with pytest.raises(BackendError, match="pads with mode 'cubic'"):
        Pad(X, (1, 1), "cubic")
