"""Which layers the output suffers from."""

import json
import math

import pytest
import torch

import fxq
from fxq.common.metrics import sqnr
from tests.support.helpers import module
from tests.support.tuning_models import DATA, STATIC, wide


@pytest.fixture(scope="module")
def sensitivities():
    return fxq.sensitivity(wide(), STATIC, DATA)


def test_the_layer_that_is_bad_comes_first(sensitivities):
    assert sensitivities[0].path == "bad" and sensitivities[0].share > 0.5
    model = wide()
    recipe = eval(sensitivities[0].line, {"recipe": STATIC, "fxq": fxq})
    mended, as_it_is = (fxq.quantize(model, r, data=DATA).output_sqnr for r in (recipe, STATIC))
    assert mended > as_it_is + 6
    for row in sensitivities[1:]:
        recipe = eval(row.line, {"recipe": STATIC, "fxq": fxq})
        assert fxq.quantize(model, recipe, data=DATA).output_sqnr < mended


def test_the_numbers_are_those_of_one_layer_alone(sensitivities):
    model, recipe = wide(), STATIC
    first = next(row for row in sensitivities if row.path == "first")
    for row in sensitivities:
        if row is not first:
            recipe = eval(row.line, {"recipe": recipe, "fxq": fxq})
    quantized = fxq.quantize(model, recipe.with_optimize("coverage"), data=DATA)
    want, got = (torch.cat([m(x) for x in DATA]) for m in (model, quantized))
    assert first.sqnr == pytest.approx(sqnr(want, got), abs=1e-3)
    assert sum(row.share for row in sensitivities) == pytest.approx(1.0)
    noises = sum(10 ** (-row.sqnr / 10) for row in sensitivities if row.sqnr < math.inf)
    assert -10 * math.log10(noises) == pytest.approx(sensitivities.output_sqnr, abs=3.0)  # they add up, roughly


def test_the_table(sensitivities):
    text = str(sensitivities)
    assert "alone dB" in text and "of the noise" in text and "most of the error is from bad" in text
    assert "float costs µs" not in text  # nothing is measured for the reference backend
    data = json.loads(sensitivities.to_json())
    assert data["batches"] == 2 and len(data["layers"]) == len(sensitivities)
    assert sensitivities.where(path="first")[0].macs > 0 and sensitivities.sort("macs", reverse=True)[0].path == "first"


def test_what_is_no_model_or_no_data():
    with pytest.raises(fxq.InputError, match="data is empty"):
        fxq.sensitivity(wide(), STATIC)
    with pytest.raises(fxq.InputError, match=r"not an nn\.Module"):
        fxq.sensitivity(print, STATIC, DATA)
    with pytest.raises(fxq.RecipeError, match="name one"):
        fxq.sensitivity(wide(), fxq.Recipe.static(backend="fastest"), DATA)


def test_nothing_on_integers():
    no_layers = fxq.sensitivity(module(lambda self, x: x.sin()), STATIC, [torch.rand(3)])
    assert len(no_layers) == 0 and no_layers.output_sqnr == math.inf and "0 layers on integers" in str(no_layers)
