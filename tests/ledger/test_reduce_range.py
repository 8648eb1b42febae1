"""Role that has 7 bits (reduce_range) where kernels overflow with 8: on a CPU without VNNI, else simulated."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxq
from fxq.backends import cpu
from fxq.common.metrics import sqnr
from fxq.errors import RecipeError
from fxq.ledger.ledger import ReducedRange
from fxq.pipeline.manager import PassManager
from fxq.quant.spec import FLOAT, QuantConfig, TensorSpec
from tests.support.helpers import plain
from tests.support.models import settled

pytestmark = [
    pytest.mark.skipif(not (cpu.is_x86() and cpu.has_onednn_int8()), reason="needs the oneDNN int8 kernels"),
    pytest.mark.filterwarnings("ignore:this CPU has no VNNI"),
]
VNNI = cpu.has_vnni()
X86 = fxq.Recipe.static(backend="x86", optimize="coverage")


@pytest.fixture(autouse=True)
def without_vnni(monkeypatch):
    monkeypatch.setattr(cpu, "has_vnni", lambda: False)


def qdq_form(recipe):
    return recipe.without_pass("lower").without_pass("verify-lowering")


def exact_weights():
    """A network that 7 bits of weights are enough for: the largest one of each channel is 63 times the smallest."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    for conv in (model[0], model[2]):
        values = torch.randint(-62, 63, conv.weight.shape).float()
        values[:, 0, 0, 0] = 63
        conv.weight = nn.Parameter(values / 512)
    return model, [torch.randn(4, 3, 12, 12) for _ in range(3)]


def exact_activations():
    """A layer whose inputs 7 bits are enough for."""
    inputs = [torch.randint(0, 128, (32, 16)).float() / 127 for _ in range(3)]
    inputs[0][0, 0], inputs[0][0, 1] = 0, 1
    return nn.Sequential(nn.Linear(16, 8)).eval(), inputs


