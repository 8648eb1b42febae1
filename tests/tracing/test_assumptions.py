"""Plain values that follow from sizes, ranks and dtypes are traced, and the graph checks them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.common.metrics import sqnr
from tests.support.graphs import expected, graph, text
from tests.support.helpers import REFERENCE, module
from tests.support.machine import no_warnings
from tests.support.traced import X, close, conv

pytestmark = no_warnings


def test_arithmetic_on_sizes_stays_in_the_graph():
    model = module(lambda self, x: self.a(x).view(x.size(0), -1), a=conv())
    assert text(graph(model, X, "trace")) == expected("""
        x = input
        a = module Conv2d(x)
        size = .size(x, 0)
        view = .view(a, size, -1)
        return view
    """)
    assert close(model, X)(X[:1]).shape == (1, 192)


def by_channels(self, x):
    if x.shape[1] == 3:
        x = x * 2
    return self.a(x)


def test_a_branch_on_a_size_is_checked():
    gm = graph(module(by_channels, a=nn.Conv2d(3, 4, 1)), X, "trace")
    assert "check_same(eq, True, how='bool'" in text(gm)
    qmodel = (
        close(module(by_channels, a=nn.Identity(), b=conv()), X) if False else close(module(by_channels, a=conv()), X)
    )
    with pytest.raises(
        fxq.InputError, match=r"test_assumptions\.py:\d+: .*`if x.shape\[1\] == 3:` is True, but here it is Fal"
    ):
        qmodel(torch.rand(2, 4, 8, 8))
    assert qmodel(X[:2]).shape == (2, 3, 8, 8)


def needless(self, x):
    """The second operand, which is no traced value, decides at any size."""
    causal = x.shape[1] > 1 and self.is_causal
    return self.a(x) * 2 if causal else self.a(x)


def handed_on(self, x):
    """The branch's own value goes into a call where it is false."""
    causal = x.shape[1] > 1 and self.is_causal
    return F.scaled_dot_product_attention(self.a(x), x, x, is_causal=causal)


def either(self, x):
    """Sizes that, if both are one, give another graph."""
    return self.a(x) if x.shape[2] > 1 or x.shape[3] > 1 else self.a(x) * 2


def halved(self, x):
    """A loop that the example does not enter."""
    while x.shape[2] > 64:
        x = F.max_pool2d(x, 2)
    return self.a(x)


def counted(self, x):
    """A line that branches several times in one run."""
    return self.a(x) * (2 if len([size for size in x.shape if size > 1]) > 0 else 3)


@pytest.mark.parametrize("function", [needless, handed_on])
def test_a_branch_that_makes_no_difference_is_not_checked(function):
    """Also of several layers, which share the line."""

    class Block(nn.Module):
        is_causal = False
        forward = function

        def __init__(self):
            super().__init__()
            self.a = conv()

    model = nn.Sequential(Block(), Block()).eval()
    gm = graph(model, X, "trace")
    assert "check_same" not in text(gm) and "gt" not in text(gm)
    quantized = fxq.quantize(model, REFERENCE, data=[X])
    assert quantized(X[:, :, :1, :1]).shape == model(X[:, :, :1, :1]).shape


@pytest.mark.parametrize("forward", [by_channels, either, halved, counted])
def test_a_branch_that_might_make_one_is(forward):
    gm = graph(module(forward, a=conv()), X, "trace")
    assert "check_same" in text(gm)


class Stateful(nn.Module):
    """Changes its state after all ops, at a size that the example does not have."""

    def __init__(self, change, first):
        super().__init__()
        self.a, self.n, self.kept, self.change, self.first = conv(), 0, [], change, first

    def forward(self, x):
        if self.first:
            y = self.a(x) * (1 + self.n + len(self.kept))
        if x.shape[2] == 2:
            self.change(self)
        return y if self.first else self.a(x) * (1 + self.n + len(self.kept))


def count(module):
    module.n += 1


def append(module):
    module.kept.append(1)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("change", [count, append])
def test_a_branch_that_changes_state_is_checked(change, first):
    """The graph has no such branch: without the check, later calls would differ from those of the model."""
    model = Stateful(change, first).eval()
    qmodel = close(model, X)
    assert (model.n, model.kept) == (0, [])
    with pytest.raises(fxq.InputError, match=r"`if x.shape\[2\] == 2:` is False, but here it is True"):
        qmodel(X[:, :, :2])
    assert qmodel(X[:, :, :3]).shape == (*X.shape[:2], 3, X.shape[3])


def test_a_branch_that_counts_what_no_code_reads_is_not():
    def forward(self, x):
        if x.shape[2] == 2:
            self.calls = 1
        return self.a(x)

    assert "check_same" not in text(graph(module(forward, a=conv()), X, "trace"))


def unpacked(self, x):
    n, c, h, w = x.shape
    return self.a(x).reshape(n, c * h, w)


