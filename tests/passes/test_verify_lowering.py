"""verify-lowering: a kernel that is wrong is found, warned about and put back."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fxq
from fxq.backends import lower_graph
from fxq.backends.kernel import Kernel
from fxq.backends.plain.converters import Dequantize, PReLUQuantize, Quantize, Requantize
from fxq.backends.plain.pool import MaxPool2d
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.backends.x86.onednn_linear import OnednnLinear
from fxq.common.metrics import sqnr
from fxq.graph.view import view
from fxq.passes.verify_lowering import VerifyLowering
from tests.support.graphs import again, equal, expected, kinds, text, until
from tests.support.helpers import REFERENCE, steps
from tests.support.kernels import planted
from tests.support.machine import X86, decibels, needs_x86, quiet, told
from tests.support.models import NETWORKS, batch, build, call


@pytest.mark.one_in(8)
@needs_x86
@pytest.mark.parametrize("name", NETWORKS)
def test_right_kernels_stay(name):
    with quiet():
        manager = until(build(name), batch(name), "verify-lowering", X86)
    assert manager.history["verify-lowering"].edits == ()
    assert text(manager.history["verify-lowering"].graph) == text(manager.history["lower"].graph)
    assert again(manager, VerifyLowering()) == []


def crooked(y):
    return y + 2 if y.dtype == torch.uint8 else y * 1.01


def raising(y):
    raise RuntimeError("no primitive")


def transposed(y):
    return y.transpose(-1, -2)[..., :1]


def other_dtype(y):
    return y.to(torch.int16)


def half_of_it(y):
    """One step off in half of the elements: no tie explains that."""
    y = y.clone()
    y[::2] ^= 1
    return y


def not_a_number(y):
    return y * float("nan") if y.dtype == torch.float32 else y + 2


@pytest.mark.one_in(4)
@needs_x86
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (crooked, "off by"),
        (raising, "it raised RuntimeError: no primitive"),
        (transposed, "it returns torch.uint8"),
        (other_dtype, "it returns torch.int16"),
    ],
)
def test_a_wrong_kernel_is_put_back(monkeypatch, change, why):
    model, x = build("residual"), batch("residual")
    right = fxq.quantize(model, X86.without_pass("lower").without_pass("verify-lowering"), data=[x])
    planted(monkeypatch, OnednnConv, change)
    with pytest.warns(fxq.FxqWarning) as caught:
        quantized = fxq.quantize(model, X86, data=[x])
    convs = ["stem", "conv1", "conv2", "down", "conv3"]
    first, *others = told(caught)
    assert len(others) == len(convs) - 1
    assert "x86.conv" in first
    assert why in first
    assert 'layer "stem", support/models.py:' in first
    assert "x86.conv" not in kinds(quantized)
    assert "x86.linear" in kinds(quantized)
    wrong = quantized.ledger.where(kind="unverified")
    assert {e.path for e in wrong if e.op == "conv2d"} == set(convs)
    assert all(e.precision == "float" for e in wrong)
    # The wrong kernels are replaced by their q/dq form; only the kernels after them differ.
    assert sqnr(call(right, x), call(quantized, x)) > 60


@needs_x86
def test_text_of_what_is_put_back(monkeypatch):
    planted(monkeypatch, OnednnLinear, crooked)
    with pytest.warns(fxq.FxqWarning, match=r'%head \(.*layer "head".*the x86\.linear kernel is wrong on this machine'):
        manager = until(build("residual"), batch("residual"), "verify-lowering", X86)
    assert text(manager.gm) == expected("""
        x = input
        x_q = module cpu.quantize(x)
        stem_relu = x86.conv(x_q)
        conv1_relu = x86.conv(stem_relu)
        conv2_add_relu = x86.conv(conv1_relu, stem_relu)
        down = x86.conv(conv2_add_relu)
        conv3_add_relu = x86.conv(conv2_add_relu, down)
        mean = cpu.mean(conv3_add_relu)
        mean_dq = dequantize(mean, A)
        head_weight_dq = int8(head_weight, axis=0)
        head = linear(mean_dq, head_weight_dq, @fxq_data.head_bias_corrected)
        return head
    """)
    assert [e.rule for e in manager.history["verify-lowering"].edits] == ["put_back"]


@needs_x86
@pytest.mark.parametrize("change", [half_of_it, not_a_number])
def test_other_wrong_kernels(monkeypatch, change):
    planted(monkeypatch, MaxPool2d if change is half_of_it else OnednnLinear, change)
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong on this machine"):
        quantized = fxq.quantize(build("spellings"), X86, data=[batch("spellings")])
    assert ("cpu.max_pool2d" in kinds(quantized)) is (change is not_a_number)


@needs_x86
def test_values_near_the_end_of_float32_are_blamed_on_the_data(monkeypatch):
    """There a kernel may overflow: an int32 sum times such a scale is infinite. Some do, on some machines."""
    planted(monkeypatch, OnednnConv, crooked)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval(), torch.rand(4, 3, 12, 12) - 0.5
    with pytest.warns(fxq.FxqWarning) as caught:
        quantized = fxq.quantize(model, X86, data=[x * 2e38])
    wrong = [message for message in told(caught) if "x86.conv kernel" in message]
    assert len(wrong) == 2
    why = r"fails on values as large as .*e\+3\d, near the end of float32 \(3.4e\+38\): .*; scale the data down"
    assert all(re.search(why, message) for message in wrong)
    assert sqnr(call(model, x * 2e38), call(quantized, x * 2e38)) > 30


@pytest.mark.one_in(2)
@needs_x86
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (half_of_it, "bound to its inputs it returns something else"),
        (raising, "RuntimeError: no primitive"),
    ],
)
def test_a_kernel_that_is_wrong_where_it_is_bound(monkeypatch, change, why):
    bind = OnednnConv.bind
    monkeypatch.setattr(OnednnConv, "bind", lambda self, *inputs: lambda *xs: change(bind(self, *inputs)(*xs)))
    with pytest.warns(fxq.FxqWarning, match=why):
        quantized = fxq.quantize(build("residual"), X86, data=[batch("residual")])
    assert not any(isinstance(m, OnednnConv) for m in quantized.modules())


@needs_x86
def test_a_right_kernel_after_a_wrong_one_stays(monkeypatch):
    """Each kernel is judged on the right inputs, not on what a wrong one before it made of them."""
    forward = OnednnConv.forward
    seen = []

    def first_is_wrong(self, *args):
        seen.append(self)
        return forward(self, *args) + 2 if self is seen[0] else forward(self, *args)

    monkeypatch.setattr(OnednnConv, "forward", first_is_wrong)
    with pytest.warns(fxq.FxqWarning) as caught:
        quantized = fxq.quantize(build("residual"), X86, data=[batch("residual")])
    assert len(told(caught)) == 1
    assert kinds(quantized).count("x86.conv") == 4


@needs_x86
def test_without_the_pass_the_wrong_kernel_stays(monkeypatch):
    """The pass is what finds it."""
    planted(monkeypatch, OnednnLinear, crooked)
    quantized = fxq.quantize(build("residual"), X86.without_pass("verify-lowering"), data=[batch("residual")])
    assert "x86.linear" in kinds(quantized)


def test_nothing_to_verify_on_the_reference_backend():
    manager = until(build("residual"), batch("residual"), "lower", REFERENCE)
    before, result = str(view(manager.gm)), call(manager.gm, batch("residual"))
    assert again(manager, VerifyLowering()) == []
    assert str(view(manager.gm)) == before
    assert equal(call(manager.gm, batch("residual")), result)


# ---- conversions, ties, residuals


class TieProne(nn.Module):
    """A PReLU reads what is on a grid: with a slope of 1/4, many of its values lie between two steps exactly."""

    def __init__(self):
        super().__init__()
        self.c, self.act, self.d = nn.Conv2d(3, 4, 3), nn.PReLU(), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        y = self.c(x)
        return self.d(torch.cat([y, self.act(y)], 1))


@needs_x86
def test_ties_are_no_error():
    with quiet():
        recipe = X86.override(fxq.by_op("prelu"), fxq.FLOAT)
        quantized = fxq.quantize(TieProne().eval(), recipe, data=[torch.randn(4, 3, 16, 16)])
    assert "cpu.prelu_quantize" in kinds(quantized)


@pytest.mark.one_in(3)
@needs_x86
@pytest.mark.parametrize(
    ("kernel", "name", "recipe"),
    [
        (Quantize, "residual", X86),
        (Dequantize, "squeeze_excite", X86.override(fxq.by_op("hardsigmoid"), fxq.FLOAT)),
        (PReLUQuantize, "prelu_chain", X86.override(fxq.by_op("prelu"), fxq.FLOAT)),
    ],
)
def test_wrong_conversions_are_put_back(monkeypatch, kernel, name, recipe):
    model, x = build(name), batch(name)
    right = fxq.quantize(model, recipe, data=[x])
    assert kernel.name in kinds(right)
    wanted = call(right, x)
    planted(monkeypatch, kernel, lambda y: y // 2 if y.dtype == torch.uint8 else y / 2)
    with pytest.warns(fxq.FxqWarning, match=rf"the {kernel.name} kernel is wrong on this machine"):
        quantized = fxq.quantize(model, recipe, data=[x])
    assert kernel.name not in kinds(quantized)
    assert sqnr(wanted, call(quantized, x)) > 45


@needs_x86
def test_a_wrong_requantize_is_put_back(monkeypatch):
    """No pass makes a requantize by itself: pairs with different grids, to the coarser one and back."""
    model, x = ReadLater().eval(), torch.randn(4, 3, 8, 8)
    recipe = X86.insert_pass(Coarser(), after="insert-qdq")
    wanted = call(fxq.quantize(model, recipe, data=[x]), x)
    planted(monkeypatch, Requantize, lambda y: y // 2)
    with pytest.warns(fxq.FxqWarning, match=r"the cpu.requantize kernel is wrong") as caught:
        quantized = fxq.quantize(model, recipe, data=[x])
    assert len(told(caught)) == 2
    assert sqnr(wanted, call(quantized, x)) > decibels(40)


@dataclass(frozen=True)
class Coarser(fxq.Pass):
    """A second quantize and dequantize after the first dequantize, on a coarser grid."""

    name = "coarser"
    needs = gives = fxq.extend.Stage.QDQ

    def run(self, rewriter):
        first = rewriter.nodes("dequantize")[0]
        grid = {"scale": 1.7 * first.kwargs["scale"], "zero_point": 128}
        q = rewriter.call("quantize", first, after=first, name="second_q", **grid)
        second = rewriter.call("dequantize", q, after=q, name="second_dq", **grid)
        rewriter.reroute(first, second, only=lambda user: user not in (q, second))


class ReadLater(nn.Module):
    """A residual that is read again after the sum."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        a = torch.relu(self.stem(x))
        b = torch.relu(self.conv(x[:, :1].expand(-1, 4, -1, -1)) + a)
        return self.head(torch.cat([a, b], 1))


