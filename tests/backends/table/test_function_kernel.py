"""Kernels that are plain functions, as users write them."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxq
from fxq.backends.kernel import known_kernels
from fxq.graph.query import submodule
from fxq.graph.unit import calls_among
from fxq.ops import OPS
from tests.support.machine import needs_x86
from tests.support.processes import in_new_python

pytestmark = needs_x86


@fxq.fusion(everywhere=False)
def own_scaled_tanh(op, x, w, b, s):
    return op.mul(op.tanh(op.linear(x, w, b)), s)


@fxq.extend.kernel("x86", own_scaled_tanh)
def run(x, w, b, s, *, out):
    y = s * torch.tanh(F.linear(x.dequantize(), w.dequantize(), b))
    return y if out is None else out.quantize(y)


@fxq.fusion(everywhere=False)
def own_scaled_conv(op, x, w, s):
    return op.mul(op.conv2d(x, w, None, padding=(1, 1)), s)


def packed_weight(w):
    return (w.values.int() - w.zero_point.view(-1, 1, 1, 1)).double()


@fxq.extend.kernel("x86", own_scaled_conv, pack=packed_weight)
def run_conv(x, w, s, *, stride, out, packed):
    """Kernel function with exact integer sums in float64, and a float result that fxq rounds."""
    sums = F.conv2d(x.values.double() - x.zero_point, packed, padding=1, stride=stride)
    return (sums * (x.scale.double() * w.scale.double()).view(-1, 1, 1) * s).float()


@fxq.fusion("relu_and_{act}", act=("sigmoid", "tanh"), everywhere=False)
def relu_and_act(op, x, w, b, *, act):
    y = op.linear(x, w, b)
    return op.relu(y), op[act](y)


@fxq.extend.kernel("x86", relu_and_act)
def run_two(x, w, b, *, act, out):
    y = F.linear(x.dequantize(), w.dequantize(), b)
    relu, activated = torch.relu(y), getattr(torch, act)(y)
    return relu if out[0] is None else out[0].quantize(relu), activated


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)) * 1.7)


class Convolution(nn.Module):
    def __init__(self, stride=1, dilation=1) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, stride=stride, dilation=dilation, bias=False)
        self.second = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.second(self.first(x) * 0.5)


class Two(nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.first, self.a, self.b, self.act = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4), act

    def forward(self, x):
        y = self.first(x)
        relu, activated = torch.relu(y), self.act(y)
        return self.a(relu) + self.b(activated)


def seeded(make, *args):
    torch.manual_seed(0)
    return make(*args).eval()


DATA = [torch.randn(16, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
IMAGES = [torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(i)) for i in range(2)]
STATIC = fxq.Recipe.static(backend="x86", optimize="coverage")
DYNAMIC = fxq.Recipe.dynamic(backend="x86", optimize="coverage")


def quantized(model, recipe, data):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "with all possible ops on integers")
        return fxq.quantize(model, recipe, data=data)


def kernels(qmodel):
    return [m.name for m in (submodule(qmodel, n) for n in qmodel.graph.nodes) if isinstance(m, fxq.extend.Kernel)]


NAME = "tests.backends.table.test_function_kernel.run"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_a_function_runs_a_fusion(recipe, tmp_path):
    model = seeded(Network)
    qmodel = quantized(model, recipe.with_fusions(own_scaled_tanh), DATA)
    assert NAME in kernels(qmodel) and qmodel.ledger.coverage == 1.0
    reference = quantized(model, recipe.with_backend("reference"), DATA)
    for x in DATA * 2:  # later calls are bound to the kind of their inputs
        assert torch.allclose(qmodel(x), reference(x), atol=0.02)  # a step of what the second layer reads
    for again in (copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel))):
        assert kernels(again) == kernels(qmodel) and torch.equal(again(DATA[0]), qmodel(DATA[0]))
    qmodel.save(tmp_path / "m.fxq")
    loaded = fxq.load(tmp_path / "m.fxq")
    assert kernels(loaded) == kernels(qmodel) and torch.equal(loaded(DATA[0]), qmodel(DATA[0]))


def test_what_the_function_is_called_with(monkeypatch):
    calls = []

    def spy(x, w, b, s, *, out):
        calls.append((x, w, b, s, out))
        return run(x, w, b, s, out=out)

    monkeypatch.setattr(known_kernels()[NAME], "function", staticmethod(spy))
    model = seeded(Network)
    quantized(model, STATIC.with_fusions(own_scaled_tanh), DATA)
    x, w, b, s, out = calls[-1]
    assert (x.values.dtype, x.axis, x.scale.shape, w.values.dtype, w.axis, w.scale.shape, s) == (
        torch.uint8, None, (), torch.int8, 0, (16,), 1.7,
    )  # fmt: skip
    assert torch.allclose(w.dequantize(), model.first.weight, rtol=0, atol=0.6 * float(w.scale.max()))
    assert b.dtype == torch.float32 and isinstance(out, fxq.extend.QParams) and out.dtype == torch.uint8
    del calls[:]
    quantized(model, DYNAMIC.with_fusions(own_scaled_tanh), DATA)
    x, _, _, _, out = calls[-1]
    assert out is None and x.scale.shape == (len(x.values), 1) == x.zero_point.shape
    assert any(torch.allclose(x.dequantize(), data[: len(x.values)], atol=0.6 * float(x.scale.max())) for data in DATA)


@pytest.mark.parametrize("stride", [1, 2])
def test_packed_weights_options_and_floats_that_fxq_rounds(stride, tmp_path):
    model = seeded(Convolution, stride)
    qmodel = quantized(model, STATIC.with_fusions(own_scaled_conv), IMAGES)
    assert f"{NAME}_conv" in kernels(qmodel) and qmodel.output_sqnr > 30
    (kernel,) = (m for m in qmodel.modules() if getattr(m, "name", "") == f"{NAME}_conv")
    assert not any("packed" in name for name, _ in kernel.named_buffers())
    before = qmodel(IMAGES[0])
    qmodel.save(tmp_path / "m.fxq")
    assert torch.equal(fxq.load(tmp_path / "m.fxq")(IMAGES[0]), before)
    kernel.values_w.zero_()  # packed again when the weight is edited
    zeros = torch.zeros_like(IMAGES[0])
    kernel_of_zero = qmodel(IMAGES[0])
    assert not torch.equal(kernel_of_zero, before) and torch.equal(kernel_of_zero, qmodel(zeros))


def test_an_option_that_the_function_does_not_take():
    model = seeded(Convolution, 1, 2)
    recipe = STATIC.with_fusions(own_scaled_conv)
    qmodel = quantized(model, recipe, IMAGES)
    assert f"{NAME}_conv" not in kernels(qmodel) and qmodel.output_sqnr > 30
    graph = fxq.extend.run_passes(model, recipe, example_inputs=IMAGES[0], until="fold-batch-norm")
    (node,) = graph.graph.find_nodes(op="call_function", target=OPS["mul"].target)
    convolution, _ = graph.graph.find_nodes(op="call_function", target=OPS["conv2d"].target)
    calls = calls_among([convolution, node], "own_scaled_conv", {"x": None, "w": None, "s": 0.5}, [node])
    (match,) = [match for match in fxq.extend.X86().matching_rows(calls) if len(match.calls) == 2]
    assert match.refused(graph) == "its dilation is (2, 2), and its kernel function takes no dilation"


@pytest.mark.parametrize("act", [torch.sigmoid, torch.tanh])
def test_several_outputs_and_variants(act):
    model = seeded(Two, act)
    qmodel = quantized(model, STATIC.with_fusions(relu_and_act), DATA)
    assert f"{NAME}_two" in kernels(qmodel) and qmodel.output_sqnr > 30
    assert torch.equal(copy.deepcopy(qmodel)(DATA[0]), qmodel(DATA[0]))


class MyX86(fxq.extend.X86):
    """Backend with an own kernel of an op of fxq's."""

    name = "tests_function_kernel"


