"""Edited tensors of kernels count at the next call, on every backend, bound or not; what cannot be edited raises."""

import copy

import pytest
import torch
from torch import nn

import fxq
from fxq.backends.kernel import Kernel, PostOp
from fxq.backends.packed.quantized_tensors import has_engine
from fxq.backends.plain.binary import Add
from fxq.backends.plain.pool import Mean
from fxq.backends.table.layer_kernel import LayerKernel
from fxq.backends.table.layer_spec import LayerSpec
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.backends.x86.onednn_linear import OnednnLinear
from fxq.errors import BackendError, InputError
from fxq.quant.qparams import QParams
from tests.support.helpers import module
from tests.support.kernels import weight
from tests.support.machine import needs_x86

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
ONEDNN = needs_x86
ENGINES = [
    pytest.param("x86", marks=ONEDNN),
    *(
        pytest.param(name, marks=pytest.mark.skipif(not has_engine(name), reason=f"needs {name}"))
        for name in ("fbgemm", "qnnpack")
    ),
]


def quantized(backend):
    """Two convolutions with a PReLU between them, a transposed one, and a layer of one row with float output."""
    torch.manual_seed(0)

    def forward(self, x):
        y = self.up(self.act(self.a(x).relu()))
        return self.last(self.b(y).mean((2, 3)))

    parts = {"a": nn.Conv2d(3, 8, 3, padding=1), "act": nn.Conv2d(8, 8, 1), "up": nn.ConvTranspose2d(8, 8, 2, stride=2)}
    model = module(forward, **parts, b=nn.Conv2d(8, 6, 3), last=nn.Linear(6, 5))
    return fxq.quantize(model, fxq.Recipe.static(backend=backend, optimize="coverage"), data=[X])


def weighted(qmodel):
    return [(path, m) for path, m in qmodel.named_modules() if isinstance(m, LayerKernel)]


def assigned_data(tensor, value):
    tensor.data = value


EDITS = {
    "another bias": lambda k: setattr(k, "bias", k.bias + 100 * k.weight_scale.max()),
    "a parameter as bias": lambda k: setattr(k, "bias", nn.Parameter(k.bias * -2)),
    "the bias in place": lambda k: k.bias.mul_(-3),
    "the data of the bias": lambda k: assigned_data(k.bias, k.bias * -3),
    "another weight": lambda k: setattr(k, "weight", k.weight.neg()),
    "the weight in place": lambda k: k.weight.neg_(),
    "a part of the weight in place": lambda k: k.weight[1:].zero_(),
    "the data of the weight": lambda k: assigned_data(k.weight, k.weight.neg()),
    "the scale in place": lambda k: k.weight_scale.mul_(0.25),
    "another scale": lambda k: setattr(k, "weight_scale", k.weight_scale / 4),
    "through an alias": lambda k: k.weight.detach().view(-1).fill_(7),
}


@pytest.mark.one_in(33)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("backend", ENGINES)
def test_an_edited_tensor_counts_at_the_next_call(backend, edit):
    """The results are those of a fresh copy, which packs and binds anew."""
    qmodel = quantized(backend)
    paths = [path for path, kernel in weighted(qmodel)]
    assert len(paths) >= 4
    for calls, path in enumerate(paths):  # not called before, called once, bound, ...
        for x in (X, X[:1]):
            for _ in range(calls % 4):
                qmodel(x)
        before = [copy.deepcopy(qmodel)(x) for x in (X, X[:1])]
        with torch.no_grad():
            EDITS[edit](qmodel.get_submodule(path))
        for x, old in zip((X, X[:1]), before, strict=True):
            got = qmodel(x)
            assert torch.equal(got, copy.deepcopy(qmodel)(x)), path
            assert not torch.equal(got, old), path
            assert torch.equal(qmodel(x), got) and torch.equal(qmodel(x), got), path


@pytest.mark.parametrize("backend", ENGINES)
def test_another_bias_is_added(backend):
    """Against numbers: the last layer, which emits float where the engine can, with its bias raised by 100."""
    qmodel = quantized(backend)
    _, last = weighted(qmodel)[-1]
    if last.out is not None:
        pytest.skip(f"{backend} emits no float")
    for _ in range(3):
        before = qmodel(X[:1])
    last.bias = last.bias + 100
    torch.testing.assert_close(qmodel(X[:1]), before + 100, rtol=0, atol=1e-4)
    last.bias.add_(100)
    torch.testing.assert_close(qmodel(X[:1]), before + 200, rtol=0, atol=1e-4)


