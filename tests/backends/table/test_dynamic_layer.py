"""Layers with dynamic ranges, against float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxq.backends.kernel import PostOp
from fxq.backends.packed.packed_linear import PackedLinear
from fxq.backends.table.dynamic_layer import DynamicLayer
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.backends.x86.onednn_linear import OnednnLinear
from fxq.backends.x86.transposed_conv import ConvTranspose1d, ConvTranspose2d
from fxq.errors import BackendError
from fxq.quant.qparams import QParams
from tests.support.kernels import POSTS, activations, copies, weight
from tests.support.machine import QMAX, needs_x86
from tests.support.processes import in_new_python

pytestmark = needs_x86
MIDDLE = (QMAX + 1) // 2
STEPS = QParams.per_tensor(1.0, MIDDLE, 0, QMAX)
FROM_ZERO = QParams.per_tensor(1.0, 0, 0, QMAX)


def layer(*shape, axis=0, bias=True, **options):
    """Layer with input scale 1 that emits float, and its weight and bias in float64."""
    values, qparams, real = weight(*shape, axis=axis)
    channels = shape[axis] * (options.get("groups", 1) if axis else 1)
    b = torch.randn(channels) if bias else None
    return LayerSpec(values, qparams, b, STEPS, None, **options), real, None if b is None else b.double()


def check(kernel, spec, inputs, scale, function):
    """Compare a dynamic layer with float64 on the dequantized integers, up to float32 rounding.

    Once with the zero point that is known before, and once with one for each scale.
    """
    q, kernels = activations(*inputs), []
    drawn = torch.randint(0, QMAX + 1, scale.shape).float()
    for zero_point, x in (((), spec.x), ((drawn,), FROM_ZERO)):
        layer_kernel = DynamicLayer.of(kernel, replace(spec, x=x))
        arguments = (q, scale, *zero_point)
        wanted = function((q.double() - (zero_point[0].double() if zero_point else MIDDLE)) * scale.double())
        for _ in range(2):  # the second call is bound in a model; here it uses what the first has packed
            torch.testing.assert_close(layer_kernel(*arguments).double(), wanted, rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(layer_kernel.bind(*arguments)(*arguments).double(), wanted, rtol=1e-4, atol=2e-4)
        kernels.append(layer_kernel)
    return kernels[0], q


@pytest.mark.one_in(4)
@pytest.mark.parametrize("integers", [True, False], ids=["int_mm", "layer"])
@pytest.mark.usefixtures("loops")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_linear_layers(integers, data):
    """The product by `torch._int_mm`, and by the layer's kernel, as for large weights."""
    rows, inside, out = (data.draw(st.integers(1, 40)) for _ in range(3))
    post = data.draw(st.sampled_from([None, "relu", "relu6", "hardtanh", "gelu", "gelu_tanh"]))
    of, function = POSTS[post] if post else (None, lambda y: y)
    spec, w, b = layer(out, inside, bias=data.draw(st.booleans()), post=of)
    per_row = data.draw(st.booleans())
    scale = torch.rand(2, rows, 1) + 0.1 if per_row else torch.tensor(0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnednnLinear, "is_integer_product", lambda self, rows: integers and self._emits_sums)
        check(OnednnLinear, spec, (2, rows, inside), scale, lambda x: function(F.linear(x, w, b)))


