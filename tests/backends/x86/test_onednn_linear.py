"""Linear layers against float64, including single rows with float results, which may run on `_int_mm`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fxq.backends import cpu
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86 import onednn_linear
from fxq.backends.x86.onednn_linear import OnednnLinear
from fxq.errors import InputError
from fxq.quant.qparams import QParams
from tests.support.kernels import (
    OUTS,
    POSTS,
    RESIDUAL,
    ZERO_POINTS,
    X,
    activations,
    agree,
    bytes_,
    copies,
    real,
    weight,
)
from tests.support.machine import QMAX, needs_x86

pytestmark = needs_x86
SEVEN_BITS = QParams.per_tensor(0.0217, 51, 0, 127)  # a grid that every CPU takes


@pytest.mark.parametrize("shape", [(33,), (1, 33), (1, 1, 33)])
@pytest.mark.parametrize("quick", [True, False])
def test_one_row_is_right_either_way(shape, quick, monkeypatch):
    product, asked = torch._int_mm, []
    monkeypatch.setattr(torch, "_int_mm", lambda *operands: asked.append(1) or product(*operands))
    monkeypatch.setattr(cpu, "has_int_mm", lambda: quick)
    q, qp, w = weight(40, 33)
    bias = torch.randn(40)
    linear = OnednnLinear(LayerSpec(q, qp, bias, SEVEN_BITS, None))
    x = torch.randint(0, 128, shape, dtype=torch.uint8)
    wanted = real(x, SEVEN_BITS) @ w.T + bias.double()
    for got in (linear(x), linear.bind(x)(x)):
        assert got.shape == (*shape[:-1], 40) and got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    assert bool(asked) is quick


@pytest.fixture(params=[True, False], ids=["matmul", "convolution"])
def matmul(request, monkeypatch):
    """Both kernels for many rows, regardless of which one this CPU would use."""
    monkeypatch.setattr(cpu, "has_integer_matmul", lambda: request.param)
    monkeypatch.setattr(onednn_linear, "MIN_CONV_WEIGHT_ELEMENTS", 0)
    return request.param


@pytest.mark.one_in(3)
@pytest.mark.parametrize("out", [None, *OUTS], ids=str)
@pytest.mark.parametrize("post", [None, *(name for name in POSTS if name in OnednnLinear.posts)])
def test_linear(post, out, matmul):
    rule, function = POSTS[post] if post else (None, lambda y: y)
    q, qp, w = weight(40, 33)
    linear = OnednnLinear(LayerSpec(q, qp, torch.ones(40), X, out, post=rule))
    for shape in [(33,), (0, 33), (7, 33), (2, 3, 5, 33)]:
        x = activations(*shape)
        agree(linear(x), function(F.linear(real(x, X), w, torch.ones(40).double())), out)
    x = activations(33, 6).t()
    assert torch.equal(linear(x), linear(x.contiguous()))
    for copy in copies(linear):
        assert torch.equal(copy(x), linear(x))
    assert ("taps" in linear._derived.values) is not (matmul or post in ("gelu", "leaky_relu", "tanh"))
    linear.weight.neg_()
    agree(linear(x), function(F.linear(real(x, X), -w, torch.ones(40).double())), out)


@pytest.mark.slow
@settings(max_examples=45, deadline=None)
@given(st.data())
def test_linear_of_one_row_in_float(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    inputs, outputs = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    x = QParams.per_tensor(0.0217, draw(st.sampled_from(ZERO_POINTS)), 0, QMAX)
    q, qp, w = weight(outputs, inputs, axis=draw(st.sampled_from([0, 0, None])))
    bias = draw(st.sampled_from([None, torch.randn(outputs)]))
    row = draw(st.sampled_from([activations(inputs), activations(2 * inputs)[::2], activations(inputs + 5)[5:]]))
    linear = OnednnLinear(LayerSpec(q, qp, bias, x, None))
    y = F.linear(real(row, x), w, None if bias is None else bias.double())
    for shape in [(inputs,), (1, inputs), (1, 1, 1, inputs)]:
        agree(linear(row.reshape(shape)), y.view(*shape[:-1], outputs), None)
    for strides in [(1, 1), (7 * inputs, 1)]:
        agree(linear(row.contiguous().as_strided((1, inputs), strides)), y.view(1, -1), None)
    for copy in copies(linear):
        assert not copy._derived and torch.equal(copy(row), linear(row))


@pytest.mark.parametrize("shape", [(33,), (1, 33), (6, 33), (2, 3, 33)], ids=str)
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("out", OUTS, ids=str)
def test_a_residual_is_overwritten_only_where_it_may_be(out, inplace, shape, matmul):
    q, qp, w = weight(40, 33)
    linear = OnednnLinear(LayerSpec(q, qp, None, X, out, residual=RESIDUAL, inplace=inplace))
    x, residual = activations(*shape), bytes_(*shape[:-1], 40)
    kept, wanted = residual.clone(), F.linear(real(x, X), w) + real(residual, RESIDUAL)
    agree(linear(x, residual.clone()), wanted, out)
    y = linear.bind(x, residual)(x, residual)
    agree(y, wanted, out)
    assert (inplace or torch.equal(residual, kept)) and ("taps" in linear._derived.values) is not matmul


def test_an_image_of_rows_has_as_many_features_as_the_layer(matmul):
    linear = OnednnLinear(LayerSpec(*weight(40, 33)[:2], None, X, None))
    with pytest.raises(InputError, match="the layer takes 33 features"):
        linear(activations(33, 66))


@pytest.mark.parametrize("residual", [None, RESIDUAL], ids=["alone", "residual"])
@pytest.mark.parametrize("shape", [(0, 3, 33), (2, 0, 33), (0, 33)], ids=str)
def test_linear_of_nothing(shape, residual):
    for out in OUTS if residual else [None, *OUTS]:
        linear = OnednnLinear(LayerSpec(*weight(40, 33)[:2], None, X, out, residual=residual))
        others = [bytes_(*shape[:-1], 40)] if residual else []
        agree(linear(activations(*shape), *others), torch.zeros(*shape[:-1], 40, dtype=torch.float64), out)
