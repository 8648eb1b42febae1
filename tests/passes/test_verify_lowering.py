"""verify-lowering: a kernel that is wrong is found, warned about and put back."""

import re
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends import lower_graph
from fxq.backends.kernel import Kernel
from fxq.backends.packed import quantized_tensors as packed
from fxq.backends.plain.converters import Dequantize, PReLUQuantize, Quantize, Requantize
from fxq.backends.plain.pool import MaxPool2d
from fxq.backends.x86.onednn_conv import OnednnConv
from fxq.backends.x86.onednn_linear import OnednnLinear
from fxq.common.metrics import sqnr
from fxq.graph.info import info
from fxq.graph.query import submodule
from fxq.graph.view import view
from fxq.passes.verify_lowering import VerifyLowering, _Verifier
from tests.graphs import again, equal, expected, kinds, text, until
from tests.helpers import REFERENCE, steps
from tests.machine import X86, decibels, needs_x86, quiet, told
from tests.models import NETWORKS, batch, build, call


def planted(monkeypatch, kernel, change):
    """Let a kernel's forward return `change(result)`."""
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda self, *args: change(forward(self, *args)))


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
    assert 'layer "stem", tests/models.py:' in first
    assert "x86.conv" not in kinds(quantized)
    assert "x86.linear" in kinds(quantized)
    wrong = quantized.ledger.where(kind="unverified")
    assert {e.path for e in wrong if e.op == "conv2d"} == set(convs)
    assert all(e.fate == "float" for e in wrong)
    # What was put back is the qdq form itself; only the kernels behind it differ.
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
        head = linear(mean_dq, head_weight_dq, @head.bias)
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


@needs_x86
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (half_of_it, "bound to the kind of its inputs it returns something else"),
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
def test_a_right_kernel_behind_a_wrong_one_stays(monkeypatch):
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


# ---- large terms


class Wide(nn.Module):
    """Layers whose terms are large beside the results of the batch that kernels are verified on."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(64, 64, 3), nn.Conv2d(64, 8, 1)

    def forward(self, x):
        return self.b(self.a(x))


class Difference(nn.Module):
    """A difference of large values that are nearly the same."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(64, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = self.a(x)
        return self.b((y + 1e6) - (y * 1.001 + 1e6))


class Cancels(nn.Module):
    """Weights that add up to zero, of an input that is nearly constant."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(64, 8, 3)
        with torch.no_grad():
            self.a.weight -= self.a.weight.mean((1, 2, 3), keepdim=True)

    def forward(self, x):
        return self.a(x)


FAR = [
    (Wide, [(0.0, 1.0), (0.0, 1e4)]),
    (Wide, [(0.0, 1.0), (0.0, 1e6)]),
    (Difference, [(0.0, 1.0)]),
    (Cancels, [(1e6, 1e-3)]),
]
BACKENDS = ["x86", *(name for name in ("fbgemm",) if packed.has_engine(name))]


@needs_x86
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("model", "batches"), FAR)
def test_what_is_left_of_large_terms_is_as_inexact_as_they_are(model, batches, backend):
    """No right kernel is accused where the grid is far wider than the values, or where its terms cancel."""
    torch.manual_seed(0)
    recipe = fxq.Recipe.static(backend=backend, optimize="coverage", activation=fxq.TensorSpec(observer="minmax"))
    data = [torch.randn(4, 64, 8, 8) * scale + mean for mean, scale in batches]
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxq.FxqWarning)
        warnings.filterwarnings("ignore", message="this CPU has no VNNI")
        quantized = fxq.quantize(model().eval(), recipe.with_min_sqnr(None), data=data)
    assert not quantized.history["verify-lowering"].edits


@needs_x86
@pytest.mark.parametrize("batches", [batches for model, batches in FAR if model is Wide])
@pytest.mark.parametrize("change", [lambda y: y * 1.02, lambda y: y + y.abs().max() * 0.01, lambda y: y.roll(1, 1)])
def test_a_wrong_kernel_is_found_there_all_the_same(monkeypatch, change, batches):
    """By two in a hundred of the largest result that a batch of the grid's own size gives."""
    data = [torch.randn(4, 64, 8, 8) * scale + mean for mean, scale in reversed(batches)]
    recipe = fxq.Recipe.static(backend="x86", optimize="coverage", activation=fxq.TensorSpec(observer="minmax"))
    planted(monkeypatch, OnednnConv, lambda y: change(y) if y.dtype == torch.float32 else y)
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong on this machine"):
        quantized = fxq.quantize(Wide().eval(), recipe, data=data)
    assert [entry.fate for entry in quantized.ledger] == ["int8", "float"]