@needs_x86
def test_a_residual_that_is_read_later_is_not_overwritten(monkeypatch):
    model, x = ReadLater().eval(), torch.randn(4, 3, 8, 8)
    right = fxq.quantize(model, X86, data=[x])
    settle = lower_graph._allow_inplace

    def always(rewriter):
        settle(rewriter)
        for kernel in rewriter.gm.modules():
            if isinstance(kernel, Kernel) and kernel.inplace is not None:
                kernel.inplace = True

    monkeypatch.setattr(lower_graph, "_allow_inplace", always)
    unverified = fxq.quantize(model, X86.without_pass("verify-lowering"), data=[x])
    assert not equal(call(unverified, x), call(right, x))
    with pytest.warns(
        fxq.FxqWarning, match=r"kernel overwrites its residual, but %\w+ is in the same memory"
    ) as caught:
        quantized = fxq.quantize(model, X86, data=[x])
    assert len(told(caught)) == 1
    assert equal(call(quantized, x), call(right, x))
    assert kinds(quantized) == kinds(right)


class Blocks(nn.Module):
    """Residual blocks, so that kernels overwrite residuals."""

    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2, 2, 1) for _ in range(2 * blocks))

    def forward(self, x):
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = torch.relu(second(first(x).relu()) + x)
        return x


@needs_x86
def test_verification_takes_time_in_proportion_to_the_graph():
    """Memory that a residual may share is listed once, not for each residual."""
    calls = []
    for blocks in (5, 10):
        manager = until(Blocks(blocks).eval(), torch.rand(1, 2, 4, 4), "lower", X86)
        assert len(manager.context.regions) == 4 * blocks + 1
        calls.append(steps(lambda manager=manager: again(manager, VerifyLowering())))
    assert calls[1] < 2.1 * calls[0]