@fxq.extend.kernel("tests.backends.table.test_function_kernel:MyX86", "linear")
def own_linear(x, weight, bias, *, out):
    return F.linear(x.dequantize(), weight.dequantize(), bias)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_a_function_runs_an_op(recipe):
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4)).eval()
    qmodel = quantized(model, recipe.with_backend(MyX86), DATA)
    assert (
        kernels(qmodel).count("tests.backends.table.test_function_kernel.own_linear") == 2 and qmodel.output_sqnr > 30
    )
    assert "x86.linear" in kernels(quantized(model, STATIC, DATA))


@pytest.mark.parametrize("recipe", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_a_wrong_kernel_is_noticed_and_put_back(recipe, monkeypatch):
    def wrong(x, w, b, s, *, out):
        return run(x, w, b, s, out=None) * 0.9

    monkeypatch.setattr(known_kernels()[NAME], "function", staticmethod(wrong))
    with pytest.warns(fxq.FxqWarning, match="kernel is wrong on this machine: off by") as warned:
        qmodel = fxq.quantize(seeded(Network), recipe.with_fusions(own_scaled_tanh), data=DATA)
    assert NAME not in kernels(qmodel) and qmodel.output_sqnr > 30
    texts = [str(w.message) for w in warned]
    assert any("its function is tests.backends.table.test_function_kernel:" in text for text in texts)


@pytest.mark.parametrize(("changed", "name"), [("w", "its tensor 'values_w'"), ("x", "its input %x_q")])
def test_a_kernel_that_changes_its_weight_or_input_is_put_back_and_they_are_restored(changed, name, monkeypatch):
    """The second layer, which reads the input too, and the fallback would silently read the changed values."""

    def changing(x, w, b, s, *, out):
        y = run(x, w, b, s, out=out)
        {"w": w, "x": x}[changed].values.zero_()
        return y

    class Twice(Network):
        def forward(self, x):
            return super().forward(x) + self.second(torch.relu(self.first(x)))

    monkeypatch.setattr(known_kernels()[NAME], "function", staticmethod(changing))
    with pytest.warns(fxq.FxqWarning, match=f"{NAME} kernel is wrong on this machine: it changes {re.escape(name)}"):
        qmodel = fxq.quantize(seeded(Twice), STATIC.with_fusions(own_scaled_tanh), data=DATA)
    assert NAME not in kernels(qmodel) and qmodel.output_sqnr > 30


def returns(value):
    return staticmethod(lambda x, w, b, s, *, out: value(x, out))


def test_a_result_of_another_shape_is_put_back(monkeypatch):
    monkeypatch.setattr(known_kernels()[NAME], "function", returns(lambda x, out: torch.zeros(3)))
    with pytest.warns(fxq.FxqWarning, match=r"it returns torch.uint8 \[3\] instead of torch.uint8 \[16, 16\]"):
        qmodel = fxq.quantize(seeded(Network), STATIC.with_fusions(own_scaled_tanh), data=DATA)
    assert NAME not in kernels(qmodel)


@pytest.mark.parametrize(
    ("recipe", "value", "message"),
    [
        (
            STATIC,
            lambda x, out: x.values.int(),
            r"run returns int32 \[16, 8\]; it must return uint8 on the grid `out`",
        ),
        (STATIC, lambda x, out: x.dequantize().double(), r"run returns float64 \[16, 8\]; it must return uint8"),
        (STATIC, lambda x, out: x, "run returns QTensor; it must return uint8"),
        (DYNAMIC, lambda x, out: x.values, r"run returns uint8 .*; it must return float32, as `out` is None"),
    ],
)
def test_a_result_of_another_type_is_an_error(recipe, value, message, monkeypatch):
    monkeypatch.setattr(known_kernels()[NAME], "function", returns(value))
    with pytest.raises(fxq.InputError, match=message):
        quantized(seeded(Network), recipe.with_fusions(own_scaled_tanh), DATA)


def test_not_as_many_results_as_outputs(monkeypatch):
    kind = known_kernels()[f"{NAME}_two"]
    monkeypatch.setattr(kind, "function", staticmethod(lambda x, w, b, *, act, out: x.dequantize()))
    with pytest.raises(fxq.InputError, match=r"run_two returns float32 .*; its pattern has 2 outputs"):
        quantized(seeded(Two, torch.tanh), STATIC.with_fusions(relu_and_act), DATA)


def wrong_captures(x, w, c, s, *, out): ...


def too_few(x, w, b, *, out): ...


def without_out(x, w, b, s): ...


def positional(x, w, b, /, s, *, out): ...


def any_keyword(x, w, b, s, *, out, **rest): ...


def no_option(x, w, b, s, *, out, strides): ...


def packed_without_pack(x, w, b, s, *, out, packed): ...


def without_act(x, w, b, *, out): ...


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (lambda: fxq.extend.kernel("x87", own_scaled_tanh), "unknown backend 'x87'; did you mean"),
        (lambda: fxq.extend.kernel("reference", own_scaled_tanh), "'reference' has no table of kernels"),
        (lambda: fxq.extend.kernel("x86", "liner"), "unknown op 'liner'; did you mean 'linear'"),
        (
            lambda: fxq.extend.kernel("x86", run),
            "kernel takes the result of fxq.fusion or the name of an op, not <func",
        ),
        (lambda: fxq.extend.kernel("x86", "conv2d_relu"), "or the name of an op, not 'conv2d_relu'"),
        (lambda: fxq.extend.kernel("x86", own_scaled_tanh)(nn.Tanh()), "decorates a plain function, not Tanh"),
        (lambda: fxq.extend.kernel("x86", own_scaled_tanh)(wrong_captures), "unknown capture of 'own_scaled_tanh' 'c'"),
        (
            lambda: fxq.extend.kernel("x86", own_scaled_tanh)(too_few),
            "too_few does not take 's', which 'own_scaled_tanh' capt",
        ),
        (lambda: fxq.extend.kernel("x86", own_scaled_tanh)(without_out), "needs a keyword-only parameter 'out'"),
        (lambda: fxq.extend.kernel("x86", own_scaled_tanh)(positional), "positional-only parameters"),
        (lambda: fxq.extend.kernel("x86", own_scaled_tanh)(any_keyword), r"\*\*kwargs; arguments are passed by name"),
        (lambda: fxq.extend.kernel("x86", own_scaled_tanh)(no_option), "unknown option of 'own_scaled_tanh' 'strides'"),
        (lambda: fxq.extend.kernel("x86", own_scaled_tanh)(packed_without_pack), "takes 'packed', and has no `pack`"),
        (
            lambda: fxq.extend.kernel("x86", own_scaled_tanh, pack=lambda w: w)(run),
            "needs a keyword-only parameter 'packed'",
        ),
        (
            lambda: fxq.extend.kernel("x86", own_scaled_conv, pack=lambda v: v)(run_conv),
            "unknown capture of 'own_scaled_conv' 'v'",
        ),
        (
            lambda: fxq.extend.kernel("x86", relu_and_act)(without_act),
            "needs a keyword-only parameter 'act', the variant",
        ),
        (
            lambda: fxq.extend.kernel("x86", own_scaled_tanh)(lambda x, w, b, s, *, out: x),
            "kernel of 'own_scaled_tanh' on x86 is made by tests.backends.table.test_function_kernel:run already",
        ),
    ],
)
def test_a_kernel_function_that_is_refused(decorate, message):
    with pytest.raises(fxq.FxqError, match=message):
        decorate()


