"""One calibration, several recipes: what `convert` makes with another recipe is what `quantize` makes with it."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxq
from fxq.errors import RecipeError
from fxq.workflow.steps import converted, phases, up_to
from tests.support.graphs import equal
from tests.support.helpers import REFERENCE, Scale
from tests.support.models import batch, build, call


class Block(nn.Module):
    """A residual block, whose sum is fused with its last layer, and functions that only move values."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.b, self.fc = nn.Conv2d(4, 4, 1), nn.Linear(4, 3)
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x):
        x = torch.relu(x + self.b(self.act(self.norm(self.a(x)))))
        x = torch.max_pool2d(x, 2)
        return self.fc(torch.cat([x, -x], 2).mean(3).transpose(1, 2).reshape(-1, 4))


def network():
    torch.manual_seed(0)
    return Block().eval()


DATA = [torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]
PLACES = [
    "a",
    "b",
    "fc",
    "act",
    nn.Conv2d,
    fxq.by_op("add"),
    fxq.by_op("relu"),
    fxq.by_op("max_pool2d"),
    fxq.by_op("reshape"),
]
WEIGHTS = [fxq.TensorSpec(bits=bits, signed=True, symmetric=True, per="channel", observer="minmax") for bits in (4, 8)]
OBSERVERS = [fxq.TensorSpec(observer=text) for text in ("histogram", "minmax", "percentile:99", "percentile:95")]
CONFIGS = st.sampled_from(
    [fxq.FLOAT, *(fxq.QuantConfig(activation, weight) for activation in OBSERVERS for weight in WEIGHTS)]
)


def static(overrides=()):
    recipe = fxq.Recipe.static(backend="reference", optimize="coverage")
    for selector, config in overrides:
        recipe = recipe.override(selector, config)
    return recipe


@pytest.fixture(scope="module")
def calibrated():
    return {
        all_values: fxq.calibrate(
            fxq.prepare(network(), static(), example_inputs=DATA[0], observe_all=all_values), DATA
        )
        for all_values in (False, True)
    }


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLACES), CONFIGS), max_size=3), st.booleans())
def test_another_recipe_gives_what_quantize_does(calibrated, overrides, all_values):
    recipe = static(overrides)
    try:
        got = fxq.convert(calibrated[all_values], recipe)
    except RecipeError as error:
        assert not all_values and "calibration has not observed" in str(error) and "observe_all=True" in str(error)
        return
    want = fxq.quantize(network(), recipe, data=DATA)
    assert torch.equal(got(DATA[0]), want(DATA[0]))
    assert str(got.ledger) == str(want.ledger) and got.output_sqnr == want.output_sqnr
    assert got.history.names == want.history.names and got.recipe == want.recipe


def test_what_calibration_did_not_look_at_is_refused_and_says_what_to_do(calibrated):
    """A convolution as a unit of its own, with a sum after it on integers: its output was inside of a unit."""
    recipe = static([(fxq.by_op("relu"), fxq.FLOAT), ("b", fxq.FLOAT)])
    spec = fxq.TensorSpec(observer="moving_average")
    with pytest.raises(
        RecipeError, match=r"has not observed in the way that 'moving_average' needs: .* observe_all=True"
    ):
        fxq.convert(calibrated[False], static([("a", fxq.QuantConfig(spec))]))
    for name in ("residual", "dense", "several_inputs"):
        observed = fxq.prepare(build(name), static(), example_inputs=batch(name), observe_all=True)
        call(observed, batch(name))
        assert equal(
            call(fxq.convert(observed), batch(name)),
            call(fxq.quantize(build(name), static(), data=[batch(name)]), batch(name)),
        )
    assert fxq.convert(calibrated[True], recipe).ledger.where(path="b")[0].precision == "float"


