"""The function that `bind` of a kernel returns computes what `forward` does, also for other inputs of that kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fxq.backends.kernel import Kernel, PostOp
from fxq.backends.plain import binary as arithmetic
from fxq.backends.plain.clamp_and_pad import Clamp, Pad
from fxq.backends.plain.converters import Dequantize, PReLUQuantize, Quantize, Requantize
from fxq.backends.plain.lookup import Lookup
from fxq.backends.plain.pool import AdaptiveMaxPool, MaxPool2d, MaxPool3d, Mean
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86 import onednn_binary as x86_elementwise
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.backends.x86.onednn_linear import OnednnLinear
from fxq.backends.x86.onednn_pool import AdaptiveAvgPool2d, AvgPool2d
from fxq.backends.x86.squeeze_excite import SqueezeExcite
from tests.support.kernels import OUTS, RESIDUAL, X, activations, weight
from tests.support.machine import needs_x86

pytestmark = needs_x86
OUT, NARROW = OUTS[0], OUTS[1]
IMAGES = [(2, 8, 6, 6), (1, 8, 1, 1), (1, 8, 6, 1), (3, 8, 7, 9)]
SLOPES = torch.linspace(-0.2, 0.9, 8)


def conv(**options: object) -> Kernel:
    size = options.pop("size", 1)
    per_group = 8 // options.get("groups", 1)  # type: ignore[operator]
    values, qparams, _ = weight(8, per_group, size, size)  # type: ignore[arg-type]
    out = options.pop("out", OUT)
    return OnednnConv(LayerSpec(values, qparams, torch.randn(8), X, out, **options))  # type: ignore[arg-type]


def linear(features: int, **options: object) -> Kernel:
    values, qparams, _ = weight(5, features)
    return OnednnLinear(LayerSpec(values, qparams, torch.randn(5), X, options.pop("out", OUT), **options))  # type: ignore[arg-type]


def excite(out: object = OUT) -> Kernel:
    squeeze, single, _ = weight(3, 8)
    back, two, _ = weight(8, 3)
    return SqueezeExcite(squeeze, single.scale, back, two.scale, X, out, "relu", "hardsigmoid")  # type: ignore[arg-type]


OF_IMAGES = {
    "conv": lambda: conv(),
    "conv padded": lambda: conv(size=3, padding=1),
    "conv strided": lambda: conv(size=3, padding=2, stride=2),
    "depthwise": lambda: conv(size=3, padding=1, groups=8),
    "conv to float": lambda: conv(out=None),
    "conv relu6 narrow": lambda: conv(post=PostOp("relu6"), out=NARROW),
    "conv hardswish": lambda: conv(post=PostOp("hardswish"), out=NARROW),
    "conv leaky_relu": lambda: conv(post=PostOp("leaky_relu", (0.1,))),
    "conv prelu": lambda: conv(post=PostOp("prelu"), slope=SLOPES),
    "conv prelu in groups": lambda: conv(post=PostOp("prelu"), slope=SLOPES, groups=2),
    "conv prelu to float": lambda: conv(post=PostOp("prelu"), slope=SLOPES, out=None),
    "quantize": lambda: Quantize(OUT),
    "prelu quantize": lambda: PReLUQuantize(SLOPES, OUT),
    "dequantize": lambda: Dequantize(X),
    "requantize": lambda: Requantize(X, OUT),
    "clamp": lambda: Clamp(X, PostOp("relu6")),
    "pad": lambda: Pad(X, (1, 0, 2, 1)),
    "max_pool2d": lambda: MaxPool2d(3, 2, 1),
    "max_pool3d": lambda: MaxPool3d((1, 2, 1), 1, (0, 1, 0)),
    "adaptive max": lambda: AdaptiveMaxPool((1, None)),
    "avg_pool2d": lambda: AvgPool2d(X, OUT, (1, 1)),
    "adaptive average": lambda: AdaptiveAvgPool2d(X, OUT, (1, 1)),
    "mean": lambda: Mean(X, OUT, (2, 3), keepdim=True),
    "mean to float": lambda: Mean(X, None, (1,)),
    "sum": lambda: Mean(X, NARROW, (-1,), total=True),
    "squeeze_excite": lambda: excite(),
    "squeeze_excite to float": lambda: excite(None),
    "table": lambda: Lookup.of(torch.sigmoid, "sigmoid", X, OUT),
    "table per channel": lambda: Lookup.of(lambda x: x * SLOPES, "scale", X, OUT, 8),
}
OF_TWO = {
    "add": lambda: arithmetic.Add(X, RESIDUAL, OUT),
    "sub": lambda: arithmetic.Add(X, RESIDUAL, NARROW, sign=-1),
    "mul": lambda: arithmetic.Mul(X, RESIDUAL, OUT),
    "x86 add": lambda: x86_elementwise.OnednnAdd(X, RESIDUAL, OUT),
    "x86 sub": lambda: x86_elementwise.OnednnAdd(X, RESIDUAL, OUT, sign=-1),
    "x86 add in place": lambda: x86_elementwise.OnednnAdd(X, RESIDUAL, OUT, inplace=True),
    "x86 mul": lambda: x86_elementwise.OnednnMul(X, RESIDUAL, NARROW),
    "conv add": lambda: conv(residual=RESIDUAL),
    "conv add relu": lambda: conv(residual=RESIDUAL, post=PostOp("relu"), out=NARROW),
    "conv add in place": lambda: conv(residual=RESIDUAL, inplace=True, size=3, padding=1),
}


def layouts(x: Tensor) -> Iterator[Tensor]:
    """`x` in other memory layouts."""
    yield x
    if x.dim() == 4:
        yield x.contiguous(memory_format=torch.channels_last)
    yield torch.cat([x[:1], x])[1:]
    yield x.transpose(-1, -2).contiguous().transpose(-1, -2)
    yield torch.repeat_interleave(x, 2, -1)[..., ::2]
    yield x[:1].expand(x.shape)
    yield x[:0]


def again(x: Tensor) -> Tensor:
    """Return other values with the same shape, strides and dtype; expanded dimensions stay expanded."""
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    part = y[
        tuple(slice(0, 1) if step == 0 and n else slice(None) for n, step in zip(x.shape, x.stride(), strict=True))
    ]
    part.copy_(activations(*part.shape).to(x.dtype) / (1 if x.dtype == torch.uint8 else 50))
    return y


def bound_as_run(kernel: Kernel, *inputs: Tensor) -> None:
    """Check that the kernel bound to these inputs returns what `forward` returns, or raises what it raises."""
    try:
        expected = kernel(*map(torch.clone, inputs))
    except Exception as error:
        with pytest.raises(type(error)):
            kernel.callable_for(*inputs)(*map(torch.clone, inputs))
        return
    run = kernel.callable_for(*inputs)
    for values in (inputs, tuple(map(again, inputs))):
        copied = [again(x).copy_(x) if 0 not in x.stride() else x for x in values]
        expected = kernel(*[again(x).copy_(x) if 0 not in x.stride() else x for x in values])
        got = run(*copied)
        assert got.shape == expected.shape and got.stride() == expected.stride() and got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", IMAGES, ids=str)
@pytest.mark.parametrize("name", OF_IMAGES)
def test_image(name, shape):
    torch.manual_seed(0)
    kernel = OF_IMAGES[name]()
    image = (
        activations(*shape).float() / 50 - 2
        if "quantize" in name and name not in ("dequantize", "requantize")
        else None
    )
    for x in layouts(activations(*shape) if image is None else image):
        bound_as_run(kernel, x)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("shape", [*IMAGES, (1, 64, 40, 40)], ids=str)
@pytest.mark.parametrize("name", OF_TWO)
def test_two_tensors(name, shape):
    torch.manual_seed(0)
    kernel = OF_TWO[name]()
    for x in layouts(activations(*shape)):
        for second in layouts(activations(*shape)):
            if not (kernel.inplace and 0 in second.stride() and second.numel()):
                bound_as_run(kernel, x, second)


@pytest.mark.parametrize("others", [(1, 1, 1, 1), (1, 8, 1, 1), (2, 8, 1, 1), (8, 6, 6), (1,)], ids=str)
@pytest.mark.parametrize("name", ["add", "mul", "x86 add", "x86 mul"])
def test_two_tensors_that_broadcast(name, others):
    torch.manual_seed(0)
    kernel = OF_TWO[name]()
    for x in layouts(activations(2, 8, 6, 6)):
        bound_as_run(kernel, x, activations(*others))
        bound_as_run(kernel, activations(*others), x)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("gate", [(1, 64, 1, 1), (2, 64, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["mul", "x86 mul"])
def test_a_large_product_with_a_gate(name, gate):
    torch.manual_seed(0)
    kernel = OF_TWO[name]()
    for x in layouts(activations(2, 64, 50, 50)):
        bound_as_run(kernel, x, activations(*gate))
        bound_as_run(kernel, activations(*gate), x)


@pytest.mark.parametrize("out", [OUT, None], ids=["integers", "floats"])
@pytest.mark.parametrize("shape", [(4, 6), (1, 6), (6,), (1, 1, 6), (2, 3, 6), (1, 1)], ids=str)
def test_linear(shape, out):
    torch.manual_seed(0)
    kernel = linear(shape[-1], out=out)
    for x in layouts(activations(*shape)) if len(shape) > 1 else [activations(*shape), activations(12)[::2]]:
        bound_as_run(kernel, x)
    bound_as_run(kernel, activations(2, 2 * shape[-1])[:1, : shape[-1]])
    bound_as_run(kernel, activations(2, shape[-1] + 1))  # refused


@pytest.mark.parametrize("inplace", [False, True])
def test_linear_add(inplace):
    torch.manual_seed(0)
    kernel = linear(6, residual=RESIDUAL, inplace=inplace, post=PostOp("relu"), out=NARROW)
    for x in layouts(activations(4, 6)):
        bound_as_run(kernel, x, activations(x.shape[0], 5))


def test_a_large_tensor_is_walked_over():
    torch.manual_seed(0)
    for kernel, x in ((Quantize(OUT), torch.randn(600, 700)), (Dequantize(X), activations(600, 700))):
        bound_as_run(kernel, x)
        bound_as_run(kernel, x.t())