@needs_x86
def test_a_convolution_of_nothing_but_padding_is_not_accused():
    """Its taps step over the one element that there is: zero, but for the rounding of the zero point's products."""
    torch.manual_seed(0)
    model = nn.Conv1d(6, 6, 2, padding=1, dilation=2, groups=6, bias=False).eval()
    data = [(torch.rand(64, 6, 1) * 300 - 80,)]
    recipe = fxq.Recipe.static(backend="x86", optimize="coverage").with_min_sqnr(None)
    quantized = fxq.quantize(nn.Sequential(model).eval(), recipe, data=data)
    assert [entry.fate for entry in quantized.ledger] == ["int8"]
    assert float(quantized(*data[0]).abs().max()) < 1e-4


def test_one_sample_that_the_lowered_graph_cannot_run(monkeypatch):
    """Said where the float model runs on it, and only there."""
    run = _Verifier.run

    def of_several(self):
        if any(len(value) == 1 for value in self.values.values()):  # the inputs
            raise RuntimeError("only several")
        return run(self)

    monkeypatch.setattr(_Verifier, "run", of_several)
    model, x = build("residual"), batch("residual")
    with pytest.warns(fxq.FxqWarning, match="does not run on .*as the float model does: RuntimeError: only several"):
        fxq.quantize(model, X86, data=[x])


class Several(nn.Module):
    """Cannot run on one sample."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x).view(2, -1, 4)


def test_one_sample_that_the_model_cannot_run_is_no_matter():
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxq.FxqWarning)
        warnings.filterwarnings("ignore", message="this CPU has no VNNI")
        fxq.quantize(Several().eval(), X86.with_optimize("coverage"), data=[torch.randn(4, 4)])


@needs_x86
def test_a_kernel_may_leave_a_little_where_the_result_is_zero():
    """The input is all zeros on a grid whose zero is 255: the products and their correction cancel in float32."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 1, 1), nn.AvgPool2d(2), nn.ReLU6(), nn.ConvTranspose2d(1, 6, 2, bias=False)
    network = nn.Sequential(*layers).eval()
    with torch.no_grad():
        network[0].weight.fill_(1.0)
        network[0].bias.fill_(-2.0)
    with quiet():
        quantized = fxq.quantize(network, X86.with_min_sqnr(None), data=[torch.rand(2, 1, 4, 4)])
    assert "x86.conv_transpose2d" in kinds(quantized)
    assert not quantized.history["verify-lowering"].edits


# ---- conversions, ties, residuals, single samples


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
        recipe = X86.override(fxq.op("prelu"), fxq.FLOAT)
        quantized = fxq.quantize(TieProne().eval(), recipe, data=[torch.randn(4, 3, 16, 16)])
    assert "cpu.prelu_quantize" in kinds(quantized)