@pytest.mark.parametrize("options", [{}, {"padding": 1, "stride": 2}, {"groups": 4, "padding": 2, "dilation": 2}])
@pytest.mark.parametrize("batch", [1, 3])
def test_convolutions(options, batch):
    """Padding is the zero point, whatever the scale."""
    groups = options.get("groups", 1)
    spec, w, b = layer(8, 8 // groups, 3, 3, **options, post=PostOp("relu"))
    scale = torch.rand(batch, 1, 1, 1) + 0.1
    check(OnednnConv, spec, (batch, 8, 9, 7), scale, lambda x: F.conv2d(x, w, b, **options).relu())


def test_transposed_convolutions():
    spec, w, b = layer(6, 5, 2, 2, axis=1, stride=2)
    check(ConvTranspose2d, spec, (2, 6, 4, 3), torch.rand(2, 1, 1, 1), lambda x: F.conv_transpose2d(x, w, b, stride=2))


@pytest.mark.parametrize("batch", [1, 5])  # as many as there are channels, too
def test_transposed_convolutions_of_signals(batch):
    spec, w, b = layer(6, 5, 1, 2, axis=1, stride=(1, 2))
    check(
        ConvTranspose1d, spec, (batch, 6, 4), torch.rand(batch, 1, 1),
        lambda x: F.conv_transpose1d(x, w.squeeze(2), b, stride=2),
    )  # fmt: skip


@pytest.mark.usefixtures("loops")
def test_no_input():
    spec, _, _ = layer(4, 6)
    assert DynamicLayer.of(OnednnLinear, spec)(activations(0, 6), torch.ones(0, 1)).shape == (0, 4)


def test_the_edges_of_an_image_are_padded_with_the_zero_point():
    """One sample, images of alternating sizes, and an edited weight: each has its own cached result for ones."""
    spec, w, b = layer(4, 3, 3, 3, padding=1)
    kernel, scale = DynamicLayer.of(OnednnConv, replace(spec, x=FROM_ZERO)), torch.rand(1, 1, 1) + 0.1
    for size, by in ((5, 1), (8, 1), (5, 2)):
        if by == 2:
            kernel.weight_scale.mul_(by)
        q, zero_point = activations(3, size, size), torch.full((1, 1, 1), 77.0)
        wanted = F.conv2d((q.double() - 77) * scale.double(), by * w, b, padding=1)
        torch.testing.assert_close(kernel(q, scale, zero_point).double(), wanted, rtol=1e-4, atol=2e-4)


@pytest.mark.usefixtures("loops")
def test_copies_and_edits():
    spec, w, b = layer(4, 6)
    scale = torch.rand(5, 1)
    original, q = check(OnednnLinear, spec, (5, 6), scale, lambda x: F.linear(x, w, b))
    for kernel in copies(original):
        assert torch.equal(kernel(q, scale), original(q, scale))
    before = original(q, scale)
    original.bias.add_(1.0)
    torch.testing.assert_close(original(q, scale), before + 1.0)
    original.weight.zero_()
    assert torch.equal(original(q, scale), original.bias.expand(5, 4))


def test_refusals():
    spec, _, _ = layer(4, 6)
    adds = LayerSpec(spec.weight, spec.weight_qparams, None, STEPS, None, residual=STEPS)
    assert DynamicLayer.refuses(OnednnLinear, adds) == "it adds a residual to a result with a dynamic scale"
    assert "convolution" in DynamicLayer.refuses(OnednnConv, spec)
    with pytest.raises(BackendError, match="silu"):
        DynamicLayer.of(OnednnLinear, layer(4, 6, post=POSTS["silu"][0])[0])(activations(1, 6), torch.ones(1, 1))
    assert not PackedLinear.emits_float or DynamicLayer.refuses(PackedLinear, spec) is None


@pytest.mark.slow
def test_a_file_is_read_where_no_kernel_was_imported_before(tmp_path):
    """The file has only the name of the layer's kernel, so unpickling does not import it."""
    spec, _, _ = layer(4, 3)
    kernel, q = DynamicLayer.of(OnednnLinear, spec), activations(2, 3)
    torch.save((kernel, q, kernel(q, torch.tensor(0.3))), tmp_path / "layer.pt")
    script = (
        f"import torch; kernel, q, y = torch.load({str(tmp_path / 'layer.pt')!r}, weights_only=False); "
        "assert torch.equal(kernel(q, torch.tensor(0.3)), y)"
    )
    done = in_new_python(script)
    assert done.returncode == 0, done.stderr