def test_the_observed_model_can_be_calibrated_further():
    observed = fxq.calibrate(fxq.prepare(network(), static(), example_inputs=DATA[0]), DATA[:1])
    before = fxq.convert(observed)
    shown = before(DATA[0])
    fxq.calibrate(observed, [batch * 3 for batch in DATA[1:]])
    assert torch.equal(before(DATA[0]), shown)
    want = fxq.quantize(network(), static(), data=[DATA[0], *(batch * 3 for batch in DATA[1:])])
    assert torch.equal(fxq.convert(observed)(DATA[0]), want(DATA[0]))
    assert not torch.equal(want(DATA[0]), shown)


def test_backends_presets_and_passes_after_calibration(calibrated):
    recipes = [
        fxq.Recipe.dynamic(backend="reference"),
        static().without_pass("keep-small-values"),
        fxq.Recipe.static(backend="reference").without_pass("correct-bias"),
        replace(static(), reduce_range="weights"),
        static().with_backend("auto"),
    ]
    for recipe in recipes:
        got, want = fxq.convert(calibrated[True], recipe), fxq.quantize(network(), recipe, data=DATA)
        assert torch.equal(got(DATA[0]), want(DATA[0])) and got.history.names == want.history.names


class Greedy(Scale):
    """Reads more samples than are kept."""

    name = "greedy"
    needs = gives = fxq.extend.Stage.QDQ
    samples_read = 1000


@pytest.mark.parametrize(
    "recipe, message",
    [
        (
            static().leaf("b"),
            "other leaf_modules than the one that the model was prepared with: .*change the traced graph",
        ),
        (static().insert_pass(Scale(2.0), after="fuse"), r"before calibration, the recipe has other passes, .*: scale"),
        (static().insert_pass(Greedy(), after="insert-qdq"), "reads 1000 calibration samples, and 64 are kept"),
        (static([("norm", fxq.FLOAT)]), "another graph before fusion, as if one recipe folds a batch norm"),
        (static([("nothing.*", fxq.FLOAT)]), "selects nothing"),
    ],
)
@pytest.mark.parametrize("all_values", [False, True])
def test_what_needs_another_calibration_is_refused(calibrated, recipe, message, all_values):
    with pytest.raises(RecipeError, match=message):
        fxq.convert(calibrated[all_values], recipe)


def test_without_data_the_error_is_that_of_any_observer():
    with pytest.raises(fxq.CalibrationError, match="has seen no data"):
        fxq.convert(fxq.prepare(network(), static(), example_inputs=DATA[0], observe_all=True))


def test_passes_up_to_a_stage():
    assert [step.name for step in up_to(REFERENCE, fxq.extend.Stage.CANONICAL)] == ["trace"]
    assert up_to(REFERENCE, fxq.extend.Stage.FUSED)[-1].name == "fold-batch-norm"
    assert [line[0].name for line in phases(REFERENCE)] == ["trace", "choose-grids", "lower"]


class Counted(fxq.Pass):
    """Reads samples, and counts how often it runs."""

    name = "counted"
    needs = gives = fxq.extend.Stage.QDQ
    runs = 0
    samples_read = 8

    def run(self, rewriter):
        Counted.runs += 1
        warnings.warn("a warning of the shared passes", fxq.FxqWarning, stacklevel=1)


def test_passes_that_read_samples_run_once_for_equal_graphs():
    Counted.runs = 0
    recipe = static().insert_pass(Counted(), after="insert-qdq")
    qdq_cache = []
    with pytest.warns(fxq.FxqWarning) as heard:
        first, second = (
            converted(fxq.calibrate(fxq.prepare(network(), recipe, example_inputs=DATA[0]), DATA), recipe, qdq_cache)
            for _ in range(2)
        )
    assert [str(warning.message) for warning in heard].count("a warning of the shared passes") == 2
    assert (Counted.runs, len(qdq_cache)) == (1, 1)
    assert fxq.extend.write_graph(first) == fxq.extend.write_graph(second)
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    assert [step.name for step in first.history] == [step.name for step in second.history]
    third = converted(
        fxq.calibrate(fxq.prepare(network(), recipe, example_inputs=DATA[0]), DATA[:1]), recipe, qdq_cache
    )
    assert (Counted.runs, len(qdq_cache)) == (2, 2)
    assert not torch.equal(first(DATA[0]), third(DATA[0]))
