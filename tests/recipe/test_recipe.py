from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import RecipeError
from fxq.passes import PASSES, CorrectBias
from fxq.quant.spec import ACTIVATION, DYNAMIC, DYNAMIC_STATE, FLOAT, ROLES, STATE, WEIGHT, QuantConfig, TensorSpec
from fxq.recipe.recipe import Recipe, as_recipe
from tests.support.helpers import Scale

NAMES = [p.name for p in PASSES]


def names(recipe):
    return [p.name for p in recipe.pipeline]


# ---- building


def test_a_recipe_is_frozen_and_every_method_returns_a_new_one():
    recipe = Recipe.static()
    others = [
        recipe.override("head", FLOAT),
        recipe.insert_pass(Scale(), after="fuse"),
        recipe.without_pass("propagate"),
        recipe.leaf("head"),
        recipe.with_check(),
    ]
    assert recipe == Recipe.static() and all(changed != recipe for changed in others)
    with pytest.raises(FrozenInstanceError):
        recipe.backend = "x86"


def test_later_overrides_win():
    low = QuantConfig(activation=TensorSpec(bits=4))
    recipe = Recipe.static().override("layer*", FLOAT).override("layer1.conv", low).override(nn.Linear, FLOAT)
    types = {"layer1": nn.Sequential, "layer1.conv": nn.Conv2d, "layer2": nn.Conv2d, "fc": nn.Linear, "o": nn.ReLU}
    configs = {path: recipe.config_for(path, (), types)[0] for path in types}
    assert configs == {"layer1": FLOAT, "layer1.conv": low, "layer2": FLOAT, "fc": FLOAT, "o": recipe.config}
    again = recipe.override("*", recipe.config)
    assert {again.config_for(path, (), types)[0] for path in types} == {recipe.config}


def test_the_override_that_decided_is_told():
    recipe = Recipe.static().override("a", FLOAT).override(fxq.by_op("relu"), FLOAT)
    assert str(recipe.config_for("a", ("relu",), {})[1]) == "fxq.by_op('relu')"
    assert str(recipe.config_for("a", ("linear",), {})[1]) == "'a'"
    assert recipe.config_for("b", ("linear",), {})[1] is None


def test_an_override_takes_a_config():
    with pytest.raises(RecipeError, match=r"override\('head', ...\) takes a fxq\.QuantConfig or fxq\.FLOAT"):
        Recipe.static().override("head", TensorSpec())


# ---- passes


# ---- unknown names


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Recipe(preset="statik"), RecipeError, "unknown preset 'statik'; did you mean 'static'"),
        (lambda: as_recipe("sttic"), RecipeError, "unknown preset 'sttic'; did you mean 'static'"),
        (lambda: Recipe.static().with_check("numerik"), RecipeError, "unknown check 'numerik'; did you mean 'numeric'"),
        (lambda: Recipe.static(optimize=False), RecipeError, "unknown value of optimize 'False'"),
        (
            lambda: Recipe.static(activation=TensorSpec(observer="histgram")),
            RecipeError,
            "unknown observer 'histgram'; did you mean 'histogram'",
        ),
        (
            lambda: Recipe.static().override("a", QuantConfig(weight=TensorSpec(signed=True, observer="minmx"))),
            RecipeError,
            "unknown observer 'minmx'; did you mean 'minmax'",
        ),
        (
            lambda: Recipe.static(activation=TensorSpec(observer="percentile:precent=99")),
            RecipeError,
            "unknown option of the observer Percentile 'precent'; did you mean 'percent'",
        ),
        (
            lambda: Recipe.static(activation=TensorSpec(observer="percentile:0.1")),
            RecipeError,
            "observer Percentile: percent is '0.1'; it must be from 50 to 100",
        ),
        (
            lambda: TensorSpec(per="chanel"),
            RecipeError,
            "unknown value of per in TensorSpec 'chanel'; did you mean 'channel'.*a block size, such as 64",
        ),
        (
            lambda: TensorSpec(range="lerned"),
            RecipeError,
            "unknown value of range in TensorSpec 'lerned'; did you mean 'learned'",
        ),
        (
            lambda: Recipe.static(backend="x68"),
            RecipeError,
            "unknown backend 'x68'; did you mean 'x86'",
        ),
    ],
)
def test_an_unknown_name_names_the_nearest(make, error, message):
    with pytest.raises(error, match=message):
        make()


# ---- specs


@pytest.mark.parametrize("bits", [1, 9, 0, -8, 8.0, "8", None])
def test_bits_out_of_range(bits):
    with pytest.raises(RecipeError, match=r"bits is .*; it must be an integer from 2 to 8"):
        TensorSpec(bits=bits)


@pytest.mark.parametrize(
    ("spec", "qmin", "qmax", "dtype"),
    [
        (TensorSpec(), 0, 255, torch.uint8),
        (TensorSpec(bits=7), 0, 127, torch.uint8),
        (TensorSpec(signed=True), -128, 127, torch.int8),
        (TensorSpec(signed=True, symmetric=True), -127, 127, torch.int8),
        (TensorSpec(bits=2, signed=True, symmetric=True), -1, 1, torch.int8),
        (TensorSpec(bits=4, signed=True), -8, 7, torch.int8),
    ],
)
def test_the_grid_of_a_spec(spec, qmin, qmax, dtype):
    assert (spec.qmin, spec.qmax, spec.dtype) == (qmin, qmax, dtype)


def test_a_config_has_a_spec_or_none_for_each_role():
    assert FLOAT.is_float and not QuantConfig().is_float and not QuantConfig(weight=None).is_float
    assert [QuantConfig().of(role) for role in ROLES] == [ACTIVATION, WEIGHT, None, STATE]
    assert QuantConfig(DYNAMIC).state == QuantConfig(None).state == DYNAMIC_STATE
    with pytest.raises(RecipeError, match=r"weight is a fxq\.TensorSpec or None, not 8"):
        QuantConfig(weight=8)


def test_correct_bias_is_in_the_pipeline_and_can_be_left_out():
    """Files of before insert it; with other options, it takes the place of the one that is there."""
    recipe = Recipe.static().without_pass("correct-bias")
    assert names(recipe) == [name for name in NAMES if name != "correct-bias"] and len(names(recipe)) == len(NAMES) - 1
    inserted = {"insert": "fxq.passes:CorrectBias", "after": "smooth"}
    assert Recipe.from_dict({"preset": "static", "pass": [inserted]}) == Recipe.static()
    corrected = recipe.insert_pass(CorrectBias(scale=False), after="smooth")
    assert names(corrected) == NAMES and Recipe.from_dict(corrected.to_dict()) == corrected
    with pytest.raises(RecipeError, match=r"already: remove it first, with recipe\.without_pass"):
        Recipe.static().insert_pass(CorrectBias(scale=False), after="insert-qdq")


@pytest.mark.parametrize("value", [3, None, nn.Linear, ["static"]])
def test_what_is_no_recipe(value):
    with pytest.raises(RecipeError, match=r"a recipe is a fxq\.Recipe, a preset's name, a dict or a path"):
        as_recipe(value)


def test_a_state_without_a_spec_is_float_in_training():
    recipe = fxq.Recipe.qat().override("rnn", fxq.QuantConfig(fxq.TensorSpec(observer="minmax")))
    assert recipe.config.state is None
    assert recipe.overrides[0][1].state is None


def test_a_model_is_trained_for_one_backend():
    with pytest.raises(RecipeError, match="trained for the kernels of one backend"):
        fxq.Recipe.qat(backend="fastest")
