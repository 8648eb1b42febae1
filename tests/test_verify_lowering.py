"""verify-lowering: a kernel that is wrong is found, warned about and put back."""

import warnings

import pytest
import torch

import fxq
from fxq.backends.cpu import has_onednn_int8
from fxq.backends.x86_kernels import Conv, Linear
from fxq.backends.x86_pool import MaxPool2d
from fxq.passes.verify_lowering import VerifyLowering, disagreement
from tests.graphs import REFERENCE, again, equal, expected, kinds, text, until
from tests.models import NETWORKS, batch, build, call

X86 = fxq.Recipe.static(backend="x86")
needs_x86 = pytest.mark.skipif(not has_onednn_int8(), reason="needs the oneDNN int8 kernels")


def planted(monkeypatch, kernel, change):
    """Let a kernel's forward return `change(result)`."""
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda self, *args: change(forward(self, *args)))


@needs_x86
@pytest.mark.parametrize("name", NETWORKS)
def test_right_kernels_stay(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxq.FxqWarning)
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
    planted(monkeypatch, Conv, change)
    with pytest.warns(fxq.FxqWarning) as caught:
        quantized = fxq.quantize(model, X86, data=[x])
    convs = ["stem", "conv1", "conv2", "down", "conv3"]
    told = [str(w.message) for w in caught]
    assert len(told) == len(convs)
    assert "x86.conv" in told[0]
    assert why in told[0]
    assert 'layer "stem", tests/models.py:' in told[0]
    assert "x86.conv" not in kinds(quantized)
    assert "x86.linear" in kinds(quantized)
    wrong = quantized.ledger.where(lambda e: "failed verification" in e.reason)
    assert {e.path for e in wrong if e.op == "conv2d"} == set(convs)
    assert all(e.fate == "float" for e in wrong)
    # What was put back is the qdq form itself; only the kernels behind it differ.
    assert fxq.numeric.sqnr(call(right, x), call(quantized, x)) > 60


@needs_x86
def test_text_of_what_is_put_back(monkeypatch):
    planted(monkeypatch, Linear, crooked)
    with pytest.warns(fxq.FxqWarning, match=r'%head \(.*layer "head".*the x86\.linear kernel is wrong on this machine'):
        manager = until(build("residual"), batch("residual"), "verify-lowering", X86)
    assert text(manager.gm) == expected("""
        x = input
        x_q = module x86.quantize(x)
        stem_relu = x86.conv(x_q)
        conv1_relu = x86.conv(stem_relu)
        conv2_add_relu = x86.conv(conv1_relu, stem_relu)
        down = x86.conv(conv2_add_relu)
        conv3_add_relu = x86.conv(conv2_add_relu, down)
        mean = x86.mean2d(conv3_add_relu)
        mean_dq_1 = dequantize(mean, A)
        head_weight_dq_1 = int8(head_weight, axis=0)
        head_1 = linear(mean_dq_1, head_weight_dq_1, @head.bias)
        return head_1
    """)
    assert [e.rule for e in manager.history["verify-lowering"].edits] == ["put_back"]


@needs_x86
@pytest.mark.parametrize("change", [half_of_it, not_a_number])
def test_other_wrong_kernels(monkeypatch, change):
    planted(monkeypatch, MaxPool2d if change is half_of_it else Linear, change)
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong on this machine"):
        quantized = fxq.quantize(build("spellings"), X86, data=[batch("spellings")])
    assert ("x86.max_pool2d" in kinds(quantized)) is (change is not_a_number)


@needs_x86
def test_a_right_kernel_behind_a_wrong_one_stays(monkeypatch):
    """Each kernel is judged on the right inputs, not on what a wrong one before it made of them."""
    forward = Conv.forward
    seen = []

    def first_is_wrong(self, *args):
        seen.append(self)
        return forward(self, *args) + 2 if self is seen[0] else forward(self, *args)

    monkeypatch.setattr(Conv, "forward", first_is_wrong)
    with pytest.warns(fxq.FxqWarning) as caught:
        quantized = fxq.quantize(build("residual"), X86, data=[batch("residual")])
    assert len(caught) == 1
    assert kinds(quantized).count("x86.conv") == 4


@needs_x86
def test_without_the_pass_the_wrong_kernel_stays(monkeypatch):
    """The pass is what finds it."""
    planted(monkeypatch, Linear, crooked)
    quantized = fxq.quantize(build("residual"), X86.without_pass("verify-lowering"), data=[batch("residual")])
    assert "x86.linear" in kinds(quantized)


def test_nothing_to_verify_on_the_reference_backend():
    manager = until(build("residual"), batch("residual"), "verify-lowering", REFERENCE)
    assert manager.history["verify-lowering"].edits == ()
    assert equal(call(manager.gm, batch("residual")), call(manager.gm, batch("residual")))


# ---- what counts as a disagreement


def integers(*values):
    return torch.tensor(values, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("expected", "got", "wrong"),
    [
        (torch.zeros(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8), False),
        (torch.zeros(1000, dtype=torch.uint8), (torch.arange(1000) < 10).to(torch.uint8), False),  # 1 % ties
        (torch.zeros(1000, dtype=torch.uint8), (torch.arange(1000) < 11).to(torch.uint8), True),
        (torch.zeros(1000, dtype=torch.uint8), 2 * (torch.arange(1000) < 1).to(torch.uint8), True),  # two steps
        (integers(5, 5, 5), integers(5, 6, 5), False),  # a tie in a small tensor
        (integers(0, 5, 5), integers(255, 5, 5), True),  # 0 - 255 does not wrap
        (integers(5, 5, 5), integers(5, 5), True),
        (integers(5, 5, 5), torch.tensor([5.0, 5.0, 5.0]), True),
        (torch.tensor([1.0, -100.0]), torch.tensor([1.0, -100.009]), False),
        (torch.tensor([1.0, -100.0]), torch.tensor([1.0, -100.02]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")]), True),
        (torch.zeros(3), torch.full((3,), 1e-20), True),
        (torch.zeros(0, 3), torch.zeros(0, 3), False),
    ],
)
def test_disagreement(expected, got, wrong):
    assert (disagreement(expected, got, ties=0.01, float_tolerance=1e-4) is not None) is wrong