def test_a_file_needs_the_module_of_the_function(tmp_path):
    quantized(seeded(Network), STATIC.with_fusions(own_scaled_tanh), DATA).save(tmp_path / "m.fxq")
    code = "import sys, fxq; fxq.load(sys.argv[1])"
    for module, message in (
        ("math", "loading a file imports no code: `import tests.backends.table.test_function_kernel` first"),
        (__name__, ""),
    ):
        done = in_new_python(f"import {module}; {code}", tmp_path / "m.fxq")
        assert (done.returncode == 0) == (not message) and message in done.stderr


def test_a_recipe_names_the_function(tmp_path):
    recipe = STATIC.with_fusions(own_scaled_tanh).with_extensions(run)
    recipe.save(tmp_path / "r.toml")
    assert recipe.extensions == (f"{__name__}:run",) and fxq.Recipe.load(tmp_path / "r.toml") == recipe


class Mine(fxq.extend.X86):
    """Backend whose kernels of weight-only layers are functions, so that other tests keep theirs."""

    name = "weight_only_functions"


MINE = f"{__name__}:Mine"


def transposed(weight):
    return weight.dequantize().T.contiguous()


@fxq.extend.kernel(MINE, "linear", pack=transposed, weight_only=True)
def run_weight_only(x, weight, bias, *, out, packed):
    assert out is None and x.dtype == torch.float32 and weight.values.dtype in (torch.int8, torch.uint8)
    y = x @ packed
    return y if bias is None else y + bias


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("bits", "bias"), [(8, True), (8, False), (4, True)])
def test_weight_only_layers(bits, bias, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=bias), nn.Tanh(), nn.Linear(32, 4)).eval()
    x = torch.randn(5, 64)
    qmodel, reference = (
        fxq.quantize(model, fxq.Recipe.weight_only(bits=bits, backend=backend), example_inputs=x)
        for backend in (MINE, "reference")
    )
    assert [entry.precision for entry in qmodel.ledger] == ["weight-only", "float", "weight-only"]
    assert [type(m).name for m in qmodel.modules() if isinstance(m, fxq.extend.Kernel)] == [
        f"{__name__}.run_weight_only"
    ] * 2
    expected = reference(x)
    torch.testing.assert_close(qmodel(x), expected, rtol=1e-5, atol=1e-5)
    qmodel.save(tmp_path / "m.fxq")
    assert torch.equal(fxq.load(tmp_path / "m.fxq")(x), qmodel(x))
    assert torch.equal(copy.deepcopy(qmodel)(x), qmodel(x))


