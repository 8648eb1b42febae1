"""The inputs of a forward: nested, by keyword, any number, and those that a recipe fixes."""

import pytest
import torch

import fxq
from fxq.common.metrics import sqnr
from tests.support.helpers import REFERENCE, module
from tests.support.machine import no_warnings
from tests.support.traced import X, close, conv

pytestmark = no_warnings


def nested(self, inputs, scale=None):
    y = self.a(inputs["x"])
    for extra in inputs["list"]:
        y = y + extra
    if inputs["flag"] and "no" not in inputs:
        y = y * inputs["number"]
    return y if scale is None else y * scale


def nest(x, n=2, flag=True):
    return {"x": x, "list": [x] * n, "flag": flag, "number": 3}


def test_nested_inputs():
    model = module(nested, a=conv())
    qmodel = close(model, nest(X))
    with torch.no_grad():
        smaller = {**nest(X[:1]), "number": 5.0}
        assert sqnr(model(smaller), qmodel(smaller)) > 30
    for wrong, words in [
        (nest(X, 3), r"inputs\['list'\]=\[a tensor, a tensor\]"),
        (nest(X, flag=False), r"inputs\['flag'\]=True, as in the example, but got"),
        ({"x": X}, "traced for inputs={'x': a tensor, 'list'"),
    ]:
        with pytest.raises(fxq.InputError, match=f"{words}.*Quantize the model again with inputs"):
            qmodel(wrong)
    assert close(model, nest(X), scale=torch.ones(1))(nest(X), torch.ones(1)).shape == X.shape


def test_keywords_that_a_signature_does_not_name():
    model = module(lambda self, x, **named: self.a(x) * named.get("gain", 1) + len(named), a=conv())
    assert [n.name for n in close(model, X, gain=torch.ones(1)).graph.nodes if n.op == "placeholder"] == ["x", "gain"]
    with pytest.raises(fxq.InputError, match="gain"):
        close(model, X)(X, gain=torch.ones(1))


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_inputs_is_checked(count):
    qmodel = close(module(lambda self, *xs: self.a(sum(xs)), a=conv()), *[X] * count)
    with pytest.raises(fxq.InputError, match="traced for xs="):
        qmodel(*[X] * (count + 1))


def with_mode(self, x, mode, gain=2, *, flag=True):
    y = self.a(x) if mode == "plain" else -self.a(x)
    return y * gain if flag else y


def test_concrete_arguments():
    model = module(with_mode, a=conv())
    recipe = REFERENCE.fix_args(mode="negative", gain=3, flag=False)
    assert fxq.Recipe.from_dict(recipe.to_dict()) == recipe
    qmodel = fxq.quantize(model, recipe, data=[{"x": X}])
    with torch.no_grad():
        assert sqnr(model(X, "negative", 3, flag=False), qmodel(X)) > 30
    for wrong in ({"mode": "plain"}, {"mode": "negative", "gain": 2}, {"mode": "negative", "flag": True}):
        with pytest.raises(fxq.InputError, match="the graph was traced for"):
            qmodel(X, **wrong)


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"mod": "plain"}, "unknown argument in concrete_args 'mod'; did you mean 'mode'"),
        ({"mode": "plain", "x": X}, "concrete_args: x is a Tensor, not a plain value"),
        ({"mode": "plain", "gain": 3}, "concrete_args fixes gain=3, but the data gives 5"),
    ],
)
def test_concrete_arguments_that_do_not_fit(fixed, words):
    with pytest.raises(fxq.RecipeError, match=words):
        fxq.quantize(module(with_mode, a=conv()), REFERENCE.fix_args(**fixed), data=[{"x": X, "gain": 5}])
