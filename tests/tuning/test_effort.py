"""`effort` of `fxq.quantize`: a quick conversion times nothing and stays near the default; the best is no worse."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fxq
from fxq.common.data import samples_in
from fxq.cost import cache
from fxq.passes import CorrectBias, VerifyLowering, correct_bias
from fxq.pipeline import float_ops
from fxq.tuning import effort
from fxq.workflow import fastest


class Untraceable(nn.Module):
    """Model with a branch on values, so that it is quantized in parts."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.last = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))

    def forward(self, x):
        y = self.first(x)
        return self.last(y if float(y.mean()) > 0 else -y)


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Hardswish(), nn.Conv2d(16, 4, 3)]
    return nn.Sequential(*layers).eval()


def images(count=4):
    return [torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def test_a_quick_conversion_times_nothing_and_is_as_accurate(monkeypatch):
    model, data = network(), images()
    default = fxq.quantize(model, data=data)
    assert len(default.decisions) > 0
    monkeypatch.setattr(cache, "measure", lambda *args, **options: pytest.fail("it is timed"))
    quick = fxq.quantize(model, data=data, effort="fast")
    assert len(quick.decisions) == 0 and quick.ledger.count("float") == 0
    assert quick.output_sqnr > default.output_sqnr - 1  # dB
    assert type(quick.recipe).from_dict(quick.recipe.to_dict()) == quick.recipe


def test_a_quick_conversion_fits_once(monkeypatch):
    tested = []
    validated = CorrectBias._validated
    monkeypatch.setattr(CorrectBias, "_validated", lambda *args: tested.append(1) or validated(*args))
    few = [images(1)[0][:4]]
    fxq.quantize(network(), fxq.Recipe.static(optimize="coverage"), data=few)
    assert len(tested) == 1  # a fit to few samples is tested on held-out ones
    fxq.quantize(network(), data=few, effort="fast")
    assert len(tested) == 1


def test_a_quick_conversion_of_a_large_model_corrects_in_two_runs(monkeypatch):
    monkeypatch.setattr(float_ops, "_MIN_LARGE_MACS", 0)
    sizes, fit = [], correct_bias._fit
    monkeypatch.setattr(
        correct_bias, "_fit", lambda gm, batch, *rest: sizes.append(samples_in(batch)) or fit(gm, batch, *rest)
    )
    qmodel = fxq.quantize(network(), data=images(), effort="fast")
    assert sizes == [2, 2, 2, 2]  # half of 16 samples, of four batches, which are not joined
    sizes.clear()
    fxq.quantize(network(), data=images(2), effort="fast")
    assert sizes == [4, 4] and qmodel.output_sqnr > 20  # dB


def test_a_quick_conversion_verifies_kernels_on_the_batch_alone():
    run = fxq.quantize(network(), data=images(), effort="fast")
    assert run.recipe.pipeline["verify-lowering"] == VerifyLowering(sizes=False)
    own = fxq.Recipe.static().without_pass("correct-bias").insert_pass(CorrectBias(samples=32), after="smooth")
    assert effort.quick(own).pipeline["correct-bias"] == CorrectBias(samples=32)  # chosen by the user


@pytest.mark.parametrize("preset", ["dynamic", "weight_only"])
def test_recipes_without_calibration_are_quick_too(preset):
    recipe = effort.quick(getattr(fxq.Recipe, preset)(backend="reference"))
    assert recipe.preset == preset and recipe.optimize == "coverage" and recipe.reduce_range == "weights"
    qmodel = fxq.quantize(nn.Linear(8, 8).eval(), recipe, example_inputs=torch.randn(4, 8))
    assert qmodel.ledger.count("float") == 0


def test_the_best_recipe_is_no_worse():
    four = fxq.TensorSpec(bits=4, signed=True, symmetric=True, per="channel", observer="minmax")
    recipe = fxq.Recipe.static(weight=four, backend="reference")
    default = fxq.quantize(network(), recipe, data=images())
    qmodel = fxq.quantize(network(), recipe, data=iter(images()), effort="best")
    assert {"adaround", "gptq"} & {step.name for step in qmodel.recipe.pipeline}
    assert qmodel.backend == "reference"  # the recipe names it
    held_out = [torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(9))]
    model = network()
    sqnrs = [fxq.compare(model, q, held_out).output_sqnr for q in (default, qmodel)]
    assert sqnrs[1] > sqnrs[0] + 1  # dB


def test_channels_of_uneven_ranges_are_equalized(monkeypatch):
    """A channel with large values takes the range of a tensor, unless both layers beside it are scaled."""
    model, data = network()[:3], images()
    with torch.no_grad():
        factors = torch.logspace(-1, 1, 16)
        model[0].weight.mul_(factors.view(-1, 1, 1, 1))
        model[0].bias.mul_(factors)
        model[2].weight.div_(factors.view(1, -1, 1, 1))
    monkeypatch.setattr(effort, "_with_observers", lambda recipe: [])
    monkeypatch.setattr(effort, "_with_rounding", lambda recipe: [])
    recipe = fxq.Recipe.static(backend="reference")
    default = fxq.quantize(model, recipe, data=data)
    qmodel = fxq.quantize(model, recipe, data=data, effort="best")
    assert "equalize" in [step.name for step in qmodel.recipe.pipeline]
    held_out = [torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(9))]
    sqnrs = [fxq.compare(model, q, held_out).output_sqnr for q in (default, qmodel)]
    assert sqnrs[1] > sqnrs[0] + 10  # dB


@pytest.mark.slow
def test_the_best_recipe_is_for_the_fastest_backend(monkeypatch):
    monkeypatch.setattr(fastest, "fastest_order", lambda: ("x86", "reference"))
    qmodel = fxq.quantize(network(), data=images(), effort="best")
    assert [attempt.backend for attempt in qmodel.attempts] == ["x86", "reference"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fxq.FxqWarning")
@pytest.mark.parametrize("chosen", ["fast", "best"])
def test_a_model_in_parts(chosen, monkeypatch):
    monkeypatch.setattr(fastest, "fastest_order", lambda: ("x86",))
    qmodel = fxq.quantize(Untraceable().eval(), data=images(2), effort=chosen, progress=False)
    assert len(qmodel.parts) == 2 and qmodel.output_sqnr > 20


def test_the_effort_is_checked(monkeypatch):
    with pytest.raises(fxq.RecipeError, match=r"unknown effort 'fats'.*fast"):
        fxq.quantize(network(), data=images(1), effort="fats")
    monkeypatch.setattr(effort.Ranks, "of", lambda group: SimpleNamespace(size=2))
    with pytest.raises(fxq.RecipeError, match="one process"):
        fxq.quantize(network(), data=images(1), effort="best")


@pytest.mark.parametrize("chosen", ["fast", "default", "best"])
def test_a_recipe_for_training_is_refused_with_the_reason(chosen):
    with pytest.raises(fxq.RecipeError, match=r"'qat' needs training, which fxq.quantize does not do: call trained"):
        fxq.quantize(network(), fxq.Recipe.qat(), data=images(1), effort=chosen)