@needs_x86
@pytest.mark.parametrize(
    ("kernel", "name", "recipe"),
    [
        (Quantize, "residual", X86),
        (Dequantize, "squeeze_excite", X86.override(fxq.op("hardsigmoid"), fxq.FLOAT)),
        (PReLUQuantize, "prelu_chain", X86),
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
    """A second quantize and dequantize behind the first dequantize, on a coarser grid."""

    name = "coarser"
    needs = gives = fxq.Stage.QDQ

    def run(self, rewriter):
        first = rewriter.nodes("dequantize")[0]
        grid = {"scale": 1.7 * first.kwargs["scale"], "zero_point": 128}
        q = rewriter.call("quantize", first, after=first, name="second_q", **grid)
        second = rewriter.call("dequantize", q, after=q, name="second_dq", **grid)
        rewriter.reroute(first, second, only=lambda user: user not in (q, second))


class ReadLater(nn.Module):
    """A residual that is read again behind the sum."""

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
    settle = lower_graph._settle_inplace

    def always(rewriter):
        settle(rewriter)
        for kernel in rewriter.gm.modules():
            if isinstance(kernel, Kernel) and kernel.inplace is not None:
                kernel.inplace = True

    monkeypatch.setattr(lower_graph, "_settle_inplace", always)
    unverified = fxq.quantize(model, X86.without_pass("verify-lowering"), data=[x])
    assert not equal(call(unverified, x), call(right, x))
    with pytest.warns(
        fxq.FxqWarning, match=r"kernel overwrites its residual, but %\w+ is in the same memory"
    ) as caught:
        quantized = fxq.quantize(model, X86, data=[x])
    assert len(told(caught)) == 1
    assert equal(call(quantized, x), call(right, x))
    assert kinds(quantized) == kinds(right)


@needs_x86
def test_a_kernel_that_is_wrong_for_one_sample_only(monkeypatch):
    """Kernels plan by input shape."""
    planted(monkeypatch, OnednnConv, lambda y: y if len(y) > 1 else y + 2)
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong"):
        quantized = fxq.quantize(build("residual"), X86, data=[batch("residual")])
    assert "x86.conv" not in kinds(quantized)


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
    """What a residual may share memory with is not listed anew for each of them."""
    calls = []
    for blocks in (10, 20):
        manager = until(Blocks(blocks).eval(), torch.rand(1, 2, 4, 4), "lower", X86)
        assert len(manager.context.regions) == 4 * blocks + 1
        calls.append(steps(lambda manager=manager: again(manager, VerifyLowering())))
    assert calls[1] < 2.1 * calls[0]


@dataclass(frozen=True)
class Behind(fxq.Pass):
    """A pass behind lower that does what it is given."""

    edit: Any = None
    name: ClassVar[str] = "behind"
    needs: ClassVar[fxq.Stage] = fxq.Stage.LOWERED
    gives: ClassVar[fxq.Stage] = fxq.Stage.LOWERED

    def run(self, rewriter):
        self.edit(rewriter)


def rename_all(rewriter):
    for i, node in enumerate(n for n in rewriter.nodes() if n.op == "call_module"):
        rewriter.rename(node, f"k{i}")


def merge_equal(rewriter):
    first, second = (n for n in rewriter.nodes() if "max_pool" in str(n.target))
    rewriter.replace(second, first)


def make_anew(rewriter):
    for old in rewriter.nodes():
        if isinstance(submodule(rewriter.gm, old), OnednnLinear):
            new = rewriter.node("call_module", old.target, old.args, like=old, before=old)
            rewriter.describe(new, shape=info(old).shape, dtype=info(old).dtype)
            rewriter.replace(old, new)


class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.conv(x)
        return torch.add(F.max_pool2d(y, 2), F.max_pool2d(y, 2))


def with_pass(edit):
    return X86.with_optimize("coverage").insert_pass(Behind(edit), after="lower")


@needs_x86
def test_a_kernel_with_another_name_is_verified(monkeypatch):
    planted(monkeypatch, OnednnLinear, lambda result: result + 3)
    x = torch.rand(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    with pytest.warns(fxq.FxqWarning, match="x86.linear kernel is wrong"):
        quantized = fxq.quantize(model, with_pass(rename_all), data=[x])
    assert [e.fate for e in quantized.ledger if e.op == "linear"] == ["float", "float"]
    assert (quantized(x) - model(x)).abs().max() < 0.1  # a few steps of 1/100


@needs_x86
def test_a_kernel_whose_inputs_became_one_is_verified(monkeypatch):
    x = torch.rand(2, 3, 9, 9)
    model = Pools().eval()
    quantized = fxq.quantize(model, with_pass(merge_equal), data=[x])
    assert sum("max_pool" in kind for kind in kinds(quantized)) == 1
    assert (quantized(x) - model(x)).abs().max() < 0.1  # a few steps of 1/100


@needs_x86
def test_a_kernel_that_a_pass_has_made_is_said_not_to_be_verified():
    x = torch.rand(4, 8)
    with pytest.warns(fxq.FxqWarning, match="x86.linear kernel was put there behind lower.* is not verified"):
        fxq.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), with_pass(make_anew), data=[x])


@needs_x86
def test_a_kernel_that_reads_more_than_before_is_refused():
    def read_more(rewriter):
        node = next(n for n in rewriter.nodes() if isinstance(submodule(rewriter.gm, n), OnednnLinear))
        rewriter.update(node, args=(*node.args, next(iter(rewriter.graph.nodes))))

    with pytest.raises(fxq.PassError, match="made for 1 inputs and reads 2; a pass behind lower has changed it"):
        fxq.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), with_pass(read_more), data=[torch.rand(4, 8)])