def test_weight_only_layers_that_the_function_cannot_run():
    """Weights in float16 have no grid, so fxq's own kernel runs them."""
    model, x = nn.Sequential(nn.Linear(64, 4)).eval(), torch.randn(3, 64)
    spec = fxq.TensorSpec(signed=True, symmetric=True, format="float16")
    qmodel = fxq.quantize(model, fxq.Recipe.weight_only(weight=spec, backend=MINE), example_inputs=x)
    torch.testing.assert_close(qmodel(x), model(x), rtol=1e-3, atol=1e-3)
    (kernel,) = (m for m in qmodel.modules() if isinstance(m, fxq.extend.Kernel))
    assert type(kernel).name == "weight_only.linear"
    assert [entry.precision for entry in qmodel.ledger] == ["weight-only"]


def test_int8_layers_have_no_weight_only_kernel():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 4)).eval()
    qmodel = fxq.quantize(
        model, fxq.Recipe.static(backend=MINE, optimize="coverage"), data=[torch.randn(16, 64) for _ in range(2)]
    )
    kernels = [type(m).name for m in qmodel.modules() if isinstance(m, fxq.extend.Kernel)]
    assert kernels and not any("run_weight_only" in name for name in kernels)


def test_weight_only_kernels_of_fusions_are_refused():
    with pytest.raises(fxq.InputError, match="takes the name of an op if weight_only=True"):
        fxq.extend.kernel(MINE, own_scaled_tanh, weight_only=True)
