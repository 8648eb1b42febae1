"""The presets, and what their options make of a recipe."""

from typing import get_type_hints

import pytest
import torch
from torch import nn

import fxq
from fxq.errors import RecipeError
from fxq.passes import PASSES
from fxq.quant.spec import WEIGHT, TensorSpec
from fxq.recipe.recipe import Recipe


def test_presets_and_options():
    spec = TensorSpec(bits=7, observer="minmax")
    recipe = Recipe.static(backend="reference", activation=spec)
    assert (recipe.preset, recipe.backend, recipe.config.activation) == ("static", "reference", spec)
    assert recipe.config.weight == TensorSpec(signed=True, symmetric=True, per="channel", observer="minmax")
    assert [p.name for p in recipe.pipeline] == [p.name for p in PASSES]


@pytest.mark.parametrize("preset", ["static", "dynamic", "weight_only", "stored", "qat"])
def test_type_hints_of_presets_can_be_read(preset):
    assert get_type_hints(getattr(Recipe, preset))["return"] is Recipe


def test_static_takes_leaves_and_fixed_arguments():
    recipe = Recipe.static(leaf_modules=["head.*", "neck"], concrete_args={"mode": "eval"}, strict_trace=True)
    assert recipe == Recipe.static(strict_trace=True).leaf("head.*", "neck").fix_args(mode="eval")
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    with pytest.raises(RecipeError, match=r"list of path globs, not 'head': write \['head'\]"):
        Recipe.static(leaf_modules="head")
    with pytest.raises(RecipeError, match=r"leaf takes path globs, such as 'head\.\*', not <class 'torch.nn"):
        recipe.leaf(nn.Linear)


def test_a_recipe_for_training():
    recipe = fxq.Recipe.qat(freeze_ranges_after=10, freeze_norms_after=20, freeze_weights_over=30, backend="reference")
    step = recipe.pipeline["insert-fake-quantizers"]
    assert (step.freeze_ranges_after, step.freeze_norms_after, step.freeze_weights_over) == (10, 20, 30)
    assert recipe.optimize == "coverage"
    assert [p.name for p in recipe.pipeline] == [p.name for p in fxq.Recipe.qat().pipeline]
    assert recipe.trains
    assert not fxq.Recipe.static().trains
    assert not fxq.Recipe.qat().without_pass("insert-fake-quantizers").trains
    assert fxq.Recipe.from_dict(recipe.to_dict()) == recipe
    assert fxq.Recipe(preset="qat") == fxq.Recipe.from_dict({"preset": "qat"}) == fxq.Recipe.qat()
    fast = fxq.Recipe.qat(optimize="speed")
    assert fxq.Recipe.from_dict(fast.to_dict()) == fast != fxq.Recipe.qat()


def test_scales_that_are_learned_start_where_the_error_is_least():
    recipe = fxq.Recipe.qat(learned=True, weight=fxq.TensorSpec(bits=4, signed=True, symmetric=True, per="channel"))
    assert (recipe.config.weight.range, recipe.config.weight.observer, recipe.config.weight.bits) == (
        "learned",
        "mse",
        4,
    )
    assert (recipe.config.activation.range, recipe.config.activation.observer) == ("learned", "mse")
    assert fxq.Recipe.qat(learned=True, activation=None).config.activation is None


@pytest.mark.parametrize("wrong", [-1, 1.5, None, True])
def test_when_to_freeze_is_a_number_of_forwards(wrong):
    with pytest.raises(RecipeError, match=r"freeze_norms_after is .*; it must be an integer from 0"):
        fxq.Recipe.qat(freeze_norms_after=wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": "4"}, "bits is '4'"),
        ({"bits": 9}, "bits is 9"),
        ({"dtype": torch.bfloat16}, "must be torch.float16"),
        ({"bits": 4, "dtype": torch.float16}, "leave out bits and per"),
        ({"per": 32, "dtype": torch.float16}, "leave out bits and per"),
        ({"bits": 4, "weight": WEIGHT}, "with a weight spec takes no bits"),
        ({"dtype": torch.float16, "weight": WEIGHT}, "with a weight spec takes no dtype"),
        ({"activation": WEIGHT}, "takes no activation"),
    ],
)
def test_weights_alone(options, message):
    with pytest.raises(RecipeError, match=message):
        fxq.Recipe.weight_only(**options)
