"""Checks of recipes: combinations that are not supported yet raise an error when the recipe is made."""

from dataclasses import replace

import pytest

import fxq
from fxq.errors import RecipeError
from fxq.quant.spec import ACTIVATION, DYNAMIC, FLOAT16, STATE, TRAINED, WEIGHT, WEIGHT4

CASES = {
    "a float16 activation": (
        fxq.QuantConfig(replace(ACTIVATION, format="float16")),
        'format="float16" for the activation .*: it is for weights',
    ),
    "float16": (fxq.QuantConfig(weight=FLOAT16), "weights in float16 are not supported yet: set activation=None"),
    "activations alone": (fxq.QuantConfig(weight=None), "integer activations with float weights"),
    "bias": (fxq.QuantConfig(bias=fxq.TensorSpec()), "a spec for the bias .*: leave bias=None"),
    "state": (fxq.QuantConfig(state=fxq.TensorSpec()), "a calibrated range for the state that is not symmetric"),
    "a learned state": (
        fxq.QuantConfig(state=fxq.TensorSpec(symmetric=True, range="learned")),
        'for the state .*: use range="dynamic" or range="fixed" or range="calibrated"',
    ),
    "a calibrated state alone": (
        fxq.QuantConfig(DYNAMIC, state=STATE),
        'a calibrated state with a dynamic activation is not supported yet: use range="dynamic"',
    ),
    "blocks of an activation": (
        fxq.QuantConfig(replace(ACTIVATION, per=64)),
        'per=64 for the activation .*: use per="tensor" or per="row"',
    ),
    "symmetric blocks of a state": (
        fxq.QuantConfig(state=fxq.TensorSpec(bits=4, per=32, symmetric=True, range="dynamic")),
        "a state per block that is symmetric or signed is not supported yet",
    ),
    "symmetric blocks of a state alone": (
        fxq.QuantConfig(None, None, state=fxq.TensorSpec(bits=4, per=32, symmetric=True, range="dynamic")),
        "a state per block that is symmetric or signed is not supported yet",
    ),
    "calibrated blocks of a state": (
        fxq.QuantConfig(state=fxq.TensorSpec(bits=4, per=32)),
        'range="calibrated" for a state per block is not supported yet',
    ),
    "per channel": (fxq.QuantConfig(replace(ACTIVATION, per="channel")), "per='channel' for the activation"),
    "groups": (
        fxq.QuantConfig(weight=replace(WEIGHT, bits=4, per=64)),
        "weights in int4 symmetric blocks of 64 .*: set activation=None",
    ),
    "measured weights": (fxq.QuantConfig(weight=replace(WEIGHT, range="dynamic")), 'range="dynamic" for the weight'),
    "fixed": (
        fxq.QuantConfig(replace(ACTIVATION, range="fixed")),
        'range="fixed" .*: use range="calibrated" or range="dynamic" or range="learned"',
    ),
}


@pytest.mark.parametrize(("config", "message"), CASES.values(), ids=CASES)
def test_a_config(config, message):
    assert fxq.QuantConfig.from_dict(config.to_dict()) == config
    with pytest.raises(RecipeError, match=f"^the override for 'head': .*{message}"):
        fxq.Recipe.static().override("head", config)
    with pytest.raises(RecipeError, match=f"^the recipe: .*{message}") as caught:
        fxq.Recipe.from_dict({"config": config.to_dict()})
    assert "not supported yet" in str(caught.value)


LEARNED = fxq.TensorSpec(range="learned", observer="mse")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (fxq.QuantConfig(None, replace(WEIGHT, range="learned")), 'range="learned" for the weight is for training'),
        (fxq.QuantConfig(LEARNED), 'range="learned" for the activation is for training: start with fxq.Recipe.qat'),
    ],
)
def test_what_is_for_training_alone(config, message):
    with pytest.raises(RecipeError, match=f"^the override for 'head': {message}"):
        fxq.Recipe.static().override("head", config)
    assert fxq.Recipe.qat().override("head", replace(config, state=None))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            fxq.QuantConfig(TRAINED, state=fxq.TensorSpec(bits=4, symmetric=True)),
            "a quantized state .*: set state=None",
        ),
        (fxq.QuantConfig(DYNAMIC), 'range="dynamic" for the activation cannot be trained yet'),
        (fxq.QuantConfig(None, FLOAT16), 'format="float16" for the weight cannot be trained'),
        (fxq.QuantConfig(None, replace(WEIGHT4, range="learned")), "learned scales per block of the weight are not"),
        (fxq.QuantConfig(ACTIVATION), "the 'histogram' observer of the activation cannot follow values that change"),
        (fxq.QuantConfig(None, replace(WEIGHT, observer="mse")), "the 'mse' observer of the weight cannot follow"),
        (
            fxq.QuantConfig(None, replace(WEIGHT, observer="moving_average")),
            'smallest and largest value: use observer="minmax"',
        ),
    ],
)
def test_what_cannot_be_trained(config, message):
    with pytest.raises(RecipeError, match=f"^the override for 'head': .*{message}"):
        fxq.Recipe.qat().override("head", config)


def test_a_preset_that_was():
    with pytest.raises(RecipeError, match='is called "static" now'):
        fxq.Recipe(preset="static_corrected")


@pytest.mark.parametrize("observer", ["histogram", "percentile:99.9", "entropy", "fxq.quant.observers:Histogram"])
def test_one_range_per_channel_of_an_observer_that_has_one_per_tensor(observer):
    weight = replace(WEIGHT, observer=observer)
    message = f"the {observer!r} observer of the weight .* one per channel. Use observer='minmax' or 'mse', or per="
    with pytest.raises(RecipeError, match="one per block"):
        fxq.Recipe.weight_only(weight=replace(WEIGHT4, observer=observer))
    with pytest.raises(RecipeError, match=f"^the recipe: {message}"):
        fxq.Recipe.static(weight=weight)
    with pytest.raises(RecipeError, match=f"^the override for 'head': {message}"):
        fxq.Recipe.static().override("head", fxq.QuantConfig(weight=weight))
    assert fxq.Recipe.static(weight=replace(weight, per="tensor")).config.weight.observer == observer


@pytest.mark.parametrize("role", ["activation", "state"])
def test_an_observer_that_keeps_calibration_data(role):
    config = fxq.QuantConfig(**{role: fxq.TensorSpec(observer="mse", symmetric=role == "state")})
    with pytest.raises(RecipeError, match=f"'mse' observer of the {role} stores all .* Use observer='histogram'"):
        fxq.Recipe.static().override("head", config)
    measured = fxq.TensorSpec(observer="mse", range="dynamic", symmetric=True)
    assert fxq.Recipe.static(activation=measured)


@pytest.mark.parametrize("observer", ["minmax", "moving_average", "mse", "mse:2.4"])
@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_what_is_built(per, observer):
    assert fxq.Recipe.static(weight=replace(WEIGHT, per=per, observer=observer)).override("head", fxq.FLOAT)