def on_samples(model, quantized, data, together):
    """SQNR over the samples that are recorded: so many, of each of three batches a third."""
    real, got = ([m(x[: together // 3]) for x in data] for m in (model, quantized))
    return sqnr(real, got)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("make", "better"), [(exact_weights, "weights"), (exact_activations, "activations")])
@pytest.mark.parametrize("corrected", [False, True])
def test_auto_keeps_the_better_one_and_says_so(make, better, corrected):
    torch.manual_seed(0)
    model, data = make()
    recipe = X86 if corrected else plain(X86)
    quantized = fxq.quantize(model, recipe, data=data)
    reduced = quantized.ledger.reduced_range
    assert reduced.role == better == max(reduced.sqnr, key=reduced.sqnr.get)
    with torch.no_grad():
        for role, measured in reduced.sqnr.items():
            alone = fxq.quantize(model, qdq_form(replace(plain(X86), reduce_range=role)), data=data)
            off = on_samples(model, alone, data, 64 if corrected else 32) - measured
            assert abs(off) < 0.1  # dB; propagate and fallback leave roundings out
            assert alone.ledger.reduced_range == ReducedRange(role)
    text = f"{better} have 7 bits where 8 would saturate in this CPU's kernels; output of the qdq graph: "
    assert f"{text}{reduced.sqnr['activations']:.1f} dB with activations" in str(quantized.ledger)
    facts = json.loads(quantized.ledger.to_json())
    assert facts["reduce_range"] == better and facts[f"sqnr_reduced_{better}"] == reduced.sqnr[better]


def test_the_recipe_says_which():
    model, data = exact_weights()
    quantized = fxq.quantize(model, replace(X86, reduce_range="activations"), data=data)
    assert "activations have 7 bits where 8 would saturate in this CPU's kernels; as the recipe says" in str(
        quantized.ledger
    )
    assert {int(layer.weight.max()) for layer in quantized.qparams().values()} == {127}


def test_nothing_is_tried_where_nothing_overflows(monkeypatch):
    plain = PassManager.fork

    def fork(self, **changes):
        assert "reduce_range" not in changes, "two graphs were made"
        return plain(self, **changes)

    monkeypatch.setattr(PassManager, "fork", fork)
    model, data = exact_weights()
    seven = TensorSpec(bits=7, signed=True, symmetric=True, per="channel", observer="minmax")
    recipes = [
        replace(X86, reduce_range="weights"),
        X86.with_backend("reference"),
        fxq.Recipe.static(backend="x86", optimize="coverage", weight=seven),
        fxq.Recipe.static(backend="x86", optimize="coverage", activation=TensorSpec(bits=7)),
        X86.override("*", FLOAT),
    ]
    for recipe in recipes[:-1]:
        fxq.quantize(model, recipe, data=data)
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        assert fxq.quantize(model, recipes[-1], data=data).ledger.reduced_range is None
    if VNNI:
        monkeypatch.setattr(cpu, "has_vnni", lambda: True)
        assert fxq.quantize(model, X86, data=data).ledger.reduced_range is None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("role", ["activations", "weights"])
def test_bits_that_an_override_asks_for_are_kept(role):
    model, data = exact_weights()
    six = QuantConfig(weight=TensorSpec(bits=6, signed=True, symmetric=True, per="channel", observer="minmax"))
    quantized = fxq.quantize(model, replace(X86, reduce_range=role).override("2", six), data=data)
    largest = {path: int(layer.weight.abs().max()) for path, layer in quantized.qparams().items()}
    assert largest == {"0": 127 if role == "activations" else 63, "2": 31}
    grids = {n.name: "qmax=127" in n.text for n in quantized.history["insert-qdq"].graph if n.label == "quantize"}
    assert grids["input_1_q"] == (role == "activations") and not grids["_0_relu_q"]


class Depthwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu())


@pytest.mark.one_in(2)
@pytest.mark.skipif(not cpu.has_exact_depthwise(), reason="oneDNN adds a depthwise convolution's products in int16")
@pytest.mark.parametrize("role", ["activations", "weights"])
def test_a_depthwise_convolution_keeps_8_bits(role, monkeypatch):
    monkeypatch.setattr(cpu, "has_exact_depthwise", lambda: True)
    model, x = settled(Depthwise), torch.randn(8, 3, 16, 16)
    quantized = fxq.quantize(model, replace(X86, reduce_range=role), data=[x])
    kernels = [m for m in quantized.modules() if type(m).__name__ == "OnednnConv"]
    assert [m.x.qmax for m in kernels] == ([127, 255, 127] if role == "activations" else [255] * 3)
    assert [int(m.weight.abs().max()) for m in kernels] == ([127] * 3 if role == "activations" else [63, 127, 63])


def test_a_model_without_a_float_output():
    class Classes(nn.Sequential):
        def forward(self, x):
            return super().forward(x).argmax(1)

    model, data = Classes(nn.Linear(16, 8)).eval(), [torch.randn(8, 16)]
    reduced = fxq.quantize(model, X86, data=data).ledger.reduced_range
    assert reduced.role == "activations" and set(reduced.sqnr.values()) == {None}


def test_a_copy_of_an_observed_model_is_converted_alike():
    model, data = exact_weights()
    observed = fxq.calibrate(fxq.prepare(model, X86, example_inputs=data[0]), data)
    copied = copy.deepcopy(observed)
    qmodel, two = fxq.convert(observed), fxq.convert(copied)
    assert torch.equal(qmodel(data[0]), two(data[0])) and qmodel.ledger.reduced_range == two.ledger.reduced_range
    assert len(observed.manager.context.samples) == observed.batches_seen == 3
    again = fxq.convert(observed)
    assert torch.equal(qmodel(data[0]), again(data[0])) and qmodel.ledger.reduced_range == again.ledger.reduced_range


def test_without_data_the_observed_model_can_still_be_calibrated():
    model, data = exact_weights()
    observed = fxq.prepare(model, X86, example_inputs=data[0])
    with pytest.raises(fxq.FxqError, match="has seen no data"):
        fxq.convert(observed)
    fxq.convert(fxq.calibrate(observed, data))


def test_a_pinned_recipe_names_the_role_that_was_chosen():
    model, data = exact_weights()
    quantized = fxq.quantize(model, X86, data=data)
    recipe = quantized.recipe_as_decided()
    assert recipe.reduce_range == "weights"
    again = fxq.quantize(model, recipe, data=data)
    assert torch.equal(again(data[0]), quantized(data[0])) and again.ledger.reduced_range == ReducedRange("weights")


def test_a_recipe_names_a_role():
    with pytest.raises(RecipeError, match="unknown value of reduce_range 'weight'; did you mean 'weights'"):
        fxq.Recipe.static(reduce_range="weight")
    recipe = fxq.Recipe.static(reduce_range="weights")
    assert recipe.to_dict()["reduce_range"] == "weights" and fxq.Recipe.from_dict(recipe.to_dict()) == recipe
