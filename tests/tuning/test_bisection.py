"""Which layer is the first to blame: one that is spoiled on purpose."""

import math

import pytest
import torch
from torch import nn

import fxq
from tests.support.machine import X86, needs_x86
from tests.support.tuning_models import DATA, STATIC, wide

COARSE = fxq.QuantConfig(weight=fxq.TensorSpec(bits=2, signed=True, symmetric=True, observer="minmax"))
EVEN = STATIC.with_min_sqnr(None)


def chain():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3)] + [nn.Conv2d(6, 6, 3, padding=1) for _ in range(5)]
    layers.append(nn.Conv2d(6, 2, 1))
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*(step for layer in layers for step in (layer, nn.ReLU()))).eval()


@pytest.mark.one_in(8)
@pytest.mark.parametrize("recipe", [EVEN, pytest.param(X86.with_min_sqnr(None), marks=needs_x86)])
@pytest.mark.parametrize("path", ["0", "4", "10", "12"])
def test_the_spoiled_layer_is_named(path, recipe):
    q = fxq.quantize(chain(), recipe.override(path, COARSE), data=DATA)
    bisection = fxq.bisect(chain(), q, DATA)
    assert bisection.layer.path in (path, str(int(path) + 1))  # a unit goes by its last op
    assert bisection.after > bisection.before + 6 and bisection.before == pytest.approx(bisection.output_sqnr, abs=6)
    assert f"recipe.override({path!r}, fxq.FLOAT)" in bisection.remedy
    mended = eval(bisection.remedy, {"recipe": recipe.override(path, COARSE), "fxq": fxq})
    assert fxq.quantize(chain(), mended, data=DATA).output_sqnr > q.output_sqnr + 6


def test_the_first_of_two_that_are_as_bad():
    q = fxq.quantize(chain(), EVEN.override("2", COARSE).override("8", COARSE), data=DATA)
    bisection = fxq.bisect(chain(), q, DATA)
    assert bisection.layer.path in ("2", "3", "8", "9")  # whichever makes half of the noise
    assert len(bisection) <= 5 and [row.position for row in bisection] == sorted(row.position for row in bisection)


def test_the_table():
    q = fxq.quantize(chain(), EVEN.override("4", COARSE), data=DATA)
    bisection = fxq.bisect(chain(), q, DATA)
    text = str(bisection)
    assert "exact up to" in text and "dB when all before it is exact" in text and text.endswith(bisection.remedy)
    assert bisection.where(precision="int8") and bisection.sort("sqnr")[0].sqnr <= bisection[-1].sqnr
    assert f'"layer": "{bisection.layer.name}"' in bisection.to_json()


def test_no_error():
    model = nn.Sequential(nn.Linear(3, 3)).eval()
    recipe = STATIC.override("0", fxq.FLOAT)
    with pytest.warns(fxq.FxqWarning, match="nothing runs on integers"):
        q = fxq.quantize(model, recipe, data=[torch.rand(2, 3)])
    bisection = fxq.bisect(model, q, [torch.rand(2, 3)])
    assert bisection.layer is None and len(bisection) == 0 and bisection.output_sqnr == math.inf
    assert "the output has no error" in str(bisection)


def test_what_cannot_be_bisected():
    model = wide()
    q = fxq.quantize(model, STATIC, data=DATA)
    with pytest.raises(fxq.InputError, match="takes the float model"):
        fxq.bisect(q, q, DATA)
    with pytest.raises(fxq.InputError, match="not a quantized model"):
        fxq.bisect(model, model, DATA)
    with pytest.raises(fxq.InputError, match="not the model that b was made from"):
        fxq.bisect(chain(), q, DATA)
    with pytest.raises(fxq.InputError, match="data is empty"):
        fxq.bisect(model, q, [])