@ONEDNN
def test_tensors_of_inference_mode_can_be_edited():
    """They do not count how often they are written to."""
    with torch.inference_mode():
        qmodel = copy.deepcopy(quantized("x86"))
        _, kernel = weighted(qmodel)[0]
        for name, tensor in list(kernel._buffers.items()):
            kernel._buffers[name] = None if tensor is None else tensor.clone()
        assert kernel.bias.is_inference()
        for _ in range(3):
            before = qmodel(X)
        kernel.bias.mul_(-3)
        got = qmodel(X)
    assert torch.equal(got, copy.deepcopy(qmodel)(X)) and not torch.equal(got, before)


@ONEDNN
def test_a_model_that_was_moved_can_be_edited():
    qmodel = quantized("x86")
    for _ in range(3):
        qmodel(X)
    qmodel.to(memory_format=torch.channels_last)
    for _, kernel in weighted(qmodel):
        kernel.bias.mul_(-3)
    assert torch.equal(qmodel(X), copy.deepcopy(qmodel)(X))


@ONEDNN
@pytest.mark.parametrize("shape", [(4, 4), (16, 8, 3, 3), ()])
def test_another_shape_raises(shape):
    q, qp, _ = weight(8, 4, 3, 3)
    kernel = OnednnConv(LayerSpec(q, qp, torch.randn(8), QParams.per_tensor(0.02, 9, 0, 127), None))
    x = torch.randint(0, 128, (1, 4, 5, 5), dtype=torch.uint8)
    kernel(x)
    kernel.weight = torch.ones(shape, dtype=torch.int8)
    with pytest.raises(InputError, match=r"x86\.conv: weight was int8 \[8, 4, 3, 3\] and is int8 .*from_config"):
        kernel(x)
    kernel.weight = q
    kernel(x)
    kernel.bias = torch.randn(8, dtype=torch.float64)
    with pytest.raises(InputError, match=r"bias was float32 \[8\] and is float64 \[8\]"):
        kernel(x)
    kernel.bias = None
    with pytest.raises(InputError, match=r"bias was float32 \[8\] and is None"):
        kernel(x)


@ONEDNN
def test_what_the_kernel_refuses_raises():
    q, qp, _ = weight(8, 4, 3, 3)
    grid = QParams.per_tensor(0.02, 9, 0, 127)
    slopes = torch.linspace(0, 0.5, 8)
    kernel = OnednnConv(LayerSpec(q, qp, None, grid, grid, post=PostOp("prelu"), slope=slopes))
    x = torch.randint(0, 128, (1, 4, 5, 5), dtype=torch.uint8)
    kernel(x)
    kernel.slope[0] = 2.0
    with pytest.raises(BackendError, match="slopes above 1 in some channels"):
        kernel(x)


@ONEDNN
def test_edited_weights_whose_sums_leave_int32_are_refused():
    rows = torch.ones(2, 140_000, dtype=torch.int8)
    scale = QParams(torch.ones(()), torch.zeros((), dtype=torch.int32), -127, 127, torch.int8)
    kernel = OnednnLinear(LayerSpec(rows, scale, None, QParams.per_tensor(0.02, 0, 0, 127), None))
    x = torch.full((2, 140_000), 127, dtype=torch.uint8)
    torch.testing.assert_close(kernel(x), torch.full((2, 2), 140_000 * 127 * 0.02), rtol=1e-6, atol=0.0)
    kernel.weight.fill_(127)
    with pytest.raises(BackendError, match="beyond int32"):
        kernel(x)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (lambda grid: Add(grid, grid, grid), "out"),
        (lambda grid: Mean(grid, grid, (1,)), "dim"),
        (lambda grid: OnednnConv(LayerSpec(*weight(8, 4, 3, 3)[:2], None, grid, grid)), "stride"),
    ],
)
def test_options_are_fixed(kernel, name):
    built: Kernel = kernel(QParams.per_tensor(0.02, 9, 0, 127))
    with pytest.raises(InputError, match=rf"{name} is fixed: .*from_config"):
        setattr(built, name, (2, 2))