def looped(self, x):
    for i in range(x.shape[2] // 4):
        x = self.a(x) + i
    return x


def chunks(self, x):
    total = 0
    for part in x.chunk(3, 1):
        total = total + part
    for part in x.split(1, dim=1):
        total = total + part
    for part in torch.unbind(x, 1):
        total = total + part.unsqueeze(1)
    return self.a(total + x)


def questions(self, x):
    if x.dim() == 4 and x.dtype == torch.float32 and x.is_floating_point() and isinstance(x, torch.Tensor):
        return self.a(x) * len(x)
    return x


def numbers(self, x):
    size = int(x.shape[2] // 2), round(x.shape[3] / 3)
    return F.interpolate(self.a(x), size=size) * math.sqrt(x.shape[1]) * max(x.shape[2], 4) * float(x.shape[2])


def masks(self, x):
    n, s = x.shape[0], x.shape[2]
    mask = torch.ones(n, 1, s, s, device=x.device).tril().to(x.dtype)
    if mask.dim() == 4:
        mask = (1 - mask) * torch.finfo(x.dtype).min
    position = torch.arange(s, device=x.device).expand(n, -1)
    return torch.softmax(self.a(x) + mask, -1) + position[:, None, None, :] + self.table[:, :s]


FORWARDS = [(unpacked, True), (looped, True), (chunks, True), (questions, False), (numbers, True), (masks, True)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("forward", "any_batch"), FORWARDS)
def test_what_sizes_decide_goes_through(forward, any_batch):
    model = module(forward, a=conv())
    model.register_buffer("table", torch.randn(8, 16))
    qmodel = close(model, X)
    if any_batch:
        with torch.no_grad():
            assert sqnr(model(X[:3]), qmodel(X[:3])) > 30
    else:
        with pytest.raises(fxq.InputError, match="is 4, but here it is 3"):
            qmodel(X[:3])


@pytest.mark.parametrize("forward", [looped, chunks, numbers])
def test_another_size_is_an_error_or_right(forward):
    model = module(forward, a=conv())
    qmodel = close(model, X)
    with pytest.raises(fxq.InputError, match="the graph was traced with inputs for which"):
        qmodel(torch.rand(4, 4 if forward is chunks else 3, 12, 12))


def test_checks_do_not_stop_quantization_around_them():
    def forward(self, x):
        x = self.a(x)
        if x.shape[1] == 3:
            x = self.b(x)
        return self.c(x)

    qmodel = close(module(forward, a=conv(), b=conv(), c=conv()), X)
    assert [e.precision for e in qmodel.ledger] == ["int8"] * 3
    quantized = [n for n in qmodel.history["insert-qdq"].graph if n.label == "quantize"]
    assert len(quantized) == 3


class AssertingNorm(nn.BatchNorm2d):
    """As timm writes it."""

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        assert len(x.shape) == x.dim()
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


def test_ranks_are_no_nodes_that_stand_between_ops():
    model = module(lambda self, x: F.relu(self.norm(self.a(x))), a=conv(), norm=AssertingNorm(3))
    assert text(graph(model, X, "fold-batch-norm")) == expected("""
        x = input
        check_fixed = check_fixed({'x': x}, {'x': '<a tensor with 4 axes>'})
        a = conv2d(x, @fxq_data.a_weight_folded, @fxq_data.a_bias_folded, padding=(1, 1))
        relu = relu(a)
        return relu
    """)


def test_another_rank_than_the_example_has_is_refused():
    model = module(lambda self, x: self.a(x) if x.dim() == 2 else self.a(x).mean(1), a=nn.Linear(8, 3))
    qmodel = close(model, X[0, 0])
    with pytest.raises(fxq.InputError, match=r"x=a tensor with 2 axes, .* got a tensor of float32 with 3 axes"):
        qmodel(X[0])


@pytest.mark.parametrize("squeezed", [lambda x: x.squeeze(), lambda x: torch.squeeze(x, 0)])
def test_ranks_after_a_squeeze_depend_on_sizes_and_are_checked(squeezed):
    def forward(self, x):
        y = squeezed(self.a(x))
        return y.flatten(1) if y.dim() == 4 else y.flatten()

    qmodel = close(module(forward, a=conv()), X)
    with pytest.raises(fxq.InputError, match=r"bool of a value in `.*y.dim\(\) == 4.*` is True"):
        qmodel(X[:1])


def on_the_device(self, x):
    if x.device.type == "meta":
        return x
    with torch.autocast(device_type=self.a(x).device.type, enabled=False):
        return self.a(x)


def test_devices_that_decide_are_checked():
    gm = graph(module(on_the_device, a=conv()), X, "trace")
    assert "check_fixed({'x': x}, {'x': '<a tensor on cpu>'})" in text(gm) and "check_same" not in text(gm)
    close(module(on_the_device, a=conv()), X)
    with pytest.raises(fxq.InputError, match=r"for x=a tensor on cpu, .* got a tensor of float32 on meta"):
        gm(X.to("meta"))


def test_dtypes_that_decide_are_checked():
    qmodel = close(module(lambda self, x: self.a(x) if x.dtype == torch.float32 else x, a=conv()), X)
    with pytest.raises(
        fxq.InputError, match="traced for x=a tensor of float32, as in the example, but got a tensor of"
    ):
        qmodel(X.double())
